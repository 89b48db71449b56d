"""The section `rollout` of job files: adapters that sample their own rows, which are rewarded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from lorafusion_jax.config.data_sources import TrainSources
from lorafusion_jax.config.user_functions import FUNCTION
from lorafusion_jax.config.values import Count, Positive, Section, Whole, as_number, check_text
from lorafusion_jax.families.hf_config import shortened

MOST_REWARDS, MOST_GROUP, MOST_TURNS, MOST_LAG = 16, 1024, 64, 8
KINDS = ("exact", "match", "function", "url", "adapter")
ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One part of a reward.

    Attributes:
        kind: exact, match, function, url or adapter.
        value: column of the right answer, regular expression, FILE.py:function, address, or a reward adapter: its name
            in the job, or its PEFT folder.
        weight: factor of its numbers.
    """

    kind: str
    value: str
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


def read_rewards(value: object) -> tuple[Reward, ...]:
    """Reads a reward, or a list of them, which are added.

    Raises:
        ValueError: what is expected instead.

    >>> read_rewards(["exact", {"function": "score.py:short", "weight": 0.1}])[1].value
    'score.py:short'
    """
    if isinstance(value, tuple) and all(isinstance(entry, Reward) for entry in value):
        return value
    entries = value if isinstance(value, list) else [value]
    if not 0 < len(entries) <= MOST_REWARDS:
        raise ValueError(f"a reward, or a list of 1 to {MOST_REWARDS}, not {shortened(value)}")
    return tuple(_reward(entry) for entry in entries)


def check_function(text: str) -> str:
    """Refuses what is not FILE.py:function."""
    if not FUNCTION.fullmatch(check_text(text)):
        raise ValueError(f"FILE.py:function, a path relative to the job file and a name in it, not {shortened(text)}")
    return text


def _reward(entry: object) -> Reward:
    if entry == "exact":
        return Reward(kind="exact", value=ANSWER)
    if isinstance(entry, str):
        return Reward(kind="function", value=check_function(entry))
    expected = (
        "exact, FILE.py:function, or a table with one of exact: COLUMN, match: REGULAR EXPRESSION, "
        "function: FILE.py:function, url: ADDRESS, adapter: NAME OR FOLDER, and a weight"
    )
    kinds = [kind for kind in KINDS if isinstance(entry, dict) and kind in entry]
    if not isinstance(entry, dict) or len(kinds) != 1 or set(entry) - {*kinds, "weight"}:
        raise ValueError(f"{expected}, not {shortened(entry)}")
    (kind,), text = kinds, entry[kinds[0]]
    if not isinstance(text, str):
        raise ValueError(f"a text as {kind}, not {shortened(text)}")
    check_text(text)
    if kind == "function":
        check_function(text)
    if kind == "match":
        try:
            re.compile(text)
        except re.error as problem:
            raise ValueError(f"a regular expression, not {shortened(text)}: {problem}") from None
    if kind == "url" and not re.match(r"https?://[^/\s]+", text):
        raise ValueError(f"an address that begins with http:// or https://, not {shortened(text)}")
    return Reward(kind=kind, value=text, weight=_weight(entry.get("weight", 1.0)))


def _weight(value: Any) -> float:
    weight = float(as_number(value)) if isinstance(value, int | float | str) else float("nan")  # type: ignore[arg-type]
    if not 0 < abs(weight) <= 1e6:  # nor NaN
        raise ValueError(f"a weight that is not 0 and at most 1e6 in size, not {shortened(value)}")
    return weight


def _as_written(rewards: Sequence[Reward]) -> Any:
    return [
        {reward.kind: reward.value} | ({} if reward.weight == 1 else {"weight": reward.weight}) for reward in rewards
    ] or None


def _optional_rewards(value: object) -> tuple[Reward, ...]:
    return () if value is None or value in ((), []) else read_rewards(value)


def _optional_function(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"FILE.py:function, not {shortened(value)}")
    return None if value is None else check_function(value)


def _texts(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"a text or a list of texts that are not empty, not {shortened(value)}")
    return tuple(texts)


Texts = Annotated[
    tuple[str, ...],
    PlainValidator(_texts),
    PlainSerializer(list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
_ENTRY = {
    "anyOf": [
        {"type": "string"},
        *(
            {
                "type": "object",
                "properties": {kind: {"type": "string"}, "weight": {"type": "number"}},
                "required": [kind],
                "additionalProperties": False,
            }
            for kind in KINDS
        ),
    ]
}
Rewards = Annotated[
    tuple[Reward, ...],
    PlainValidator(_optional_rewards),
    PlainSerializer(_as_written),
    WithJsonSchema({"anyOf": [*_ENTRY["anyOf"], {"type": "array", "items": _ENTRY}, {"type": "null"}]}),
]
Function = Annotated[
    str | None,
    PlainValidator(_optional_function),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": FUNCTION.pattern.replace("?P<file>", "").replace(
        "?P<name>", "")}, {"type": "null"}]}),
]  # fmt: skip


class LimitSettings(Section):
    """Limits of the process in which functions run."""

    timeout_s: Annotated[Positive, Field(le=86_400)] = Field(
        default=60.0, description="seconds for a call: the rewards of a batch, a turn of the tool"
    )
    memory_gb: Annotated[Positive, Field(le=4096)] = Field(default=4.0, description="of the process of functions")
    disk_mb: Annotated[Positive, Field(le=1_000_000)] = Field(
        default=100.0, description="that functions may write into their folder, which is deleted"
    )


class EvalSettings(LimitSettings):
    """What evaluations measure besides the held-out loss."""

    score: Function = Field(
        default=None,
        description="FILE.py:function that scores answers to held-out prompts: (prompts, completions, answer, …) -> a "
        "number for each; their mean is eval_score, for early_stop, halving, ranking and the report",
    )
    samples: Annotated[Count, Field(le=65_536)] = Field(default=64, description="first held-out rows that are scored")
    max_tokens: Count = Field(default=128, description="most tokens of an answer, which is greedy")


class RolloutSettings(LimitSettings):
    """Reinforcement learning: the adapter samples answers to prompts, and trains on them as they are rewarded."""

    prompts: TrainSources | None = Field(
        default=None,
        description="rows with a prompt, a text or messages, and what rewards need; another name for data.train",
    )
    reward: Rewards = Field(
        default=(),
        description="exact (the answer is the row's 'answer'), FILE.py:function, {match: REGULAR EXPRESSION}, {url: "
        "ADDRESS}, {adapter: a reward adapter of the job, or its PEFT folder}, each with a weight; or a list, which is "
        "added",
    )
    group: Annotated[Count, Field(le=MOST_GROUP)] = Field(
        default=8, description="answers to each prompt; batch.global_samples counts answers"
    )
    max_tokens: Count = Field(default=128, description="most tokens of an answer; those of each turn")
    temperature: Positive = Field(default=1.0, description="of the draws; log-probabilities are without it")
    stop: Texts = Field(default=(), description="texts that end an answer; they are not learned")
    advantages: Literal["auto", "group", "batch", "mean", "leave_one_out", "global", "none"] = Field(
        default="auto", description="how rewards become advantages; auto: as the objective's own trainers do"
    )
    tool: Function = Field(
        default=None,
        description="FILE.py:function that answers a turn: (row, answers so far) -> a text, or None at the end",
    )
    turns: Annotated[Count, Field(le=MOST_TURNS)] = Field(default=1, description="most answers, with a tool between")
    tool_tokens: Count = Field(default=128, description="most tokens of what the tool says in a turn; more are cut")
    lag: Annotated[Whole, Field(ge=0, le=MOST_LAG)] = Field(
        default=0,
        description="most steps between the weights that sample and those that train; above 0 adapters of a run sample "
        "together",
    )

    @property
    def is_on(self) -> bool:
        return bool(self.reward)

    @property
    def functions(self) -> list[str]:
        """The rewards that are functions."""
        return [reward.value for reward in self.reward if reward.kind == "function"]

    @property
    def reserved_tokens(self) -> int:
        """Room for what follows a prompt."""
        return self.turns * self.max_tokens + (self.turns - 1) * self.tool_tokens

    @property
    def fix_of_room(self) -> str:
        """What makes that room smaller, as the fix of an error says it."""
        smaller = "smaller rollout.max_tokens"
        return smaller if self.turns == 1 else f"{smaller}, rollout.turns or rollout.tool_tokens"


def estimator_of(adapter: Any) -> str:
    """How an adapter's rewards become advantages."""
    name = adapter.rollout.advantages
    return adapter.objective.chosen.objective.advantages if name == "auto" else name


def prompts_as_data(values: dict[str, Any]) -> dict[str, Any]:
    """Returns settings of an adapter with `rollout.prompts` as `data.train`.

    Raises:
        ValueError: both are given and differ.
    """
    rollout, data = values.get("rollout"), values.get("data")
    if not isinstance(rollout, dict) or rollout.get("prompts") is None or not isinstance(data, dict | None):
        return values
    data, prompts = data or {}, rollout["prompts"]
    if data.get("train", prompts) != prompts:
        raise ValueError("the same rows as rollout.prompts, or left out")
    return values | {"data": data | {"train": prompts}}
