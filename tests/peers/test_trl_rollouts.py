"""Advantages, losses and gradients on fixed rollouts against TRL's own GRPO and RLOO trainers."""

from __future__ import annotations

import json
import math
import os
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.data.rollouts import PromptRow
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.objective.choose import choose
from lorafusion_jax.objective.protocol import Sample
from lorafusion_jax.rollout.drawn import Drawn, Turns

PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with trl; make test-peers")
GROUP, ROWS = 4, 12
# name → TRL's trainer and settings; ours
CASES = {
    "grpo": ("grpo", {"beta": 0.0}, {"objective": "grpo"}),
    "batch": ("grpo", {"beta": 0.0, "scale_rewards": "batch"}, {"objective": "grpo", "advantages": "batch"}),
    "dr_grpo": ("grpo", {"beta": 0.0, "scale_rewards": "none"}, {"objective": "grpo", "advantages": "mean"}),
    "gspo": (
        "grpo",
        {
            "beta": 0.0, "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        {"objective": "gspo"},
    ),
    "cispo": ("grpo", {"beta": 0.0, "loss_type": "cispo", "epsilon_high": 5.0}, {"objective": "cispo"}),
    "rloo": ("rloo", {"beta": 0.0}, {"objective": {"name": "rloo", "beta": 0.0}}),
    "rloo_kl": ("rloo", {"beta": 0.3}, {"objective": {"name": "rloo", "beta": 0.3}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def rollouts():
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 7, ROWS).tolist()
    old = [(-draw.uniform(0.5, 4, length)).tolist() for length in lengths]
    near = partial(draw.normal, 0, 0.1)
    rewards = draw.normal(size=ROWS).round(3).tolist()
    return {
        "group": GROUP,
        "completions": [draw.integers(10, 200, length).tolist() for length in lengths],
        "rewards": [None if number == 5 else reward for number, reward in enumerate(rewards)],
        "old": old,
        "logprobs": [(np.array(row) + near(size=len(row))).clip(max=-1e-3).tolist() for row in old],
        "reference": [(np.array(row) + near(size=len(row))).clip(max=-1e-3).tolist() for row in old],
    }


@pytest.fixture(scope="module")
def theirs(rollouts):
    cases = {name: {"trainer": trainer, "config": config} for name, (trainer, config, _) in CASES.items()}
    asked = rollouts | {"cases": cases, "tokenizer": str(examples_directory() / "base")}
    script = Path(__file__).parent / "trl_rollouts.py"
    done = subprocess.run([PEERS, script], input=json.dumps(asked), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_advantages_losses_and_gradients_are_theirs(rollouts, theirs, name):
    objective = CASES[name][2]["objective"]
    settings = objective if isinstance(objective, dict) else {"name": objective}
    adapter, chosen = _adapter(settings, CASES[name][2].get("advantages", "auto"))
    answers = [
        Turns(tokens=ids, learned=[True] * len(ids), logprobs=old, texts=[""], reward=reward, reference=reference)
        for ids, old, reward, reference in zip(
            *(rollouts[key] for key in ("completions", "old", "rewards", "reference")), strict=True
        )
    ]
    if not chosen.compares:
        for answer in answers:
            answer.reference = []
    prompts = [PromptRow(prompt="a", tokens=[5], row={})] * ROWS
    drawn = Drawn(adapter="a", batch=0, lag=0, answers=answers)
    samples = drawn.to_batch(adapter, prompts, _report()).samples
    advantages = samples.values["advantages"][samples.offsets[1:] - 1]
    np.testing.assert_allclose(advantages, theirs[name]["advantages"], rtol=1e-5, atol=1e-6)
    width = max(map(len, rollouts["completions"]))
    lengths = np.array([len(ids) for ids in rollouts["completions"]])

    def padded(rows):
        return jnp.array([[*row, *[0.0] * (width - len(row))] for row in rows])

    def loss_of(logprobs):
        def loss(logprobs, old, advantage, length):
            mask = jnp.arange(width) < length
            sample = Sample(
                nll=-jnp.where(mask, logprobs, 0).sum()[None], tokens=length[None].astype(float),
                token_weight=jnp.array([ROWS / lengths.sum()]), logprobs=logprobs, mask=mask, answer=mask,
                segment=jnp.zeros(width, int), reference_logprobs=old,
                values={"advantages": jnp.where(mask, advantage, 0.0), "old_logprobs": old},
            )  # fmt: skip
            return chosen.objective.loss(sample, chosen.options)[0]

        old = padded(rollouts["old"])
        return jax.vmap(loss)(logprobs, old, jnp.asarray(advantages), jnp.asarray(lengths)).mean()

    loss, gradient = jax.value_and_grad(loss_of)(padded(rollouts["logprobs"]))
    assert math.isclose(loss, theirs[name]["loss"], rel_tol=1e-5, abs_tol=1e-6)
    np.testing.assert_allclose(gradient, padded(theirs[name]["gradient"]), rtol=1e-5, atol=1e-6)


def _adapter(settings, advantages):
    from lorafusion_jax.config.schema import AdapterConfig, DataSettings, ObjectiveSettings, RolloutSettings

    rollout = RolloutSettings(reward="exact", group=GROUP, advantages=advantages)
    adapter = AdapterConfig(
        name="a", data=DataSettings(train="a.jsonl"), objective=ObjectiveSettings(**settings), rollout=rollout
    )
    options = {key: value for key, value in settings.items() if key != "name"}
    return adapter, choose(settings["name"], options)


def _report():
    from lorafusion_jax.data.tokenized_set import DataReport

    fields = dict.fromkeys(("rows", "tokens", "loss_tokens", "longest", "cut"), 0)
    texts = {"source": "a", "format": "grpo", "columns": {}, "loss": "answer"}
    return DataReport(**fields, **texts, dropped=(), too_long=(), uncut=())
