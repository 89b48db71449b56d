"""What an objective is: which texts a sample has, and what is minimised of their log-likelihoods. Never imports jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

GIVEN: frozenset[str] = frozenset()  # further inputs that a run can provide; none yet
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
    """One text of a sample. It does not attend to other segments.

    Give either prompt and answer, or `messages`, or `text`. The model's chat template formats the first two; the
    answer, or the last answer of the messages, is learned. All of `text` is learned.
    """

    name: str
    prompt: str | None = None
    answer: str | None = None
    messages: Sequence[dict] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        pair = (self.prompt is not None) + (self.answer is not None)
        if pair == 1 or (pair > 0) + (self.messages is not None) + (self.text is not None) != 1:
            raise ValueError(f"segment '{self.name}' needs exactly one of prompt and answer, messages, or text")


class SampleSums(NamedTuple):
    """Sums of one sample with S segments. Fields may be added, so access them by name.

    nll [S]: Σ -log p of the learned tokens of each segment, in nats. tokens [S]: number of these tokens.
    """

    nll: Any
    tokens: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """Options of an objective without settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One kind of objective.

    With `mean_over` "tokens", the loss of a step is the mean negative log-likelihood of the learned tokens of the
    adapter's global batch, and `loss` is None. With "samples", it is the mean of `loss` over the samples of the global
    batch. Samples are never split and `loss` gets one sample, so results do not depend on packing or on the other
    adapters.

    Args:
        loss: (SampleSums, options) → (loss, metrics): scalars by jax operations. jax differentiates the loss.
        metrics: names of the metrics that `loss` returns, with their units. They are averaged like the loss.
        segments: row → its `num_segments` segments; raises ValueError with a reason for an unusable row. None: rows
            are read as `data.format` says, one segment each.
        columns: columns that `segments` needs; `data.columns` may rename them.
        options: frozen dataclass of the settings: the keys of `objective` in a job file except `name`.
        needs: further inputs that the run must provide.

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
            raise ValueError("mean_over='samples' needs a loss, mean_over='tokens' has none")
        if (self.segments is None) != (not self.columns) or (self.segments is None and self.num_segments != 1):
            raise ValueError("give segments, columns and num_segments together")
        if taken := set(self.metrics) & set(TAKEN):
            raise ValueError(f"metrics cannot be called {', '.join(sorted(taken))}")
        if missing := self.needs - GIVEN:
            raise ValueError(f"a run does not provide {', '.join(sorted(missing))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An objective with its settings."""

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
