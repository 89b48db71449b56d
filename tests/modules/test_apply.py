"""apply_lora on models that know nothing of LoRA."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_models import draw_module
from flax import nnx
from host_arrays import normal, on_device

from lorafusion_jax.errors import ConfigError, ErrorList, RunError
from lorafusion_jax.modules import (
    AdapterSpec,
    LoRAContext,
    Session,
    adapter_arrays,
    apply_lora,
    lora_report,
    merge_adapter,
    quantize_base,
    share_inputs,
    use_adapters,
)

LAW = AdapterSpec(name="law", rank=2, alpha=4, targets=("up", "down"))
MED = AdapterSpec(name="med", rank=3, alpha=3, targets=("up",), seed=5)


class Block(nnx.Module):
    def __init__(self, seed):
        self.up = nnx.Linear(8, 12, rngs=nnx.Rngs(seed))
        self.down = nnx.Linear(12, 8, use_bias=False, rngs=nnx.Rngs(seed + 1))

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    """Linear layers in every kind of container."""

    def __init__(self):
        self.blocks = nnx.List([Block(0), Block(2)])
        self.heads = nnx.Dict(price=nnx.Linear(8, 2, rngs=nnx.Rngs(4)))
        self.pair = nnx.data((nnx.Linear(8, 8, rngs=nnx.Rngs(5)), nnx.Linear(8, 8, rngs=nnx.Rngs(6))))
        self.table = nnx.data({"mix": [nnx.Linear(8, 8, rngs=nnx.Rngs(7))]})

    def __call__(self, x):
        for layer in (*self.blocks, *self.pair, *self.table["mix"]):
            x = layer(x)
        return self.heads["price"](x)


@pytest.fixture(scope="module")
def x():
    return normal(0, (4, 3, 8))


def paths(model):
    return {".".join(map(str, path[:-1])) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}


def randomize(model):
    """Gives every B numbers in the rows that the adapters have."""
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_b":
            node = model
            for part in path[:-1]:
                node = node[part] if isinstance(part, int) or part in ("mix", "price") else getattr(node, part)
            used = np.any(np.asarray(node.lora_a[...]) != 0, axis=1)[:, :, None]
            node.lora_b[...] = on_device(np.where(used, normal(len(path), leaf.shape), 0))
    return model


def test_all_linear_reaches_every_container_shares_kernels_and_changes_no_output(x):
    model = draw_module(Net)
    before, kernels = model(x), [model.pair[0].kernel, model.blocks[1].down.kernel]
    assert apply_lora(model, [LAW], targets="all-linear") is model
    assert paths(model) == {
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
        "heads.price",
        "pair.0",
        "pair.1",
        "table.mix.0",
    }
    assert model.pair[0].kernel is kernels[0]
    assert model.blocks[1].down.kernel is kernels[1]
    # B is zero; the two matmuls may be scheduled differently, hence a few units in the last place
    np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-6)


def test_adapters_keep_their_own_targets_and_ranks():
    model = apply_lora(draw_module(Net), [LAW, MED])
    up, down = model.blocks[0].up, model.blocks[0].down
    assert up.lora_a.shape == (2, 8, 3)
    assert down.lora_b.shape == (2, 2, 8)
    assert not up.lora_a[...][0, :, 2:].any()
    assert up.lora_a[...][1].all()
    assert not down.lora_a[...][1].any()
    alone = apply_lora(draw_module(Net), [LAW])
    np.testing.assert_array_equal(alone.blocks[0].up.lora_a[...][0], up.lora_a[...][0, :, :2])


def test_rows_follow_the_table(x):
    specs = [LAW, MED]
    joint, alone = randomize(apply_lora(draw_module(Net), specs)), {}
    for index, spec in enumerate(specs):
        alone[index] = apply_lora(draw_module(Net), [spec], targets=("up", "down"))
        for block, source in zip(alone[index].blocks, joint.blocks, strict=True):
            for name in ("up", "down"):
                layer, banks = getattr(block, name), getattr(source, name)
                a, b = np.asarray(banks.lora_a[...])[index], np.asarray(banks.lora_b[...])[index]
                missing = max(0, spec.rank - a.shape[1])
                layer.lora_a[...] = on_device(np.pad(a[None, :, : spec.rank], ((0, 0), (0, 0), (0, missing))))
                layer.lora_b[...] = on_device(np.pad(b[None, : spec.rank], ((0, 0), (0, missing), (0, 0))))

    @nnx.jit
    def forward(model, x, table):
        with use_adapters(LoRAContext.of(specs, table)):
            return model(x)

    expected = [np.asarray(nnx.jit(lambda model, x: model(x))(alone[index], x)) for index in range(2)]
    for table in ([0, 1, 1, 0], [1, 1, 0, 0]):
        mixed = np.asarray(forward(joint, x, on_device(table, np.int32)))
        for example, index in enumerate(table):
            # same arithmetic on padded and unpadded ranks, summed in float32
            np.testing.assert_allclose(mixed[example], expected[index][example], rtol=1e-4, atol=1e-5)
    for name, index in (("law", 0), ("med", 1)):
        with use_adapters(specs, only=name):
            np.testing.assert_allclose(joint(x), expected[index], rtol=1e-4, atol=1e-5)


def test_split_and_optax_train_the_adapters_and_nothing_else(x):
    model = apply_lora(draw_module(Net), [LAW], targets="all-linear")
    frozen_before = jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.LoRAParam)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(
            lambda model: jnp.mean((model(x) - 1) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam)
        )(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, x)) for _ in range(5)]
    assert losses[-1] < losses[0]
    chex.assert_trees_all_equal(nnx.state(model, nnx.Not(nnx.LoRAParam)), frozen_before)


def test_a_shared_module_stays_shared(x):
    class Twice(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.second = self.first

    model = apply_lora(Twice(), [LAW], targets=["second"])
    assert model.first is model.second
    assert model.first.lora_a.shape == (1, 8, 2)


def test_a_model_that_is_a_linear_layer_and_subclasses_without_own_arithmetic():
    class Named(nnx.Linear):
        pass

    assert apply_lora(Named(8, 4, rngs=nnx.Rngs(0)), [LAW], targets="all-linear").lora_a.shape == (1, 8, 2)


def refused(model, **more):
    with pytest.raises((ConfigError, ErrorList)) as caught:
        apply_lora(model, more.pop("adapters", [LAW]), **more)
    return getattr(caught.value, "errors", (caught.value,))


def test_a_target_that_matches_nothing_is_told_with_the_names_there_are():
    (error,) = refused(draw_module(Net), targets=["up", "q_proj"])
    assert error.code == "lora.unknown-target"
    assert "'q_proj'" in error.what
    assert "down" in error.fix


def test_a_model_without_linear_layers_is_told_to_have_none():
    (error,) = refused(nnx.Dict(norm=nnx.LayerNorm(4, rngs=nnx.Rngs(0))), targets=["up"])
    assert "no layer that can carry LoRA" in error.what
    assert "no module with a weight" in error.why
    assert "[]" not in str(error)


def test_a_target_in_some_layers_only_is_an_error_unless_allowed():
    model = draw_module(Net)
    (error,) = refused(model, targets=r"blocks\.0\.up")
    assert error.code == "lora.partial-target"
    assert "blocks.1.up" in error.where
    apply_lora(model, [LAW], targets=r"blocks\.0\.up", allow_partial=True)
    assert paths(model) == {"blocks.0.up"}


def test_layers_that_compute_otherwise_are_refused_by_name():
    def make():
        return nnx.Dict(
            table=nnx.Embed(8, 4, rngs=nnx.Rngs(0)),
            filter=nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0)),
            batched=nnx.LinearGeneral(8, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0)),
            experts=nnx.Einsum("bed,def->bef", (8, 2, 4), rngs=nnx.Rngs(0)),
        )

    errors = refused(draw_module(make), targets=["table", "filter", "batched", "experts"])
    whys = {error.where.split()[0]: error.why for error in errors if error.code == "lora.unsupported-linear"}
    assert "embedding" in whys["table"]
    assert "Conv" in whys["filter"]
    assert "batch" in whys["batched"]
    assert "'e' is in input, weight and output, but is not the weight's first axis" in whys["experts"]


def test_second_applications_are_refused():
    (error,) = refused(apply_lora(draw_module(Net), [LAW], targets=["up"]), targets=["up"])
    assert "already" in error.why
    assert error.where == "blocks.0.up and 1 more (Linear)"


def test_adapters_need_different_names():
    assert refused(draw_module(Net), adapters=[LAW, LAW])[0].code == "lora.adapters"
    assert refused(draw_module(Net), adapters=[])[0].code == "lora.adapters"


def test_a_context_of_other_adapters_is_refused(x):
    model = apply_lora(draw_module(Net), [LAW, MED], targets=["up"])
    with pytest.raises(RunError, match="1 adapters, but the model has 2"), use_adapters(LoRAContext.of([LAW], [0])):
        model(x)


@pytest.mark.wrong_types
@pytest.mark.parametrize("table", [[0, 2], [0, -2], [0.5], ["law"]])
def test_a_table_names_adapters_that_there_are(table):
    with pytest.raises(ConfigError, match=r"lora\.unknown-adapter"):
        LoRAContext.of([LAW, MED], table)


def test_a_table_around_a_jitted_function_is_refused_in_both_of_its_lives(x):
    model = apply_lora(draw_module(Net), [LAW], targets=["up"])
    forward = nnx.jit(lambda model, x: model(x))
    with pytest.raises(RunError, match="outside-jit"), use_adapters(LoRAContext.of([LAW], [0])):
        forward(model, x)
    forward(model, x)
    with pytest.raises(RunError, match="context-unused"), use_adapters(LoRAContext.of([LAW], [0])):
        forward(model, x)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)
        self.out = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.second(self.first(x)))


def tie(model):
    model.second.kernel = model.first.kernel
    return model


@pytest.mark.parametrize("targets", ["first", "all-linear", ("first", "second")])
def test_a_weight_of_two_layers_is_refused_with_both_paths(targets):
    with pytest.raises(ConfigError, match="one weight") as caught:
        apply_lora(tie(Tied(nnx.Rngs(0))), [LAW], targets=targets)
    assert "first" in caught.value.where
    assert "second" in caught.value.where


@pytest.mark.parametrize(
    "use",
    [
        lambda model: merge_adapter(model, "law"),
        lambda model: quantize_base(model, "int8"),
        share_inputs,
        lambda model: adapter_arrays(model, "law"),
        lambda model: Session(model, {"law": optax.sgd(1.0)}),
    ],
    ids=["merge", "quantize", "share", "save", "session"],
)
def test_a_weight_that_is_shared_later_is_refused_by_whatever_uses_it(use):
    model = tie(apply_lora(Tied(nnx.Rngs(0)), [LAW], targets="all-linear", heads=()))
    before = np.asarray(model.first.kernel[...])
    with pytest.raises(ConfigError, match="one weight"):
        use(model)
    np.testing.assert_array_equal(model.first.kernel[...], before)


def test_a_layer_at_two_paths_is_one_owner_and_others_may_share():
    model = tie(Tied(nnx.Rngs(0)))
    model.again = model.out
    apply_lora(model, [LAW], targets=("out",), allow_partial=True)
    merge_adapter(model, "law")


def test_layers_that_share_a_frozen_weight_share_its_stored_form():
    model = quantize_base(apply_lora(tie(Tied(nnx.Rngs(0))), [LAW], targets=("out",)), "int8")
    assert model.first.kernel is model.second.kernel


def test_all_linear_takes_blocks_that_differ_and_leaves_out_what_is_excluded():
    def linear():
        return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    blocks = [nnx.Dict(mix=linear(), gate=linear()), nnx.Dict(mlp=nnx.Dict(up=linear())), nnx.Dict(skip=linear())]
    model = apply_lora(nnx.Dict(blocks=nnx.List(blocks)), [LAW], targets="all-linear", exclude="gate")
    adapted = [row.path for row in lora_report(model).adapted]
    assert adapted == ["blocks.0.mix", "blocks.1.mlp.up", "blocks.2.skip"]
    with pytest.raises(ConfigError, match="exclude 'gaet'"):
        apply_lora(nnx.Dict(up=linear()), [LAW], targets="all-linear", exclude=["gaet"])
    with pytest.raises(ConfigError, match="some layers only"):
        apply_lora(nnx.Dict(blocks=nnx.List([nnx.Dict(a=linear()), nnx.Dict(b=linear())])), [LAW], targets="a")


class OwnEinsum(nnx.Module):
    def __init__(self, equation, weight, bias):
        self.equation, self.w, self.bias = equation, nnx.Param(jnp.ones(weight)), nnx.Param(jnp.ones(bias))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...]) + self.bias[...]


def test_a_bias_of_heads_is_no_second_weight():
    model = nnx.Dict(heads=OwnEinsum("btd,dnh->btnh", (8, 2, 3), (2, 3)), flat=OwnEinsum("btd,df->btf", (8, 4), (1, 4)))
    model = apply_lora(model, [LAW], targets="all-linear")  # warns of nothing
    assert model.heads.lora_a.shape == (1, 8, 2)
    assert [row.path for row in lora_report(model).adapted] == ["heads", "flat"]


class Scaled(nnx.Module):
    """A layer that scales its weight, as layers of muP and some projections do."""

    def __init__(self, scale):
        self.equation, self.scale = "...k,kn->...n", scale
        self.w = nnx.Param(jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.scale(self.w[...]))


@pytest.mark.parametrize(
    "scale",
    [lambda w: -w * 0.3, lambda w: jnp.float32(3) * w.astype(jnp.float32), lambda w: 2 * (w / jnp.sqrt(8.0))],
    ids=["after", "before", "both"],
)
def test_a_weight_times_a_scalar_is_a_scaled_product(scale):
    x, plain = normal(3, (2, 5, 8)), Scaled(scale)
    expected = plain(x)
    model = apply_lora(nnx.Dict(layer=plain), [LAW], targets="all-linear")
    np.testing.assert_allclose(model.layer(x), expected, rtol=1e-5, atol=1e-5)
    model.layer.lora_b[...] = jnp.ones_like(model.layer.lora_b[...])
    unmerged = model.layer(x)
    assert abs(unmerged - expected).max() > 0.1
    merge_adapter(model, "law")
    np.testing.assert_allclose(model.layer(x), unmerged, rtol=1e-5, atol=1e-5)


def test_a_weight_scaled_by_column_is_refused():
    model = apply_lora(nnx.Dict(layer=Scaled(lambda w: w * jnp.arange(4.0))), [LAW], targets="all-linear")
    with pytest.raises(ConfigError, match="does more with the weight"):
        model.layer(normal(3, (2, 8)))
