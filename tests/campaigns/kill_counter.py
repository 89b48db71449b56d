"""Builds kill_at_call.c, which ends a process just before one of its calls that change a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("kill_at_call.c")


def build_counter(library: Path) -> None:
    """Compiles it to a library for LD_PRELOAD; needs a C compiler."""
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
