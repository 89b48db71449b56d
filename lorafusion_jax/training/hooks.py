"""The loop's callbacks into its run: saves, evaluations, exports and new plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lorafusion_jax.training.changes import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Called by the loop.

    Attributes:
        save: (wait) starts a checkpoint, and waits until it is written if `wait` is set.
        evaluate: (adapter, step, slots done) measures and reports the held-out loss. Returns the metrics, `eval_loss`
            and others; None without held-out data. All processes get the same.
        finish: (adapter, slots done) exports an adapter that has ended, possibly in the background.
        keep_best: (adapter, slots done) exports the current weights of an adapter as its best ones.
        add: (new adapters, slots done) gives new adapters a place and initial weights. All programs compile again.
        lacks_rows: (slot) whether rows of a slot are not drawn yet. Called before every slot of a run with rollouts.
        draw_rows: (slot) draws them, at a drained slot.
        finished: reports exports and saves that were completed in the background.
        wants_revision: whether a request for another plan is pending. Called before every slot.
        revise: gives the job another plan from the drained slot `progress.slot` on and returns its changes; None if the
            plan stays. Collective over processes.
        bubble_share: measured idle share of the recent slots without pauses; None if unknown.
        evaluation_s: expected seconds of an adapter's evaluation; None if unknown.
    """

    save: Callable[[bool], None]
    evaluate: Callable[[str, int, int], Mapping[str, float] | None]
    finish: Callable[[str, int], None]
    keep_best: Callable[[str, int], None] = lambda name, slots_done: None
    add: Callable[[Sequence[str], int], None] = lambda names, slots_done: None
    lacks_rows: Callable[[int], bool] = lambda slot: False
    draw_rows: Callable[[int], None] = lambda slot: None
    finished: Callable[[], None] = lambda: None
    wants_revision: Callable[[], bool] = lambda: False
    revise: Callable[[], Sequence[Change] | None] = lambda: None
    bubble_share: Callable[[], float | None] = lambda: None
    evaluation_s: Callable[[str], float | None] = lambda name: None
