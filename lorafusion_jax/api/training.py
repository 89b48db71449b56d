"""`training_client`: adapters trained by calls from Python, as with Tinker's SDK, without a server."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from lorafusion_jax.api.arguments import names_unknown, read_settings
from lorafusion_jax.api.custom_loss import CustomLoss, differentiate
from lorafusion_jax.api.sampling import SampledSequence, SamplerBank, SamplingParams
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.places import Places
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.stack import check_session
from lorafusion_jax.data.tokenizer import Tokenizer, load_tokenizer
from lorafusion_jax.errors import CallError, CheckpointError, RunError
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.objective.rows import TARGETS, WEIGHTS
from lorafusion_jax.peft.read_config import CONFIG_FILE
from lorafusion_jax.readable import has_file, has_folder
from lorafusion_jax.session import AdapterState, Session, Task
from lorafusion_jax.session.calls import (
    Call,
    ForwardBackward,
    LoadState,
    OptimStep,
    Row,
    RowsResult,
    SaveState,
    StepDone,
    dense,
)
from lorafusion_jax.session.export import export_task
from lorafusion_jax.session.session_thread import SessionThread, other_process
from lorafusion_jax.session.stream import Stream

AdamParams = OptimStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence, and the inputs of its loss. Data of Tinker's SDK can take its place.

    Args:
        model_input: token ids, N of them.
        loss_fn_inputs: name → array with N entries: "target_tokens", "weights", …, see `forward_backward`.
    """

    model_input: Any
    loss_fn_inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of `forward_backward` and `forward`.

    Attributes:
        loss_fn_outputs: of each datum "logprobs" of the shape of its targets; of cross-entropy also "elementwise_loss".
        metrics: "loss:sum", and those of a custom loss.
    """

    loss_fn_outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float]


class _OfProcess:
    """Is not copied into another process."""

    def __reduce__(self) -> Any:
        raise other_process()


class CallFuture[T](_OfProcess):
    """The result of a call to come: `result()` waits for it, and so does `await`."""

    def __init__(self, future: Future[Any], client: Any, read: Callable[[Any], T] = lambda value: value):
        self._future, self._read = future, read
        self._client = client  # which would end without a reference, and the call with it

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result.

        Raises:
            CallError: the call failed.
            TimeoutError: it takes longer than `timeout` seconds.
        """
        return self._read(self._future.result(timeout))

    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        value = yield from asyncio.wrap_future(self._future).__await__()
        return self._read(value)


@names_unknown
def training_client(
    base: str | Path | Mapping[str, Any],
    *,
    rank: int = 32,
    alpha: float = 32.0,
    seed: int = 0,
    targets: str | list[str] = "all-linear",
    places: Mapping[Any, int] | None = None,
    reproducible: bool = False,
    batch: Mapping[str, Any] | None = None,
    mesh: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
) -> TrainingClient:
    """Loads a base model, and returns a client that trains an adapter of it by calls.

    The calls are those of Tinker's training client: `forward_backward` adds gradients, `optim_step` takes a step of
    AdamW. They return at once, and run in their order. `new_client` trains more adapters on the same base, whose data
    share microbatches.

    Args:
        base: folder or hub name of the model, or the section `base` of a job file.
        rank, alpha: of the adapter; the low-rank product is scaled by alpha / rank.
        targets: projections that it adapts; a list also bounds those of more clients, which saves memory.
        seed: of its first weights.
        places: rank → number of adapters that can train at a time (None: one of `rank`).
        reproducible: results do not depend on the company of other clients, or on when calls arrive, by a single bit;
            microbatches are less full.
        batch, mesh, train: sections of a job file, of which `batch.capacity_tokens` is the longest sequence.

    Raises:
        LoraFusionError: the base, the mesh or the memory do not fit.

    Example:
        >>> from lorafusion_jax.examples import examples_directory
        >>> base = {"model": examples_directory() / "base", "dtype": "float32"}
        >>> small = {"batch": {"capacity_tokens": 128, "tile_tokens": 16}, "train": {"block_layers": 1}}
        >>> tokens = [5, 6, 7, 8]
        >>> datum = Datum(model_input=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0, 1, 1]})
        >>> with training_client(base, rank=2, targets=["q_proj"], **small) as client:
        ...     before = client.forward_backward([datum], "cross_entropy")
        ...     step = client.optim_step(learning_rate=1e-2)
        ...     after = client.forward([datum], "cross_entropy")
        ...     before.result().metrics["loss:sum"] > after.result().metrics["loss:sum"], step.result().step
        (True, 1)
    """
    sections = {
        "base": base if isinstance(base, Mapping) else {"model": base},
        "batch": batch,
        "mesh": mesh,
        "train": train,
    }
    no_data = {"train": "-", "max_length": 2}
    adapter = {"name": "client", "data": no_data, "lora": {"rank": rank, "alpha": alpha, "targets": targets}}
    job = {name: section for name, section in sections.items() if section is not None} | {"adapters": [adapter]}
    config = parse_config(source_of(job))
    check_session(config)
    narrow = None if isinstance(targets, str) else targets
    classes = Places.of({rank: 1} if places is None else places, dropout=False, targets=narrow)
    if not classes.holds("lora", rank):  # before the base is read
        raise _no_place(classes, rank, f"rank {rank} is above the largest place, {max(classes.ranks)}")
    prepare_machine()
    session = Session.open_places(
        config.base,
        config.mesh,
        classes,
        batch=config.batch,
        train=config.train,
        directory=config.directory,
        reproducible=reproducible,
        row_targets=1,
    )
    shared = _Shared(SessionThread(session), targets, base_directory(config))
    try:
        return TrainingClient(shared, rank=rank, alpha=alpha, seed=seed, targets=targets)
    except BaseException:
        shared.thread.close()
        raise


@dataclass(slots=True)
class _Shared:
    """What the clients of one session share."""

    thread: SessionThread
    targets: str | list[str]
    base: Path
    clients: set[str] = field(default_factory=set)
    numbers: Any = field(default_factory=itertools.count)
    banks: dict[Any, SamplerBank] = field(default_factory=dict)
    seeds: int = 0  # that samples without a seed have had; only the session's thread draws
    writers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "writes"))
    tokenizer: Future[Tokenizer] = field(init=False)  # read with the base: its folder may be gone at the first sample

    def __post_init__(self) -> None:
        self.tokenizer = self.writers.submit(load_tokenizer, self.base)

    def end(self, name: str) -> None:
        """Ends a client, and after the last one the session. In a fork of the process it does nothing."""
        if self.thread.is_copy:
            return
        self.clients.discard(name)
        wait([self.thread.do(lambda session: session.forget(name))])
        if not self.clients:
            self.thread.close()
            self.writers.shutdown()


class TrainingClient(_OfProcess):
    """Trains one adapter by calls; see `training_client`, which opens the first one.

    A call that fails adds nothing, and later calls run. Methods may be called in any thread of the process that opened
    it, and not in a fork of that.
    """

    def __init__(self, shared: _Shared, **adapter: Any):
        self._shared = shared
        name = f"client-{next(shared.numbers)}"
        self._task: Task = shared.thread.do(lambda session: _start(session, name, adapter)).result()
        source = self._task.source
        assert isinstance(source, Stream)
        self._stream = source
        source.wake = shared.thread.wake
        shared.clients.add(name)
        # The last reference may go in any thread, the session's own among them, which cannot wait for itself.
        self._end = weakref.finalize(self, lambda: threading.Thread(target=shared.end, args=(name,)).start())
        self._end.atexit = False

    def forward_backward(
        self, data: Iterable[Any], loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float] | None = None
    ) -> CallFuture[ForwardBackwardOutput]:
        """Adds the gradients of the sum of the losses of all positions.

        Args:
            data: `Datum`s. Targets are [N]; of cross-entropy also [N, K], with weights of that shape.
            loss_fn: "cross_entropy" with "weights"; "importance_sampling", "ppo", "cispo", "dro" or "gspo" with
                "logprobs" of the sampler and "advantages"; "gspo" also with "sequence_ratio_mask".
            loss_fn_config: "clip_low_threshold", "clip_high_threshold", "beta"; thresholds may also be inputs.
        """
        return self._run_rows(list(map(_row, _listed(data))), loss_fn, loss_fn_config)

    def forward(
        self, data: Iterable[Any], loss_fn: str = "cross_entropy", loss_fn_config: Mapping[str, float] | None = None
    ) -> CallFuture[ForwardBackwardOutput]:
        """Computes log-probabilities and losses without gradients; arguments as in `forward_backward`."""
        return self._run_rows(list(map(_row, _listed(data))), loss_fn, loss_fn_config, forward_only=True)

    def forward_backward_custom(
        self, data: Iterable[Any], loss_fn: CustomLoss, *, returns_gradients: bool = False
    ) -> CallFuture[ForwardBackwardOutput]:
        """Adds the gradients of any function of the log-probabilities. Waits for a forward pass.

        Args:
            data: `Datum`s with "target_tokens"; other inputs are for the loss only.
            loss_fn: (data, log-probabilities of each datum) → (loss, metrics), by operations of jax, which
                differentiates the loss.
            returns_gradients: the loss returns (loss, metrics, gradients with respect to each array); it may use numpy.
        """
        data = _listed(data)
        rows = [_row(datum) for datum in data]
        rows = [Row(tokens=row.tokens, inputs=_targets_of(row, np.zeros)) for row in rows]
        outputs = self._run_rows(rows, "cross_entropy", None, forward_only=True).result().loss_fn_outputs
        logprobs = [output["logprobs"] for output in outputs]
        loss, metrics, gradients = differentiate(loss_fn, data, logprobs, returns_gradients)
        surrogate_rows = [
            Row(tokens=row.tokens, inputs={**row.inputs, WEIGHTS: -np.asarray(gradient)})
            for row, gradient in zip(rows, gradients, strict=True)
        ]

        def read(result: RowsResult) -> ForwardBackwardOutput:
            surrogate = {"surrogate_loss:sum": result.metrics["loss:sum"]}
            return ForwardBackwardOutput(
                loss_fn_outputs=result.outputs, metrics={**metrics, "loss:sum": loss, **surrogate}
            )

        return CallFuture(self._submit(ForwardBackward(rows=surrogate_rows)), self, read)

    def optim_step(self, adam_params: Any = None, **numbers: float) -> CallFuture[StepDone]:
        """Takes a step of AdamW with what was added since the last one; without any of it, with gradients of zero.

        Args:
            adam_params: `AdamParams`, the SDK's, or a dict; or give its numbers by name: `learning_rate`, `beta1`,
                `beta2`, `eps`, `weight_decay`, `grad_clip_norm` (0: no clipping).
        """
        step = read_settings(OptimStep, adam_params, numbers, code="call.optimizer", argument="adam_params")
        return CallFuture(self._submit(step), self)

    def save_state(self, path: str | Path, *, overwrite: bool = False) -> CallFuture[Path]:
        """Writes the adapter with its optimizer as a folder, from which `load_state_with_optimizer` continues."""
        return self._write(SaveState(), Path(path), lambda state, target: state.write(target), overwrite)

    def save_weights_for_sampler(self, path: str | Path, *, overwrite: bool = False) -> CallFuture[Path]:
        """Writes the adapter as a PEFT folder."""

        def write(state: AdapterState, target: Path) -> Path:
            return export_task(self._task, state, target, name=target.name)

        return self._write(SaveState(optimizer=False), Path(path), write, overwrite)

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """Returns a client that samples from the adapter as it is after the calls so far. Waits for its weights."""
        state = self._submit(SaveState(optimizer=False)).result()
        return SamplingClient(self, state.weights)

    def load_state(self, path: str | Path) -> CallFuture[None]:
        """Loads the weights of a `save_state`, after saves before it are written; the optimizer begins anew."""
        return self._load(path, optimizer=False)

    def load_state_with_optimizer(self, path: str | Path) -> CallFuture[None]:
        """Continues from a `save_state`, after saves before it are written."""
        return self._load(path, optimizer=True)

    @names_unknown
    def new_client(
        self, *, rank: int = 32, alpha: float = 32.0, seed: int = 0, targets: str | list[str] | None = None
    ) -> TrainingClient:
        """Returns a client for another adapter of the same base; arguments as in `training_client`.

        Args:
            targets: None: those of the first client.

        Raises:
            RunError: `session.place`, no place is free.
        """
        targets = self._shared.targets if targets is None else targets
        return TrainingClient(self._shared, rank=rank, alpha=alpha, seed=seed, targets=targets)

    def close(self) -> None:
        """Ends the client; calls without a result fail. The last client of a session ends the session.

        A client to which nothing refers any more, nor to its results and samplers, ends by itself.
        """
        if self._end.detach() is not None:
            self._shared.end(self._task.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, call: Call) -> Future[Any]:
        self._shared.thread.check_process()
        return self._stream.submit(call)

    def _run_rows(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, float] | None, *, forward_only: bool = False
    ) -> CallFuture[ForwardBackwardOutput]:
        call = ForwardBackward(rows=rows, loss=loss, config=dict(config or {}), forward_only=forward_only)
        return CallFuture(
            self._submit(call),
            self,
            lambda result: ForwardBackwardOutput(loss_fn_outputs=result.outputs, metrics=result.metrics),
        )

    def _write(
        self, call: SaveState, target: Path, write: Callable[[AdapterState, Path], Path], overwrite: bool
    ) -> CallFuture[Path]:
        def refuse_existing() -> None:
            if target.exists() and not overwrite:
                raise RunError("save.exists", f"{target} exists.", fix="another path, or overwrite=True")

        def write_new() -> Path:
            refuse_existing()  # calls before this one may have written it by now
            return write(state.result(), target)

        refuse_existing()
        state = self._submit(call)

        return CallFuture(self._shared.writers.submit(write_new), self)

    def _load(self, path: str | Path, *, optimizer: bool) -> CallFuture[None]:
        self._shared.thread.check_process()
        # Where saves are written, so that it reads what calls before it have saved there.
        state = self._shared.writers.submit(self._read_state, Path(path)).result()
        return CallFuture(self._submit(LoadState(state=state, optimizer=optimizer)), self)

    def _read_state(self, folder: Path) -> AdapterState:
        if not has_folder(folder) or has_file(folder / CONFIG_FILE):
            message = f"{folder} is a PEFT folder." if has_folder(folder) else f"there is no folder {folder}."
            raise CheckpointError("state.missing", message, fix="the folder of a save_state")
        return AdapterState.read(folder, self._task.adapter)


class SamplingClient(_OfProcess):
    """Samples from an adapter as it was; see `TrainingClient.save_weights_and_get_sampling_client`."""

    def __init__(self, client: TrainingClient, weights: Mapping[str, np.ndarray]):
        self._client, self._weights = client, weights
        self._shared, self._task = client._shared, client._task
        self._number = next(self._shared.numbers)

    def sample(
        self, prompt: Any, num_samples: int = 1, sampling_params: Any = None, **settings: Any
    ) -> CallFuture[list[SampledSequence]]:
        """Draws samples. Training goes on afterwards.

        Args:
            prompt: token ids, or a model input of the SDK.
            sampling_params: `SamplingParams`, the SDK's, or a dict; or give its settings by name.
        """
        params = read_settings(
            SamplingParams, sampling_params, settings, code="call.sampling", argument="sampling_params"
        )
        tokens = _tokens(prompt).tolist()
        if not isinstance(num_samples, int | np.integer) or num_samples < 1:
            raise CallError("call.sampling", f"num_samples is {num_samples!r}, not a whole number from 1.")

        def sample(session: Session) -> list[SampledSequence]:
            key = self._task.spec.rank, self._task.spec.targets, self._task.spec.scale
            if key not in self._shared.banks:
                self._shared.banks[key] = SamplerBank(session, self._task, self._shared.tokenizer.result())
            with_seed = replace(params, seed=self._shared.seeds) if params.seed is None else params
            self._shared.seeds += num_samples if params.seed is None else 0
            return self._shared.banks[key].sample(self._number, self._weights, tokens, num_samples, with_seed)

        return CallFuture(self._shared.thread.do(sample), self)


def _start(session: Session, name: str, adapter: Mapping[str, Any]) -> Task:
    task = session.new_stream(name, **adapter)
    why_none = session.places.refuses(task.spec)
    if why_none or (free_place := session.find_place(task.spec)) is None:
        lacking = set(task.spec.targets) - set(session.places.targets or task.spec.targets)
        raise _no_place(session.places, task.spec.rank, why_none, lacking)
    session.start(free_place, task)
    return task


def _no_place(places: Places, rank: int, why_none: str, lacking: Iterable[str] = ()) -> RunError:
    """What to say where an adapter has no place.

    Args:
        why_none: why no place of the session would do; empty: all that would are taken.
        lacking: its targets that no place has.
    """
    counts = Counter(places.ranks) + Counter([rank])
    more = f"training_client(…, places={{{', '.join(f'{of}: {count}' for of, count in sorted(counts.items()))}}})"
    if lacking and rank <= max(places.ranks):
        more = f"training_client(…, targets={sorted({*(places.targets or ()), *lacking})})"
    why = why_none or "all places that fit are taken"
    fix = more if why_none else f"close a client, or {more}"
    return RunError("session.place", f"no place for an adapter of rank {rank}.", why=why, fix=fix)


def _listed(data: Any) -> list[Any]:
    """Reads the data of a call, which is a list also where it is one datum."""
    if isinstance(data, Mapping) or hasattr(data, "model_input"):
        raise CallError("call.inputs", "the data of a call is one datum, not a list.", fix="[datum]")
    if not isinstance(data, Iterable):
        raise CallError("call.inputs", f"the data of a call is {data!r}, not a list.", fix="[datum]")
    return list(data)


def _row(datum: Any) -> Row:
    """Reads a `Datum`, one of the SDK, or a mapping with the same names."""
    get = datum.get if isinstance(datum, Mapping) else lambda name: getattr(datum, name, None)
    tokens, inputs = get("model_input"), get("loss_fn_inputs")
    if tokens is None or not isinstance(inputs, Mapping):
        raise CallError("call.inputs", "a datum without model_input and loss_fn_inputs.", fix="lf.Datum(…)")
    if isinstance(datum, Mapping) and (unknown := datum.keys() - {"model_input", "loss_fn_inputs"}):
        message = f"a datum with {', '.join(map(repr, unknown))}."
        raise CallError("call.inputs", message, why="it has model_input and loss_fn_inputs, with all else inside")
    return Row(tokens=_tokens(tokens), inputs={name: _array(value) for name, value in inputs.items()})


def _tokens(model_input: Any) -> np.ndarray:
    to_ints = getattr(model_input, "to_ints", None)
    return np.asarray(model_input if to_ints is None else to_ints())


def _array(value: Any) -> np.ndarray:
    """Reads an array, a list, or a tensor of the SDK, which may be sparse."""
    rows = getattr(value, "sparse_crow_indices", None)
    if rows is not None:
        return dense(np.asarray(value.data), rows, value.sparse_col_indices, value.shape)
    to_numpy = getattr(value, "to_numpy", None)
    return np.asarray(value if to_numpy is None else to_numpy())


def _targets_of(row: Row, weights: Callable[[tuple[int, ...]], np.ndarray]) -> dict[str, np.ndarray]:
    if TARGETS not in row.inputs:
        raise CallError("call.inputs", f"a custom loss needs the input {TARGETS}.")
    return {TARGETS: row.inputs[TARGETS], WEIGHTS: weights(row.inputs[TARGETS].shape)}
