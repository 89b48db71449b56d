"""Processes that compile the programs of layers while a run starts.

A cold start waits for Python and for Mosaic: lowering holds Python's lock, and Mosaic compiles one kernel of a process
at a time. So backward and evaluation of each stage compile in a process each, while the run compiles forward. What they
make is in the folders of lowered and of compiled programs, where the run finds it. They get shapes only and hold no
weights. A process that fails, as for lack of memory, costs time, no more: the run compiles then, and says so.

The run's pool leaves a twentieth of a card. Each process sees the card of its stage alone and has a budget there, and
there are only as many as fit beside the run, which creates its own handles first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.sealed_programs import topology
from lorafusion_jax.session import lowered
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.processes import is_alone
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import layer_kind

PROGRAMS = ("backward", "evaluate")
LONGEST_S = 900.0  # after that, a process hangs and the run goes on without it
CORES = 4  # of the machine for each process, or they would slow each other down
GIB = 2**30
CONTEXT_BYTES = GIB // 2  # that CUDA takes of a card for each process
TRIES_BYTES = 3 * GIB // 2  # for the products that XLA times before it chooses one: a process's whole pool
JAX_FRACTION = 0.75  # of a card that the pool takes if nobody told jax otherwise
RESERVE_BYTES = 3 * GIB // 2  # of a card beside the pool, for the run's own context and handles
MOST_SAID = 2000
WORKER = "lorafusion_jax.session.ahead_worker"

type Shape = list  # [sizes, dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Static sizes of a microbatch."""

    capacity_tokens: int
    tile_tokens: int
    max_segments: int
    max_adapters: int

    @classmethod
    def of(cls, batch: Microbatch) -> Rows:
        capacity = batch.tokens.shape[-1]
        tiles, segments, adapters = (
            leaf.shape[-1] for leaf in (batch.tile_adapter, batch.segment_lengths, batch.adapters)
        )
        return cls(
            capacity_tokens=capacity, tile_tokens=capacity // tiles, max_segments=segments, max_adapters=adapters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A program of a stage, by the shapes of what it takes.

    Attributes:
        config: the job, resolved.
        stage: number of the stage.
        program: one of `PROGRAMS`.
        rows: the microbatches to compile for.
        blocks: of each sort of block its layers: (kind of layer, shapes by name; of a quantised kernel by array).
        leaves, sums: shapes of the adapters' leaves and of the sums of their gradients.
        memory_fraction: of the card, the process's pool.
        topology: what the run's keys of compiled programs say of its devices, in hexadecimal.
    """

    config: dict[str, Any]
    stage: int
    program: str
    remat: str
    rows: list[Rows]
    blocks: list[list[tuple[int, dict[str, Any]]]]
    leaves: dict[str, Shape]
    sums: dict[str, Shape]
    memory_fraction: float
    topology: str

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str) -> Request:
        values = json.loads(line)
        return cls(**values | {"rows": [Rows(**rows) for rows in values["rows"]]})


class Worker:
    """A process that compiles one program, on one card."""

    def __init__(self, card: Any) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            text=True,
            env=environment_of(card),
        )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has failed
            self._process.stdin.write(line)
            self._process.stdin.close()

    def wait(self) -> str | None:
        """Waits for its end; what it said last if it failed."""
        try:
            if self._process.wait(LONGEST_S) == 0:
                return None
        except subprocess.TimeoutExpired:
            return f"not done after {LONGEST_S:.0f} s"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return (lines or ["it said nothing"])[-1][:MOST_SAID]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()


class Ahead:
    """The processes of a start. They import what they need until `compile` tells them what to do.

    Attributes:
        times: start and end of every program that a process has made, by `time.perf_counter`.
        failures: last line of what a process said that failed, by program.
    """

    def __init__(self, workers: Sequence[tuple[int, Worker]] = (), cards: Sequence[Any] = ()):
        """Takes the workers with their stages, and the cards of the run."""
        self._idle, self._busy = list(workers), dict[tuple[int, str], Worker]()
        self._cards = cards
        self._began = 0.0
        self.times: dict[str, tuple[float, float]] = {}
        self.failures: dict[str, str] = {}

    def compile(self, requests: Callable[[], Sequence[Request]]) -> None:
        """Sends each request to a process of its stage; those for which there is none are left to the run."""
        if not self._idle:
            return
        self._began = time.perf_counter()
        create_handles(self._cards)
        for request in requests():
            index = next((index for index, (stage, _) in enumerate(self._idle) if stage == request.stage), None)
            if index is not None:
                _, worker = self._idle.pop(index)
                worker.send(request.line())
                self._busy[request.stage, request.program] = worker

    def wait(self, stage: int, *programs: str) -> None:
        """Waits for processes that compile programs of a stage."""
        for program in programs:
            if (worker := self._busy.get((stage, program))) is None:
                continue
            name, problem = f"{program} of stage {stage} ahead", worker.wait()
            if problem is None:
                self.times[name] = (self._began, time.perf_counter())
            else:
                self.failures[name] = problem

    def close(self) -> None:
        """Ends all processes."""
        for worker in (*(worker for _, worker in self._idle), *self._busy.values()):
            worker.close()


@contextmanager
def compile_ahead(config: JobConfig, *, platform: str | None = None) -> Iterator[Ahead]:
    """Starts the processes for a job whose programs no start before has kept; ends them with the block.

    Args:
        platform: where the job runs (None: on jax's devices).
    """
    facts, count = json.dumps(config.model_dump(mode="json")), 0
    mesh, cold = config.mesh, lowered.lowered_folder() is not None and not lowered.started_before(facts)
    single = is_alone() and mesh.replicas == mesh.tensor == 1  # only programs of one device are kept
    cards: list[Any] = []
    if cold and single and (platform or jax.default_backend()) == "gpu":
        count = int((os.cpu_count() or 1) // CORES)
        cards = [stage.mesh.devices.item() for stage in stage_meshes(mesh.stages, mesh.data, mesh.fsdp)]
    on_each_card = range(min(len(PROGRAMS), processes_beside(*pool_and_card())))
    stages = [stage for _ in on_each_card for stage in range(len(cards))][:count]  # backward of every stage first
    ahead = Ahead([(stage, Worker(cards[stage])) for stage in stages], cards)
    try:
        yield ahead
        lowered.mark_start(facts)
    finally:
        ahead.close()


def pool_and_card() -> tuple[int, int] | tuple[None, None]:
    """Bytes of a card that the run's pool may take, and of the card; None where they are unknown (CPU)."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return None, None
    options = jax.config.jax_pjrt_client_create_options
    fraction = options.get("memory_fraction") if isinstance(options, Mapping) else None
    return limit, round(limit / (fraction or JAX_FRACTION))


def processes_beside(pool: int | None, card: int | None) -> int:
    """Number of processes for which a card has memory beside the run's pool; `PROGRAMS` if its size is unknown.

    Example:
        >>> processes_beside(pool=136 * GIB, card=143 * GIB), processes_beside(pool=22 * GIB, card=23 * GIB)
        (2, 0)
    """
    if pool is None or card is None:
        return len(PROGRAMS)
    return max(0, (card - pool - RESERVE_BYTES) // (CONTEXT_BYTES + TRIES_BYTES))


def environment_of(card: Any) -> dict[str, str]:
    """Returns the environment of a process that sees this one of the cards that this process sees."""
    visible, number = os.environ.get("CUDA_VISIBLE_DEVICES"), card.local_hardware_id or 0
    device = visible.split(",")[number].strip() if visible else str(number)
    return os.environ | {"CUDA_VISIBLE_DEVICES": device}


def create_handles(cards: Sequence[Any]) -> None:
    """Multiplies on each card by cuBLAS, which allocates what it needs outside of the pool at its first product."""
    options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}
    multiply = jax.jit(lambda x: x @ x, compiler_options=options)
    for card in cards:
        multiply(jax.device_put(jnp.ones((256, 256), jnp.bfloat16), card)).block_until_ready()


def requests_of(
    config: JobConfig, stages: Mapping[int, Stage], rows: Sequence[Microbatch], held_out: Sequence[Microbatch]
) -> list[Request]:
    """Describes the programs of the layers of stages.

    Args:
        rows, held_out: as in `Executor.warm_up`.
    """
    requests = []
    _, card = pool_and_card()
    for number, stage in stages.items():
        for program in PROGRAMS:
            batches = rows if program != "evaluate" else held_out
            alone = stage.parts.model.crossing is None and all(batch.balance is None for batch in batches)
            if batches and alone:  # otherwise more than activations goes through the layers
                requests.append(
                    Request(
                        config=config.model_dump(mode="json"),
                        stage=number,
                        program=program,
                        remat=stage.remat,
                        rows=[Rows.of(batch) for batch in batches],
                        blocks=_blocks(stage),
                        leaves=_shapes(stage.all_leaves),
                        sums=_shapes(stage.sums),
                        memory_fraction=TRIES_BYTES / card if card else 1.0,
                        topology=topology().hex(),
                    )
                )
    return requests


def _blocks(stage: Stage) -> list[list[tuple[int, dict[str, Any]]]]:
    sorts = {}
    for block in stage.blocks:
        layers = [(layer_kind(weights), _shapes(dict(weights))) for weights in block]
        sorts.setdefault(json.dumps(layers), layers)
    return list(sorts.values())


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda leaf: [list(leaf.shape), str(leaf.dtype)], arrays)
