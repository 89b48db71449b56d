"""The report page: what it takes from a run folder."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from lorafusion_jax.report import page
from lorafusion_jax.report.page.build import _crowd, best_shown, rank_adapters
from lorafusion_jax.report.page.collect import read_curves, thin
from lorafusion_jax.report.ranking import Measure
from lorafusion_jax.report.recorder import encode_row
from scheduling.plots import svg

LOSS = Measure()


def write_metrics(folder, rows):
    (folder / "metrics.jsonl").write_bytes(b"".join(encode_row({"slot": 0, "time": 0.0, **row}) for row in rows))


def test_curves_hold_every_metric_of_an_objective_and_no_counter(tmp_path):
    rows = [
        {"kind": "step", "adapter": "b", "step": 1, "loss": 2.0, "lr": 1e-3, "loss_tokens": 7, "margin": 0.5},
        {"kind": "step", "adapter": "b", "step": 2, "loss": None, "lr": 2e-3, "loss_tokens": 7, "margin": 0.25},
        {"kind": "eval", "adapter": "b", "step": 0, "eval_loss": 3.0, "eval_tokens": 9, "eval_margin": 0.1},
        {"kind": "step", "adapter": "stranger", "step": 1, "loss": 1.0},
        {"kind": "slot", "slots": 3, "useful_tokens_per_s": 5.0},
    ]
    write_metrics(tmp_path, rows)
    curves = read_curves(tmp_path, ["a", "b"])
    assert curves["a"].series == {}
    assert curves["b"].series == {
        "loss": [(1, 2.0)],
        "lr": [(1, 1e-3), (2, 2e-3)],
        "margin": [(1, 0.5), (2, 0.25)],
        "eval_loss": [(0, 3.0)],
        "eval_margin": [(0, 0.1)],
    }


def test_training_loss_is_the_mean_of_the_last_tenth_and_best_the_lowest_after_the_start(tmp_path):
    steps = [{"kind": "step", "adapter": "b", "step": n, "loss": 100.0 - n} for n in range(1, 41)]
    evals = [{"kind": "eval", "adapter": "b", "step": n, "eval_loss": loss} for n, loss in ((0, 0.5), (20, 2), (40, 3))]
    write_metrics(tmp_path, steps + evals)
    curves = read_curves(tmp_path, ["b"])["b"]
    assert curves.train_loss == pytest.approx((63 + 62 + 61 + 60) / 4)
    assert curves.best(Measure()) == (20, 2.0)
    assert curves.best(Measure("eval_loss", rises=True)) == (40, 3.0)


@pytest.mark.parametrize("count", [0, 1, 399, 400, 401, 799, 10_000])
def test_a_long_curve_keeps_its_mean_and_its_end(count):
    points = [(step, math.sin(step / 50)) for step in range(1, count + 1)]
    drawn = thin(points)
    assert len(drawn) <= 400
    assert drawn[-1:] == points[-1:]
    assert [step for step, _ in drawn] == sorted({step for step, _ in drawn})
    if count > 400:
        area = sum(value for _, value in points) / count
        assert sum(value for _, value in drawn) / len(drawn) == pytest.approx(area, abs=0.02)
    assert json.dumps(drawn)


def test_a_ranking_has_all_that_can_be_compared_the_best_first():
    def point(name, best, status="done", held_out: str | None = "one file", lr=1e-3, measure=LOSS):
        settings = {"optim.lr": lr, "lora.rank": 4, "seed": len(name)}
        row = {"label": name, "best": best and (3, best), "status": status, "settings": settings}
        return row | {"compared": (held_out, measure)}

    points = [
        point("law", 2.0), point("worse", 2.5, lr=1e-2), point("best", 1.5), point("broken", 1.0, status="failed"),
        point("new", None), point("other", 1.0, held_out="another"), point("no set", None, held_out=None),
        point("first", 0.5, held_out="x", measure=Measure("eval_reward", rises=True)),
        point("second", 0.25, held_out="x", measure=Measure("eval_reward", rises=True)),
    ]  # fmt: skip
    losses, rewards = rank_adapters(points)
    assert losses["labels"] == ["best", "law", "worse", "broken", "new"]
    assert (losses["placed"], losses["swept"], losses["measure"]) == (3, ["optim.lr"], "held-out loss")
    assert rewards["labels"] == ["first", "second"]
    assert [row["label"] for row in points if row.get("is_best")] == ["best", "first"]
    assert best_shown([losses, rewards]) == ["best", "first", "law", "second", "worse"]


def test_the_timeline_has_no_colour_of_its_own_for_paper_or_ink():
    """All but the colours of adapters follow the page into the dark."""
    rules = (Path(page.__file__).parent / "report.css").read_text()
    fills = set(re.findall(r'<(?!text)\w+ [^>]*fill="(#\w+)"', Path(svg.__file__).read_text()))
    assert "#ffffff" in fills
    assert {fill for fill in fills if f'.timeline [fill="{fill}"]' not in rules} == set()
    assert ".timeline text { fill: var(" in rules
    assert "background: #" not in rules


def test_of_a_thousand_adapters_the_page_shows_quantiles_and_the_worst():
    adapters = [
        {"label": f"a{number}", "status": "done", "train": float(number), "after": None, "tokens": 10}
        for number in range(1000)
    ]
    adapters[3] |= {"status": "failed"}
    adapters[5] |= {"after": 2000.0}
    crowd = _crowd(adapters)
    assert crowd["shown"] == ["a3", "a5", *(f"a{number}" for number in range(999, 981, -1))]
    assert "median 499.5, 10 % 99.9, 90 % 899.1, from 0 to 999" in crowd["lines"][1]
    assert _crowd(adapters[:40]) is None
