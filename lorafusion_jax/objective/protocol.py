"""What an objective is: which texts a sample has, and what is minimised of their log-likelihoods. Never imports jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lorafusion_jax.adapters.kind import Head, Leaf

REFERENCE, LOGPROBS, HIDDEN, SCORE, DIVERGENCE = "reference", "logprobs", "hidden", "score", "divergence"
TOKEN_SCORE = "token_score"
GIVEN = frozenset(
    {REFERENCE, LOGPROBS, HIDDEN, DIVERGENCE, SCORE, TOKEN_SCORE}
)  # further inputs that a run can provide
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
MOST_IN_GROUP = 1024
DEFAULTED = ("lora.dropout", "optim.lr", "data.max_length", "data.on_long")
type Learn = Literal["answer", "all", "nothing"]
type CellType = Literal["flag", "number", "list", "messages"]
type Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One text of a sample. It does not attend to other segments.

    Give exactly one of: prompt and answer, `messages`, `text`, or the token ids of both, `prompt_ids` and `answer_ids`.
    The model's chat template formats the first two. The answer is what `answer` and `answer_ids` hold, the last answer
    of the messages, and all of `text`.

    Args:
        name: for messages.
        prompt_messages: number of messages before the answer (None: the answer is the last message of the assistant).
        template: whether the chat template formats prompt and answer; else they are joined as they are.
        learn: which tokens have a log-likelihood: those of the answer, all, or none.
        values: name → numbers of the answer's tokens: one for all of them, or a list with one for each. All rows of a
            file have the same names.
    """

    name: str
    prompt: str | None = None
    answer: str | None = None
    messages: Sequence[dict] | None = None
    text: str | None = None
    prompt_ids: Sequence[int] | None = None
    answer_ids: Sequence[int] | None = None
    prompt_messages: int | None = None
    template: bool = True
    learn: Learn = "answer"
    values: Mapping[str, float | Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pairs = [(self.prompt, self.answer), (self.prompt_ids, self.answer_ids)]
        halves = [(answer is not None) + (other is not None) for answer, other in pairs]
        forms = sum(half > 0 for half in halves) + (self.messages is not None) + (self.text is not None)
        if 1 in halves or forms != 1:
            raise ValueError(
                f"segment '{self.name}' needs exactly one of prompt and answer, messages, text, or the ids of both"
            )


class Sample(NamedTuple):
    """What a loss sees of one sample with S segments. Fields may be added, so access them by name.

    In an objective over groups of G rows, segments are [G, S] and numbers [G]. Arrays per token hold the learned tokens
    of all segments in order, L is the most of any sample; where `mask` is False there is no token, and they hold 0.

    Attributes:
        nll: [S], Σ -log p of the learned tokens, in nats.
        tokens: [S], number of learned tokens.
        token_weight: [S], (samples of the global batch) / (learned tokens of this segment in the global batch): the
            mean over samples of nll · token_weight is the mean over the tokens of the global batch.
        numbers: the numbers of the row, scalars; only those that it has, whatever other rows and adapters have.
        reference_nll: [S], `nll` under the reference: data, without a gradient. Needs "reference".
        logprobs: [L], log p. Needs "logprobs".
        mask: [L], bool. Needs "logprobs".
        answer: [L], bool, whether the token belongs to the answer; differs from `mask` with `learn="all"` only.
        segment: [L], number of the token's segment, in a group row · S + segment.
        reference_logprobs: [L]; needs both.
        values: name → [L], from `Segment.values`; 0 outside of the answer. Only those that the row has.
        hidden: [S, D], final-normed state of the last token of each segment. Needs "hidden".
        divergence: [S], Σ over the learned tokens of the divergence of the adapter's distribution over the vocabulary
            from the reference's, as `Objective.divergence` says. Needs "divergence".
        head: leaf name → tensor of the adapter's head, if the objective has one.
        token_score: [L], product of the state that predicts each token and the first leaf of the head, [D, 1]. Needs
            "token_score" and "logprobs".
        score: [S], product of `hidden` and the first leaf of the head, [D, 1]; [S, n] if the leaf is [D, n]. Needs
            "score".
    """

    nll: Any
    tokens: Any
    token_weight: Any
    numbers: Mapping[str, Any] = {}
    reference_nll: Any = None
    logprobs: Any = None
    mask: Any = None
    answer: Any = None
    segment: Any = None
    reference_logprobs: Any = None
    values: Mapping[str, Any] = {}
    hidden: Any = None
    divergence: Any = None
    head: Mapping[str, Any] = {}
    score: Any = None
    token_score: Any = None


class Divergence(NamedTuple):
    """The generalised Jensen-Shannon divergence of p, the adapter's distribution, and q, the reference's.

    m = (1 - β) p + β q,  β KL(q ‖ m) + (1 - β) KL(p ‖ m);  β = 0 is KL(q ‖ p), forward, and β = 1 KL(p ‖ q), reverse.

    Attributes:
        temperature: logits of both are divided by it.
    """

    beta: float
    temperature: float = 1.0


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
        loss: (Sample, options) → (loss, metrics): scalars by jax operations. jax differentiates the loss.
        metrics: names of the metrics that `loss` returns, with their units. They are averaged like the loss.
        ratios: those that are pairs (sum, count): the sums of the global batch are divided by its counts.
        segments: row → its `num_segments` segments; raises ValueError with a reason for an unusable row. With `group`
            it gets the rows of one group and returns the segments of each. None: rows are read as `data.format` says,
            one segment each.
        num_segments: S, of a row.
        columns: columns that `segments` needs; `data.columns` may rename them.
        optional_columns: columns that it reads where they exist.
        types: column → its type, for files whose cells are all texts (CSV): "flag" is true, false, 1 or 0, "list" a
            number or a JSON list, "messages" a JSON list of messages or a text.
        stand_ins: column → columns that hold the same and are read where it is absent, the first that is there.
        numbers: row → numbers that the loss needs, by name; the same names for every row of a file.
        expand: row of the file → the rows that it stands for; raises ValueError.
        by_part: the first rows that all rows of the file stand for come before all second ones, and so on.
        group: number of consecutive rows of the file that form one sample, or options → this number. The planner keeps
            them together, and samples are counted in groups. None: every row is a sample.
        options: frozen dataclass of the settings: the keys of `objective` in a job file except `name`, `reference`.
        needs: further inputs that the run must provide, or options → these.
        divergence: options → the divergence that the objective needs.
        head: leaves of the adapter on the final-normed states, or options → these. They are trained with the adapter,
            and PEFT folders have them in `modules_to_save`, by their `peft_name`, such as "score.weight". A head
            without these names stays in the run, and exported folders lack it.
        task: PEFT's name of the task in adapter_config.json.
        review: (numbers of all samples by name, options) → notes for the user; raises ValueError if the data cannot be
            used. A number is NaN in the samples of files without it.
        defaults: defaults of the job file for adapters with this objective, e.g. {"lora.dropout": 0.0}.
        advantages: how rewards of rollouts become advantages, see `rollout.drawn`; empty: it cannot train on
            rollouts.
        reward_kl: options → factor of the divergence from the reference that is taken off the rewards of rollouts.

    Example:
        >>> from lorafusion_jax.objective.table import OBJECTIVES
        >>> OBJECTIVES["sft"].mean_over, OBJECTIVES["dpo"].num_segments
        ('tokens', 2)
    """

    mean_over: Literal["tokens", "samples"] = "samples"
    loss: Callable[[Sample, Any], tuple[Any, Mapping[str, Any]]] | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    ratios: frozenset[str] = frozenset()
    segments: Callable[[Any], Sequence[Any]] | None = None
    num_segments: int = 1
    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    types: Mapping[str, CellType] = field(default_factory=dict)
    stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Callable[[Row], Mapping[str, float]] | None = None
    expand: Callable[[Row], Sequence[Row]] | None = None
    by_part: bool = False
    group: int | Callable[[Any], int] | None = None
    options: type = NoOptions
    needs: frozenset[str] | Callable[[Any], frozenset[str]] = frozenset()
    divergence: Callable[[Any], Divergence] | None = None
    head: tuple[Leaf, ...] | Callable[[Any], tuple[Leaf, ...]] = ()
    task: str = "CAUSAL_LM"
    review: Callable[[Mapping[str, Any], Any], Sequence[str]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    advantages: str = ""
    reward_kl: Callable[[Any], float] | None = None

    def __post_init__(self) -> None:
        if (self.loss is None) != (self.mean_over == "tokens"):
            raise ValueError("mean_over='samples' needs a loss, mean_over='tokens' has none")
        reads_rows = self.columns or self.optional_columns
        if (self.segments is None) != (not reads_rows) or (self.segments is None and self.num_segments != 1):
            raise ValueError("give segments, columns and num_segments together")
        if self.segments is None and (self.numbers or self.expand or self.group is not None):
            raise ValueError("numbers, expand and group need segments")
        if self.by_part and self.expand is None:
            raise ValueError("by_part needs expand")
        if undeclared := self.ratios - set(self.metrics):
            raise ValueError(f"ratios that are no metrics: {', '.join(sorted(undeclared))}")
        if collisions := set(self.metrics) & set(TAKEN):
            raise ValueError(f"metrics cannot be called {', '.join(sorted(collisions))}")
        if wrong := [setting for setting in self.defaults if setting not in DEFAULTED]:
            raise ValueError(f"an objective has no defaults of {', '.join(wrong)}, only of {', '.join(DEFAULTED)}")
        if not callable(self.needs):
            check_needs(self.needs)


def check_needs(needs: frozenset[str]) -> frozenset[str]:
    """Returns the needs of an objective.

    Raises:
        ValueError: a run does not provide one of them.
    """
    if missing := needs - GIVEN:
        raise ValueError(f"a run does not provide {', '.join(sorted(missing))}, only {', '.join(sorted(GIVEN))}")
    return needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An objective with its settings.

    Attributes:
        reference: what the job file says: "base", "start", an adapter of the job or a PEFT folder (None: the default).
    """

    name: str
    objective: Objective
    options: Any
    reference: str | None = None

    @property
    def of_samples(self) -> bool:
        return self.objective.mean_over == "samples"

    @property
    def needs(self) -> frozenset[str]:
        needs = self.objective.needs
        return check_needs(needs(self.options)) if callable(needs) else needs

    @property
    def compares(self) -> bool:
        """Whether it needs a reference."""
        return not self.needs.isdisjoint({REFERENCE, DIVERGENCE})

    @property
    def group(self) -> int | None:
        """Rows of a sample; None if samples are single rows."""
        group = self.objective.group
        rows = group(self.options) if callable(group) else group
        if rows is not None and not 0 < rows <= MOST_IN_GROUP:
            raise ValueError(f"a group of 1 to {MOST_IN_GROUP} rows, not {rows}")
        return rows

    @property
    def num_segments(self) -> int:
        """Number of segments of a sample."""
        return (self.group or 1) * self.objective.num_segments

    @property
    def head(self) -> Head | None:
        """The tensors of its own; None if it has none."""
        leaves = self.objective.head
        leaves = leaves(self.options) if callable(leaves) else leaves
        return Head(name=self.name, leaves=tuple(leaves), task=self.objective.task) if leaves else None

    @property
    def ratios(self) -> frozenset[str]:
        return self.objective.ratios

    def same_as(self, other: Chosen) -> bool:
        return (self.name, self.options) == (other.name, other.options)


SFT = Chosen(name="sft", objective=Objective(mean_over="tokens"), options=NoOptions())
