"""A session without devices, for campaigns of thousands of runs: whole numbers instead of a model.

Everything else of a run is real: data, plans, requests, checkpoints, folders. The state of an adapter is a number that
a step changes by what is in its global batch, by the learning rate and by the number before:

    w ← (31 w + Σ batch + rate) mod 2²³

Sums of whole numbers do not depend on their order, so the result of an adapter is the same number on every mesh, in
every packing, and after every disturbance; `alone` computes it from the adapter's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.data.assemble import Microbatch, Weights, assemble, num_segments, pieces_of
from lorafusion_jax.data.prepare import AdapterData, Prepared
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.ahead import Ahead
from lorafusion_jax.session.assembler import Assembler
from lorafusion_jax.session.evaluation import Evaluation
from lorafusion_jax.session.loop import Loop
from lorafusion_jax.session.references import ReferenceQueue
from lorafusion_jax.session.steps import Steps
from lorafusion_jax.session.task import AdapterProgress, step_rates, tasks_of
from scheduling import Plan, SampleRef
from scheduling.pipeline import Event
from scheduling.timeline import Timeline

MODULUS = 2**23  # float32 holds all whole numbers below
WEIGHTS = "weights.npy"


def content(rows: Microbatch, adapter: int) -> np.ndarray:
    """What a microbatch adds for an adapter, by replica: its tokens, their keys, and what is learned of them."""
    learned = (rows.row_adapter == adapter) & (rows.weights > 0)
    numbers = rows.tokens.astype(np.int64) * 7 + rows.row_key % 65_521
    numbers += np.round(rows.weights * 4096).astype(np.int64)
    return np.where(learned, numbers, 0).sum(-1)


def next_weight(weight: int, total: int, rate: float) -> int:
    return (31 * weight + total + round(rate * 1e7)) % MODULUS


def alone(adapter: AdapterConfig, data: AdapterData) -> list[int]:
    """The weight of an adapter before its first step and after every step, if nothing happens to it."""
    starts = data.batch_starts(adapter.global_samples).tolist()
    ends = [*starts[1:], len(data.order)]
    rates, history = step_rates(adapter, data), [adapter.seed]
    for batch, (start, end) in enumerate(zip(starts, ends, strict=True)):
        masks = [data.train.sample(int(data.order[index]))[1] for index in range(start, end)]
        weights = [Weights(1.0 / sum(int(mask.sum()) for mask in masks))]
        total = 0
        for index in range(start, end):
            ref = SampleRef(adapter=adapter.name, epoch=0, batch=0, sample=index)
            pieces = pieces_of([ref], data, 0, weights)
            size = len(pieces[0].tokens)
            rows = assemble(
                pieces, capacity_tokens=size, tile_tokens=size, max_segments=num_segments(1), max_adapters=1
            )
            total += int(content(rows, 0))
        history.append(next_weight(history[-1], total, float(rates[batch])))
    return history


@dataclass(slots=True)
class State:
    """An adapter's weight, and its sum so far on every replica.

    Attributes:
        refuses: whether a step was not finite; devices refuse the steps that were issued after it.
    """

    weight: int
    sums: np.ndarray
    refuses: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """As `StepResult`."""

    loss: float
    healthy: bool
    before: int
    grad_norm: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class QuickExecutor:
    """As `Executor` and `BatchEnds`; whatever is issued is done at once.

    Attributes:
        sick: adapter → the weight before a step that is not finite.
    """

    sick: ClassVar[dict[str, int]] = {}

    def __init__(self, stages: int, replicas: int):
        self.links = None
        self.stages, self.local_replicas = tuple(range(stages)), list(range(replicas))
        self.states: dict[str, State] = {}
        self._rows: dict[int, Microbatch] = {}
        self._done: list[int] = []

    def blaming(self, *what: Any) -> Any:
        return nullcontext()

    def is_warm(self, rows: Sequence[Microbatch]) -> bool:
        return True

    def warm_up(self, *arguments: Any) -> dict[str, tuple[float, float]]:
        return {}

    def admit(self, slot: int, rows: Microbatch) -> None:
        self._rows[slot] = rows

    def issue(self, event: Event, adapters: Sequence[str] = ()) -> None:
        if event.kind == "backward" and event.stage == 0:
            rows = self._rows.pop(event.slot)
            for number, state in enumerate(self.states.values()):
                state.sums += content(rows, number)
            self._done.append(event.slot)

    def completed_slots(self) -> list[int]:
        done, self._done = self._done, []
        return done

    def wait_all(self) -> None:
        assert not self._rows

    def close_batch(self, event: Event, adapter: str) -> bool:
        return event.stage == 0  # the last that closes it

    def step(self, adapter: str, numbers: Any) -> Result:
        state = self.states[adapter]
        before, total = state.weight, int(state.sums.sum())
        state.sums[:] = 0
        if state.refuses:
            return Result(0.0, healthy=False, before=before)
        state.weight, state.refuses = next_weight(before, total, float(numbers.lr)), self.sick.get(adapter) == before
        return Result(state.weight / MODULUS, healthy=not state.refuses, before=before)

    def put_back(self, adapter: str, result: Result) -> None:
        self.states[adapter].weight = result.before

    def not_finite(self, adapter: str, result: Result) -> str:
        return "the number is not finite"


class QuickSpans:
    """As `Spans`."""

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        yield

    def join(self, links: None) -> None:
        pass

    def bubble_share(self) -> None:
        return None

    def close(self, plan: Plan) -> Timeline:
        return Timeline(spans=(), num_stages=plan.num_stages)


class QuickSession:
    """As `Session`. A checkpoint holds the numbers of its adapters, each under its name."""

    def __init__(self, config: JobConfig, prepared: Prepared):
        self._config = config
        self.executor = QuickExecutor(config.mesh.stages, config.mesh.replicas)
        self.tasks, self.index = tasks_of(config, prepared), dict(stack_of(config).index)
        self.assembler = Assembler(config.batch.tile_tokens, self.executor.local_replicas, self.index)
        self.steps = Steps(self.executor, self.executor, self.tasks)  # type: ignore[arg-type]
        self.loop = Loop(self.executor, self.executor, self.steps, self.index)  # type: ignore[arg-type]
        self.run, self.drain = self.loop.run, self.loop.drain
        self.references = ReferenceQueue(self.executor)  # type: ignore[arg-type]
        self.spans, self.is_paged = QuickSpans(), False
        self.reading = SimpleNamespace(
            from_cache=False, take_notices=lambda: [], wait_stored=lambda timeout: True, times=(0.0, 0.0)
        )
        self.facts = SimpleNamespace(
            layers=[1.0] * config.mesh.stages, remat="none", memory_warning=None, peak_bytes=None, state_bytes=1 << 10,
            num_trainable=1, num_frozen=1, stored={"weights": 1, "gradients": 1, "moments": 1},
            device={"device": "cpu", "platform": "cpu", "tuning_table": ""},
        )  # fmt: skip

    @classmethod
    def open(cls, config: JobConfig, prepared: Prepared, **options: Any) -> QuickSession:
        return cls(config, prepared)

    @property
    def names(self) -> list[str]:
        return list(self.executor.states)

    def holds(self, names: Collection[str]) -> bool:
        return True

    def send_ahead(self, uses: Any, slot: int) -> None:
        del uses, slot  # all are in places

    def start_all(self, weights: Mapping[int, Any]) -> None:
        self._start(self._config)

    def _start(self, config: JobConfig) -> None:
        replicas = len(self.executor.local_replicas)
        for adapter in config.adapters[len(self.executor.states) :]:
            self.executor.states[adapter.name] = State(adapter.seed, np.zeros(replicas, np.int64))

    def needs_room(self, config: JobConfig) -> bool:
        return len(config.adapters) > len(self.names)

    def add(
        self, config: JobConfig, prepared: Prepared, weights: Mapping[int, Any], clocks: Mapping[str, AdapterProgress]
    ) -> None:
        assert [adapter.name for adapter in config.adapters][: len(self.names)] == self.names
        self._config = config
        self.index |= stack_of(config).index
        self.tasks |= {
            name: task for name, task in tasks_of(config, prepared, clocks).items() if name not in self.tasks
        }
        self._start(config)

    def finish_loading(self, rows: Sequence[Microbatch], report: Callable[[str], None], ahead: Ahead) -> dict[str, Any]:
        return {"base": (0.0, 0.0)}

    def load_states(self, states: Mapping[str, AdapterState]) -> None:
        mine = len(self.executor.local_replicas)
        for name, state in states.items():
            saved, sums = state.sums["sums"], np.zeros(mine, np.int64)
            sums[0] = saved.sum()
            if len(saved) == mine:
                sums = np.array(saved)
            self.executor.states[name] = State(int(state.weights["weight"]), sums)

    def compute_references(self, prepared: Prepared, names: Sequence[str], report: Callable[[str], None]) -> dict:
        assert not names
        return {}

    def take_data(
        self, config: JobConfig, prepared: Prepared, clocks: Mapping[str, AdapterProgress] | None = None
    ) -> None:
        clocks = {name: task.clock for name, task in self.tasks.items()} if clocks is None else clocks
        self.tasks |= tasks_of(select_adapters(config, self.names), prepared, clocks)

    def snapshot(self) -> SimpleNamespace:
        states = {
            name: AdapterState(
                step=self.tasks[name].step,
                data="",
                weights={"weight": np.array(state.weight)},
                optimizer={},
                sums={"sums": state.sums.copy()},
            )
            for name, state in self.executor.states.items()
        }
        return SimpleNamespace(states=lambda: states, adapter=lambda name: {"w": states[name].weights["weight"]})

    def read(self, name: str, *, optimizer: bool) -> Callable[[], SimpleNamespace]:
        weight = np.array(self.executor.states[name].weight)
        return lambda: SimpleNamespace(weights={"w": weight})

    def evaluate(self, name: str) -> Evaluation:
        return Evaluation(loss=self.executor.states[name].weight / MODULUS, tokens=1, metrics={})

    def lacks_memory(self, config: JobConfig) -> None:
        return None

    def compile_reads(self) -> None:
        pass

    def close(self) -> None:
        pass


def export(
    config: Any, adapter: Any, spec: Any, leaves: Mapping[str, np.ndarray], target: Any, record: dict, *, plan: str
) -> None:
    """As `write_adapter`: a folder with digests, but without the files of PEFT."""
    with new_folder(target, replace=True) as folder:
        np.save(folder / WEIGHTS, leaves["w"])
        text = f'{{"step": {record["step"]}, "failed": "{record["failed"] or ""}"}}'
        (folder / "run.json").write_text(text, encoding="utf-8")
