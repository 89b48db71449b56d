"""How many lines and files the commits add whose message has a text, by folder.

python -m benchmarks.net_lines "One session" [first..last]
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def net_lines(root: Path, text: str, commits: str = "HEAD") -> tuple[Counter[str], Counter[str]]:
    """Lines and files by top folder: what was added less what was taken away."""
    git = ("git", "-C", str(root), "log", "--no-merges", "--no-renames", "--fixed-strings", f"--grep={text}")

    def rows(how: str) -> list[list[str]]:
        told = subprocess.run([*git, "--format=", how, commits], check=True, capture_output=True, text=True).stdout
        return [line.split("\t") for line in told.splitlines() if line]

    lines, files = Counter(), Counter()
    for added, removed, path in rows("--numstat"):
        lines[path.partition("/")[0]] += 0 if added == "-" else int(added) - int(removed)
    for status, path in rows("--name-status"):
        files[path.partition("/")[0]] += {"A": 1, "D": -1}.get(status, 0)
    return lines, files


def main() -> None:
    lines, files = net_lines(ROOT, *sys.argv[1:])
    for folder in sorted(lines):
        print(f"{folder:24} {lines[folder]:+7d} lines {files[folder]:+5d} files")


if __name__ == "__main__":
    main()
