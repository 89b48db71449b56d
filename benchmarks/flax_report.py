"""Tables of steps of users' own NNX models, of rows of `flax_model.py`."""

from __future__ import annotations

from benchmarks.csv_rows import Row, markdown
from benchmarks.csv_rows import rows as rows_of

FLAX_MODEL = "flax_model_h200_2026-11-23b/rows.jsonl"
VIT, VIT_BY_DEFAULT = "flax_vit_h200_2026-11-30b/rows.jsonl", "flax_vit_h200_2026-11-30b/default.jsonl"
MESH = [f"flax_model_h200_2026-11-30_mesh/{kind}.jsonl" for kind in ("fp8", "nf4")]
OF_VIT = {  # adapters, how a user writes it
    "frozen": ("none", "–"),
    "nnx.LoRA": ("1", "`nnx.LoRA`"),
    "ours 1": ("1", "`only=`"),
    "ours 1 xla": ("1", '`only=`, `implementation="xla"`'),
    "ours 4": ("4", "a table of examples"),
}


def flax_model() -> str:
    """A step of a user's own NNX model under `nnx.jit`."""
    lines = [
        (name, f"{row['step_ms']:.1f}", f"{row['over_frozen']:.3f}") for name, row in _of("step", FLAX_MODEL).items()
    ]
    return markdown(("LoRA", "ms per step", "over frozen"), lines)


def flax_vit() -> str:
    """A step of ViT-L/14, with XLA's Triton GEMMs off as `compiler_options` has it, and with XLA's own options."""
    files = VIT, VIT_BY_DEFAULT
    steps, memory = [_of("step", file) for file in files], _of("compiled", VIT)
    lines = [
        (
            adapters, way, *(_step(of_file.get(name)) for of_file in steps),
            f"{memory[name]['memory_gb']:.1f} GB",
        )
        for name, (adapters, way) in OF_VIT.items()
    ]  # fmt: skip
    return markdown(("adapters", "way", "`compiler_options()`", "XLA's own options", "memory"), lines)


def flax_mesh() -> str:
    """A step over the frozen one of the same run, on a mesh of two data and of two tensor devices."""
    steps = {
        mesh: {
            row["variant"]: f"{row['step_ms']:.1f} ms, {row['over_frozen']:.2f}"
            for file in MESH
            for row in rows_of(file)
            if row.get("case") == "step" and row["mesh"] == mesh
        }
        for mesh in ("data", "tensor")
    }
    bases = {"ours 4": "bfloat16", "ours 4 fp8": "fp8", "ours 4 nf4": "nf4"}
    lines = [(name, *(of_mesh[variant] for of_mesh in steps.values())) for variant, name in bases.items()]
    return markdown(("base", "`data=2`", "`tensor=2`"), lines)


def _of(case: str, file: str) -> dict[str, Row]:
    return {row["variant"]: row for row in rows_of(file) if row.get("case") == case}


def _step(row: Row | None) -> str:
    return "–" if row is None else f"{row['step_ms']:.1f} ms, {row['over_frozen']:.2f}"
