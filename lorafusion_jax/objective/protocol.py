"""What an objective is: which texts a sample has, and what is minimised of their log-likelihoods. Never imports jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

GIVEN: frozenset[str] = frozenset()  # what a run can give an objective besides the sums; nothing yet
TAKEN = (
    "kind",
    "adapter",
    "step",
    "slot",
    "time",
    "loss",
    "loss_tokens",
    "grad_norm",
    "lr",
    "eval_loss",
    "eval_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One text of a sample. The model reads it by itself: it sees no other segment.

    Give one of prompt and answer, `messages`, or `text`. With the first two, the model's chat template writes the text
    and what is learned is the answer, or the last answer of the messages; of `text` everything is.
    """

    name: str
    prompt: str | None = None
    answer: str | None = None
    messages: Sequence[dict] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        pair = (self.prompt is not None) + (self.answer is not None)
        if pair == 1 or (pair > 0) + (self.messages is not None) + (self.text is not None) != 1:
            raise ValueError(f"segment '{self.name}' needs prompt and answer, messages, or text, and one of them only")


class SampleSums(NamedTuple):
    """What the model says of one sample; S segments. Fields may be added, so take them by name.

    nll [S]: Σ -log p of the learned tokens of each segment, in nats. tokens [S]: how many those are.
    """

    nll: Any
    tokens: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """An objective without settings of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One kind of objective.

    With `mean_over` "tokens" the loss of a step is the mean negative log-likelihood of the learned tokens of the
    adapter's global batch, and there is no `loss`. With "samples" it is the mean of `loss` over the samples of the
    global batch. A sample is never split, and `loss` sees one sample, so nothing depends on how samples are packed or
    on who shares a microbatch.

    Args:
        loss: (SampleSums, options) → (loss, metrics): scalars, by jax operations; jax differentiates the loss.
        metrics: names of what `loss` returns besides, each with its unit; means like the loss.
        segments: row → its segments, always `num_segments` of them; raises ValueError with a reason for a row that
            cannot be used. None: rows are read as `data.format` says, one segment each.
        columns: what a row must have for `segments`; `data.columns` may rename them.
        options: frozen dataclass of the settings, keys of `objective` in a job file besides `name`.
        needs: what the run must give besides the sums.

    Example:
        >>> OBJECTIVES["sft"].mean_over
        'tokens'
    """

    mean_over: Literal["tokens", "samples"] = "samples"
    loss: Callable[[SampleSums, Any], tuple[Any, Mapping[str, Any]]] | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    segments: Callable[[Mapping[str, Any]], tuple[Segment, ...]] | None = None
    num_segments: int = 1
    columns: tuple[str, ...] = ()
    options: type = NoOptions
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if (self.loss is None) != (self.mean_over == "tokens"):
            raise ValueError("a loss is of samples: give one with mean_over='samples', none with 'tokens'")
        if (self.segments is None) != (not self.columns) or (self.segments is None and self.num_segments != 1):
            raise ValueError("segments, the columns that they are made of, and their number belong together")
        if taken := set(self.metrics) & set(TAKEN):
            raise ValueError(f"metrics cannot be called {', '.join(sorted(taken))}")
        if missing := self.needs - GIVEN:
            raise ValueError(f"a run cannot give an objective {', '.join(sorted(missing))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An adapter's objective with its settings."""

    name: str
    objective: Objective
    options: Any

    @property
    def of_samples(self) -> bool:
        return self.objective.mean_over == "samples"

    def same_as(self, other: Chosen) -> bool:
        return (self.name, self.options) == (other.name, other.options)


OBJECTIVES: Mapping[str, Objective] = {"sft": Objective(mean_over="tokens")}
SFT = Chosen(name="sft", objective=OBJECTIVES["sft"], options=NoOptions())
