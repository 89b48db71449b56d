"""The screen of compared meshes and microbatch sizes."""

from __future__ import annotations

from rich.console import Console

from lorafusion_jax.planning.choices import Choice, Choices
from lorafusion_jax.report.console import plain_table, say
from lorafusion_jax.report.format import count, duration, exact, percent
from lorafusion_jax.weights.table import NONE

MOST_ROWS = 12
GIB = 2**30


def show_choices(console: Console, compared: Choices) -> None:
    """Prints the table, the fastest first, and why the first one is proposed."""
    devices = f"{compared.gpus} × {compared.device}" if compared.gpus > 1 else f"one {compared.device}"
    say(console, f"{devices}, default rates, nothing measured\n", style="bold")
    stored = any(choice.quantize != NONE for choice in compared.choices)
    shared = any(choice.tensor > 1 for choice in compared.choices)
    table = plain_table(
        ("stages × data × fsdp" + " × tensor" * shared, "capacity", *(("base as",) if stored else ()), "remat"),
        ("memory", "useful tok/s", "bubbles", "time"),
    )
    for index, choice in enumerate(compared.choices[:MOST_ROWS]):
        style = "bold green" if index == 0 and choice.fits is not False else "dim" if choice.fits is False else None
        table.add_row(*_cells(choice, stored=stored, shared=shared), style=style)
    console.print(table)
    if (left := len(compared.choices) - MOST_ROWS) > 0:
        say(console, f"{left} more are slower or do not fit")
    if compared.why:
        say(console, f"\n{compared.why}")
    else:
        say(console, "\nnothing fits; more devices, or shorter samples", style="yellow")


def _cells(choice: Choice, *, stored: bool, shared: bool) -> list[str]:
    memory = f"{choice.memory_bytes / GIB:.1f} GiB" + (" too much" if choice.fits is False else "")
    times = (
        ["–", "–", "–"]
        if choice.seconds is None or choice.tokens_per_s is None
        else [count(choice.tokens_per_s), percent(choice.bubble_share or 0.0), duration(choice.seconds)]
    )
    mesh = f"{choice.stages} × {choice.data} × {choice.fsdp}" + (f" × {choice.tensor}" if shared else "")
    kind = (choice.quantize,) if stored else ()
    return [mesh, exact(choice.capacity_tokens), *kind, choice.remat, memory, *times]
