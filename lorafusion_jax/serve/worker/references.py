"""What the reference of a job says of its samples, in the job's folder, so that a move does not compute it again."""

from __future__ import annotations

import json
from pathlib import Path

from lorafusion_jax.checkpoint.references import KEY, read_reference
from lorafusion_jax.checkpoint.references import write_references as write_arrays
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import SetReferences, reference_shapes
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.files import replace_text
from lorafusion_jax.session.assembler import teacher_state

NAME, NOTE = "reference", "references.json"


def write_references(folder: Path, references: SetReferences) -> None:
    """Writes them and their digest. A full disk only means that they are computed again."""
    try:
        noted = write_arrays(folder, {NAME: references}, {NAME: NAME})
        replace_text(folder / NOTE, json.dumps({KEY: noted}))
    except (OSError, LoraFusionError) as problem:
        print(f"references were not kept: {problem}", flush=True)


def read_references(folder: Path, config: JobConfig, prepared: Prepared) -> SetReferences | None:
    """Reads them; None if there are none for these samples, or if they are damaged."""
    (adapter,) = config.adapters
    try:
        noted = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        shapes = reference_shapes(prepared.adapters[adapter.name], teacher_state(config))
        return read_reference(folder, noted, NAME, shapes)
    except (OSError, ValueError, LoraFusionError):
        return None
