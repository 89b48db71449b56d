"""LoRA on Linen models that know nothing of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw_params
from flax import linen as nn
from host_arrays import changed, normal, on_device

from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.modules import AdapterSpec, LinenLoRA

LAW = AdapterSpec(name="law", rank=2, alpha=4)
MED = AdapterSpec(name="med", rank=4, alpha=4, seed=5)
SPECS = [LAW, MED]
TABLE = on_device([0, 1, 1, 0], np.int32)


class Mix(nn.Module):
    """A linear module of a package, with its equation at the call."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param("w", nn.initializers.lecun_normal(), self.shape))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attn")(x)
        x = nn.relu(nn.Dense(12, name="up")(x))
        x = nn.Einsum((12, 8), "btf,fd->btd", name="down")(x)
        x = Mix((2, 8, 3), name="mix")("btd,hdc->bthc", x)
        return nn.DenseGeneral(5, axis=(-2, -1), name="head")(x)


@pytest.fixture(scope="module")
def x():
    return normal(0, (4, 5, 8))


@pytest.fixture(scope="module")
def params(x):
    return draw_params(Net(), x)


def make(params, x, specs=SPECS, **more):
    lora = LinenLoRA(specs, targets="all-linear", **more)  # Mix, too: its call is one product with its only matrix
    adapters = lora.init(Net(), {"params": params}, x)
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        b = np.zeros(leaf.shape, np.float32)
        for index, spec in enumerate(specs):
            b[index, : spec.rank] = rng.normal(size=b[index, : spec.rank].shape)
        return on_device(b) if path[-1].key == "lora_b" else leaf

    return lora, jax.tree_util.tree_map_with_path(fill, adapters)


def apply(lora, params, adapters, x, table=TABLE, **options):
    @jax.jit
    def forward(adapters, table):
        with lora.use(table, **options):
            return Net().apply({"params": params, "LoRAParam": adapters}, x)

    return forward(adapters, table)


@jax.jit
def plain(params, x):
    return Net().apply({"params": params}, x)


def test_every_adapter_has_its_own_rank(params, x):
    _, adapters = make(params, x)
    assert adapters["up"]["lora_a"].shape == (2, 8, 4)
    assert not adapters["up"]["lora_a"][0, :, 2:].any()
    assert adapters["up"]["lora_a"][1].all()


def test_all_linear_reaches_attention_and_own_modules_but_not_the_head(params, x):
    _, adapters = make(params, x)
    assert set(adapters) == {"attn", "up", "down", "mix"}
    assert set(adapters["attn"]) == {"query", "key", "value", "out"}


def test_a_mixed_batch_equals_merged_weights(params, x):
    lora, adapters = make(params, x)
    actual = np.asarray(apply(lora, params, adapters, x))
    inside = {"query": 1, "key": 1, "value": 1, "out": 2, "up": 1, "down": 1}
    for index, spec in enumerate(SPECS):
        flat = {tuple(part.key for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        banks = {tuple(p.key for p in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(adapters)}
        for path in {path[:-1] for path in banks}:
            a, b = (np.asarray(banks[*path, name][index], np.float64) for name in ("lora_a", "lora_b"))
            name = "w" if path[-1] == "mix" else "kernel"
            weight, delta = flat[*path, name], spec.scale * a @ b
            if path[-1] == "mix":
                delta = delta.reshape(8, 2, 3).transpose(1, 0, 2)
            else:
                assert len(weight.shape) > inside[path[-1]]
                delta = delta.reshape(weight.shape)
            flat[*path, name] = on_device(weight + delta, np.float32)
        tree = {}
        for path, leaf in flat.items():
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = leaf
        rows = np.flatnonzero(np.asarray(TABLE) == index)
        # sums in another order in six layers
        np.testing.assert_allclose(actual[rows], np.asarray(plain(tree, x))[rows], rtol=1e-4, atol=1e-4)


def test_rank_padding_gets_no_gradient_and_stays_zero(params, x):
    lora, adapters = make(params, x)

    def loss(adapters):
        return jnp.sum(apply(lora, params, adapters, x) ** 2)

    grads = jax.device_get(jax.jit(jax.grad(loss))(adapters))
    assert grads["up"]["lora_a"][0, :, :2].any()
    assert not grads["up"]["lora_a"][0, :, 2:].any()
    assert not grads["up"]["lora_b"][0, 2:].any()


def test_checkpoints_of_the_base_load_unchanged(params, x):
    fresh = LinenLoRA(SPECS, targets="all-linear", modules=[(Mix, "w")])
    adapters = fresh.init(Net(), {"params": params}, x)
    # B is zero: what the base computes, up to the order of sums
    np.testing.assert_allclose(apply(fresh, params, adapters, x), plain(params, x), atol=1e-5)


def test_dropout_needs_a_step_and_follows_it(params, x):
    specs = [AdapterSpec(name="law", rank=2, alpha=4, dropout=0.5)]
    lora, adapters = make(params, x, specs)
    table = on_device(np.zeros(4, np.int32))
    with pytest.raises(ConfigError, match=r"dropout=0\.5"):
        apply(lora, params, adapters, x, table)

    @jax.jit
    def at_step(step):
        return apply(lora, params, adapters, x, table, step=step)

    first, again, two = (np.asarray(at_step(step)) for step in (1, 1, 2))
    still = np.asarray(apply(lora, params, adapters, x, table, train=False))
    np.testing.assert_array_equal(first, again)
    assert (first != two).all()
    assert (first != still).all()


def test_a_missing_collection_is_an_error_that_names_it(params, x):
    lora, _ = make(params, x)
    with pytest.raises(RunError, match=r'"LoRAParam": adapters'), lora.use(TABLE):
        Net().apply({"params": params}, x)


def test_a_target_that_matches_nothing_names_the_layers(params, x):
    with pytest.raises(ConfigError, match=r"down, head.*up"):
        LinenLoRA(SPECS, targets="q_proj").init(Net(), {"params": params}, x)


def test_merged_parameters_compute_what_the_adapter_computes(params, x):
    lora, adapters = make(params, x)
    expected = apply(lora, params, adapters, x, None, only="med")
    merged = lora.merge(Net(), {"params": params}, adapters, "med", x)
    np.testing.assert_allclose(plain(merged, x), expected, rtol=1e-4, atol=1e-4)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    with pytest.raises(ConfigError, match=r"lora\.unknown-adapter"):
        lora.merge(Net(), {"params": params}, adapters, "mde", x)


def test_an_adapter_comes_out_at_its_own_rank(params, x):
    lora, adapters = make(params, x)
    assert lora.adapter_arrays(lora.put_adapter_arrays(adapters, "law", lora.adapter_arrays(adapters, "law")), "law")
    arrays = lora.adapter_arrays(adapters, "law")
    assert arrays["mix.lora_a"].shape == (8, 2)
    assert arrays["mix.lora_b"].shape == (2, 6)
    np.testing.assert_array_equal(arrays["up.lora_b"], adapters["up"]["lora_b"][0, :2])


class Tied(nn.Module):
    """Its head is applied to the embedding's weight, as in many published models; one weight has a name of its own."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 8, name="embed")
        x = Named((8, 8), name="mix")(embed(tokens))
        return nn.Dense(7, use_bias=False).apply({"params": {"kernel": embed.embedding.T}}, x)


class Named(nn.Module):
    shape: tuple[int, ...]
    weight_name: str = "mixing"

    @nn.compact
    def __call__(self, x):
        return x @ self.param(self.weight_name, nn.initializers.lecun_normal(), self.shape)


def test_a_head_applied_to_shared_weights_is_left_out():
    tokens = on_device(np.zeros((4, 3), np.int32))
    params = draw_params(Tied(), tokens)
    lora = LinenLoRA(SPECS, targets="all-linear", modules=[(Named, lambda module: module.weight_name)])
    adapters = lora.init(Tied(), {"params": params}, tokens)
    assert list(adapters) == ["mix"]
    with lora.use(TABLE):
        y = Tied().apply({"params": params, "LoRAParam": adapters}, tokens)
    np.testing.assert_allclose(y, Tied().apply({"params": params}, tokens), rtol=1e-6)


class Gated(nn.Module):
    """Two linear modules that share the scope of the module around them, for the sake of old checkpoints."""

    @nn.compact
    def __call__(self, x):
        for name in ("gate", "out"):
            layer = Named((8, 8), weight_name=name)
            nn.share_scope(self, layer)
            x = x + nn.tanh(layer(x))
        return x


def test_modules_that_share_a_scope_have_adapters_each(x):
    params = draw_params(Gated(), x)
    lora = LinenLoRA(SPECS, targets=["out"], modules=[(Named, lambda module: module.weight_name)])
    adapters = lora.init(Gated(), {"params": params}, x)
    assert list(adapters) == ["out"]
    adapters["out"]["lora_b"] = changed(adapters["out"]["lora_b"], np.s_[0, :2], 0.5)
    with lora.use(only="law"):
        y = Gated().apply({"params": params, "LoRAParam": adapters}, x)
    a, b = adapters["out"]["lora_a"][0], adapters["out"]["lora_b"][0]
    merged = params | {"out": params["out"] + 2 * a @ b}
    np.testing.assert_allclose(y, Gated().apply({"params": merged}, x), rtol=1e-5, atol=1e-5)
    same = lora.merge(Gated(), {"params": params}, adapters, "law", x)
    np.testing.assert_allclose(same["out"], merged["out"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(same["gate"], params["gate"])


class Jitted(nn.Module):
    """A model that jits itself, as gemma's do."""

    @nn.jit
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="up")(x)


def test_a_model_that_jits_itself_never_keeps_another_table(x):
    params = draw_params(Jitted(), x)
    lora = LinenLoRA(SPECS, targets="all-linear")
    adapters = lora.init(Jitted(), {"params": params}, x)
    adapters["up"]["lora_b"] = changed(adapters["up"]["lora_b"], np.s_[0, :2], 0.5)

    def outputs(adapters, table):
        with lora.use(table):
            return Jitted().apply({"params": params, "LoRAParam": adapters}, x)

    jitted = jax.jit(outputs)
    first, law = (np.asarray(jitted(adapters, on_device([number] * 4, np.int32))) for number in (1, 0))
    np.testing.assert_allclose(first, Jitted().apply({"params": params}, x), rtol=1e-5, atol=1e-6)
    assert np.abs(law - first).max() > 0.1
    grads = jax.jit(jax.grad(lambda adapters: outputs(adapters, TABLE).sum()))(adapters)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    merged = lora.merge(Jitted(), {"params": params}, adapters, "law", x)
    np.testing.assert_allclose(Jitted().apply({"params": merged}, x), law, rtol=1e-5, atol=1e-5)
    with pytest.raises(RunError, match=r"lora\.context-outside-jit"):
        outputs(adapters, TABLE)
