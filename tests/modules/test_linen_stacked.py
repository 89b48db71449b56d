"""Linen layers under nn.scan, nn.vmap and nn.remat, in models that name no collection but "params"."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_models import draw_params
from flax import linen as nn
from flax.core import freeze
from host_arrays import filled, normal, on_device
from safetensors.numpy import load_file

import lorafusion_jax as lf
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.modules import AdapterSpec, LinenLoRA, adapter_arrays, merge_adapter
from lorafusion_jax.optim.per_adapter import active_adapters, per_adapter

LAW = AdapterSpec(name="law", rank=2, alpha=4)
MED = AdapterSpec(name="med", rank=3, alpha=3, seed=5)
SPECS = [LAW, MED]
TABLE = on_device([0, 1, 1, 0], np.int32)
D, VOCABULARY = 8, 40


class Product(nn.Module):
    """A package's own linear class, with its equation at the call."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param("w", nn.initializers.lecun_normal(), self.shape))


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D, name="wide")(nn.gelu(nn.Dense(6, name="narrow")(x)))


class Layer(nn.Module):
    """Attention, a projection of a package and two experts that an nn.vmap runs, and numbers that are sown."""

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)
        x = x + Product((D, D), name="mix")("btd,de->bte", x)
        experts = nn.vmap(
            Expert, in_axes=None, out_axes=0, axis_size=2, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        self.sow("intermediates", "mean", x.mean())
        return x + experts(name="experts")(x).sum(0), None


class Model(nn.Module):
    """A scan over rematerialised layers, tokens in and logits of the vocabulary out. The scan names only "params"."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name="embed")(tokens)
        scan = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x = scan(name="layers")(x, None)[0]
        return nn.Dense(VOCABULARY, name="logitdense")(nn.Dense(D, name="up")(x))


MODEL = Model()


@pytest.fixture(scope="module")
def tokens():
    return on_device(np.random.default_rng(0).integers(0, VOCABULARY, (4, 5)), np.int32)


@pytest.fixture(scope="module")
def params(tokens):
    return draw_params(MODEL, tokens)


@pytest.fixture(scope="module")
def lora(params, tokens):
    """Adapters whose B is not zero."""
    lora = LinenLoRA(SPECS, targets="all-linear")
    adapters = lora.init(MODEL, {"params": params}, tokens)
    for number, spec in enumerate(SPECS):
        rng = np.random.default_rng(number)
        arrays = lora.adapter_arrays(adapters, spec.name)
        filled = {key: rng.normal(size=value.shape) * 0.3 for key, value in arrays.items()}
        adapters = lora.put_adapter_arrays(adapters, spec.name, filled)
    return lora, adapters


def outputs(lora, params, adapters, tokens, **options):
    @jax.jit
    def forward(adapters):
        with lora.use(options.pop("table", None), **options):
            return MODEL.apply({"params": params, "LoRAParam": adapters}, tokens)

    return forward(adapters)


@jax.jit
def plain(params, tokens):
    return MODEL.apply({"params": params}, tokens)


def test_a_mixed_batch_computes_what_merged_parameters_compute(lora, params, tokens):
    lora, adapters = lora
    assert adapters["layers"]["attention"]["query"]["lora_a"].shape == (3, 2, D, 3)
    assert adapters["layers"]["experts"]["wide"]["lora_b"].shape == (3, 2, 2, 3, D)
    mixed = np.asarray(outputs(lora, params, adapters, tokens, table=TABLE))
    for number, spec in enumerate(SPECS):
        merged = lora.merge(MODEL, {"params": params}, adapters, spec.name, tokens)
        expected = np.asarray(plain(merged, tokens))
        rows = np.flatnonzero(np.asarray(TABLE) == number)
        np.testing.assert_allclose(mixed[rows], expected[rows], rtol=1e-4, atol=1e-4)  # sums in another order
        alone, its_tree = lora.only_adapter(adapters, spec.name)
        np.testing.assert_allclose(
            outputs(alone, params, its_tree, tokens, only=spec.name), expected, rtol=1e-4, atol=1e-4
        )


def test_the_head_is_the_layer_as_wide_as_the_vocabulary(lora, params, tokens):
    lora, adapters = lora
    report = lora.report(MODEL, {"params": params}, tokens)
    assert {row.path for row in report.adapted} >= {"layers.mix", "layers.attention.out", "layers.experts.narrow", "up"}
    assert {row.path: row.layers for row in report.adapted}["layers.experts.narrow"] == 6
    whys = {row.path: row.why for row in report.skipped}
    assert "output head" in whys["logitdense"]
    assert whys["embed"] == "an embedding"
    assert "logitdense" not in adapters
    assert report.frozen == sum(leaf.size for leaf in jax.tree.leaves(params))
    sizes = {spec.name: sum(a.size for a in lora.adapter_arrays(adapters, spec.name).values()) for spec in SPECS}
    assert report.parameters == sizes
    named = LinenLoRA(SPECS, targets="all-linear", heads="up").init(MODEL, {"params": params}, tokens)
    assert "logitdense" in named
    assert "up" not in named


def test_variables_of_other_collections_and_frozen_parameters_stay_as_they_are(lora, params, tokens):
    lora, adapters = lora

    @jax.jit
    def call(adapters):
        with lora.use(TABLE):
            variables = {"params": freeze(params), "LoRAParam": adapters}
            return MODEL.apply(variables, tokens, mutable=["intermediates", "params"])

    y, changed = call(adapters)
    assert changed["intermediates"]["layers"]["mean"][0].shape == (3,)
    assert jax.tree.structure(dict(changed["params"])) == jax.tree.structure(params)
    np.testing.assert_allclose(y, outputs(lora, params, adapters, tokens, table=TABLE), rtol=1e-5, atol=1e-5)


def test_each_adapter_has_its_own_optimizer_and_its_own_dropout_in_each_layer(params, tokens):
    specs = [AdapterSpec(name="law", rank=2, alpha=4, dropout=0.5), MED]
    lora = LinenLoRA(specs, targets=["mix", "narrow"])
    adapters = lora.init(MODEL, {"params": params}, tokens)
    optimizer = per_adapter({"law": optax.sgd(1.0), "med": optax.adam(1e-2)})

    @jax.jit
    def step(adapters, state, table, number):
        def loss(adapters):
            with lora.use(table, step=number, train=True):
                return jnp.mean(MODEL.apply({"params": params, "LoRAParam": adapters}, tokens) ** 2)

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, state = optimizer.update(grads, state, adapters, active=active_adapters(table, 2))
        return optax.apply_updates(adapters, updates), state, value, grads

    after, _, value, grads = step(adapters, optimizer.init(adapters), on_device(np.zeros(4, np.int32)), 1)
    arrays = lora.adapter_arrays(after, "med")
    for key, array in lora.adapter_arrays(adapters, "med").items():
        np.testing.assert_array_equal(arrays[key], array)
    assert all(np.asarray(grads["layers"]["mix"]["lora_b"][layer, 0]).any() for layer in range(3))
    # equal layers with equal inputs would have equal gradients if they drew equal masks
    again = step(adapters, optimizer.init(adapters), on_device(np.zeros(4, np.int32)), 1)
    np.testing.assert_array_equal(again[2], value)


def test_adapters_are_saved_and_loaded_in_every_format(lora, params, tokens, tmp_path):
    lora, adapters = lora
    empty = jax.tree.map(lambda leaf: filled(0.0, *leaf.shape), adapters)
    before = lora.adapter_arrays(adapters, "med")
    lora.save_adapter(adapters, "med", tmp_path / "own")
    lf.save_peft(lora.hold(adapters), "med", tmp_path / "peft", base_name="org/base")
    lf.save_checkpoint(lora.hold(adapters), tmp_path / "orbax")
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    key = "base_model.model.layers.attention.query.2.lora_A.weight"
    np.testing.assert_array_equal(tensors[key], before["layers.attention.query.lora_a"][2].T)
    lf.load_peft(held := lora.hold(empty), "med", tmp_path / "peft")
    lf.load_checkpoint(other := lora.hold(empty), tmp_path / "orbax")
    for loaded in (lora.load_adapter(empty, "med", tmp_path / "own"), held.tree(), other.tree()):
        for name, array in lora.adapter_arrays(loaded, "med").items():
            np.testing.assert_array_equal(array, before[name])
    assert not any(array.any() for array in adapter_arrays(held, "law").values())
    assert jax.tree.structure(held.tree()) == jax.tree.structure(adapters)


def test_misuse_is_named(lora, params, tokens):
    lora, adapters = lora
    with pytest.raises(ConfigError, match=r"lora\.no-init"):
        LinenLoRA(SPECS).hold(adapters)
    with pytest.raises(ConfigError, match=r"LinenLoRA\.merge"):
        merge_adapter(lora.hold(adapters), "law")
    with pytest.raises(CheckpointError, match=r"lora\.misfit"):
        lora.put_adapter_arrays(adapters, "law", {"up.lora_a": np.zeros((8, 2))})


def test_a_scanned_base_in_fewer_bytes(params, tokens):
    lora = LinenLoRA([LAW], targets=["query", "wide"])
    adapters = lora.init(MODEL, {"params": params}, tokens)
    small = lora.quantize_base(MODEL, {"params": params}, "int8", tokens)
    y, plain = (outputs(lora, tree, adapters, tokens, only="law") for tree in (small, params))
    assert 0 < np.abs(y - plain).max() < 0.1 * np.abs(plain).max()


class Second(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Block, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)
        return scan(name="layers")(x, None)[0]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(D, name="up")(x), None


def test_layers_stacked_along_another_axis_are_refused_by_name():
    x = filled(1.0, 2, D)
    params = draw_params(Second(), x)
    with pytest.raises(ConfigError, match=r"at its first axes|not along its first axes") as caught:
        LinenLoRA(SPECS, targets="all-linear").init(Second(), {"params": params}, x)
    assert "layers.up" in str(caught.value)


class Bank(nn.Module):
    """A package's experts: a weight [experts, out, in], multiplied in one call."""

    @nn.compact
    def __call__(self, x_XBTD):
        return jnp.einsum("xbtd,xfd->bxtf", x_XBTD, self.param("tables", nn.initializers.lecun_normal(), (3, 6, D)))


class Mixture(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        wide = Bank(name="bank")(jnp.stack([x, 2 * x, -x]))
        narrow = nn.Einsum((3, 6, D), "bxtf,xfd->bxtd", use_bias=False, name="back")(nn.gelu(wide))
        return x + narrow.sum(1), None


class Mixtures(nn.Module):
    """Layers of experts in a scan, and one beside it."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(nn.remat(Mixture), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(D, name="last")(Mixture(name="beside")(scan(name="layers")(x, None)[0], None)[0])


def test_experts_take_lora_if_a_target_names_them(tmp_path):
    """Each expert has an adapter of its own, in a layer of a scan and beside it."""
    model, x = Mixtures(), normal(4, (4, 5, D))
    params = draw_params(model, x)
    everything = LinenLoRA(SPECS, targets="all-linear")
    with pytest.warns(UserWarning, match=r"layers.bank.*\(Bank\): a weight for each expert: .* name it"):
        assert everything.init(model, {"params": params}, x).keys() == {"last"}
    whys = {row.path: row.why for row in everything.report(model, {"params": params}, x).skipped}
    assert "for each expert" in whys["beside.back"]
    lora = LinenLoRA(SPECS, targets=["bank", "back"])
    adapters = lora.init(model, {"params": params}, x)
    assert adapters["layers"]["bank"]["lora_a"].shape == (2, 3, 2, D, 3)
    assert adapters["beside"]["back"]["lora_b"].shape == (3, 2, 3, D)
    for number, spec in enumerate(SPECS):
        rng = np.random.default_rng(number)
        arrays = lora.adapter_arrays(adapters, spec.name)
        filled = {key: rng.normal(size=value.shape) * 0.3 for key, value in arrays.items()}
        adapters = lora.put_adapter_arrays(adapters, spec.name, filled)

    @jax.jit
    def forward(adapters):
        with lora.use(TABLE):
            return model.apply({"params": params, "LoRAParam": adapters}, x)

    slopes = jax.grad(lambda adapters: jnp.sum(forward(adapters)[np.array([0, 3])] ** 2))(adapters)
    for number, spec in enumerate(SPECS):
        merged = lora.merge(model, {"params": params}, adapters, spec.name, x)
        rows = np.flatnonzero(np.asarray(TABLE) == number)
        wanted = model.apply({"params": merged}, x)[rows]
        np.testing.assert_allclose(forward(adapters)[rows], wanted, rtol=1e-4, atol=1e-4)  # sums in another order
        own = lora.adapter_arrays(slopes, spec.name)  # only rows of the first adapter are in the loss
        assert all(bool(np.any(slope != 0)) == (number == 0) for slope in own.values())
    lf.save_peft(lora.hold(adapters), "law", tmp_path / "law")
    empty = jax.tree.map(lambda leaf: filled(0.0, *leaf.shape), adapters)
    lf.load_peft(held := lora.hold(empty), "law", tmp_path / "law")
    for key, array in lora.adapter_arrays(held.tree(), "law").items():
        np.testing.assert_array_equal(array, lora.adapter_arrays(adapters, "law")[key])
