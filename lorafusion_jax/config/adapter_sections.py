"""The sections of job files that adapters have: data, LoRA, optimizer and objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    StrictInt,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from lorafusion_jax.adapters.patterns import Patterns, unusable_pattern
from lorafusion_jax.adapters.table import BIASED, PLAIN, adapter_kind, unknown_kind
from lorafusion_jax.config.chat_templates import NAMED, check_template
from lorafusion_jax.config.data_sources import SOURCES_SCHEMA, Sources, TrainSources, as_written, held_out_sources
from lorafusion_jax.config.values import (
    LARGEST_COUNT,
    Count,
    Flag,
    Folder,
    Fraction,
    NotNegative,
    Number,
    Positive,
    Section,
    Text,
    check_text,
    known_name,
)
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.families.token_rows import check_tokens
from lorafusion_jax.objective.choose import choose, unknown_objective
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.optim.schedules import unknown_schedule
from lorafusion_jax.optim.table import optimizer, unknown_optimizer

MOST_LAYERS = 4096


def _usable[T: Iterable[str]](patterns: T) -> T:
    for pattern in patterns:
        if wrong := unusable_pattern(pattern):
            raise ValueError(f"patterns that can be matched, not '{shortened(pattern)}': {wrong}")
    return patterns


def _held_out(value: object) -> Sources | float:
    """Reads files, or a share of the training data. As a union, each value would get two errors."""
    if isinstance(value, str | list | dict | tuple):
        return held_out_sources(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    raise ValueError(f"a file, or the share of data.train to hold out, between 0 and 1, not {shortened(value)}")


HELD_OUT_SCHEMA = {"anyOf": [*SOURCES_SCHEMA["anyOf"], {"type": "number", "exclusiveMinimum": 0, "maximum": 1}]}
HeldOut = Annotated[
    Sources | float, PlainValidator(_held_out), PlainSerializer(as_written), WithJsonSchema(HELD_OUT_SCHEMA)
]
TrainableTokens = Annotated[list[int | str] | dict[str, list[int | str]] | None, PlainValidator(check_tokens)]


def _different(targets: str | list[str]) -> str | list[str]:
    counts = Counter(targets if isinstance(targets, list) else ())
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"a list of different names; {', '.join(twice)} stands there twice")
    return targets


class DataSettings(Section):
    """Training data of an adapter, and the tokens that it learns."""

    train: TrainSources = Field(
        description="file (.jsonl .json .csv .parquet, or with .gz or .zst), folder, glob, hf:org/set[:split] or "
        "NAME:argument of an installed source; or a list of them, each a path, {path: …, weight: 0.3} or "
        "{source: NAME, argument: …, weight: 0.3}: an epoch has so many times its rows"
    )
    eval: HeldOut | None = Field(
        default=None,
        description="held-out file, or a list of files; or the share of train to hold out, e.g. 0.05: equal samples "
        "stay together, and adapters with the same data hold out the same ones",
    )
    format: Literal["auto", "messages", "conversations", "prompt", "instruction", "text", "tokens"] = Field(
        default="auto", description="format of the rows; auto = detected from the columns of each source"
    )
    columns: dict[Text, Text] = Field(
        default={}, description="role -> column, e.g. {prompt: question, completion: answer}"
    )
    where: dict[Text, Text | StrictBool | StrictInt] = Field(
        default={},
        description="only the rows with these values, of train and of eval, e.g. {customer: acme}: column -> a text, a "
        "whole number or true",
    )
    max_length: Annotated[Count, Field(ge=2)] = Field(
        default=4096, description="maximum tokens of one text of a sample"
    )
    on_long: Literal["cut", "drop", "error"] = Field(default="cut", description="treatment of longer samples")
    on_bad: Literal["drop", "error"] = Field(
        default="drop",
        description="treatment of rows that cannot be used, such as an empty answer: drop counts and names them, and "
        "more than 1 % are an error",
    )
    loss: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto", description="tokens that are learned; auto = answers, or all tokens of plain text"
    )
    chat_template: Annotated[str, AfterValidator(check_template)] | None = Field(
        default=None,
        description=f"chat template instead of the base's: {', '.join(NAMED)}, a file of Jinja, or its text. The PEFT "
        "folder has it, and generate and chat use it",
    )


class LoraSettings(Section):
    """The LoRA configuration; in PEFT r, lora_alpha, lora_dropout, target_modules, use_rslora."""

    kind: Annotated[str, known_name(unknown_kind)] = Field(
        default="lora",
        description="kind of adapter: lora, dora, vera, pissa (starts from the largest singular values of the base), "
        "lora-fa (A is constant), or one of an installed package",
    )
    rank: Annotated[Count, Field(le=1024)] = Field(default=16, description="PEFT's r")
    alpha: Positive = Field(default=32.0, description="the low-rank product is scaled by alpha / rank")
    dropout: Fraction = Field(default=0.05, description="dropout rate of the inputs in training; dora starts without")
    targets: Annotated[Text | list[Text], AfterValidator(_different)] = Field(
        default="all-linear", description="projections, e.g. [q_proj, v_proj]"
    )
    rslora: Flag = Field(default=False, description="scale by alpha / sqrt(rank)")
    rank_pattern: dict[str, Annotated[Count, Field(le=1024)]] = Field(
        default={},
        description="rank of some projections, e.g. {q_proj: 32, 'layers.0.mlp.*': 4}: names, ends of paths or regular "
        "expressions, of which the first that matches counts; PEFT's rank_pattern",
    )
    alpha_pattern: dict[str, Positive] = Field(default={}, description="the same for alpha")
    layers_to_transform: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="layers with the adapter, from 0; default all"
    )
    exclude: str | list[str] = Field(
        default=[],
        description="projections without it: names, ends of paths, or one regular expression for whole paths like "
        "model.layers.0.self_attn.q_proj; PEFT's exclude_modules",
    )
    lora_bias: Flag = Field(
        default=False, description="train a bias with B, which is added to its product; of the kind lora"
    )
    trainable_tokens: TrainableTokens = Field(
        default=None,
        description="tokens whose rows of the embedding train, too, e.g. ['<think>', 128002]; a tied head shares them, "
        "and one of its own has {embed_tokens: [...], lm_head: [...]}; PEFT's trainable_token_indices",
    )
    init_from: Folder | None = Field(
        default=None,
        description="PEFT folder to continue from, with its rank, alpha, rslora, targets, patterns, layers and "
        "trainable tokens",
    )

    same_base: Flag = Field(
        default=False,
        description="the base that init_from names under another name or path is this one, e.g. a copy; what is known "
        "of its files is still compared",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_dropout(cls, values: Any) -> Any:
        """A kind that has no dropout, or pays for it, starts without."""
        kind = values.get("kind") if isinstance(values, dict) else None
        if not isinstance(kind, str) or unknown_kind(kind) is not None or "dropout" in values:
            return values
        definition = adapter_kind(kind)
        free = definition.dropout and definition.column_scale is None
        return values if free else values | {"dropout": 0.0}

    @field_validator("layers_to_transform", mode="before")
    @classmethod
    def _are_layers(cls, value: object) -> object:
        layers = value if isinstance(value, list | tuple) else [value]
        if value is None or (layers and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)):
            return None if value is None else tuple(layers)
        raise ValueError(f"a whole number from 0 to {MOST_LAYERS - 1}, or a list of them, not {shortened(value)}")

    @field_validator("exclude", mode="before")
    @classmethod
    def _are_names(cls, value: object) -> object:
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise ValueError(f"a text or a list of different texts, not {shortened(value)}")
        for name in names:
            check_text(str(name))
        return _usable([value])[0] if isinstance(value, str) else value

    @field_validator("rank_pattern", "alpha_pattern", mode="before")
    @classmethod
    def _are_patterns(cls, value: object) -> object:
        if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
            raise ValueError(f"a table of names or patterns and numbers, not {shortened(value)}")
        _usable(value)
        return value

    @model_validator(mode="after")
    def _bias_is_of_lora(self) -> Self:
        if self.lora_bias and self.kind != PLAIN:
            raise ValueError(f"no lora_bias with kind {self.kind}, which has none")
        return self

    @property
    def adapter_kind(self) -> str:
        """The kind in the table."""
        return BIASED if self.lora_bias else self.kind

    @property
    def patterns(self) -> Patterns | None:
        """What differs between projections; None if nothing does."""
        if not (self.rank_pattern or self.alpha_pattern or self.layers_to_transform or self.exclude):
            return None
        return Patterns(
            rank=self.rank,
            alpha=self.alpha,
            ranks=tuple(self.rank_pattern.items()),
            alphas=tuple(self.alpha_pattern.items()),
            layers=self.layers_to_transform,
            exclude=self.exclude if isinstance(self.exclude, str) else tuple(self.exclude),
        )


class OptimSettings(Section):
    """The adapter's own optimizer and schedule."""

    name: Annotated[str, known_name(unknown_optimizer)] = Field(default="adamw", description="the optimizer")
    lr: Positive = Field(default=2e-4, description="peak learning rate")
    schedule: Annotated[str, known_name(unknown_schedule)] = Field(
        default="cosine", description="schedule of the learning rate after the warm-up"
    )
    lr_ratio: Positive | dict[Text, Positive] | None = Field(
        default=None,
        description="learning rate of B over that of A (LoRA+: 16); or by group of an adapter kind's tensors, "
        "e.g. {magnitude: 4}",
    )
    warmup: Annotated[NotNegative, Field(le=LARGEST_COUNT)] = Field(
        default=0.03,
        description="linear: step k of w has k/w of the rate. Below 1 it is a share of the adapter's steps, rounded to "
        "the nearest; from 1 on a number of steps",
    )
    min_lr_ratio: Annotated[NotNegative, Field(le=1)] = Field(
        default=0.0, description="final learning rate, as a share of lr"
    )
    weight_decay: NotNegative = Field(
        default=0.0, description="decoupled weight decay, times the learning rate; sgd adds it to the gradient; 0 = off"
    )
    clip: NotNegative = Field(default=1.0, description="maximum global gradient norm of the adapter; 0 = off")
    b1: Fraction | None = Field(default=None, description="decay of the first moment; adamw, lion: 0.9")
    b2: Fraction | None = Field(default=None, description="decay of the second moment; adamw: 0.999, lion: 0.99")
    eps: Positive | None = Field(default=None, description="added to the root of the second moment; adamw: 1e-8")
    momentum: Fraction | None = Field(default=None, description="momentum of sgd: 0.0")
    options: dict[Text, Number] = Field(default={}, description="options of an optimizer from another package, by name")

    @field_validator("warmup")
    @classmethod
    def _whole_steps(cls, warmup: float) -> float:
        if warmup > 1 and warmup != int(warmup):
            raise ValueError(f"a share below 1 or a whole number of steps, not {warmup}")
        return warmup

    @field_validator("options")
    @classmethod
    def _options_exist(cls, options: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        name = info.data.get("name")  # missing if it is invalid
        if name is None:
            return options
        names = sorted(set(optimizer(name).options) - set(cls.model_fields))
        wrong = sorted(set(options) - set(names))
        if wrong:
            expected = f"numbers that {name} reads ({', '.join(names)})" if names else f"empty: {name} reads none"
            raise ValueError(f"{expected}; not {', '.join(wrong)}")
        return options

    @property
    def lr_ratios(self) -> dict[str, float]:
        """Factors of the learning rate by group of leaves."""
        ratio = self.lr_ratio
        return {} if ratio is None else ratio if isinstance(ratio, dict) else {"b": ratio}

    def option(self, name: str) -> float | None:
        """A number that only some optimizers use; None if it is not set."""
        return getattr(self, name) if name in type(self).model_fields else self.options.get(name)


class ObjectiveSettings(Section):
    """The objective of an adapter; its options are further keys next to its name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, known_name(unknown_objective)] = Field(
        default="sft", description="sft (supervised fine-tuning), or one of an installed package"
    )
    reference: Folder | None = Field(
        default=None,
        description="of objectives that compare with one: base, start (this adapter before its first step), an "
        "adapter of the job before its first step, or a PEFT folder; default start with lora.init_from, else base",
    )

    @model_validator(mode="after")
    def _options_exist(self) -> Self:
        assert self.chosen
        return self

    @cached_property
    def chosen(self) -> Chosen:
        """The objective with its options."""
        return choose(self.name, self.model_extra or {}, self.reference)
