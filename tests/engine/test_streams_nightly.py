"""Streams on several devices, with several targets at a position, losses that are wrong, and samples: nightly."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from live_sessions import open_session
from stream_clients import TARGETS, TOKENS, Client, assert_near, check_refused_steps, data, run_together, wait

import lorafusion_jax as lf
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.session import WindowPlanner
from lorafusion_jax.session.calls import Row

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("quick_compiles")]


@pytest.mark.parametrize("mesh", [{"stages": 2}, {"data": 2}, {"stages": 2, "data": 2}], ids=str)
def test_stages_and_replicas_give_the_same_results(planner, config, mesh):
    expected = run_together(planner)
    settings = config.mesh.model_validate(mesh)
    other = open_session(config.model_copy(update={"mesh": settings}), {4: 7}, TARGETS, row_targets=1)
    try:
        spread = WindowPlanner(other)
        for loss, (results, state) in run_together(spread).items():
            for now, before in zip(results, expected[loss][0], strict=True):
                assert now.result().metrics == pytest.approx(before.result().metrics, rel=1e-4, abs=1e-4)
            assert_near(state, expected[loss][1])
        check_refused_steps(spread)
    finally:
        other.close()


def test_several_targets_at_a_position(planner):
    rng = np.random.default_rng(0)
    targets, weights = rng.integers(0, 50, (40, 3)), rng.uniform(0, 1, (40, 3))
    tokens = rng.integers(0, 50, 40)
    together = Row(tokens=tokens, inputs={"target_tokens": targets, "weights": weights})
    apart = [Row(tokens=tokens, inputs={"target_tokens": targets[:, k], "weights": weights[:, k]}) for k in range(3)]
    results, norms = [], []
    for rows in ([together], apart):
        with Client(planner, "wide") as client:
            results.append(client.add(rows))
            norms.append(wait(planner, client.step()).metrics["grad_norm:mean"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    wide, narrow = (result.result().outputs for result in results)
    assert wide[0]["logprobs"].shape == (40, 3)
    for k in range(3):
        np.testing.assert_allclose(wide[0]["logprobs"][:, k], narrow[k]["logprobs"], atol=1e-5)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda arrays: arrays[0].sum(), "not (loss, metrics)"),
        (lambda arrays: (arrays[0], {}), "must be one number"),
        (lambda arrays: (arrays[0].sum(), None), "no table of numbers"),
        (lambda arrays: (jnp.log(arrays[0] - arrays[0]).sum(), {}), "the gradient of the loss is not finite"),
    ],
)
def test_what_a_custom_loss_returns_is_checked(opened, returned, says):
    with opened.new_client(rank=4) as client:
        with pytest.raises(LoraFusionError, match=re.escape(says)) as raised:
            client.forward_backward_custom(data(), lambda given, arrays: returned(arrays))
        assert raised.value.code == "call.loss"
        with pytest.raises(ZeroDivisionError):  # errors of the loss itself stay as they are
            client.forward_backward_custom(data(), lambda given, arrays: 1 / 0)
        gradients = [np.zeros(99) for _ in data()]
        with pytest.raises(LoraFusionError, match=r"the shape \(99,\)"):
            client.forward_backward_custom(data(), lambda given, arrays: (0.0, {}, gradients), returns_gradients=True)
        assert client.optim_step(learning_rate=1e-2).result().metrics["grad_norm:mean"] == 0  # nothing was added


def test_samples_are_of_a_snapshot(client):
    """The log-probabilities of a sample are those of `forward` on it, also after the adapter has trained on."""
    prompt = [5, 6, 7]
    for _ in range(3):  # so that the adapter differs from the base
        client.forward_backward(data())
        client.optim_step(learning_rate=1e-1)
    sampler = client.save_weights_and_get_sampling_client()
    settings = {"max_tokens": 6, "seed": 3, "temperature": 1.0, "stop": []}
    first = sampler.sample(prompt, num_samples=3, **settings).result()
    rows = [
        lf.Datum(
            model_input=[*prompt, *sample.tokens[:-1]],
            loss_fn_inputs={"target_tokens": [*prompt[1:], *sample.tokens]},
        )
        for sample in first
    ]
    for sample, output in zip(first, client.forward(rows).result().loss_fn_outputs, strict=True):
        assert (len(sample.tokens), sample.stop_reason) == (6, "length")
        np.testing.assert_allclose(output["logprobs"][2:], sample.logprobs, atol=1e-5)
    client.forward_backward(data())
    client.optim_step(learning_rate=1e-1).result()
    assert sampler.sample(prompt, num_samples=3, **settings).result() == first
    assert len({tuple(sample.tokens) for sample in first}) > 1
    (cut,) = sampler.sample(prompt, 1, SimpleNamespace(**settings | {"stop": [first[0].tokens[2]]})).result()
    assert cut.tokens == first[0].tokens[: first[0].tokens.index(first[0].tokens[2]) + 1]
    assert cut.stop_reason == "stop"
    for wrong in ([48_000], [True], [-1]):
        with pytest.raises(lf.LoraFusionError, match=r"generate\.(token|setting)"):
            sampler.sample(prompt, 1, **settings | {"stop": wrong}).result()
    with pytest.raises(lf.LoraFusionError, match="have no beams"):
        sampler.sample(prompt, beams=2)


def test_the_examples_learn():
    folder = Path(__file__).parents[2] / "examples" / "calls"
    losses = runpy.run_path(str(folder / "sft.py"))["main"]()
    assert all(values[-1] < values[0] for values in losses.values())
    rewards = runpy.run_path(str(folder / "rl.py"))["main"]()
    assert rewards[-1] > rewards[0]
    preferred = runpy.run_path(str(folder / "dpo.py"))["main"]()
    assert preferred[-1] < preferred[0]
    gaps = runpy.run_path(str(folder / "distillation.py"))["main"]()
    assert gaps[-1] < gaps[0]


def test_samples_in_bfloat16_are_as_exact_as_forward(tmp_path):
    """What bfloat16 costs depends on the weights, so the measure is what it costs `forward` on the same rows."""
    base, prompt, exact = str(examples_directory() / "base"), TOKENS[0][:4], "float32"
    options = {"rank": 8, "targets": TARGETS, "batch": {"capacity_tokens": 512, "tile_tokens": 32}}
    logprobs = {}
    for dtype in ("bfloat16", exact):
        with lf.training_client({"model": base, "dtype": dtype}, **options) as client:
            if dtype == exact:
                client.load_state(tmp_path / "state").result()
            else:
                for _ in range(4):
                    client.forward_backward(data())
                    client.optim_step(learning_rate=1e-2)
                client.save_state(tmp_path / "state").result()
                sampler = client.save_weights_and_get_sampling_client()
                samples = sampler.sample(prompt, 16, max_tokens=24, seed=0, temperature=1.0, stop=[]).result()
                wholes = [[*prompt, *sample.tokens] for sample in samples]
                logprobs["sampler"] = np.array([sample.logprobs for sample in samples])
            rows = [lf.Datum(model_input=t[:-1], loss_fn_inputs={"target_tokens": t[1:]}) for t in wholes]
            outputs = client.forward(rows).result().loss_fn_outputs
            logprobs[dtype] = np.array([output["logprobs"][len(prompt) - 1 :] for output in outputs])
    sampled, forwarded = (np.abs(logprobs[name] - logprobs[exact]) for name in ("sampler", "bfloat16"))
    assert np.median(forwarded) > 1e-4  # so the rows are those of two dtypes
    assert np.median(sampled) <= 1.5 * np.median(forwarded)
    assert np.sqrt(np.mean(sampled**2)) <= 1.5 * np.sqrt(np.mean(forwarded**2))
