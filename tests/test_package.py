"""The wheel: its content, and that it works without the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors import safe_open
from small_jobs import write_job, write_rows

from lorafusion_jax import examples
from lorafusion_jax.examples import draw_llama

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 3_000_000


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("outside")


@pytest.fixture(scope="module")
def wheel(outside) -> Path:
    run(
        sys.executable,
        "-m",
        "uv",
        "build",
        "--quiet",
        "--wheel",
        "--python",
        sys.executable,
        "--out-dir",
        outside / "dist",
        ROOT,
        cwd=outside,
    )
    (wheel,) = (outside / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(outside, wheel) -> Path:
    """bin folder of a new environment that holds the wheel and what it asks for, and nothing else.

    Its dependencies are links to those of this environment: Python has compiled them already.
    """
    venv = outside / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--python", python, wheel)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (package,) = distributions(path=[str(site)])
    assert package.metadata["Name"] == "lorafusion-jax"
    for needed in dependencies(package, set(), {}):
        for top in {file.parts[0] for file in needed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(needed.locate_file(top))
    return venv / "bin"


def dependencies(package: Distribution, extras: set[str], known: dict[str, Distribution]) -> list[Distribution]:
    """What a package asks for, and what that asks for."""
    for requirement in map(Requirement, package.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            name = canonicalize_name(requirement.name)
            if name not in known or requirement.extras:
                known[name] = distribution(name)
                dependencies(known[name], requirement.extras, known)
    return list(known.values())


def run(*command: str | Path, cwd: Path | None = None) -> str:
    cache = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")  # most of the time is compiling
    environment = {
        key: value
        for key, value in os.environ.items()
        if key in cache or not key.startswith(("PYTHON", "XLA_", "JAX_"))
    }
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if cwd is not None:
        environment["XDG_CACHE_HOME"] = str(cwd / "cache")
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_wheel_contains_packages_types_licence_and_examples(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    tops = {name.split("/")[0] for name in sizes if ".dist-info" not in name}
    assert tops == {"lorafusion_jax", "pallas_kernels", "scheduling"}
    for top in tops:
        assert f"{top}/py.typed" in sizes
        assert f"{top}/__init__.py" in sizes
        modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / top).rglob("*.py")}
        assert modules <= sizes.keys(), f"not in the wheel: {sorted(modules - sizes.keys())}"
    examples = {
        name.removeprefix("lorafusion_jax/_examples/"): size
        for name, size in sizes.items()
        if name.startswith("lorafusion_jax/_examples/")
    }
    assert {
        "demo.yaml",
        "data/ask.jsonl",
        "data/LICENSE.txt",
        "base/config.json",
        "base/tokenizer.json",
    } <= set(examples)
    assert "base/model.safetensors" not in examples
    assert {name.split("/")[0] for name in examples} == {"demo.yaml", "data", "base"}, "only what the demo needs"
    assert wheel.stat().st_size < MAX_BYTES
    assert any(name.endswith("licenses/LICENSE") for name in sizes)
    assert not [name for name in sizes if "__pycache__" in name or name.startswith("tests/")]


def test_the_weights_that_a_wheel_draws_are_those_of_the_base():
    base = ROOT / "examples" / "base"
    drawn = draw_llama(json.loads((base / "config.json").read_text("utf-8")))
    with safe_open(base / "model.safetensors", "numpy") as file:
        trained = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {name: (list(array.shape), "BF16") for name, array in drawn.items()} == {
            name: (part.get_shape(), part.get_dtype()) for name, part in trained.items()
        }
    assert all(array.dtype == "bfloat16" for array in drawn.values())


def test_examples_of_a_wheel_are_made_again_where_they_are_others_or_lack_a_file(tmp_path, monkeypatch):
    wheel = shutil.copytree(ROOT / "examples", tmp_path / "wheel", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(examples, "IN_WHEEL", wheel)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = examples.examples_directory()
    weights = (first / examples.WEIGHTS).read_bytes()
    for name in (examples.WEIGHTS, "base/tokenizer.json"):
        (first / name).unlink()
        assert examples.examples_directory() == first
        assert (first / name).is_file()
    assert (first / examples.WEIGHTS).read_bytes() == weights
    rows = (wheel / "data/ask.jsonl").read_bytes()
    (wheel / "data/ask.jsonl").write_bytes(rows.swapcase())  # of another version, and as long
    assert (examples.examples_directory() / "data/ask.jsonl").read_bytes() == rows.swapcase()


TRAIN = f"""
import sys
from types import SimpleNamespace
sys.path.append({str(ROOT / "tests")!r})
import one_compile
from lorafusion_jax.cli.main import main
assert not main.__code__.co_filename.startswith({str(ROOT / "lorafusion_jax")!r})
one_compile.share_programs(SimpleNamespace(setattr=setattr))
main()
"""


def test_the_installed_wheel_checks_its_demo(installed, outside):
    code = "from lorafusion_jax.examples import examples_directory; print(examples_directory())"
    where = run(installed / "python", "-c", code, cwd=outside)
    examples = Path(where.strip())
    assert outside / "cache" in examples.parents
    run(installed / "lorafusion", "check", examples / "demo.yaml", cwd=outside)


@pytest.mark.nightly  # it has all modules, see above, and `make demo` trains
def test_the_installed_wheel_trains(installed, outside, tiny_base):
    """Programs are those of lossless/test_resume.py."""
    entries = [
        {
            "name": name,
            "data": {"train": write_rows(outside, name, 10, longest=10)},
            "batch": {"global_samples": number},
            "lora": {"rank": 4, "dropout": dropout},
        }
        for name, number, dropout in (("law", 5, 0.2), ("med", 3, 0.1))
    ]
    job = write_job(outside, tiny_base, entries, batch={"capacity_tokens": 64, "tile_tokens": 16})
    run(installed / "python", "-c", TRAIN, "train", job, "--out", "quick", cwd=outside)
    assert len([*(outside / "quick" / "adapters").glob("*/latest/adapter_model.safetensors")]) == len(entries)
