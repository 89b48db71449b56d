"""The sections of job files that a run has: base, batch, mesh, training, saves and reports."""

from __future__ import annotations

from math import ceil, inf, isfinite
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from lorafusion_jax.config.places import MOST_PLACES, Places
from lorafusion_jax.config.values import (
    Count,
    Flag,
    Folder,
    HubName,
    NotNegative,
    Number,
    Positive,
    Project,
    Revision,
    Samples,
    Section,
    Text,
    check_name,
)
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.weights.table import NONE, stored_kind, unknown_stored_kind
from pallas_kernels.policy import AttentionImplementation, Implementation
from scheduling.checks import MOST_SIZES

SECONDS_OF_DAY = 86_400
MOST_MINUTES = 366 * 24 * 60  # a year
MOST_PARTS = 4  # smaller products keep a GPU less busy than the sums that they hide
HELD_OUT_LOSS = "eval_loss"
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
        check_name(name, unknown_stored_kind(name))
        stored_kind(name)  # raises if it is unknown or broken
        return name


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
    """Devices of a run: stages · data · fsdp · tensor. `mesh: auto` takes the fastest mesh of all devices."""

    stages: Count = Field(default=1, description="number of pipeline stages, which split the layers")
    data: Count = Field(default=1, description="number of replicas, each with its own microbatches")
    fsdp: Count = Field(default=1, description="number of replicas that share one copy of the frozen base")
    tensor: Count = Field(default=1, description="number of devices that compute each layer of a replica together")
    layers: Annotated[tuple[Layers, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="layers of each stage, e.g. [20, 20.5, 20.5, 19]; default by cost; profile suggests better ones",
    )

    @property
    def replicas(self) -> int:
        return self.data * self.fsdp

    @property
    def stage_devices(self) -> int:
        """Devices of a stage."""
        return self.replicas * self.tensor


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
    first_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="the same as a part of each adapter's own steps, for adapters with unequal numbers of them, "
        "as in a sweep of batch sizes",
    )
    factor: Annotated[Count, Field(ge=2, le=1024)] = Field(
        default=2, description="one of so many adapters goes on, rounded up; the slots of the others go to it"
    )

    @model_validator(mode="after")
    def _one_first(self) -> Self:
        if self.first_step is not None and self.first_share is not None:
            raise ValueError("first_step and first_share say one thing; give one of them")
        return self

    @property
    def is_on(self) -> bool:
        return self.first_step is not None or self.first_share is not None

    def compares_at(self, step: int, num_steps: int) -> bool:
        """Whether an adapter with so many steps is compared after this one, which may be its last."""
        return any(step == self.step_of(mark, num_steps) for mark in self.marks(num_steps))

    def steps(self, num_steps: int) -> list[int]:
        """The steps before its last at which an adapter with so many is compared.

        >>> HalvingSettings(first_step=2).steps(10), HalvingSettings(first_share=0.2).steps(10)
        ([2, 4, 8], [2, 4, 8])
        >>> HalvingSettings(first_share=0.125).steps(4)  # a half, a quarter and an eighth of four steps
        [1, 2]
        """
        steps = {self.step_of(mark, num_steps) for mark in self.marks(num_steps)}
        return sorted(step for step in steps if step < num_steps)

    def marks(self, longest: int) -> list[int]:
        """What names the comparisons of adapters with at most so many steps, in their order: a step, or a number."""
        marks = []
        if self.first_step is not None:
            mark = self.first_step
            while mark <= longest:
                marks.append(mark)
                mark *= self.factor
        elif self.first_share is not None:
            while self.first_share * self.factor ** len(marks) < 1:
                marks.append(1 + len(marks))
        return marks

    def step_of(self, mark: int, num_steps: int) -> int:
        """The step of an adapter with so many at which it takes part in a comparison."""
        if self.first_share is None:
            return mark
        # Of a share such as 0.1, which has no exact number, 30 steps are 3.0000000000000004.
        return max(1, ceil(round(self.first_share * self.factor ** (mark - 1) * num_steps, 9)))


class SaveSettings(Section):
    """Frequency and number of checkpoints."""

    every_steps: Count | None = Field(
        default=None, description="optimizer steps between two checkpoints, counted over all adapters"
    )
    every_minutes: Annotated[Positive, Field(le=MOST_MINUTES)] | None = Field(
        default=15.0, description="minutes between two checkpoints; the first comes after 2 at most"
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
    parts: Annotated[Count, Field(le=MOST_PARTS)] = Field(
        default=1,
        description="parts of a microbatch's rows in a layer of mesh.tensor: the sum of one over the devices runs "
        "beside the products of another",
    )
    implementation: Implementation | None = Field(
        default=None, description="LoRA kernels; default by device, see lorafusion doctor"
    )
    attention: AttentionImplementation | None = Field(default=None, description="attention kernels; default by device")
    loss_chunk: Annotated[Count, Field(ge=128)] = Field(
        default=16384, description="at most about this many times capacity_tokens logits exist at once"
    )
    router_aux: NotNegative = Field(
        default=0.0,
        description="factor of the load-balancing loss of the routers of a mixture of experts, "
        "router_aux_loss_coef in transformers; it changes adapters, routers are frozen",
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
    resident: Count | None = Field(
        default=None,
        description="adapters on the devices at a time; the others wait in host memory and take their places in turn; "
        "default: all",
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


def is_server_url(url: str) -> bool:
    """Whether a text is the URL of an HTTP server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _check_server(url: str) -> str:
    if not is_server_url(url):
        raise ValueError(f"the URL of a server, such as http://127.0.0.1:8000, not {shortened(url)}")
    return url


ServerUrl = Annotated[Text, AfterValidator(_check_server)]


def _default(section: type[Section], key: str) -> object:
    return section.model_fields[key].default


class HandoverSettings(Section):
    """A running server that loads the adapters at the end of the run, as `lorafusion handover` does."""

    vllm: ServerUrl | None = Field(default=None, description="URL of a vLLM server, such as http://gpu:8000")
    sglang: ServerUrl | None = Field(default=None, description="URL of an SGLang server")
    prompt: Text = Field(default="Hello", description="what each adapter is asked once it is loaded")
    key_file: Folder | None = Field(default=None, description="file with the server's API key")

    @model_validator(mode="after")
    def _is_one_server(self) -> Self:
        if self.vllm is not None and self.sglang is not None:
            raise ValueError("one server: vllm or sglang, not both")
        needs = [f"handover.{key}" for key in ("prompt", "key_file") if getattr(self, key) != _default(type(self), key)]
        if needs and not self.is_on:
            raise ValueError(f"a server, vllm: URL or sglang: URL, for {' and '.join(needs)}")
        return self

    @property
    def is_on(self) -> bool:
        return (self.vllm, self.sglang) != (None, None)
