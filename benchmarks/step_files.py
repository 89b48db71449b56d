"""Which files of the product run during one steady training step, on the host; what is traced once does not count.

python -m benchmarks.step_files [MODEL]
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from lorafusion_jax.config import load_config
from lorafusion_jax.report.events import RunEvent
from lorafusion_jax.training import train

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lorafusion_jax", "pallas_kernels", "scheduling")
FIRST, LAST = 4, 8  # steps of an adapter between which calls are counted


class Calls:
    """Counts calls of Python functions by file, in all threads that start after it and in its own."""

    def __init__(self):
        self.counting, self.by_file = False, Counter[str]()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument  # unused
        if self.counting and event == "call":
            self.by_file[frame.f_code.co_filename] += 1

    def stop(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    @property
    def of_product(self) -> dict[str, int]:
        paths = {Path(file): count for file, count in self.by_file.items()}
        return {
            str(path.relative_to(ROOT)): count
            for path, count in sorted(paths.items())
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        }


def write_job(folder: Path, model: Path) -> Path:
    """Writes a job of one adapter with a microbatch a step."""
    rows = [{"prompt": "a b c", "completion": "d e"} for _ in range(2 * LAST)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = {
        "base": {"model": str(model.resolve()), "dtype": "float32"},
        "batch": {"capacity_tokens": 64, "tile_tokens": 16},
        "adapters": [
            {
                "name": "law",
                "data": {"train": "rows.jsonl", "max_length": 32},
                "batch": {"global_samples": 1},
                "lora": {"rank": 4, "targets": ["q_proj"]},
            }
        ],
    }
    (folder / "jobs.yaml").write_text(json.dumps(job), encoding="utf-8")
    return folder / "jobs.yaml"


def files_of_a_step(model: Path) -> dict[str, int]:
    """Trains a few steps. Returns the calls by file from one step to a later one."""
    calls = Calls()

    def listen(event: RunEvent) -> None:
        if event.kind == "step":
            calls.counting = FIRST <= event.step < LAST

    with tempfile.TemporaryDirectory() as folder:
        train(load_config(write_job(Path(folder), model)), Path(folder) / "run", listeners=[listen])
    calls.stop()
    return calls.of_product


def main() -> None:
    by_file = files_of_a_step(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "examples" / "base")
    for file, count in by_file.items():
        print(f"{count:6d} {file}")
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in by_file)
    print(f"{len(by_file)} files, {lines} lines, {sum(by_file.values())} calls in {LAST - FIRST} steps")


if __name__ == "__main__":
    main()
