"""How old published rows are: the commit that they measured, and which of the packages have changed since."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.measured_code import code

RESULTS = Path(__file__).parent / "results"
PRODUCT = ("lorafusion_jax", "pallas_kernels", "scheduling")
KERNELS, PLANS = ("pallas_kernels",), ("scheduling",)
MEASURED = {
    "attention": KERNELS, "kernels": KERNELS, "online": PLANS, "pipelines": PLANS, "planner": PLANS, "scaling": PLANS,
    "plan_floors": PLANS, "window_density": PLANS,
}  # fmt: skip
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)  # of a table in a document
# In JSON and in CSV, where quotes may be doubled; a row of CSV without digests has the commit alone.
DIGEST = re.compile(r"""['"]+(lorafusion_jax|pallas_kernels|scheduling)['"]+: ['"]+([0-9a-f]{16})\b""")
COMMIT = re.compile(r"(?<![0-9a-f])([0-9a-f]{40})(?![0-9a-f])|,([0-9a-f]{8}),2\d{3}-")


def ages() -> str:
    """The table in Markdown: a line for each folder of rows."""
    lines = ["| rows | commit | changed since |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(_line(folder) for folder in sorted(RESULTS.iterdir()))])


def _line(folder: Path) -> str:
    text = "\n".join(
        file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir())
        if file.suffix in (".csv", ".json", ".jsonl") and ".perfetto" not in file.name
    )
    commits, known = ["".join(found) for found in COMMIT.findall(text)], dict(DIGEST.findall(text))
    measured = MEASURED.get(script_of(folder.name), PRODUCT)
    changed = [package for package in measured if known.get(package) != code().get(package)]
    shown = ", ".join(changed) or "–"
    if not known:
        shown = "not known"
    return f"| `{folder.name}` | {commits[-1][:10] if commits else 'not recorded'} | {shown} |"


def script_of(name: str) -> str:
    """The name of a folder without device, date and letter."""
    return re.sub(r"(?:_(?:h200|h100|cpu))?_\d{4}-\d\d-\d\d.*", "", name)
