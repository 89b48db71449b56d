"""The live view as text: aligned, within the width of the terminal, readable without colours and in logs."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lorafusion_jax.report.block import Row, adapter_lines, head_line, plain_state, summary_lines
from lorafusion_jax.report.events import (
    AdapterDone,
    AdapterEvaluated,
    AdapterFailed,
    PhaseBegun,
    ProgramCompiled,
    RunEvent,
    RunMoved,
    RunStarted,
    SlotDone,
    StepTaken,
)
from lorafusion_jax.report.screen import Screen

PLAN = "9f3c1a4b5c6d" + "0" * 52
SPEED = SlotDone(
    slot=112,
    slots=412,
    useful_tokens_per_s=38900.0,
    processed_tokens_per_s=41200.0,
    slot_seconds=0.2,
    eta_s=2650.0,
    adapter_eta_s={"law": 1380.0, "chat@lr=1e-4": 2650.0},
    adapter_tokens_per_s={"law": 9800.0, "chat@lr=1e-4": 850.0},
)
STARTED = RunStarted(
    device="cpu",
    slots=412,
    density=0.931,
    capacity_tokens=8192,
    trainable=2_300_000,
    frozen=8_030_000_000,
    plan=PLAN,
    adapters={"law": 250, "med": 79, "chat@lr=1e-4": 1563},
)


def story(started: RunStarted = STARTED, speed: SlotDone = SPEED) -> list[RunEvent]:
    """A run with everything in it."""
    return [
        PhaseBegun(text="reading data/law.jsonl"),
        started,
        PhaseBegun(text="evaluating law"),
        AdapterEvaluated(adapter="law", step=0, eval_loss=2.25, eval_tokens=90),
        PhaseBegun(text="compiling the training step"),
        ProgramCompiled(program="training step", seconds=34.0),
        StepTaken(slot=111, adapter="law", step=112, loss=1.214, grad_norm=0.41, lr=1.9e-4, loss_tokens=80),
        StepTaken(slot=111, adapter="chat@lr=1e-4", step=7, loss=11.5, grad_norm=10.75, lr=9.7e-5, loss_tokens=80),
        AdapterFailed(
            slot=112,
            adapter="med",
            step=57,
            reason="gradient not finite (layers.11.mlp.down_proj.lora_b) at step 57",
            kept_step=56,
        ),
        speed,
    ]


def console(width: int, *, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)


def block_after(events: list[RunEvent], width: int) -> list[str]:
    screen = Screen("exp1", console(width, terminal=True))
    for event in events:
        screen(event)
    shown = console(width, terminal=True)
    shown.print(screen.block())
    return [line.rstrip() for line in shown.file.getvalue().splitlines()]


def log_of(events: list[RunEvent], **settings) -> list[str]:
    plain = console(160, terminal=False)
    with Screen("exp1", plain, **settings) as screen:
        for event in events:
            screen(event)
    return plain.file.getvalue().splitlines()


def test_the_last_slot_is_reported_once():
    end = replace(SPEED, slot=412)
    assert sum("412/412 mb" in line for line in log_of([*story(), end, end])) == 1
    done = AdapterDone(slot=412, adapter="law", step=250)
    assert sum("412/412 mb" in line for line in log_of([*story(), end, done, end])) == 2


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_the_block_fits_and_columns_line_up(width):
    lines = block_after(story(), width)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("exp1  112/412 mb  27 %  ·  41.2 k tok/s")
    law, chat = (next(line for line in lines if name in line) for name in (" law ", " chat@"))
    for column in (r"\d/[\d ]+\d(?=  )", r"loss +[\d.]+", r"eta \w+$"):  # right ends agree
        assert re.search(column, law).end() == re.search(column, chat).end()


def test_narrow_terminals_lose_the_least_important_columns_first():
    wide, middle, narrow = (" ".join(block_after(story(), width)) for width in (140, 90, 60))
    for words in ("gnorm 0.41", "lr 1.9e-4", "45 %", "held-out 2.250", "9.8 k tok/s", "eta 23m00"):
        assert words in wide
    assert "gnorm" not in middle
    assert "9.8 k tok/s" in middle
    assert "loss  1.214" in narrow or "loss 1.214" in narrow
    assert "eta 23m00" in narrow


def test_a_failure_is_shown_in_full_at_any_width():
    for width in (60, 80, 200):
        text = " ".join(" ".join(block_after(story(), width)).split())
        assert (
            "FAILED: gradient not finite (layers.11.mlp.down_proj.lora_b) at step 57. kept step 56. others unaffected"
            in text
        )


def test_a_failure_is_red_on_a_terminal():
    shown = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", legacy_windows=False)
    shown.print(*adapter_lines({"med": Row(79, failure="FAILED: loss not finite")}, None, 100))
    assert "\x1b[1;31m" in shown.file.getvalue()


def test_the_current_phase_is_shown():
    events = story()
    assert "reading data/law.jsonl …" in block_after(events[:1], 80)[-1]
    assert "evaluating law …" in block_after(events[:3], 80)[-1]
    assert "evaluating" not in " ".join(block_after(events[:4], 80))
    assert re.search(r"compiling the training step … [\d.]+ s", block_after(events[:5], 80)[-1])
    assert "compiling" not in " ".join(block_after(events[:6], 80))


def test_done_adapters_show_only_done():
    done = AdapterDone(slot=112, adapter="law", step=112)
    law = next(line for line in block_after([*story(), done], 120) if line.startswith(" law "))
    assert law.endswith("done")
    assert "tok/s" not in law


def test_names_longer_than_the_terminal_are_shortened():
    rows = {"x" * 90: Row(10, step=3, loss=1.0), "law": Row(10, step=3, loss=1.0)}
    lines = [line.plain for line in adapter_lines(rows, None, 80)]
    assert max(map(len, lines)) <= 80
    assert "…" in lines[0]
    assert "3/10" in lines[0]


def test_head_drops_details_before_it_is_truncated():
    assert "useful" in head_line("exp1", 112, 412, SPEED, 80).plain
    short = head_line("exp1", 112, 412, SPEED, 40).plain
    assert "useful" not in short
    assert "eta 44m10" in short


def screenshot(width: int, predicted: float | None, measured: float | None) -> str:
    """The block of a run as text."""
    screen = Screen("exp1", console(width, terminal=True))
    for event in story(replace(STARTED, predicted_bubble_share=predicted), replace(SPEED, bubble_share=measured)):
        screen(event)
    shown = Console(record=True, file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False)
    shown.print(screen.block())
    return shown.export_text()


def test_bubbles_are_shown_with_the_prediction():
    first = screenshot(120, 0.038, 0.041).splitlines()[0]
    assert re.fullmatch(
        r"exp1  112/412 mb  27 %  ·  41\.2 k tok/s \(38\.9 k useful\)  ·  bubbles 4\.1 % \(plan 3\.8\)  ·  "
        r"eta 44m10, at \d\d:\d\d *",
        first,
    )
    assert "bubbles 4.1 %  ·" in screenshot(80, 0.038, 0.041)
    assert "eta 44m10" in screenshot(50, 0.038, 0.041)


def test_bubbles_are_not_shown_before_they_are_measured_and_never_of_one_stage():
    for predicted in (0.038, None):
        assert "bubbles" not in screenshot(200, predicted, None)


def test_metrics_of_an_objective_follow_the_loss():
    metrics = {"margin": 0.4142, "right": 0.75}
    step = StepTaken(
        slot=112, adapter="law", step=113, loss=1.2, grad_norm=0.4, lr=1e-4, loss_tokens=80, metrics=metrics
    )
    assert "margin 0.414  right 0.75" in " ".join(block_after([*story(), step], 160))
    assert "margin" not in " ".join(block_after([*story(), step], 60))
    held_out = {"eval_margin": 0.5}
    told = AdapterEvaluated(adapter="law", step=113, eval_loss=1.5, eval_tokens=90, metrics=held_out)
    assert log_of([*story(), told])[-1] == "law  step 113  held-out loss 1.5000  margin 0.5"


def test_a_log_has_one_line_per_event_without_escape_codes():
    lines = log_of(story(), line_every_s=0)
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert lines[0] == "reading data/law.jsonl …"
    assert lines[1] == "exp1  plan 9f3c1a4b5c6d  ·  412 microbatches of 8 192 tokens, 93.1 % used"
    assert lines[3] == "law  step 0  held-out loss 2.2500"
    assert "compiled the training step in 34 s" in lines
    assert any(line.startswith("med  FAILED: gradient not finite") for line in lines)
    assert re.match(r"\d\d:\d\d:\d\d  112/412 mb  27 %  41\.2 k tok/s \(38\.9 k useful\)  eta 44m10", lines[-1])
    assert lines[-1].endswith("law 112/250 loss 1.214  |  med failed  |  chat@lr=1e-4 7/1563 loss 11.500")


def test_a_run_that_moved_says_what_is_left():
    moved = RunMoved(slot=9, stages=1, replicas=4, slots_left=1310, slots_left_before=62, plan=PLAN)
    line = "planned again for 1 stage and 4 replicas: 1 310 slots left instead of 62"
    assert log_of([moved]) == [line]


def test_a_log_of_a_long_run_stays_short():
    progress = [replace(SPEED, slot=slot) for slot in range(113, 413)]
    lines = log_of([*story(), *progress], line_every_s=3600)
    assert sum(" mb  " in line for line in lines) == 2  # the first, and the end


def test_many_adapters_are_summed_up_in_a_log():
    rows = {f"a{number}": Row(10, step=5, loss=2.0) for number in range(28)}
    rows |= {"done": Row(10, step=10, loss=5.0, done=True), "bad": Row(10, failure="FAILED")}
    assert plain_state(rows) == "30 adapters: 1 done, 1 failed, mean loss 2.103"


def test_a_thousand_adapters_take_one_line_and_their_failures():
    rows = {f"a{number}": Row(10, step=5, loss=1 + number / 1000) for number in range(1000)}
    rows |= {f"bad{number}": Row(10, step=3, failure=f"FAILED: number {number}") for number in range(7)}
    rows["a0"].done = True
    line, *failures = (text.plain for text in summary_lines(rows, 200))
    assert line.split("  ·  ") == [
        " 1 007 adapters",
        "1 done",
        "7 failed",
        "5 021/10 070 steps",
        "loss 1.500 (1.100 to 1.899)",
        "highest 1.999 a999",
    ]
    assert len(failures) == 5
    assert "FAILED: number 0" in failures[0]


def test_resumed_runs_say_from_where():
    assert any("resumed at microbatch 40" in line for line in log_of([replace(STARTED, slot=40)]))


def test_too_little_memory_is_reported_at_the_start():
    warning = "stage 0 needs 150.0 GB by count and the device gives 143.2"
    told = log_of([replace(STARTED, memory_warning=warning)])
    assert f"  {warning}" in told


def test_resumed_adapters_show_their_progress():
    at = {"taken": {"law": 250, "med": 56, "chat@lr=1e-4": 18}, "failed": {"med": "loss not finite at step 57"}}
    resumed = [replace(STARTED, slot=40, **at), replace(SPEED, slot=40)]
    assert log_of(resumed, line_every_s=0)[-1].endswith("law 250/250 done  |  med failed  |  chat@lr=1e-4 18/1563")
    block = block_after(resumed, 120)
    assert next(line for line in block if line.startswith(" law ")).endswith("done")
    assert "FAILED: loss not finite at step 57. kept step 56." in " ".join(block)


def test_a_run_on_several_devices_says_what_runs_where():
    def told(**values) -> list[str]:
        return log_of([replace(STARTED, **values)])

    single, split = {"stages": 1, "data": 1, "fsdp": 1, "tensor": 1}, {"stages": 2, "data": 1, "fsdp": 2, "tensor": 1}
    assert told(mesh=single, layers=[32], remat="everything") == told()  # nothing to say
    assert told(mesh=single, layers=[32], remat="nothing")[-1] == "  saved for backward: nothing"
    line = "  2 stages (17 + 15 layers) × 2 replicas, 2 share a copy of the base"
    assert told(mesh=split, layers=[17, 15], remat="everything")[-1] == line
