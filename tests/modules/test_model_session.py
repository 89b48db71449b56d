"""`lf.Session`: adapters of an NNX model train as alone, whatever calls, microbatches and companies their rows have."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_models import draw_module
from flax import nnx

import lorafusion_jax as lf
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.modules import adapter_arrays

SPECS = {
    "law": lf.AdapterSpec(name="law", rank=3, alpha=6, dropout=0.3, targets=("all-linear",)),
    "med": lf.AdapterSpec(name="med", rank=2, alpha=2, targets=("stack",), seed=4),
}
RULES = {"law": optax.adamw(2e-2, weight_decay=0.1), "med": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))}


class Model(nnx.Module):
    """Causal: a row's mean so far, then a stack of layers under `nnx.scan`, whose adapters are on the second axis."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
        self.mix, self.stack = (
            nnx.Linear(8, 8, rngs=rngs),
            nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.split(2)),
        )

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.mix(jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1)[:, None])
        layer = nnx.scan(lambda x, linear: x + jnp.tanh(linear(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(layer(x, self.stack))


def loss(model, rows):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(rows["tokens"])[:, :-1], rows["tokens"][:, 1:])
    return losses, rows["weights"][:, 1:]


def rows_of(name: str, count: int) -> list[dict]:
    draw = np.random.default_rng([*name.encode()])
    lengths = draw.integers(3, 14, count)
    return [{"tokens": draw.integers(0, 16, n).astype(np.int32), "weights": (draw.random(n) < 0.7).astype(np.float32)}
            for n in lengths]  # fmt: skip


def opened(*names: str, **options) -> lf.Session:
    model = lf.apply_lora(draw_module(Model), [SPECS[name] for name in names])
    ragged = {"ragged": ("tokens", "weights"), "multiple": 16}
    return lf.Session(model, {name: RULES[name] for name in names}, **ragged | options)


def weights(session: lf.Session, name: str) -> dict[str, np.ndarray]:
    return adapter_arrays(session.model, name)


def train(session: lf.Session, *names: str, steps: int = 3) -> dict[str, list]:
    history = {name: [] for name in names}
    for step in range(steps):
        rows = {name: rows_of(f"{name}{step}", 5) for name in names}
        session.forward_backward({name: listed[:2] for name, listed in rows.items()}, loss)
        for name in reversed(names):
            session.forward_backward({name: rows[name][2:]}, loss)
        for name, done in session.optim_step().items():
            history[name].append(done)
    return history


@pytest.fixture(scope="module")
def joint() -> tuple[lf.Session, dict]:
    session = opened("law", "med", capacity=3)
    return session, train(session, "law", "med")


@pytest.mark.parametrize("name", SPECS)
def test_an_adapter_trains_as_alone(joint, name):
    """Also its dropout, which follows its own rows, and its clipping and weight decay."""
    session, history = joint
    alone = opened(name, capacity=4)
    for ours, other in zip(history[name], train(alone, name)[name], strict=True):
        assert ours.step == other.step
        np.testing.assert_allclose([ours.loss, ours.grad_norm], [other.loss, other.grad_norm], rtol=1e-5)
    first, trained = weights(opened(name), name), weights(alone, name)
    for key, array in weights(session, name).items():
        np.testing.assert_allclose(array, trained[key], rtol=1e-4, atol=1e-6, err_msg=key)
    assert any(not np.array_equal(array, trained[key]) for key, array in first.items())


def test_a_step_is_that_of_the_mean_over_all_of_its_rows(joint):
    session, rows = joint[0], rows_of("mean", 5)
    start = adapter_arrays(session.model, "med")
    graph, lora, other = nnx.split(session.model, nnx.LoRAParam, ...)
    padded = {name: np.stack([np.pad(row[name], (0, 16 - len(row[name]))) for row in rows]) for name in rows[0]}

    def mean(lora):
        with lf.use_adapters(list(SPECS.values()), only="med", train=False):
            losses, where = loss(nnx.merge(graph, lora, other, copy=True), padded)
        return (losses * where).sum() / where.sum()

    value, slopes = jax.jit(jax.value_and_grad(mean))(lora)
    session.forward_backward({"med": rows[:1]}, loss)
    session.forward_backward({"med": rows[1:]}, loss)
    done = session.optim_step()["med"]
    nnx.update(held := nnx.merge(graph, lora, other, copy=True), slopes)
    slope = adapter_arrays(held, "med")
    norm = sum(float((array**2).sum()) for array in slope.values()) ** 0.5
    np.testing.assert_allclose([done.loss, done.grad_norm], [value, norm], rtol=1e-5)
    for key, array in weights(session, "med").items():
        moved = start[key] - 0.5 * slope[key] * min(1, 0.1 / norm)
        np.testing.assert_allclose(array, moved, rtol=1e-5, atol=1e-7, err_msg=key)


def test_a_saved_session_goes_on_bit_for_bit(joint, tmp_path):
    session, _ = joint
    session.forward_backward({"law": rows_of("more", 2)}, loss)  # gradients that wait for a step
    folder = session.save(tmp_path / "saved")
    again = opened("law", "med", capacity=3)
    again.load(folder)
    histories = [train(each, "law", "med", steps=1) for each in (session, again)]
    assert histories[0] == histories[1]
    for name in SPECS:
        for key, array in weights(session, name).items():
            np.testing.assert_array_equal(array, weights(again, name)[key])
    with pytest.raises(LoraFusionError, match=r"export\.exists"):
        session.save(folder)
    other = lf.Session(opened("law", "med").model, RULES | {"med": optax.adam(1e-3)})
    for wrong in (other, opened("law")):
        with pytest.raises(LoraFusionError, match=r"lora\.misfit"):
            wrong.load(folder)
    file = folder / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.raises(LoraFusionError, match=r"session\.damaged"):
        again.load(folder)


def test_bad_rows_of_one_adapter_leave_the_other_alone(joint):
    session, _ = joint
    before, steps = weights(session, "law"), int(session._state["steps"][0])
    bad = [row | {"weights": np.full_like(row["weights"], np.inf)} for row in rows_of("bad", 2)]
    session.forward_backward({"law": bad, "med": rows_of("good", 2)}, loss)
    med = weights(session, "med")
    with pytest.raises(LoraFusionError, match=r"session\.not-finite.*law"):
        session.optim_step()
    assert all(np.array_equal(array, before[key]) for key, array in weights(session, "law").items())
    assert any(not np.array_equal(array, med[key]) for key, array in weights(session, "med").items())
    assert int(session._state["steps"][0]) == steps


def test_rows_without_weights_count_for_nothing(joint):
    session, steps = joint[0], joint[0]._state["steps"].tolist()
    weightless = [row | {"weights": np.zeros_like(row["weights"])} for row in rows_of("nothing", 2)]
    assert session.forward({"law": weightless}, loss) == {"law": 0.0}
    assert session.forward_backward({"law": weightless, "med": rows_of("good", 2)}, loss)["law"] == 0.0
    assert list(session.optim_step()) == ["med"]
    with pytest.raises(LoraFusionError, match=r"session\.no-rows.*law"):
        session.optim_step("law")
    assert session._state["steps"].tolist() == [steps[0], steps[1] + 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: {"weights": np.where(np.arange(len(row["weights"])) == 1, -1.0, row["weights"])}, "law.*below 0"),
        (lambda row: {"tokens": row["tokens"] / 2}, "must be an integer"),
    ],
)
def test_a_call_whose_last_microbatch_fails_adds_nothing(joint, change, says):
    session, rows = joint[0], rows_of("partly", 4)
    rows[3] = rows[3] | change(rows[3])  # the first three fill a microbatch
    before = jax.tree.map(np.array, session._state)
    with pytest.raises((LoraFusionError, ValueError), match=says):
        session.forward_backward({"law": rows}, loss)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, session._state))


def test_evaluation_draws_no_dropout_and_adds_no_gradient(joint):
    session, _ = joint
    rows = {"law": rows_of("held", 3)}
    assert session.forward(rows, loss) == session.forward(rows, loss)
    for names in (["law"], "law"):  # one name is no list of its letters
        with pytest.raises(LoraFusionError, match=r"session\.no-rows"):
            session.optim_step(names)


@pytest.mark.parametrize(
    ("optimizers", "said"),
    [
        (optax.sgd(0.1), "fix: {'law': …, 'med': …}"),
        ({"law": optax.sgd(0.1), "med": "adamw"}, "the optimizer of med is none of optax"),
        ({"law": optax.sgd(0.1)}, "the optimizers are of law, and the adapters are law, med"),
    ],
)
def test_what_is_wrong_with_optimizers_is_named(joint, optimizers, said):
    with pytest.raises(LoraFusionError, match=re.escape(said)):
        lf.Session(joint[0].model, optimizers, capacity=4)


def test_a_model_without_adapters_is_named():
    with pytest.raises(LoraFusionError, match=r"session\.adapters.*the model has no adapters"):
        lf.Session(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {}, capacity=4)


@pytest.mark.parametrize(
    ("rows", "function", "says"),
    [
        ({"lwa": rows_of("a", 1)}, loss, "no adapter lwa"),
        ({"law": []}, loss, "no rows"),
        (rows_of("a", 2), loss, "no rows of adapters"),
        ({"law": [{"tokens": np.zeros(3, np.int32)}]}, loss, "do not fit ragged"),
        ({"law": [{"tokens": np.zeros(3, np.int32), "weights": 1.0}]}, loss, "do not fit ragged"),
        ({"law": [*rows_of("a", 1), {"tokens": np.zeros(3, np.int32)}]}, loss, "row 1 of law has the arrays"),
        ({"law": rows_of("a", 1)}, lambda model, rows: loss(model, rows)[0].mean(), "loss has the shape"),
    ],
)
def test_rows_and_losses_that_do_not_fit_are_refused(joint, rows, function, says):
    with pytest.raises(LoraFusionError, match=says):
        joint[0].forward_backward(rows, function)


def test_optimizers_are_of_the_adapters():
    with pytest.raises(LoraFusionError, match=r"session\.adapters"):
        lf.Session(opened("law").model, RULES)


def test_another_session_on_the_model_replaces_the_first(tmp_path):
    first = opened("med")
    first.forward_backward({"med": rows_of("med", 2)}, loss)
    newest = lf.Session(first.model, {"med": optax.sgd(0.1)}, ragged=("tokens", "weights"), multiple=16)
    calls = [first.optim_step, lambda: first.forward_backward({"med": rows_of("med", 2)}, loss)]
    calls.append(lambda: first.load(first.save(tmp_path / "first")))  # it would write its weights into the model, too
    for call in calls:
        with pytest.raises(LoraFusionError, match=r"session\.replaced"):
            call()
    newest.forward_backward({"med": rows_of("med", 2)}, loss)
    assert newest.optim_step()["med"].step == 1


def test_models_without_a_hash_have_sessions():
    @dataclasses.dataclass
    class Scaled(nnx.Module):  # is compared by its fields
        linear: nnx.Linear

        def __call__(self, x):
            return self.linear(x)

    spec = lf.AdapterSpec(name="law", rank=2, alpha=4, targets=("linear",))
    model = lf.apply_lora(Scaled(nnx.Linear(4, 2, rngs=nnx.Rngs(0))), [spec])
    session = lf.Session(model, {"law": optax.sgd(0.1)})
    session.forward_backward({"law": [{"x": np.ones(4, np.float32)}]}, lambda model, rows: model(rows["x"]).sum(-1))
    assert session.optim_step()["law"].step == 1
