"""Compares meshes and microbatch sizes of a job on a number of devices, before any device is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lorafusion_jax.config.auto import AUTO, CAPACITY, MESH, QUANTIZE
from lorafusion_jax.config.job_checks import largest_sample
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.checks import tensor_problems
from lorafusion_jax.planning.network import Network
from lorafusion_jax.planning.prediction import adapter_tokens, memory_of, predicted_costs, predicted_memory
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.planning.turns import turns
from lorafusion_jax.weights.table import NONE
from scheduling import AdapterJob, make_plan, plan_statistics

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)  # capacities that are tried, if they hold the longest sample
MOST_SIZES = 4  # of them: larger ones gain little and need memory
STORED = ("fp8", "nf4")  # tried where no mesh holds the base as it is
MOST_SAMPLES = 400  # of each adapter that are planned: rates need no more
EFFORT_S = 0.05  # of the planner's search
CLOSE = 1.01  # times within this factor are equal
MOST_TENSOR = 8  # devices that compute a layer together: more are not on one host


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run a job.

    Attributes:
        stages, data, fsdp, tensor: the mesh.
        capacity_tokens: of a microbatch.
        of_data: the capacity holds every sample of the data, but not all that data.max_length allows: `auto` takes it,
            as a number it is refused.
        quantize: how the base is stored.
        remat: what a layer's forward leaves for its backward.
        memory_bytes: of the fullest device.
        fits: whether it is within a device's memory; None if that is unknown.
        tokens_per_s: predicted useful tokens; None if it does not fit.
        seconds: predicted, of the whole job.
        bubble_share: idle share of the stages between fill and drain.
    """

    stages: int
    data: int
    fsdp: int
    tensor: int
    capacity_tokens: int
    of_data: bool
    quantize: str
    remat: str
    memory_bytes: int
    fits: bool | None
    tokens_per_s: float | None = None
    seconds: float | None = None
    bubble_share: float | None = None

    @property
    def settings(self) -> list[str]:
        """The overrides of a command line that make this choice."""
        mesh = {"stages": self.stages, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        mesh_settings = [f"mesh.{name}={count}" for name, count in mesh.items() if count > 1]
        quantize_setting = [] if self.quantize == NONE else [f"base.quantize={self.quantize}"]
        capacity = AUTO if self.of_data else self.capacity_tokens
        return [*mesh_settings, f"batch.capacity_tokens={capacity}", *quantize_setting]

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.stages, self.data, self.fsdp, self.tensor)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"settings": self.settings}


class Mesh(NamedTuple):
    """Devices on the axes of a mesh."""

    stages: int
    data: int
    fsdp: int
    tensor: int

    @staticmethod
    def of(config: JobConfig) -> Mesh:
        mesh = config.mesh
        return Mesh(mesh.stages, mesh.data, mesh.fsdp, mesh.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """All ways that were compared, those that fit first, fastest first.

    Attributes:
        why: one sentence on the first choice; empty if nothing fits.
    """

    device: str
    gpus: int
    choices: tuple[Choice, ...]
    why: str

    @property
    def best(self) -> Choice | None:
        return self.choices[0] if self.choices and self.choices[0].fits is not False else None


def compare_choices(
    config: JobConfig,
    model: ModelConfig,
    prepared: Prepared,
    *,
    device: str,
    gpus: int,
    vary: Collection[str] = (CAPACITY, MESH, QUANTIZE),
    memory_bytes: int | None = None,
    network: Network | None = None,
) -> Choices:
    """Compares every mesh of `gpus` devices at several capacities.

    Devices of `mesh.tensor` are as many as the job says. If it says nothing, 2, 4 and 8 are compared where they can
    share the layers, without `mesh.fsdp`; what their sums take is predicted from the rate of the links.
    A part of each adapter's samples is planned and simulated at the device's rates. The base is quantised only if it
    fits on no mesh as the job stores it.

    Args:
        vary: what is compared; the rest is as in the job.
        memory_bytes: of a device (None: of its data sheet).
        network: of the processes that share the devices (None: one process); devices of `mesh.tensor` are all in one.

    Raises:
        ConfigError: `plan.no-mesh`, the model has too few layers for any mesh of so many devices.
    """
    jobs, tokens = [_thinned(job) for job in train_jobs(config, prepared)], sum(adapter_tokens(prepared).values())
    memory_bytes = memory_of(device) if memory_bytes is None else memory_bytes
    forms = [config.base.quantize, *(STORED if config.base.quantize == NONE and QUANTIZE in vary else ())]
    meshes = (
        list(_meshes(gpus, model, config, 1 if network is None else network.processes))
        if MESH in vary
        else [Mesh.of(config)]
    )
    sizes = _sizes(config, prepared) if CAPACITY in vary else [config.batch.capacity_tokens]
    choices: list[Choice] = []
    for quantize in forms:
        ways = [_with(config, mesh, size, quantize) for mesh in meshes for size in sizes]
        choices += [
            _measure(way, model, prepared, jobs, tokens, device, memory_bytes, network)
            for way in ways
            if way.mesh.tensor == config.mesh.tensor or not tensor_problems(way, model)
        ]
        if any(choice.fits is not False for choice in choices):
            break
    if not choices:
        raise ConfigError(
            "plan.no-mesh",
            f"no mesh of {gpus} devices is possible.",
            why=f"the model has {model.num_layers} layers, every replica needs samples of each global batch"
            + (f", and the job has mesh.tensor={config.mesh.tensor}" if config.mesh.tensor > 1 else ""),
            fix="fewer --gpus",
        )
    best_first = sorted(choices, key=lambda choice: (choice.fits is False, choice.seconds or choice.memory_bytes))
    return Choices(device=device, gpus=gpus, choices=tuple(_prefer_simple(best_first)), why=_reason(best_first))


def _meshes(gpus: int, model: ModelConfig, config: JobConfig, processes: int) -> Iterator[Mesh]:
    """Meshes with `gpus` devices; `mesh.tensor` is the job's, or compared where it has none."""
    of_job = config.mesh.tensor
    others = [count for count in (2, 4, MOST_TENSOR) if of_job == processes == 1]
    for tensor in (of_job, *others):
        for stages in _divisors(gpus // tensor) if gpus % tensor == 0 else ():
            for data in _divisors(gpus // tensor // stages):
                fsdp = gpus // tensor // stages // data
                shared = stages % (processes // math.gcd(data, processes)) == 0
                if shared and stages <= (1 if model.crossing else model.num_layers) and (fsdp == 1 or tensor == of_job):
                    yield Mesh(stages, data, fsdp, tensor)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def _sizes(config: JobConfig, prepared: Prepared) -> list[int]:
    """The first capacities that hold every sample of the data, held-out ones, too, in whole tiles."""
    tile = config.batch.tile_tokens
    sets = [
        samples for data in prepared.adapters.values() for samples in (data.train, data.eval) if samples is not None
    ]
    longest = -(-int(max(samples.lengths.max() for samples in sets)) // tile) * tile
    return [longest, *(size for size in SIZES if size > longest)][:MOST_SIZES]


def _thinned(job: AdapterJob) -> AdapterJob:
    """The job with whole batches of evenly spread samples, the longest among them."""
    count = len(job.sample_tokens)
    if count <= MOST_SAMPLES:
        return job
    batches = max(1, MOST_SAMPLES // job.global_batch)
    num_samples = min(count, batches * job.global_batch)
    tokens = [job.sample_tokens[index * count // num_samples] for index in range(num_samples)]
    tokens[0] = max(job.sample_tokens)
    return dataclasses.replace(job, sample_tokens=tuple(tokens), cuts=())


def _with(config: JobConfig, mesh: Mesh, size: int | tuple[int, ...], quantize: str) -> JobConfig:
    layers = config.mesh.layers if mesh == Mesh.of(config) else None
    return config.model_copy(
        update={
            "mesh": config.mesh.model_copy(update=mesh._asdict() | {"layers": layers}),
            "batch": config.batch.model_copy(update={"capacity_tokens": size}),
            "base": config.base.model_copy(update={"quantize": quantize}),
        }
    )


def _measure(
    config: JobConfig,
    model: ModelConfig,
    prepared: Prepared,
    jobs: Sequence[AdapterJob],
    tokens: int,
    device: str,
    memory_bytes: int | None,
    network: Network | None,
) -> Choice:
    memory, mesh = predicted_memory(config, model, memory_bytes), config.mesh
    choice = Choice(
        **Mesh.of(config)._asdict(),
        capacity_tokens=config.batch.largest,
        of_data=config.batch.largest < max(map(largest_sample, config.adapters)),
        quantize=config.base.quantize,
        remat=memory.remat,
        memory_bytes=max(stage.total for stage in memory.stages),
        fits=memory.fits,
    )
    if choice.fits is False:
        return choice
    plan = make_plan(
        jobs,
        capacity_tokens=config.batch.sizes,
        num_stages=mesh.stages,
        data_parallel=mesh.replicas,
        tile_tokens=config.batch.tile_tokens,
        seed=0,
        time_limit_s=EFFORT_S,
        **turns(config, prepared, jobs),
    )
    with_remat = config.model_copy(update={"train": config.train.model_copy(update={"remat": memory.remat})})
    statistics = plan_statistics(plan, predicted_costs(with_remat, model, device, adapter_tokens(prepared), network))
    return dataclasses.replace(
        choice,
        tokens_per_s=statistics.tokens_per_s,
        seconds=tokens / statistics.tokens_per_s,
        bubble_share=statistics.bubble_share,
    )


def _prefer_simple(ordered: Sequence[Choice]) -> list[Choice]:
    """Moves the choice with the fewest devices to a layer and stages, then the least memory, to the front of those that
    are as fast."""
    if not ordered or ordered[0].seconds is None:
        return list(ordered)
    fastest = ordered[0].seconds
    equal = [choice for choice in ordered if choice.seconds is not None and choice.seconds <= CLOSE * fastest]
    worse = [choice for choice in ordered if choice not in equal]
    return [*sorted(equal, key=lambda choice: (choice.tensor, choice.stages, choice.fsdp, choice.memory_bytes)), *worse]


def _reason(ordered: Sequence[Choice]) -> str:
    best = _prefer_simple(ordered)[0]
    if best.seconds is None:
        return ""
    form = "" if best.quantize == NONE else f", stored as {best.quantize},"
    if best.tensor > 1:
        stages = "" if best.stages == 1 else f", in {best.stages} stages"
        where = f"{best.tensor} devices compute each layer{stages}, and adding up their results costs less than waiting"
    elif best.stages == best.fsdp == 1:
        where = f"the base{form} fits on one device" + ("" if best.data == 1 else ", and replicas wait for nothing")
    elif best.fsdp > 1:
        where = f"replicas share the base{form}, and gathering it costs less than a pipeline"
    else:
        idle = f"{100 * (best.bubble_share or 0):.1f} %"
        where = f"the base{form} is split over {best.stages} stages, idle {idle} of the time"
    others = [choice for choice in ordered if choice.mesh != best.mesh and choice.seconds]
    if not others:
        return f"{where}; no other mesh fits" if len({choice.mesh for choice in ordered}) > 1 else where
    times = min(choice.seconds or 0 for choice in others) / best.seconds
    if times < 1:
        return f"{where}; another mesh takes {times:.3f} × the time, and this one is simpler or needs less memory"
    return f"{where}; the next best mesh takes {times:.2f} × the time"
