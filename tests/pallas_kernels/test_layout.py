"""Import rules inside the package, checked in the sources and in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pallas_kernels"
OPS = ("linear", "mlp", "norm", "attention", "experts")
NEUTRAL = "__init__"  # the files at the top count as one folder


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, also inside functions and for type checkers."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pallas_kernels"):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.startswith("pallas_kernels")}
    return modules


@cache  # collecting tests, which every worker does, parses no files
def files() -> dict[str, set[str]]:
    return {module(path): imports(path) for path in sorted(PACKAGE.rglob("*.py"))}


def folder(name: str) -> str:
    """The folder directly below the package that a module lies in; files at the top are one folder."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else NEUTRAL


def test_folders_import_in_one_direction():
    order = (
        NEUTRAL, "linear", "quantised", "mlp", "norm", "attention", "experts", "delta_rule", "state_space",
        "tuning",
    )  # fmt: skip
    may = {
        NEUTRAL: {NEUTRAL},
        "linear": {NEUTRAL, "linear"},
        "quantised": {NEUTRAL, "linear", "quantised"},
        "mlp": {NEUTRAL, "linear", "quantised", "mlp"},
        "norm": {NEUTRAL, "norm"},
        "attention": {NEUTRAL, "attention"},
        "experts": {NEUTRAL, "quantised", "experts"},
        "delta_rule": {NEUTRAL, "delta_rule"},
        "state_space": {NEUTRAL, "delta_rule", "state_space"},
        "tuning": set(order),
    }
    assert {folder(name) for name in files()} == set(order)
    wrong = {
        f"{name} imports {target}"
        for name, targets in files().items()
        if name != "pallas_kernels"  # the public names
        for target in targets
        if folder(target) not in may[folder(name)]
    }
    assert not wrong


def test_hopper_and_triton_folders_do_not_import_each_other():
    wrong = {
        f"{name} imports {target}"
        for name, targets in files().items()
        for target in targets
        if (".hopper" in name and (".triton" in target or "triton_call" in target))
        or (".triton" in name and ".hopper" in target)
    }
    assert not wrong
    assert any(".hopper" in name for name in files())


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_the_same_files(op):
    known = {"api", "reference", "vjp", "xla", "triton", "hopper"}
    names = {path.stem for path in (PACKAGE / op).iterdir() if path.name not in ("__init__.py", "__pycache__")}
    assert "api" in names
    assert names - known <= {
        "chunks",
        "describe",
        "extra_ranks",
        "fp8",
        "mesh",
        "passes",
        "rows",
        "scaled_gate",
        "sizes",
        "split_graph",
    }


BLOCKED = """
import sys
sys.path.append("tests")
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if {condition}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
import warnings
import jax, jax.numpy as jnp
import pallas_kernels as pk
from cuda_lowering import H200, chosen_kernels, lowered, num_kernels
from pallas_kernels.norm import rms_norm

def step(x, w, a, b, table, scale, rate, key, row_key, weight):
    drop = pk.Dropout(rate=rate, key=key, row_key=row_key)
    def layer(x, a, b):
        normed = rms_norm(x, weight, eps=1e-5)
        return pk.multi_lora_linear(normed, w, a, b, tile_adapter=table, scale=scale, dropout=drop)
    y, vjp = jax.vjp(layer, x, a, b)
    return vjp(y)

shape = jax.ShapeDtypeStruct
arguments = (
    shape((2048, 4096), jnp.bfloat16), shape((4096, 4096), jnp.bfloat16), shape((2, 4096, 8), jnp.float32),
    shape((2, 8, 4096), jnp.float32), shape((16,), jnp.int32), shape((2,), jnp.float32), shape((2,), jnp.float32),
    shape((2,), jnp.uint32), shape((2048,), jnp.uint32), shape((4096,), jnp.bfloat16),
)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    kernels = {kernels}
ours = [name for name in sys.modules if name.startswith("pallas_kernels") and "triton" in name.split(".")]
print(*kernels, len(ours), sum("are slower" in str(warning.message) for warning in told))
"""
TRACED = "chosen_kernels(H200, step, *arguments)"
LOWERED = "num_kernels(lowered(H200, step, *arguments))"


def kernels_of_a_layer(condition: str, kernels: str) -> list[int]:
    """Triton's and Mosaic's kernels of a norm and a layer for an H200, modules of `triton/` folders, and warnings."""
    code = BLOCKED.format(condition=condition, kernels=kernels)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(number) for number in done.stdout.split()]


def test_hopper_works_without_the_triton_folders():
    blocked = 'name.startswith("pallas_kernels.") and "triton" in name.split(".")'
    triton, mosaic, modules, warned = kernels_of_a_layer(blocked, TRACED)
    assert (mosaic, modules) == (4, 0)
    assert triton == 5  # the small passes stay kernels
    assert warned == 1  # the norm falls back to XLA and says so


def test_hopper_works_without_the_triton_lowering_of_jax():
    triton, mosaic, _, warned = kernels_of_a_layer('name == "jax.experimental.pallas.triton"', LOWERED)
    assert (triton, mosaic) == (0, 4)
    assert warned == 2  # the small passes and the norm
