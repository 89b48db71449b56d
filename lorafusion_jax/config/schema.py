"""The schema of job files: one frozen pydantic model per section; every field has its unit and default."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import inf, isfinite
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from lorafusion_jax.adapters.patterns import Patterns, unusable_pattern
from lorafusion_jax.adapters.table import BIASED, PLAIN, adapter_kind, unknown_kind
from lorafusion_jax.config.data_sources import SOURCES_SCHEMA, Sources, TrainSources, as_written, held_out_sources
from lorafusion_jax.config.places import MOST_PLACES, Places
from lorafusion_jax.config.token_rows import check_tokens
from lorafusion_jax.config.values import (
    LARGEST_COUNT,
    Count,
    Flag,
    Folder,
    Fraction,
    HubName,
    NotNegative,
    Number,
    Positive,
    Project,
    Revision,
    Text,
    Whole,
    check_text,
)
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.objective.choose import choose, unknown_objective
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.optim.schedules import unknown_schedule
from lorafusion_jax.optim.table import optimizer, unknown_optimizer
from lorafusion_jax.weights.table import NONE, stored_kind, unknown_stored_kind
from pallas_kernels.policy import AttentionImplementation, Implementation
from scheduling.checks import MOST_SIZES

SECONDS_OF_DAY = 86_400
MOST_MINUTES = 366 * 24 * 60  # a year

MOST_LAYERS = 4096
HELD_OUT_LOSS = "eval_loss"
# Safe as a folder name on every system. `=` has an error of its own, see `job_checks`.
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@=+-]{0,99}$"
Layers = Count | Annotated[Number, Field(ge=1, multiple_of=0.5)]  # half a layer is its attention or its MLP


def _sizes(value: object) -> int | tuple[int, ...]:
    """Reads a whole number, or a few of them in ascending order. As a union, each number would get two errors."""
    several = isinstance(value, (list, tuple))
    try:
        sizes = TypeAdapter(tuple[Count, ...]).validate_python(value if several else (value,))
    except ValidationError:
        sizes = ()
    if not 0 < len(set(sizes)) == len(sizes) <= MOST_SIZES:
        raise ValueError(
            f"a whole number from 1 to {2**31 - 1}, or up to {MOST_SIZES} different ones, not {shortened(value)}"
        )
    return sizes[0] if len(sizes) == 1 else tuple(sorted(sizes))


def _as_list(sizes: int | tuple[int, ...]) -> int | list[int]:
    return sizes if isinstance(sizes, int) else list(sizes)


Sizes = Annotated[int | tuple[int, ...], PlainValidator(_sizes), PlainSerializer(_as_list)]


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


MOST_SAMPLES = 64  # texts of an adapter at one evaluation


def _samples(value: object) -> int | list[str]:
    """Reads a number of held-out samples, or prompts. As a union, each value would get two errors."""
    if isinstance(value, list):
        texts = [text for text in value if isinstance(text, str)]
        if 0 < len(texts) == len(value) == len(set(texts)):
            return [check_text(text) for text in texts]
    elif isinstance(value, int | float) and not isinstance(value, bool) and value in range(MOST_SAMPLES + 1):
        return int(value)
    raise ValueError(f"a whole number from 0 to {MOST_SAMPLES}, or a list of different prompts, not {shortened(value)}")


SAMPLES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": MOST_SAMPLES},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
    ]
}
Samples = Annotated[int | list[str], PlainValidator(_samples), WithJsonSchema(SAMPLES_SCHEMA)]
TrainableTokens = Annotated[list[int | str] | dict[str, list[int | str]] | None, PlainValidator(check_tokens)]


def _different(targets: str | list[str]) -> str | list[str]:
    twice = sorted({name for name in targets if targets.count(name) > 1}) if isinstance(targets, list) else []
    if twice:
        raise ValueError(f"a list of different names; {', '.join(twice)} stands there twice")
    return targets


def _check_name(name: str, wrong: str | None) -> str:
    if wrong is not None:
        raise ValueError(wrong)
    return name


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BaseSettings(Section):
    """The frozen base model."""

    model: Folder = Field(description="HF directory, or a hub name org/name (needs the hf extra)")
    revision: Revision | None = Field(
        default=None, description="commit, tag or branch of a hub model; a run stays with its first commit"
    )
    hub_id: HubName | None = Field(
        default=None,
        description="the model's name on the hub, org/name, which exported adapters name as their base; default "
        "base.model if it is one, else the name of the folder, never its path",
    )
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="dtype of the frozen weights")
    quantize: str = Field(
        default=NONE,
        description="how the layers' projections are stored: none (in dtype), fp8 (8-bit floats that multiply as they "
        "are), int8, nf4 (dequantised when a layer runs), or what an installed package adds; auto = none, or else the "
        "first of fp8 and nf4 with which it fits",
    )
    cache_quantized: Flag = Field(
        default=True, description="keep the quantised weights on disk for the next start; lorafusion doctor shows where"
    )

    @field_validator("quantize")
    @classmethod
    def _stored_kind_exists(cls, name: str) -> str:
        _check_name(name, unknown_stored_kind(name))
        stored_kind(name)  # raises if it is unknown or broken
        return name


class DataSettings(Section):
    """Training data of an adapter, and the tokens that it learns."""

    train: TrainSources = Field(
        description="file (.jsonl .json .csv .parquet, or with .gz or .zst), folder, glob or hf:org/set[:split]; or a "
        "list of them, each a path or {path: …, weight: 0.3}: an epoch has so many times its rows"
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
    max_length: Annotated[Count, Field(ge=2)] = Field(
        default=4096, description="maximum tokens of one text of a sample"
    )
    on_long: Literal["cut", "drop", "error"] = Field(default="cut", description="treatment of longer samples")
    loss: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto", description="tokens that are learned; auto = answers, or all tokens of plain text"
    )


class LoraSettings(Section):
    """The LoRA configuration; in PEFT r, lora_alpha, lora_dropout, target_modules, use_rslora."""

    kind: str = Field(
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

    @field_validator("kind")
    @classmethod
    def _kind_exists(cls, name: str) -> str:
        return _check_name(name, unknown_kind(name))

    @model_validator(mode="before")
    @classmethod
    def _default_dropout(cls, values: Any) -> Any:
        """A kind that has no dropout, or pays for it, starts without."""
        kind = values.get("kind") if isinstance(values, dict) else None
        if not isinstance(kind, str) or unknown_kind(kind) is not None or "dropout" in values:
            return values
        known = adapter_kind(kind)
        free = known.dropout and known.column_scale is None
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

    name: str = Field(default="adamw", description="the optimizer")
    lr: Positive = Field(default=2e-4, description="peak learning rate")
    schedule: str = Field(default="cosine", description="schedule of the learning rate after the warm-up")
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

    @field_validator("name")
    @classmethod
    def _optimizer_exists(cls, name: str) -> str:
        return _check_name(name, unknown_optimizer(name))

    @field_validator("schedule")
    @classmethod
    def _schedule_exists(cls, name: str) -> str:
        return _check_name(name, unknown_schedule(name))

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
        known = sorted(set(optimizer(name).options) - set(cls.model_fields))
        wrong = sorted(set(options) - set(known))
        if wrong:
            what = f"numbers that {name} reads ({', '.join(known)})" if known else f"empty: {name} reads none"
            raise ValueError(f"{what}; not {', '.join(wrong)}")
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

    name: str = Field(default="sft", description="sft (supervised fine-tuning), or one of an installed package")
    reference: Folder | None = Field(
        default=None,
        description="of objectives that compare with one: base, start (this adapter before its first step), an "
        "adapter of the job before its first step, or a PEFT folder; default start with lora.init_from, else base",
    )

    @field_validator("name")
    @classmethod
    def _objective_exists(cls, name: str) -> str:
        return _check_name(name, unknown_objective(name))

    @model_validator(mode="after")
    def _options_exist(self) -> Self:
        assert self.chosen
        return self

    @cached_property
    def chosen(self) -> Chosen:
        """The objective with its options."""
        return choose(self.name, self.model_extra or {}, self.reference)


class BatchSettings(Section):
    """Sizes of global batches and microbatches."""

    global_samples: Count = Field(default=16, description="samples per optimizer step of an adapter")
    capacity_tokens: Sizes = Field(
        default=8192,
        description="tokens of one microbatch; up to four numbers, e.g. [3072, 4096, 8192]: each microbatch takes the "
        "smallest that holds it; auto = the fastest that fits, as plan --gpus compares them",
    )
    tile_tokens: Literal[16, 32, 64, 128, 256] = Field(
        default=128, description="an adapter's rows in a microbatch start at a multiple of it"
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All capacities of a microbatch, ascending."""
        return (self.capacity_tokens,) if isinstance(self.capacity_tokens, int) else self.capacity_tokens

    @property
    def largest(self) -> int:
        """Tokens of the largest microbatch."""
        return self.sizes[-1]


class MeshSettings(Section):
    """Devices of a run: stages · data · fsdp. `mesh: auto` takes the fastest mesh of all devices."""

    stages: Count = Field(default=1, description="number of pipeline stages, which split the layers")
    data: Count = Field(default=1, description="number of replicas, each with its own microbatches")
    fsdp: Count = Field(default=1, description="number of replicas that share one copy of the frozen base")
    layers: Annotated[tuple[Layers, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="layers of each stage, e.g. [20, 20.5, 20.5, 19]; default by cost; profile suggests better ones",
    )

    @property
    def replicas(self) -> int:
        return self.data * self.fsdp


class EarlyStopSettings(Section):
    """What tells how good an adapter is, and when it ends before its last step."""

    patience: Count | None = Field(
        default=None,
        description="evaluations in a row without a better result after which the adapter ends; its slots go to the "
        "others; default: never",
    )
    metric: Text = Field(
        default=HELD_OUT_LOSS,
        description="eval_loss, or eval_ and a metric of the objective, e.g. eval_rewards/accuracies; it also decides "
        "which step adapters/NAME/best holds",
    )
    greater_is_better: Flag | None = Field(
        default=None, description="default: false for a metric whose name ends in loss, else true"
    )
    min_delta: NotNegative = Field(default=0.0, description="least difference that counts as better")

    def is_better(self, value: float, best: float | None, by: float = 0.0) -> bool:
        """Whether a value of the metric is better than the best one so far by more than `by`."""
        if not isfinite(value):
            return False
        return best is None or (value - best > by if self.rises else best - value > by)

    def sort_key(self, value: float | None) -> float:
        """Sorts the best value first, and what is not a number last."""
        if value is None or not isfinite(value):
            return inf
        return -value if self.rises else value

    @property
    def rises(self) -> bool:
        """Whether a greater value is a better one."""
        falls = self.metric.endswith("loss")
        return not falls if self.greater_is_better is None else self.greater_is_better


class HalvingSettings(Section):
    """Successive halving: adapters with the same held-out data are compared, and the worse ones end."""

    first_step: Count | None = Field(
        default=None,
        description="step of the first comparison; the next follow at factor, factor², … times as many steps; "
        "default: no comparison",
    )
    factor: Annotated[Count, Field(ge=2, le=1024)] = Field(
        default=2, description="one of so many adapters goes on, rounded up; the slots of the others go to it"
    )

    def compares_at(self, step: int) -> bool:
        """Whether adapters are compared after this step."""
        return step in self.steps(step + 1)

    def steps(self, num_steps: int) -> list[int]:
        """The steps before `num_steps` at which adapters are compared."""
        steps, step = [], self.first_step or num_steps
        while step < num_steps:
            steps.append(step)
            step *= self.factor
        return steps


class SaveSettings(Section):
    """Frequency and number of checkpoints."""

    every_steps: Count | None = Field(
        default=None, description="optimizer steps between two checkpoints, counted over all adapters"
    )
    every_minutes: Annotated[Positive, Field(le=MOST_MINUTES)] | None = Field(
        default=15.0, description="minutes between two checkpoints"
    )
    keep: Count = Field(default=3, description="number of checkpoints, and of exported steps per adapter, to keep")
    best: Flag = Field(
        default=True, description="export the step with the best held-out result, too: adapters/NAME/best links to it"
    )


class TrainSettings(Section):
    """Length of a run, implementations, memory policy and logging."""

    max_steps: Count | None = Field(default=None, description="maximum optimizer steps per adapter")
    remat: Literal["auto", "everything", "gemm_inputs", "nothing"] = Field(
        default="auto",
        description="what a layer saves for backward: everything, gemm_inputs (repeats no matrix product), nothing "
        "but its input (a third more time); auto = the first that fits into the device's memory",
    )
    block_layers: Count | None = Field(
        default=None,
        description="layers per compiled program; default all of a stage up to 8 small ones, else 1 (fsdp: 4)",
    )
    implementation: Implementation | None = Field(
        default=None, description="LoRA kernels; default by device, see lorafusion doctor"
    )
    attention: AttentionImplementation | None = Field(default=None, description="attention kernels; default by device")
    loss_chunk: Annotated[Count, Field(ge=128)] = Field(
        default=16384, description="at most about this many times capacity_tokens logits exist at once"
    )
    eval_every_steps: Count | None = Field(
        default=None, description="optimizer steps of an adapter between two evaluations"
    )
    samples: Samples = Field(
        default=0,
        description="texts that every adapter generates, greedily, whenever it is evaluated: for so many of its "
        "held-out samples, or for these prompts; in events.jsonl and in the report",
    )
    sample_tokens: Annotated[Count, Field(le=4096)] = Field(default=64, description="new tokens of such a text at most")
    plan_seconds: Annotated[Positive, Field(le=SECONDS_OF_DAY)] = Field(
        default=1.0,
        description="effort of the planner's search, in seconds of a slow core; counted, not timed",
    )
    on_failed: Literal["keep", "replan"] = Field(
        default="keep",
        description="keep = the slots of a failed adapter stay in the plan, so that the results of the others "
        "are bitwise the same; replan = the rest is planned again without it, equal to rounding",
    )
    log_every_s: Annotated[NotNegative, Field(le=SECONDS_OF_DAY)] | None = Field(
        default=None,
        description="default 2 on a terminal and in metrics.jsonl, 10 in plain output",
    )
    places: dict[str, Count] = Field(
        default={},
        description="places to reserve for adapters that lorafusion add brings, by rank or kind:rank, such as {16: 2}; "
        "one that fits starts without compiling",
    )

    @field_validator("places", mode="before")
    @classmethod
    def _are_classes(cls, value: object) -> object:
        if not isinstance(value, dict):
            raise ValueError(f"a table of ranks and numbers of places, such as {{16: 2}}, not {shortened(value)}")
        try:
            Places.of(value) if value else None
        except (ConfigError, TypeError, ValueError):
            raise ValueError(
                f"ranks, or kind:rank, and at most {MOST_PLACES} places, such as {{16: 2}}, not {shortened(value)}"
            ) from None
        return {str(name): count for name, count in value.items()}


class ReportSettings(Section):
    """Trackers in addition to the run folder."""

    tensorboard: Flag = Field(default=False, description="write tensorboard/ADAPTER into the run folder, with hparams")
    wandb: Project | None = Field(
        default=None, description="project, or entity/project: a run per adapter, in a group of the run folder's name"
    )
    mlflow: Text | None = Field(
        default=None, description="experiment: a run per adapter, where MLFLOW_TRACKING_URI says"
    )
    trackio: Text | None = Field(default=None, description="project: a run per adapter, in a group")


class Extension(Section):
    """Samples that `lorafusion extend` added to an adapter's stream; a batch and a schedule begin with them.

    Attributes:
        after: samples of the stream before it.
        samples: how many were added.
    """

    after: Count
    samples: Count


class AdapterConfig(Section):
    """One adapter with its own settings and the defaults."""

    name: Annotated[str, Field(pattern=ADAPTER_NAME)]
    data: DataSettings
    lora: LoraSettings = LoraSettings()
    optim: OptimSettings = OptimSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    early_stop: EarlyStopSettings = EarlyStopSettings()
    global_samples: Count = 16
    epochs: Count = Field(default=1, description="passes over the adapter's data")
    seed: Annotated[Whole, Field(ge=0, lt=2**32)] = Field(
        default=0, description="seed of the adapter's initial weights, dropout and order of samples"
    )
    weight: Positive = Field(default=1.0, description="share of the machine relative to the other adapters")
    extended: tuple[Extension, ...] = ()  # of a run; job files do not have it
    joined: Flag = False  # the run began without it; job files do not have it

    @field_validator("name")
    @classmethod
    def _no_dots_only(cls, name: str) -> str:
        if set(name) <= {"."}:
            raise ValueError("a name needs a letter or digit")
        return name


class JobConfig(Section):
    """A job: one base model, the adapters, and the settings of the run."""

    base: BaseSettings
    adapters: tuple[AdapterConfig, ...] = Field(min_length=1)
    batch: BatchSettings = BatchSettings()
    mesh: MeshSettings = MeshSettings()
    save: SaveSettings = SaveSettings()
    train: TrainSettings = TrainSettings()
    halving: HalvingSettings = HalvingSettings()
    report: ReportSettings = ReportSettings()
    auto: tuple[str, ...] = Field(default=(), exclude=True, description="keys that the planner sets at the start")
    directory: str = Field(default=".", description="folder of the job file, for relative paths")

    def adapter(self, name: str) -> AdapterConfig:
        return next(adapter for adapter in self.adapters if adapter.name == name)
