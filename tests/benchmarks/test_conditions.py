"""Conditions of a measurement describe the measured GPU."""

import json
import re
import tomllib

import jax
import pytest

from benchmarks import measured_code
from benchmarks.conditions import conditions
from benchmarks.published import RESULTS

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
    ("visible", "expected"),
    [
        (None, {"driver": "580.1", "power_limit_w": 700.0}),
        ("3,1", {"driver": "580.1", "power_limit_w": 650.0}),
        ("GPU-a", {"driver": "580.1"}),
    ],
)
def test_power_limit_is_a_number_of_the_first_visible_gpu(tmp_path, monkeypatch, visible, expected):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answer = conditions()
    assert {key: answer[key] for key in ("driver", "power_limit_w") if key in answer} == expected
    assert answer["jax"] == jax.__version__


def test_rows_say_which_code_they_measured():
    facts = conditions()
    assert facts["code"] == {
        name: measured_code.digest(measured_code.ROOT / name)
        for name in ("lorafusion_jax", "pallas_kernels", "scheduling")
    }
    assert len(set(facts["code"].values())) == 3
    assert facts["commit"] == measured_code.commit()


def test_the_cuda_extras_and_readme_name_the_jax_of_the_rows_of_gpus():
    """The extras install no newer line of jax than one that was measured on a GPU; README names both that were."""
    device = re.compile(r'"device": "NVIDIA[^{}]*?"jax": "([\d.]+)"')
    files = [file for file in RESULTS.rglob("*.jsonl") if "_h" in file.parent.name]
    measured = {version for file in files for version in device.findall(file.read_text(encoding="utf-8"))}
    lines = sorted({tuple(int(part) for part in version.split(".")[:2]) for version in measured})
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert all(f"jax {major}.{minor}" in readme for major, minor in lines)
    major, minor = lines[-1]
    extras = tomllib.loads((RESULTS.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for name in ("cuda12", "cuda13"):
        assert [entry.partition(",")[2] for entry in extras[name]] == [f"<{major}.{minor + 1}"]


def test_every_script_of_rows_says_which_code_they_measured():
    scripts = [
        *(measured_code.ROOT / "benchmarks").rglob("*.py"), *(measured_code.ROOT / "tests" / "campaigns").glob("*.py")
    ]  # fmt: skip
    texts = {file.name: file.read_text(encoding="utf-8") for file in scripts}
    writers = {
        name
        for name, text in texts.items()
        if '"--out", type=Path, required=True' in text or "command_line(__doc__" in text
    } - {"harness.py"}
    told = {
        name
        for name, text in texts.items()
        if re.search(r"\b(conditions|commit|write_measured|write_within_budget)\(", text)
    }
    assert writers - told == {"kernel_report.py", "end_to_end_report.py", "tiny_run.py"}, "these measure nothing"


def test_a_folder_of_rows_is_told_of_the_code(tmp_path):
    measured_code.write_measured(tmp_path / "new")
    told = json.loads((tmp_path / "new" / "measured.json").read_text())
    assert told["code"] == measured_code.code()
    assert told["commit"] == measured_code.commit()
