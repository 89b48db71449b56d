"""The demo's DPO adapter: its reward accuracy rises on held-out pairs, also where it is trained without the others."""

import pytest

from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import train


@pytest.mark.nightly
def test_accuracy_rises_on_held_out_pairs(tmp_path):
    config = select_adapters(load_config(examples_directory() / "demo.yaml"), ["brief"])
    assert train(config, tmp_path / "run").exit_code == 0
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "eval"]
    accuracies = [row["eval_rewards/accuracies"] for row in rows]
    margins = [row["eval_rewards/margins"] for row in rows]
    # 8 pairs: a coin gets more than six of them right once in 28 throws.
    assert accuracies[0] <= 0.5
    assert accuracies[-1] > 0.8
    assert margins[0] == pytest.approx(0, abs=1e-4)
    assert margins[-1] > 0.01
