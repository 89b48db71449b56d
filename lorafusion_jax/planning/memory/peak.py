"""Peak memory of each stage, and the settings that fit a device."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import REMAT_POLICIES, RematPolicy
from lorafusion_jax.optim.table import optimizer
from lorafusion_jax.planning.memory.problem import FLOAT32, MemoryProblem
from lorafusion_jax.planning.memory.stored import adapter_bytes, constant_bytes, frozen_bytes
from lorafusion_jax.planning.memory.working import kept_per_layer, working_memory

# Memory of devices, and the share of it that a run may use.

GIB = 2**30
DEVICE_BYTES = {  # memory that the driver reports
    "h100": 79 * GIB,
    "h200": 140 * GIB,
    "a100-40gb": 39 * GIB,
    "a100": 79 * GIB,
    "l40s": 44 * GIB,
    "a6000": 47 * GIB,
    "rtx6000-ada": 47 * GIB,
}
USABLE = 0.92  # share of the device; the rest is for NOT_MODELLED
ALLOCATOR_USABLE = 0.97  # share of an allocator's limit (95 % of the device), which excludes CUDA and NCCL
# Less with fsdp: a backward pass gathers the weights of all layers of a program into one contiguous block, which a
# nearly full allocator cannot provide.
GATHERING = 0.05
NOT_MODELLED = (
    "copies and temporaries that the compiler adds",
    "fragmentation of the allocator",
    "CUDA, cuDNN and NCCL themselves (about 1 GiB)",
    "host memory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one device of a stage, by purpose."""

    frozen: int
    adapters: int
    sums: int
    optimizers: int
    kept: int
    batches: int
    working: int
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__dataclass_fields__)


def stage_memory(problem: MemoryProblem) -> tuple[StageMemory, ...]:
    """Computes the peak memory on one device of each stage.

    Stage s of 1F1B holds weights and states, the saved tensors of S - s microbatches, and the working memory of its
    largest program.
    """
    return tuple(_stage(problem, stage) for stage in range(problem.num_stages))


def _stage(problem: MemoryProblem, stage: int) -> StageMemory:
    in_flight = problem.num_stages - stage
    residuals = sum(
        number * sum(kept_per_layer(problem, piece.half, piece.layer).values())
        for piece, number in problem.pieces(stage)
    )
    adapters = adapter_bytes(problem, stage)
    row = problem.item * problem.capacity_tokens
    shared = row * problem.model.shared_width  # keys and values that later layers read
    slopes = row * problem.model.hidden_size + shared if problem.is_last(stage) else 0
    return StageMemory(
        frozen=frozen_bytes(problem, stage),
        adapters=sum(adapters) + constant_bytes(problem, stage),
        sums=sum(adapters),
        optimizers=sum(
            round(optimizer(name).states_per_weight * size)
            for name, size in zip(problem.optimizers, adapters, strict=True)
        ),
        kept=in_flight * (residuals + shared) + slopes,
        batches=in_flight * problem.capacity_tokens * _row_bytes(problem),
        working=max(working_memory(problem, stage).values()),
        copies=max(_state_bytes(problem, stage), default=0) if problem.copied_state else 0,
    )


def _state_bytes(problem: MemoryProblem, stage: int) -> list[int]:
    """Bytes of each adapter's weights and optimizer state."""
    trained, constant = (adapter_bytes(problem, stage, trainable=trainable) for trainable in (True, False))
    return [
        round((1 + optimizer(name).states_per_weight) * size) + unchanged
        for name, size, unchanged in zip(problem.optimizers, trained, constant, strict=True)
    ]


def _row_bytes(problem: MemoryProblem) -> int:
    """Bytes of a row of a microbatch: eight int32 or float32, rotary tables, layers' inputs, a teacher's state."""
    state = problem.item * problem.model.hidden_size if problem.teacher else 0
    layer_inputs = problem.item * problem.model.num_layers * problem.model.input_width
    return FLOAT32 * (8 + 2 * _rope_channels(problem.model)) + state + layer_inputs


def _rope_channels(model: ModelConfig) -> int:
    return sum(rope.channels or model.head_dim for rope in model.ropes)


def choose_remat(problem: MemoryProblem, device_bytes: int, *, usable: float = USABLE) -> RematPolicy:
    """Returns the fastest policy that fits every stage, or `nothing` if none does.

    Args:
        device_bytes: memory of the device, or with `usable=ALLOCATOR_USABLE` the limit of its allocator.
    """
    for remat in REMAT_POLICIES:
        if fits(replace(problem, remat=remat), device_bytes, usable=usable):
            return remat
    return "nothing"


def fits(problem: MemoryProblem, device_bytes: int, *, usable: float = USABLE) -> bool:
    """Whether every stage fits into the usable memory of a device."""
    if problem.fsdp > 1:
        usable -= GATHERING
    return max(stage.total for stage in stage_memory(problem)) <= usable * device_bytes


def advice(problem: MemoryProblem, device_bytes: int, *, tile_tokens: int = 128, usable: float = USABLE) -> str:
    """Suggests a setting with which the job fits; empty if it already fits.

    It suggests the largest capacity that fits or another remat policy, or more devices if the weights alone do not fit.
    """
    if fits(problem, device_bytes, usable=usable):
        return ""
    smaller: list[str] = []
    for remat in REMAT_POLICIES[REMAT_POLICIES.index(problem.remat) :]:
        tokens = largest_capacity(replace(problem, remat=remat), device_bytes, tile_tokens=tile_tokens, usable=usable)
        if tokens >= problem.capacity_tokens:
            return " or ".join([*smaller, f"train.remat: {remat}"])
        if tokens and not smaller:
            smaller = [f"batch.capacity_tokens: {tokens}"]
    return smaller[0] if smaller else "more mesh.stages or mesh.fsdp: the weights alone are too large"


def largest_capacity(
    problem: MemoryProblem, device_bytes: int, *, tile_tokens: int = 128, usable: float = USABLE
) -> int:
    """Returns the largest multiple of a tile, up to the problem's capacity, that fits; 0 if none does."""
    low, high = 0, problem.capacity_tokens // tile_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if fits(replace(problem, capacity_tokens=middle * tile_tokens), device_bytes, usable=usable):
            low = middle
        else:
            high = middle - 1
    return low * tile_tokens


def most_halves(problem: MemoryProblem, room: int) -> list[int]:
    """Number of half layers that fit each stage in `room` bytes, for any first half; at least two."""

    stop = problem.layers[-1].stop

    def size(stage: int, halves: int) -> int:
        extents = [Extent(first, first + halves) for first in (0, 1) if first + halves <= stop]
        splits = [(*problem.layers[:stage], extent, *problem.layers[stage + 1 :]) for extent in extents]
        return max(_stage(replace(problem, layers=layers), stage).total for layers in splits)

    possible = range(3, stop + 1)
    return [
        2 + bisect_right(possible, room, key=lambda halves, stage=stage: size(stage, halves))
        for stage in range(problem.num_stages)
    ]
