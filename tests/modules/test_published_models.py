"""LoRA in models that other people published, and the same numbers as qwix. Needs the extra `models`."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import published_models as published
import pytest
from flax import nnx
from models_as_published import AbsorbedLatents
from more_cases import nightly
from safetensors.numpy import load_file

import lorafusion_jax as lf
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import (
    AdapterSpec,
    LinenLoRA,
    adapter_arrays,
    apply_lora,
    lora_report,
    merge_adapter,
    put_adapter_arrays,
    use_adapters,
)
from lorafusion_jax.optim.per_adapter import active_adapters, per_adapter

LAW = AdapterSpec(name="law", rank=4, alpha=8)
SPECS = [LAW, AdapterSpec(name="med", rank=2, alpha=4, seed=1)]
TABLE = jnp.array([0, 1, 1, 0])
TOLERANCE = 1e-5  # relative to the largest value, float32: sums in another order
pytestmark = pytest.mark.filterwarnings("default")  # of other packages, and ours of layers that stay as they are


@pytest.fixture(autouse=True)
def mesh():
    """One device: jimm's models run on a mesh only."""
    kinds = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), kinds, devices=jax.devices()[:1])):
        yield


def close(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


def lane(cases, structures, everyday):
    """Models of packages, and structures of models; few of these run every day, all in `make test-models`."""
    return [*cases, *(name if name in everyday else nightly(name) for name in structures)]


@pytest.mark.parametrize("name", lane(published.NNX_MODELS, published.NNX_STRUCTURES, ["bonsai_llada"]))
def test_two_adapters_train_in_an_nnx_model_and_merge_into_it(name, tmp_path):
    case = (published.NNX_MODELS | published.NNX_STRUCTURES)[name]()
    before = case.call(case.model)
    model = apply_lora(case.model, SPECS, targets="all-linear")
    rules = {"law": optax.adam(1e-2), "med": optax.sgd(1e-2)}
    optimizer = nnx.Optimizer(model, per_adapter(rules), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, table):
        def loss(model):
            with use_adapters(SPECS, table):
                return jnp.mean((case.call(model) - 1) ** 2)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads, active=active_adapters(table, 2))
        return value

    losses = [float(step(model, optimizer, TABLE)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert len(lora_report(model).adapted) >= 5  # attention and MLP

    @nnx.jit
    def with_law(model):
        with use_adapters(SPECS, only="law"):
            return case.call(model)

    @nnx.jit
    def mixed(model, table):
        with use_adapters(SPECS, table):
            return case.call(model)

    adapted = with_law(model)
    assert np.abs(adapted - before).max() > 1e-3
    close(mixed(model, TABLE)[np.array([0, 3])], adapted[np.array([0, 3])])  # joint = alone
    arrays = adapter_arrays(model, "law")
    lf.save_peft(model, "law", tmp_path / "law")
    if name in published.PEFT_KEYS:
        keys = load_file(tmp_path / "law" / "adapter_model.safetensors")
        assert f"base_model.model.{published.PEFT_KEYS[name]}.lora_A.weight" in keys
    put_adapter_arrays(model, "law", {key: 0 * array for key, array in arrays.items()})
    lf.load_peft(model, "law", tmp_path / "law")
    for key, array in adapter_arrays(model, "law").items():
        np.testing.assert_array_equal(array, arrays[key])
    close(case.call(merge_adapter(model, "law")), adapted)


@pytest.mark.parametrize("name", lane(published.LINEN_MODELS, published.LINEN_STRUCTURES, ["openpi_pi0"]))
def test_two_adapters_train_in_a_linen_model_and_merge_into_it(name, tmp_path):
    case = (published.LINEN_MODELS | published.LINEN_STRUCTURES)[name]()
    init = jax.jit(lambda: case.model.init(jax.random.key(0), *case.args, **case.options))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), init()["params"])  # gemma's are in bfloat16
    lora = LinenLoRA(SPECS, targets="all-linear", modules=case.modules)
    adapters = lora.init(case.model, {"params": params}, *case.args, **case.options)
    optimizer = optax.adam(1e-2)

    def outputs(variables):
        return case.output(case.model.apply(variables, *case.args, **case.options))

    @jax.jit
    def step(adapters, state):
        def loss(adapters):
            with lora.use(TABLE):
                return jnp.mean((outputs({"params": params, "LoRAParam": adapters}) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, value

    state, losses = optimizer.init(adapters), []
    for _ in range(3):
        adapters, state, value = step(adapters, state)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)

    @jax.jit
    def with_law(adapters):
        with lora.use(only="law"):
            return outputs({"params": params, "LoRAParam": adapters})

    @jax.jit
    def mixed(adapters, table):
        with lora.use(table):
            return outputs({"params": params, "LoRAParam": adapters})

    adapted = with_law(adapters)
    assert np.abs(adapted - outputs({"params": params})).max() > 1e-3
    close(mixed(adapters, TABLE)[np.array([0, 3])], adapted[np.array([0, 3])])  # joint = alone
    lf.save_peft(lora.hold(adapters), "law", tmp_path / "law")
    lf.load_peft(held := lora.hold(jax.tree.map(jnp.zeros_like, adapters)), "law", tmp_path / "law")
    for key, array in lora.adapter_arrays(held.tree(), "law").items():
        np.testing.assert_array_equal(array, lora.adapter_arrays(adapters, "law")[key])
    report = lora.report(case.model, {"params": params}, *case.args, **case.options)
    assert not {"logitdense", "lm_head"} & {row.path.rsplit(".", 1)[-1] for row in report.adapted}
    merged = lora.merge(case.model, {"params": params}, adapters, "law", *case.args, **case.options)
    close(outputs({"params": merged}), adapted)


@pytest.mark.nightly
def test_adapters_whose_weights_a_parent_reads_are_named_and_not_merged():
    """dantinox' absorbed attention: right without them, and refused with them."""

    @nnx.jit
    def adapted(model):
        with use_adapters(SPECS, only="law"):
            return model(published.IDS)

    model = apply_lora(AbsorbedLatents(nnx.Rngs(0)), SPECS, targets="all-linear")
    with pytest.warns(UserWarning, match=r"\[lora.uncalled\] .*up_k, up_v"):
        adapted(model)
    with pytest.raises(ConfigError, match="up_k, up_v"):
        merge_adapter(model, "law")
    rest = apply_lora(AbsorbedLatents(nnx.Rngs(0)), SPECS, targets="all-linear", exclude=["up_k", "up_v"])
    before = adapted(rest)
    close(merge_adapter(rest, "law")(published.IDS), before)


@pytest.mark.parametrize("name", ["qwen3", "llama3"])  # jimm runs its layers in nnx.scan, where qwix fails
def test_one_adapter_is_qwix_lora_in_outputs_and_gradients(name):
    qwix = pytest.importorskip("qwix", exc_type=ImportError)
    case = published.NNX_MODELS[name]()
    ours = apply_lora(nnx.clone(case.model), [LAW], targets="all-linear")
    paths = [row.path for row in lora_report(ours).adapted]
    pattern = "|".join(re.escape(path.replace(".", "/")) for path in paths)
    provider = qwix.LoraProvider(module_path=pattern, rank=LAW.rank, alpha=LAW.alpha)
    theirs = qwix.apply_lora_to_model(case.model, provider, *case.inputs, rngs=nnx.Rngs(1))
    compared = 0
    for number, path in enumerate(paths):
        mine, other = at(ours, path), at(theirs, path)
        weight = next(name.removesuffix("_lora_a") for name in vars(other) if name.endswith("_lora_a"))
        a, b = getattr(other, f"{weight}_lora_a"), getattr(other, f"{weight}_lora_b")
        b[...] = 0.3 * jax.random.normal(jax.random.key(number), b.shape)
        mine.lora_a[...] = a[...].reshape(mine.lora_a.shape)
        mine.lora_b[...] = b[...].reshape(mine.lora_b.shape)
        compared += 1

    def loss(model, adapters):
        if adapters:
            with use_adapters([LAW], only="law"):
                y = case.call(model)
        else:
            y = case.call(model)
        return jnp.mean((y - 1) ** 2), y

    run = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)
    (_, mine), my_grads = run(ours, True)
    (_, other), their_grads = run(theirs, False)
    close(mine, other)
    assert compared == len(paths) >= 5
    for path in paths:
        mine = {key[-1]: leaf[...] for key, leaf in nnx.to_flat_state(inside(my_grads, path))}
        other = {key[-1][-6:]: leaf[...] for key, leaf in nnx.to_flat_state(inside(their_grads, path))}
        for leaf in ("lora_a", "lora_b"):
            close(mine[leaf].reshape(other[leaf].shape), other[leaf])


def at(model, path):
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def inside(state, path):
    for part in path.split("."):
        state = state[int(part) if part.isdigit() else part]
    return state
