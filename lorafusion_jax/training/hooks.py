"""What a loop does besides training: the run around it says how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lorafusion_jax.training.changes import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Called by the loop.

    Attributes:
        save: begins a checkpoint of the state, and waits until it is written if told so.
        evaluate: (adapter, step, slots done) → held-out loss is measured and reported.
        finish: (adapter, slots done); an adapter took its last step, and what follows may go on while others train.
        add: (new adapters, slots done) → they have a place and their first weights; all programs compile again.
        finished: tells what came of it, and of saves, meanwhile.
        wants_revision: whether a user asks for another plan; looked at before every slot.
        revise: gives the job another plan from the drained slot `progress.slot` on and returns what changes with it;
            None: it stays. All processes ask together.
        bubble_share: measured idle share of the recent slots, pauses left out; None: nothing to say.
        evaluation_s: seconds of an adapter's evaluation, by those so far; None: nobody knows.
    """

    save: Callable[[bool], None]
    evaluate: Callable[[str, int, int], None]
    finish: Callable[[str, int], None]
    add: Callable[[Sequence[str], int], None] = lambda names, slots_done: None
    finished: Callable[[], None] = lambda: None
    wants_revision: Callable[[], bool] = lambda: False
    revise: Callable[[], Sequence[Change] | None] = lambda: None
    bubble_share: Callable[[], float | None] = lambda: None
    evaluation_s: Callable[[str], float | None] = lambda name: None
