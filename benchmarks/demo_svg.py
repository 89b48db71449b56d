"""Draws the terminal of `lorafusion demo` as a picture, from a run of it: the live view in the middle, and the end.

python -m benchmarks.demo_svg                   # writes notebooks/demo.svg; about as long as make demo
python -m benchmarks.demo_svg --steps 2         # tries the script
"""

from __future__ import annotations

import argparse
import html
import io
import re
import tempfile
from pathlib import Path
from unittest import mock

from rich.console import Console, Group
from rich.text import Text

from lorafusion_jax.cli import demo
from lorafusion_jax.config import load_config
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.report.events import RunEvent, SlotDone
from lorafusion_jax.report.screen import Screen

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 108
LETTER = 12.2  # width of a letter in the picture
FONTS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'
MIDDLE = 0.6  # of the run: where the live view is drawn


class StillView:
    """Stands for the live view of a terminal: nothing is redrawn."""

    def start(self) -> None: ...

    def refresh(self) -> None: ...

    def stop(self) -> None: ...


def draw(to: Path, steps: int | None) -> None:
    """Runs the demo and writes the picture."""
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO(), legacy_windows=False)
    blocks: list[Group] = []

    def watch(drawn_on: Console, folder: Path, config, work):
        screen = Screen(folder.name, drawn_on, live=lambda block: StillView())

        def listen(event: RunEvent) -> None:
            screen(event)
            if isinstance(event, SlotDone) and event.eta_s is not None and event.slot <= MIDDLE * event.slots:
                blocks[:] = [screen.block()]

        with screen:
            result = work([listen])
        for block in blocks:
            drawn_on.print(Text("…", style="dim"))
            drawn_on.print(block)
            drawn_on.print(Text("…", style="dim"))
        return result

    config = load_config(examples_directory() / "demo.yaml", [f"train.max_steps={steps}"] if steps else [])
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("lorafusion_jax.api.watch.watch", watch),
        mock.patch.object(demo, "out", return_value=console),
        mock.patch.object(demo, "load_config", return_value=config),
        mock.patch.object(demo, "_new_folder", return_value=Path(folder) / "runs" / "demo"),
    ):
        console.print(Text("$ lorafusion demo", style="bold"))
        code = demo.command()
    assert code == 0
    svg = console.export_svg(title="lorafusion demo")
    svg = svg.replace(f"{folder}/", "").replace(str(examples_directory()), "examples")
    to.write_text(with_true_widths(with_local_fonts(svg)), encoding="utf-8")


def with_local_fonts(svg: str) -> str:
    """Takes out fonts of other hosts: a page asks no other host for anything."""
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("font-family: Fira Code, monospace", f"font-family: {FONTS}")


def with_true_widths(svg: str) -> str:
    """Gives each text the width of its letters: those whose paths became shorter would be stretched."""

    def true(text: re.Match[str]) -> str:
        return f'textLength="{len(html.unescape(text[3])) * LETTER:g}"{text[2]}>{text[3]}<'

    return re.sub(r'textLength="([\d.]+)"([^>]*)>([^<]*)<', true, svg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "notebooks" / "demo.svg")
    parser.add_argument("--steps", type=int, help="of each adapter; default all")
    options = parser.parse_args()
    draw(options.out, options.steps)


if __name__ == "__main__":
    main()
