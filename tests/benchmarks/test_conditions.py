"""Conditions of a measurement describe the measured GPU."""

import jax
import pytest

from benchmarks.conditions import conditions

SMI = """#!/bin/sh
for word in "$@"; do
    case "$word" in
        --id=3) echo "580.1, 650.00" ;;
        --id=0) echo "580.1, 700.00" ;;
        --id=GPU-a) echo "580.1, [N/A]" ;;
    esac
done
"""


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, {"driver": "580.1", "power_limit_w": 700.0}),
        ("3,1", {"driver": "580.1", "power_limit_w": 650.0}),
        ("GPU-a", {"driver": "580.1"}),
    ],
)
def test_power_limit_is_a_number_of_the_first_visible_gpu(tmp_path, monkeypatch, visible, found):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answer = conditions()
    assert {key: answer[key] for key in ("driver", "power_limit_w") if key in answer} == found
    assert answer["jax"] == jax.__version__
