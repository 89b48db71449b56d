"""Reads the base of a session, and compiles its programs meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.report.format import count
from lorafusion_jax.session.ahead import Ahead, requests_of
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.reading import BASE, Reading, Times


def load_and_compile(
    config: JobConfig,
    executor: Executor,
    reading: Reading,
    rows: Sequence[Microbatch],
    held_out: Microbatch | None,
    ahead: Ahead,
    on_progress: Callable[[str], None],
) -> dict[str, Times]:
    """Waits for the base model and compiles meanwhile; see `Session.finish_loading`.

    Args:
        held_out: a microbatch of padding of an evaluation (None: no adapter is evaluated).
    """
    base, total = f"reading {count(reading.num_bytes)}B", 0

    def report(programs: Sequence[str]) -> None:
        nonlocal total
        total = max(total, len(programs))
        compiling = [f"compiling {total - len(programs) + 1} of {total}: {', '.join(programs)}"] if programs else []
        running = [*compiling, *([] if reading.done else [base])]
        if running:
            on_progress("  ·  ".join(running))

    ahead.compile(lambda: requests_of(config, executor.local_stages, rows, held_out))
    try:
        times = executor.warm_up(rows, held_out, report, ahead) if rows else {}
    finally:  # also where a stage fails: a model that cannot be read is worse
        reading.finish()
    assert reading.times is not None
    return {BASE: reading.times, **times, **ahead.times}
