"""Ways in which people write a training loop: whatever they are, an adapter ends where it ends alone."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_models import draw_module
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from host_arrays import normal, on_device
from jax.sharding import PartitionSpec as P
from more_cases import mostly_nightly

import lorafusion_jax as lf
from lorafusion_jax.modules import adapter_arrays, load_adapter, put_adapter_arrays, save_adapter

SPECS = [lf.AdapterSpec(name="law", rank=2, alpha=4), lf.AdapterSpec(name="med", rank=3, alpha=3, seed=1)]
STEPS, RATE = 2, 0.1
RULES = {"law": optax.sgd(RATE), "med": optax.sgd(0.01)}
X, Y, TABLE = normal(0, (4, 3, 4)), normal(1, (4, 3, 4)), on_device([0, 1, 1, 0])
ACTIVE = on_device([True, True])


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def adapted(specs):
    model = lf.apply_lora(draw_module(lambda: Net(nnx.Rngs(0))), specs, targets=("up", "down"))
    arrays = adapter_arrays(model, "law")
    put_adapter_arrays(model, "law", {name: normal(7, array.shape, 0.4) for name, array in arrays.items()})
    return model


def loss_of(model, x=X, y=Y, table=TABLE):
    with lf.use_adapters(SPECS, table) as context:
        return context.mean((model(x) - y) ** 2).sum()


@pytest.fixture(scope="module")
def alone():
    """The adapter after the same steps with its own rows, a plain mean and a plain optimizer."""
    model = adapted(SPECS[:1])
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    mine = np.asarray(TABLE) == 0

    @jax.jit
    def step(lora):
        grads = jax.grad(lambda lora: jnp.mean((nnx.merge(graph, lora, frozen)(X[mine]) - Y[mine]) ** 2))(lora)
        return jax.tree.map(lambda leaf, grad: leaf - RATE * grad, lora, grads)

    for _ in range(STEPS):
        lora = step(lora)
    return adapter_arrays(nnx.merge(graph, lora, frozen), "law")


def by_nnx(model, optimizer, *, steps=STEPS, loss=loss_of, batches=None, jit=nnx.jit, around=lambda model: model):
    """The loop of Flax's guide, with parts exchanged."""
    held = nnx.Optimizer(model, optimizer, wrt=nnx.LoRAParam)

    @jit
    def step(model, held, x, y, table):
        grads = nnx.grad(lambda model: loss(around(model), x, y, table), argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        held.update(model, grads, active=lf.active_adapters(table, 2))

    for x, y, table in batches or [(X, Y, TABLE)] * steps:
        step(model, held, x, y, table)
    return model


def by_optax(model, optimizer, *, jit=jax.jit, gradient=None, update=None):
    """The loop of functions: split, grad, update, merge."""
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    gradient = gradient or (lambda loss, lora: jax.grad(loss)(lora))

    @jit
    def step(lora, state):
        grads = gradient(lambda lora, *rows: loss_of(nnx.merge(graph, lora, frozen), *rows), lora)
        updates, state = optimizer.update(grads, state, lora, active=ACTIVE)
        return optax.apply_updates(lora, updates), state

    state = optimizer.init(lora)
    for _ in range(STEPS):
        lora, state = (update or step)(lora, state)
    return nnx.merge(graph, lora, frozen)


HALVES = [(X[half], Y[half], TABLE[half]) for half in (np.s_[:2], np.s_[2:])]  # each adapter has a row in each


def accumulated(wrap):
    """Microbatches of one adapter each: law, med, law, med."""
    mine = [np.asarray(TABLE) == number for number in (0, 1)]
    return lambda: by_nnx(
        adapted(SPECS), wrap(), batches=[(X[rows], Y[rows], TABLE[rows]) for _ in range(STEPS) for rows in mine]
    )


def scan_of_halves(loss, lora):
    def add(total, rows):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(lora, *rows)), None

    stacked = [jnp.stack(parts) for parts in zip(*HALVES, strict=True)]
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, lora), tuple(stacked))
    return jax.tree.map(lambda leaf: leaf / 2, total)


def per_example(loss, lora):
    grads = jax.vmap(lambda x, y, owner: jax.grad(loss)(lora, x[None], y[None], owner[None]))(X, Y, TABLE)
    return jax.tree.map(lambda leaf: leaf.sum(0) / 2, grads)  # two rows of each adapter


def on_devices(loss, lora):
    """Rows over two devices; each has one of each adapter."""
    mesh = jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    add = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("rows"), P("rows"), P("rows")), out_specs=P())
    grad = add(
        lambda lora, *rows: jax.lax.pmean(jax.grad(loss)(jax.lax.pcast(lora, "rows", to="varying"), *rows), "rows")
    )
    return grad(lora, X, Y, TABLE)


def by_fori_loop():
    optimizer, model = lf.per_adapter(RULES), adapted(SPECS)
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)

    def step(_, carry):
        lora, state = carry
        grads = jax.grad(lambda lora: loss_of(nnx.merge(graph, lora, frozen)))(lora)
        updates, state = optimizer.update(grads, state, lora, active=ACTIVE)
        return optax.apply_updates(lora, updates), state

    lora, _ = jax.jit(lambda *carry: jax.lax.fori_loop(0, STEPS, step, carry))(lora, optimizer.init(lora))
    return nnx.merge(graph, lora, frozen)


def by_session():
    session = lf.Session(adapted(SPECS), RULES, capacity=3)
    rows = [{"x": np.asarray(x), "y": np.asarray(y)} for x, y in zip(X, Y, strict=True)]
    for _ in range(STEPS):
        session.forward_backward({"law": [rows[0], rows[3]], "med": rows[1:3]}, squares)
        session.optim_step()
    return session.model


def squares(model, rows):
    return (model(rows["x"]) - rows["y"]) ** 2


def interrupted(write_and_read):
    """One step, then whatever brings the model elsewhere, then the other step."""

    def run(tmp_path):
        model = by_nnx(adapted(SPECS), lf.per_adapter(RULES), steps=1)
        return by_nnx(write_and_read(model, tmp_path), lf.per_adapter(RULES), steps=STEPS - 1)

    return run


def by_files(model, folder):
    fresh = adapted(SPECS)
    for spec in SPECS:
        save_adapter(model, spec.name, folder / spec.name)
        load_adapter(fresh, spec.name, folder / spec.name)
    return fresh


def by_checkpoint(model, folder):
    lf.save_checkpoint(model, folder / "all")
    fresh = adapted(SPECS)
    lf.load_checkpoint(fresh, folder / "all")
    return fresh


def by_peft(model, folder):
    fresh = adapted(SPECS)
    for spec in SPECS:
        lf.save_peft(model, spec.name, folder / spec.name)
        lf.load_peft(fresh, spec.name, folder / spec.name)
    return fresh


def by_abstract(model, _):
    graph, abstract = nnx.split(nnx.eval_shape(lambda: nnx.clone(model)))
    return nnx.merge(graph, jax.tree.map(lambda _, leaf: leaf, abstract, nnx.state(model)))


def merged_and_back(model, _):
    return lf.unmerge_adapter(lf.merge_adapter(model, "law", keep=True))


def labels(lora):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "up" if "up" in jax.tree_util.keystr(path) else "down", lora
    )


def every_leaf(lora):
    return jax.tree.map(lambda _: True, labels(lora))


def padded(x, y, table):
    return (
        jnp.concatenate([x, x + jnp.nan]),
        jnp.concatenate([y, y]),
        jnp.concatenate([table, jnp.full_like(table, -1)]),
    )


IDIOMS = {
    "nnx.Optimizer": lambda: by_nnx(adapted(SPECS), lf.per_adapter(RULES)),
    "eager": lambda: by_nnx(adapted(SPECS), lf.per_adapter(RULES), jit=lambda step: step),
    "split and merge": lambda: by_optax(adapted(SPECS), lf.per_adapter(RULES)),
    "donated": lambda: by_optax(adapted(SPECS), lf.per_adapter(RULES), jit=partial(jax.jit, donate_argnums=(0, 1))),
    "remat": lambda: by_nnx(adapted(SPECS), lf.per_adapter(RULES), around=lambda model: nnx.remat(model)),
    "checkpointed loss": lambda: by_optax(
        adapted(SPECS), lf.per_adapter(RULES), gradient=lambda loss, lora: jax.grad(jax.checkpoint(loss))(lora)
    ),
    "value and aux": lambda: by_optax(
        adapted(SPECS),
        lf.per_adapter(RULES),
        gradient=lambda loss, lora: jax.value_and_grad(lambda lora: (loss(lora), 1.0), has_aux=True)(lora)[1],
    ),
    "vjp": lambda: by_optax(
        adapted(SPECS), lf.per_adapter(RULES), gradient=lambda loss, lora: jax.vjp(loss, lora)[1](jnp.ones(()))[0]
    ),
    "per example": lambda: by_optax(adapted(SPECS), lf.per_adapter(RULES), gradient=per_example),
    "scan of microbatches": lambda: by_optax(adapted(SPECS), lf.per_adapter(RULES), gradient=scan_of_halves),
    "rows over devices": lambda: by_optax(adapted(SPECS), lf.per_adapter(RULES), gradient=on_devices),
    "fori_loop": by_fori_loop,
    "clip before": lambda: by_nnx(adapted(SPECS), optax.chain(optax.clip(1e3), lf.per_adapter(RULES))),
    "clip inside": lambda: by_nnx(
        adapted(SPECS),
        lf.per_adapter({name: optax.chain(optax.clip_by_global_norm(1e3), rule) for name, rule in RULES.items()}),
    ),
    "partition by path": lambda: by_nnx(
        adapted(SPECS), optax.partition({part: lf.per_adapter(RULES) for part in ("up", "down")}, labels)
    ),
    "masked": lambda: by_nnx(adapted(SPECS), optax.masked(lf.per_adapter(RULES), every_leaf)),
    "schedule": lambda: by_nnx(
        adapted(SPECS),
        lf.per_adapter(RULES | {"law": optax.sgd(optax.piecewise_constant_schedule(RATE, {STEPS: 0.0}))}),
    ),
    "injected hyperparameters": lambda: by_nnx(
        adapted(SPECS), lf.per_adapter(RULES | {"law": optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)})
    ),
    "finite inside": lambda: by_nnx(
        adapted(SPECS), lf.per_adapter({name: optax.apply_if_finite(rule, 3) for name, rule in RULES.items()})
    ),
    "finite outside": lambda: by_nnx(adapted(SPECS), optax.apply_if_finite(lf.per_adapter(RULES), 3)),
    "microbatch of each": accumulated(lambda: lf.per_adapter(RULES)),
    "MultiSteps outside": accumulated(lambda: optax.MultiSteps(lf.per_adapter(RULES), 2, use_grad_mean=False)),
    "apply_every": accumulated(lambda: optax.chain(optax.apply_every(2), lf.per_adapter(RULES))),
    "MultiSteps inside": lambda: by_nnx(
        adapted(SPECS),
        lf.per_adapter({name: optax.MultiSteps(rule, 2) for name, rule in RULES.items()}),
        batches=HALVES * STEPS,
    ),
    "padding": lambda: by_nnx(
        adapted(SPECS), lf.per_adapter(RULES), loss=lambda model, *rows: loss_of(model, *padded(*rows))
    ),
    "table per row": lambda: by_nnx(
        adapted(SPECS),
        lf.per_adapter(RULES),
        loss=lambda model, x, y, table: loss_of(model, x.reshape(-1, 4), y.reshape(-1, 4), jnp.repeat(table, 3)),
    ),
    "Session": by_session,
    "deepcopy": interrupted(lambda model, _: copy.deepcopy(model)),
    "clone": interrupted(lambda model, _: nnx.clone(model)),
    "pickle": interrupted(lambda model, _: pickle.loads(pickle.dumps(model))),
    "safetensors": interrupted(by_files),
    "orbax": interrupted(by_checkpoint),
    "peft": interrupted(by_peft),
    "abstract": interrupted(by_abstract),
    "merged and back": interrupted(merged_and_back),
}
EVERY_DAY = ("MultiSteps outside", "scan of microbatches", "partition by path", "padding")


@pytest.mark.parametrize("name", mostly_nightly(IDIOMS, EVERY_DAY))
def test_an_adapter_ends_where_it_ends_alone(name, alone, tmp_path):
    idiom = IDIOMS[name]
    model = idiom(tmp_path) if idiom.__code__.co_argcount else idiom()
    for path, array in adapter_arrays(model, "law").items():
        np.testing.assert_allclose(array, alone[path], rtol=1e-5, atol=1e-6, err_msg=path)
    assert abs(alone["up.lora_b"] - adapter_arrays(adapted(SPECS), "law")["up.lora_b"]).max() > 1e-3


class LinenNet(nn.Module):
    wrap: str = ""

    @nn.compact
    def __call__(self, x):
        dense = nn.remat(nn.Dense) if self.wrap == "remat" else nn.Dense
        x = nn.relu(dense(6, name="up")(x))
        self.sow("intermediates", "hidden", x)
        if self.wrap == "norm":
            x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(4, name="down")(x)


@pytest.mark.parametrize("wrap", mostly_nightly(["", "remat", "norm"], [""]))
def test_an_adapter_of_a_linen_train_state_ends_where_it_ends_alone(wrap):
    model = LinenNet(wrap)
    variables = model.init(jax.random.key(0), X)

    def train(specs, rows, owners, optimizer, **active):
        lora = lf.LinenLoRA(specs, targets="all-linear", heads=())
        adapters = lora.init(model, variables, X)
        state = TrainState.create(apply_fn=model.apply, params=adapters, tx=optimizer)

        @jax.jit
        def step(state):
            def loss(adapters):
                with lora.use(owners) as context:
                    y, _ = state.apply_fn({**variables, "LoRAParam": adapters}, X[rows], mutable=["intermediates"])
                return context.mean((y - Y[rows]) ** 2).sum()

            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        for _ in range(STEPS):
            state = step(state)
        return lora.adapter_arrays(state.params, "law")

    together = train(SPECS, np.arange(4), TABLE, lf.per_adapter(RULES))
    separate = train(SPECS[:1], np.array([0, 3]), on_device([0, 0]), RULES["law"])
    for path, array in separate.items():
        np.testing.assert_allclose(together[path], array, rtol=1e-5, atol=1e-6, err_msg=path)
