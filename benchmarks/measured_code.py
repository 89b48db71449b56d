"""Which code a row measured: the commit, and digests of the packages, which tell later whether they have changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lorafusion_jax", "pallas_kernels", "scheduling")


@cache
def code() -> dict[str, str]:
    """Package → digest of its sources."""
    return {package: digest(ROOT / package) for package in PACKAGES}


def digest(folder: Path) -> str:
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        hashed.update(f"{file.relative_to(folder).as_posix()}\n".encode())
        hashed.update(hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()[:16]


def commit() -> str:
    """The commit of the checkout, with "+" if files differ from it; empty without git."""
    git = shutil.which("git")
    if git is None:
        return ""

    def ask(*what: str) -> str:
        return subprocess.run([git, *what], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    revision = ask("rev-parse", "HEAD")
    return f"{revision}+" if revision and ask("status", "--porcelain", "--untracked-files=no") else revision


def write_measured(folder: Path) -> None:
    """Makes a folder of rows, and writes into it which code they measure."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "code": code()}
    (folder / "measured.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
