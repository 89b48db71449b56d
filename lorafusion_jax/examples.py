"""Location of the example jobs, data sets and the tiny base model, in the sources or in the wheel."""

from __future__ import annotations

from pathlib import Path


def examples_directory() -> Path:
    """Folder with `demo.yaml`, `data/` and `base/`."""
    package = Path(__file__).resolve().parent
    in_package = package / "_examples"
    return in_package if in_package.is_dir() else package.parent / "examples"
