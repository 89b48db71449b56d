"""Distillation: the divergence and its gradient against the formula in float64, and runs with a teacher."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import small_jobs
from safetensors.numpy import load_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.objective.loss import token_divergences
from lorafusion_jax.report.recorder import read_rows

T, D, V = 40, 6, 300


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def divergence(hidden, teacher, head, beta, temperature):
    """The generalised Jensen-Shannon divergence of each row, as in the docstring of `Divergence`."""
    p, q = (softmax(x @ head / temperature) for x in (hidden, teacher))
    kl = lambda a, b: (a * (np.log(a) - np.log(b))).sum(-1)  # noqa: E731
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_divergence_and_gradient_are_those_of_the_formula(soft_cap):
    draw = np.random.default_rng(0)
    hidden, teacher = draw.standard_normal((2, T, D))
    head = draw.standard_normal((D, V))
    betas, temperatures = draw.choice([0.0, 0.3, 1.0], T), draw.choice([0.7, 1.0, 2.0], T)
    weights = np.where(np.arange(T) % 3 == 0, 0.0, draw.random(T))

    def cap(x):
        return x if soft_cap is None else soft_cap * np.tanh(x / soft_cap)

    def rows(hidden):
        logits, of_teacher, eye = cap(hidden @ head), cap(teacher @ head), np.eye(V)
        pairs = zip(logits, of_teacher, betas, temperatures, weights, strict=True)
        return np.array([w * divergence(x, y, eye, b, t) if w else 0.0 for x, y, b, t, w in pairs])

    arrays = [array.astype(np.float32) for array in (teacher, head, weights, betas, temperatures)]
    total = jax.jit(lambda hidden: token_divergences(hidden, *arrays, chunk=128, soft_cap=soft_cap))
    actual = total(hidden.astype(np.float32))
    np.testing.assert_allclose(actual, rows(hidden), rtol=2e-4, atol=1e-6)
    slope = np.asarray(jax.jit(jax.grad(lambda hidden: total(hidden).sum()))(hidden.astype(np.float32)))
    step = 1e-6
    for d in range(2):
        moved = np.zeros((T, D))
        moved[:, d] = step
        numeric = (rows(hidden + moved) - rows(hidden - moved)) / (2 * step)
        np.testing.assert_allclose(slope[:, d], numeric, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("distill")
    small_jobs.write_rows(folder, "law", 12, longest=12)

    def make(*objectives, **sections):
        entries = [
            {
                "name": f"a{number}",
                "data": {"train": "law.jsonl"},
                "objective": objective,
                "batch": {"global_samples": 4},
            }
            for number, objective in enumerate(objectives)
        ]
        optim = {"lr": 1e-2, "schedule": "constant", "warmup": 0}
        base = {
            "optim": optim,
            "lora": {"rank": 4, "targets": ["q_proj"]},
            "batch": {"capacity_tokens": 256, "tile_tokens": 16},
        }
        return str(small_jobs.write_job(folder, tiny_base, entries, **(base | sections)))

    return make


def losses(folder, name):
    rows = read_rows(folder / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "step" and row["adapter"] == name]


def test_an_adapter_follows_its_teacher(job, tmp_path, capsys, kept_programs):
    teacher = tmp_path / "teacher"
    assert run(["train", job({"name": "sft"}, optim={"lr": 3e-2}), "--out", str(teacher)]) == 0, capsys.readouterr().err
    folder = str(teacher / "adapters" / "a0" / "latest")
    student, same = {"name": "distill", "reference": folder}, {"name": "distill", "reference": "start", "beta": 0.5}
    joint = tmp_path / "joint"
    sections = {"epochs": 3}
    assert run(["train", job(student, same, {"name": "sft"}, **sections), "--out", str(joint)]) == 0
    assert losses(joint, "a1")[0] == pytest.approx(0, abs=1e-6)  # its own start: nothing to learn
    assert losses(joint, "a0")[-1] < 0.8 * losses(joint, "a0")[0]
    stored = load_file(joint / "references" / "a0.safetensors")["train states"]
    assert stored.shape[1] == 32
    alone = tmp_path / "alone"
    assert run(["train", job(student, **sections), "--out", str(alone)]) == 0
    np.testing.assert_allclose(losses(alone, "a0"), losses(joint, "a0"), rtol=1e-5)
    record = json.loads((joint / "run.json").read_text())["references"]
    assert record["a0"]["of"] == folder


def test_a_teacher_must_be_named(job, capsys):
    assert run(["check", job({"name": "distill"})]) == 2
    assert "distill with a reference, its teacher" in " ".join(capsys.readouterr().err.split())
