"""Runs training under the live view, prints its results and the command to type next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from lorafusion_jax.api.watch import watch
from lorafusion_jax.cli.common import next_command
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import LoraFusionError, RunError, quoted
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.report.console import errors_to, plain_table, say
from lorafusion_jax.report.early_stops import early_stops
from lorafusion_jax.report.events import Listener
from lorafusion_jax.report.format import duration, exact, last_result, loss_text
from lorafusion_jax.report.measured import reference_share
from lorafusion_jax.report.ranking import adapter_to_export, measures_of, rank
from lorafusion_jax.report.summary import final_rows, got_worse, throughput
from lorafusion_jax.session.failures import PROCESS_LOST
from lorafusion_jax.session.processes import (
    exit_after_failure,
    exit_after_peer_loss,
    is_first,
    stop_all,
    stopped_elsewhere,
)
from lorafusion_jax.signals import INTERRUPTED, last_words
from lorafusion_jax.training import Interrupted, RunFolder, RunResult

COLOURS = {"running": "bold", "done": "green", "failed": "bold red", "paused": "yellow", "cancelled": "yellow"}


def follow(
    console: Console, folder: Path, config: JobConfig, work: Callable[[Sequence[Listener]], RunResult], *, start: str
) -> int:
    """Runs `work` under the live view and shows its result; returns the exit code. `start` is the command."""
    interruption = "stopped at once: the work since the last checkpoint is repeated when the run is resumed."
    try:
        with last_words(f"{interruption}\nnext: lorafusion resume {quoted(folder)}"):
            result = watch(console, folder, config, work)
    except Interrupted:
        errors_to().print("interrupted: the state is saved.")
        next_command(console, f"lorafusion resume {quoted(folder)}")
        return INTERRUPTED
    except KeyboardInterrupt:  # second signal, or a signal before the first microbatch
        has_plan = RunFolder(folder).plan_file.exists()
        errors_to().print(interruption if has_plan else "stopped before the run started.")
        next_command(console, f"lorafusion resume {quoted(folder)}" if has_plan else start)
        stop_all()
        return INTERRUPTED
    except RunError as problem:
        if problem.code == PROCESS_LOST and stopped_elsewhere():
            errors_to().print("stopped: another process of this run was asked to stop.")
            stop_all()
            return INTERRUPTED
        leave = exit_after_peer_loss if problem.code == PROCESS_LOST else exit_after_failure
        leave(problem.exit_code)
        raise
    except LoraFusionError:  # errors of job, data or folder occur in all processes
        raise
    except Exception:
        exit_after_failure(1)
        raise
    if is_first():
        show_result(console, result)
    return result.exit_code


def show_result(console: Console, result: RunResult) -> None:
    """Prints the table of finished adapters and the next command; of a run that had finished before, one line."""
    if result.had_finished:
        counts = Counter(adapter.status for adapter in result.adapters.values())
        ended = ", ".join(f"{exact(number)} {status}" for status, number in counts.items())
        say(console, f"{result.folder} had already finished ({ended}): {result.folder}/adapters/NAME/latest")
        next_command(console, f"lorafusion status {quoted(result.folder)}")
        return
    table = plain_table(("adapter", "status"), ("steps", "last loss", "held-out before", "after"))
    rows = final_rows(result.folder)
    status = {name: adapter.status for name, adapter in result.adapters.items()}
    evaluations = {name: rows.get(name, {}).get("evaluated", {}) for name in status}
    record = RunFolder(result.folder).read_record()
    data = {name: digest for name, digest in record["eval"].items() if digest}
    ranking = rank(status, evaluations, data, measures_of(record))
    for name in ranking.order:
        adapter, row = result.adapters[name], rows.get(name, {})
        table.add_row(
            name,
            f"[{COLOURS[adapter.status]}]{adapter.status}[/]",
            f"{exact(adapter.step)}/{exact(adapter.num_steps)}",
            last_result(row),
            loss_text(row.get("before")),
            loss_text(row.get("after")),
        )
    console.print()
    console.print(table)
    for line in ranking.lines:
        say(console, line, "bold")
    for name, adapter in result.adapters.items():
        if adapter.status == "failed":
            in_folder = f"the folder holds step {adapter.step}" if adapter.step else "there is no folder"
            say(console, f"{name}: {adapter.reason}; {in_folder}", "red")
        elif worse := got_worse(name, rows.get(name, {}).get("before"), rows.get(name, {}).get("after")):
            say(console, worse, "yellow")
    slot_seconds = (throughput(result.folder) or {}).get("slot_seconds")
    for line in early_stops(read_rows(result.folder / "events.jsonl")).lines(slot_seconds):
        say(console, line)
    if any(adapter.status == "done" for adapter in result.adapters.values()):
        ran = f"{exact(len(result.plan.slots))} microbatches in {duration(result.seconds)}"
    else:
        ran = f"no adapter was left to train after {duration(result.seconds)}"
    if comparison := compare_with_prediction(result.folder):
        say(console, comparison)
    if references := reference_share(read_rows(result.folder / "events.jsonl"), result.seconds):
        say(console, references[1])
    has_best = any(RunFolder(result.folder).best(name) for name in result.adapters)
    say(
        console,
        f"{ran}  ·  PEFT folders: {result.folder}/adapters/NAME/latest"
        + (", and NAME/best of the best held-out step" if has_best else ""),
    )
    winner = adapter_to_export(status, {name: adapter.step for name, adapter in result.adapters.items()}, ranking.best)
    next_command(
        console,
        f"lorafusion export {quoted(result.folder)} {winner} --to out/{winner}"
        if winner
        else f"lorafusion status {quoted(result.folder)}",
    )


def compare_with_prediction(folder: Path) -> str | None:
    """Compares the time of slots, evaluations and saves with the prediction, for runs of one session.

    A CPU has default rates that say nothing about it: its times stand alone.
    """
    rows = [row for row in read_rows(folder / "events.jsonl") if row["kind"] in ("started", "finished")]
    if [row["kind"] for row in rows] != ["started", "finished"] or not (prediction := rows[0].get("predicted")):
        return None
    kinds = (("training", "seconds"), ("held-out losses", "evaluation_s"), ("saving", "saving_s"))
    measured_device = rows[0].get("device") != "cpu"
    parts = [
        f"{label} {duration(rows[1][key])}" + (f" ({duration(prediction[key])} predicted)" if measured_device else "")
        for label, key in kinds
        if rows[1].get(key) is not None
    ]
    return "  ·  ".join(parts)
