"""Generates every published table from the raw rows: CSV files, plots, and tables and figures in the documents.

    python -m benchmarks.tables           # the same as `make tables`
    python -m benchmarks.tables --check   # writes nothing; exits 1 and names outdated files

In a document, a table of `published.py` is between two comments, whose content is replaced:

    <!-- table: ratios -->
    <!-- end of table -->

Numbers of sentences and of small tables are those of `figures.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import end_to_end_report, kernel_report, published
from benchmarks.figures import with_figures
from benchmarks.peers import report as peer_report
from benchmarks.published import PLACE

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "tables"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        changed = outdated()
        print(*changed, sep="\n")
        return int(bool(changed))
    write_tables(FOLDER)
    for file, text in filled():
        file.write_text(text, encoding="utf-8")
    return 0


def outdated() -> list[str]:
    """Files that `main` would change. Plots are not compared, because versions of matplotlib differ."""
    with tempfile.TemporaryDirectory() as folder:
        made = write_tables(Path(folder))
        changed_files = [f for f in made if f.suffix == ".csv" and not same(f, FOLDER / f.name)]
    changed = [str((FOLDER / file.name).relative_to(ROOT)) for file in changed_files]
    return changed + [
        str(file.relative_to(ROOT)) for file, text in filled() if file.read_text(encoding="utf-8") != text
    ]


def same(made: Path, committed: Path) -> bool:
    return committed.exists() and made.read_bytes() == committed.read_bytes()


def write_tables(folder: Path) -> list[Path]:
    """Writes CSV files and plots of all rows of kernels and of whole runs."""
    files = [published.RESULTS / name for name in published.KERNEL_FILES]
    written = kernel_report.write(files, folder / "kernels_h200")
    rows = published.RESULTS / published.END_TO_END
    written += end_to_end_report.write(rows, folder / "end_to_end_h200")
    return written + peer_report.report(published.RESULTS / peer_report.PEERS, folder / "peers_h200")


def filled() -> Iterator[tuple[Path, str]]:
    """Every document with tables or figures, up to date."""
    for file in (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = file.read_text(encoding="utf-8")
        made = PLACE.sub(lambda match: f"{match[1]}{published.TABLES[match[2]]()}\n{match[3]}", text)
        yield file, with_figures(file.relative_to(ROOT).as_posix(), made)


if __name__ == "__main__":
    sys.exit(main())
