"""Lowered programs of a plain LoRA job, and a file that says what they are.

`python tests/pipeline/plain_programs.py` writes the file again for the installed jax. Do that only if plain jobs are
meant to compile other programs.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import jax

RECORDED = Path(__file__).with_suffix(".json")
GROUPS = {"layers": ("inputs", "forward", "backward", "evaluate"), "ends": ("embed", "head", "totals")}
NAMES = {name for names in GROUPS.values() for name in names}


def record(folder: Path, base: Path) -> dict[str, str]:
    """Trains two plain adapters and returns the lowered text of each program of the stage, by name."""
    from small_jobs import two_adapters, write_job, write_rows

    from lorafusion_jax import train
    from lorafusion_jax.session import lowered, stage_state
    from lorafusion_jax.session.programs import StagePrograms

    texts: dict[str, str] = {}

    class Recorded(StagePrograms):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for group, names in GROUPS.items():
                owner = getattr(self, group)
                for name in names:
                    setattr(owner, name, recorded(name, getattr(owner, name)))

    def recorded(name, program):
        def call(*arguments):
            if name not in texts:
                texts[name] = program.lower(*arguments).as_text()
            return program(*arguments)

        return call

    rows = {name: write_rows(folder, name, 8) for name in ("law", "med")}
    job = write_job(folder, base, two_adapters(rows))
    with (
        mock.patch.object(stage_state, "StagePrograms", Recorded),
        mock.patch.object(lowered, "lowered_folder", return_value=None),  # as they are traced, not as a file keeps them
    ):
        train(job, out=folder / "run", progress=False)
    return texts


def summary(text: str) -> dict:
    """The digest of a program, and its operations, by which a difference is understood."""
    operations = Counter(re.findall(r"= \"?((?:stablehlo|func|chlo)\.\w+)", text))
    return {"digest": hashlib.sha256(text.encode()).hexdigest()[:16], "operations": dict(sorted(operations.items()))}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    jax.config.update("jax_num_cpu_devices", 8)
    from conftest import write_base

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = {name: summary(text) for name, text in record(folder, write_base(folder / "base")).items()}
    stored = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    RECORDED.write_text(json.dumps(stored | {jax.__version__: programs}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
