"""A training loop for a Flax NNX model of one's own: rows of several adapters in one batch, accumulation, resume.

A adapters · N examples of a microbatch
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any
from weakref import finalize

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lorafusion_jax.digests import find_damage, refuse_damage
from lorafusion_jax.errors import CheckpointError, ConfigError, RunError
from lorafusion_jax.modules.match import check_owners
from lorafusion_jax.modules.tree import placed_like
from lorafusion_jax.modules.use import use_adapters
from lorafusion_jax.modules.weights import adapter_names, adapter_spec
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.optim.per_adapter import adapter_axes, per_adapter
from lorafusion_jax.readable import RECORD, read_text
from lorafusion_jax.tensor_file import write_tensors

type Row = Mapping[str, Any]  # name → array of one example
type Loss = Callable[[Any, dict[str, jax.Array]], Any]
TENSORS, RECORDS = "state.safetensors", "state.json"
_NEWEST: dict[int, object] = {}  # identity of a model, which may have no hash → a mark of the session that trains it


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStep:
    """What a step of one adapter did.

    Attributes:
        step: its number, from 1.
        loss: mean over the rows since the step before.
        grad_norm: of the gradient of that mean.
    """

    step: int
    loss: float
    grad_norm: float


class Session:
    """Trains the adapters of an NNX model by calls, each as alone.

    Gradients are those of an adapter's mean loss over all of its rows since its last step, however many calls and
    microbatches these came in, and whoever shared them. Dropout follows the adapter's own steps and rows. The model is
    otherwise frozen: what a call changes in its other variables is dropped, so call `model.eval()` before.

    Args:
        model: from `apply_lora`. Its adapters change in place, so everything that takes a model takes it:
            `lf.save_peft(model, "law", folder)`, `merge_adapter`, `use_adapters`.
        optimizers: adapter → its optax transformation.
        capacity: examples of a microbatch; their number does not change programs.
        ragged: names of arrays whose first axis differs between rows, such as tokens and their weights. It is filled
            up with zeros behind its end.
        multiple: lengths of filled arrays are multiples of it: a program compiles for each.

    Another session on the same model replaces this one, whose calls then raise `session.replaced`: both would step.

    Raises:
        ConfigError: `session.adapters`, the optimizers are not those of the model's adapters; `session.capacity`;
            `lora.shared-weight`.

    >>> from lorafusion_jax.modules import AdapterSpec, apply_lora
    >>> specs = [AdapterSpec(name=name, rank=2, alpha=4, targets=("all-linear",)) for name in ("law", "med")]
    >>> session = Session(apply_lora(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), specs, targets=".*"),
    ...     {"law": optax.adamw(1e-2), "med": optax.sgd(1e-1)}, capacity=4)
    >>> def squares(model, rows):  # one loss for each example
    ...     return (model(rows["x"])[:, 0] - rows["y"]) ** 2
    >>> rows = [{"x": np.ones(4, np.float32), "y": np.float32(number)} for number in range(6)]
    >>> losses = session.forward_backward({"law": rows[:5], "med": rows[5:]}, squares)
    >>> {name: step.step for name, step in session.optim_step().items()}, sorted(losses)
    ({'law': 1, 'med': 1}, ['law', 'med'])
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizers: Mapping[str, optax.GradientTransformation],
        *,
        capacity: int = 8,
        ragged: str | Sequence[str] = (),
        multiple: int = 64,
    ):
        check_owners(model)
        self.model, self.names = model, tuple(adapter_names(model))
        _check_optimizers(optimizers, self.names)
        if capacity < 1 or multiple < 1:
            raise ConfigError("session.capacity", f"capacity={capacity} and multiple={multiple} must be 1 or more.")
        self.capacity, self.ragged, self.multiple = (
            capacity,
            frozenset([ragged] if isinstance(ragged, str) else ragged),
            multiple,
        )
        self._specs = [adapter_spec(model, name) for name in self.names]
        self._graph, lora, self._frozen = nnx.split(model, nnx.LoRAParam, ...)
        self._optimizer = per_adapter({name: optimizers[name] for name in self.names})
        zeros = jnp.zeros(len(self.names))
        self._state = {  # all that a resumed session needs
            "adapters": lora,
            "optimizers": self._optimizer.init(lora),
            "gradients": jax.tree.map(jnp.zeros_like, lora),
            "losses": zeros,
            "weights": zeros,
            "steps": np.zeros(len(self.names), np.int32),
            "rows": np.zeros(len(self.names), np.int32),  # since the last step
        }
        self._losses = jax.jit(self._sum_losses, static_argnames=("loss", "train"))
        self._gradients = jax.jit(self._add_gradients, static_argnames="loss", donate_argnums=2)
        self._update = jax.jit(self._step_adapters)
        if id(model) not in _NEWEST:
            finalize(model, _NEWEST.pop, id(model), None)
        self._mark = _NEWEST[id(model)] = object()

    def forward_backward(self, rows: Mapping[str, Sequence[Row]], loss: Loss) -> dict[str, float]:
        """Adds the gradients of rows to those since the last step. A call that fails adds nothing.

        Args:
            rows: adapter → its rows, each a mapping of names to arrays of one example.
            loss: (model, rows with a first axis of examples) → losses [N, …], or losses and their weights, 0 or more.
                A function that is defined once: a program compiles for each.

        Returns:
            The mean loss of each adapter over these rows; 0 where all weights are 0.

        Raises:
            ConfigError: `session.rows`, `lora.unknown-adapter`.
            RunError: `session.loss`, the loss has no value for each example; `session.weights`, weights are below 0.
        """
        self._check_newest()
        state, parts = self._state, []
        gradients, numbers = jax.tree.map(jnp.copy, state["gradients"]), state["rows"].copy()
        for batch, table, number in self._microbatches(rows):
            part, gradients = self._gradients(
                state["adapters"], self._frozen, gradients, batch, table, number, state["steps"], loss=loss
            )
            parts.append(part)
        losses, weights = self._totals(rows, parts)
        for name in rows:
            numbers[self.names.index(name)] += len(rows[name])
        sums = {"losses": state["losses"] + losses, "weights": state["weights"] + weights}
        self._state = state | sums | {"gradients": gradients, "rows": numbers}
        return self._means(rows, losses, weights)

    def forward(self, rows: Mapping[str, Sequence[Row]], loss: Loss) -> dict[str, float]:
        """Returns the mean loss of each adapter over rows, without dropout and without gradients."""
        parts = [
            self._losses(self._state["adapters"], self._frozen, batch, table, number, self._state["steps"], loss=loss,
                         train=False)[1]
            for batch, table, number in self._microbatches(rows)
        ]  # fmt: skip
        return self._means(rows, *self._totals(rows, parts))

    def optim_step(self, adapters: str | Sequence[str] | None = None) -> dict[str, SessionStep]:
        """Takes a step of the adapters that are named, or of all that had rows since their last step. Rows whose
        weights are all 0 are none.

        Raises:
            ConfigError: `lora.unknown-adapter`.
            RunError: `session.no-rows`, an adapter had none; `session.not-finite`, its gradient is not finite. It keeps
                its weights, and what its rows had added is dropped; others step.
        """
        self._check_newest()
        weights = np.asarray(self._state["weights"])
        if adapters is None:
            names = [name for name, weight in zip(self.names, weights, strict=True) if weight]
        else:
            names = [adapters] if isinstance(adapters, str) else list(adapters)
        steps = np.array([self._number(name) for name in names], np.int32)
        empty = [name for name, number in zip(names, steps, strict=True) if not weights[number]]
        if empty or not names:
            message = f"{', '.join(empty)} had no rows" if empty else "no adapter had rows"
            message += " with a weight above 0 since the last step."
            raise RunError("session.no-rows", message, fix="forward_backward with rows of the adapter")
        mask = np.isin(np.arange(len(self.names)), steps)
        self._state, norms, means, finite = self._update(self._state, mask)
        nnx.update(self.model, self._state["adapters"])
        norms, means, finite = (np.asarray(value) for value in (norms, means, finite))
        self._state |= {
            "steps": np.asarray(self._state["steps"]) + (mask & finite),
            "rows": np.where(mask, 0, np.asarray(self._state["rows"])).astype(np.int32),
        }
        if broken := [self.names[number] for number in steps if not finite[number]]:
            message = f"the gradient of {', '.join(broken)} is not finite: no step was taken."
            fix = "look for bad rows, or a learning rate that is too large"
            raise RunError("session.not-finite", message, fix=fix)
        numbers = self._state["steps"]
        return {
            self.names[n]: SessionStep(step=int(numbers[n]), loss=float(means[n]), grad_norm=float(norms[n]))
            for n in steps
        }

    def _check_newest(self) -> None:
        if _NEWEST.get(id(self.model)) is not self._mark:
            raise RunError(
                "session.replaced",
                "another session was opened on this model after this one.",
                why="each would write its own steps over those of the other",
                fix="go on with the newest session, or train a model of its own",
            )

    def save(self, folder: str | Path) -> Path:
        """Writes adapters, states of optimizers, steps and gradients so far to a new folder, atomically."""
        leaves = _by_name(self._state)
        with new_folder(folder) as draft:
            write_tensors(draft / TENSORS, {name: np.asarray(leaf) for name, leaf in leaves.items()})
            (draft / RECORDS).write_text(json.dumps(self._record(), indent=2) + "\n", encoding="utf-8")
        return Path(folder)

    def load(self, folder: str | Path) -> None:
        """Goes on from a folder of `save`: later steps are those of a session that was never interrupted, bit for bit.

        Raises:
            CheckpointError: `lora.no-file`; `session.damaged`; `lora.misfit`, it is of other adapters, optimizers or
                shapes. The session does not change then.
            RunError: `session.replaced`, another session was opened on the model.
        """
        self._check_newest()
        folder = Path(folder)
        if not (folder / TENSORS).is_file():
            raise CheckpointError("lora.no-file", "there is no saved session.", where=str(folder))
        try:
            refuse_damage("session.damaged", find_damage(folder), "restore the folder from a copy")
            record, stored = json.loads(read_text(folder / RECORDS, RECORD)), load_file(folder / TENSORS)
        except (OSError, ValueError, SafetensorError) as problem:
            message, why = "the saved session cannot be read.", str(problem)
            raise CheckpointError("session.damaged", message, where=str(folder), why=why) from None
        leaves = _by_name(self._state)
        problems = [] if record == self._record() else ["its adapters are of another kind, rank, scale or seed"]
        problems += [f"missing: {name}" for name in leaves.keys() - stored.keys()]
        problems += [f"extra: {name}" for name in stored.keys() - leaves.keys()]
        problems += [
            f"{name} is {stored[name].shape} {stored[name].dtype} there and {leaf.shape} {leaf.dtype} here"
            for name, leaf in leaves.items()
            if name in stored and (stored[name].shape, stored[name].dtype) != (leaf.shape, leaf.dtype)
        ]
        if problems:
            message = f"the folder is not a session of this model: {'; '.join(sorted(problems)[:4])}."
            raise CheckpointError("lora.misfit", message, where=str(folder), fix="the adapters and optimizers it had")
        restored = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _like(leaf, stored[jax.tree_util.keystr(path)]), self._state
        )
        self._state = restored
        nnx.update(self.model, restored["adapters"])

    def _record(self) -> dict[str, Any]:
        fields = ("kind", "rank", "scale", "dropout", "seed")
        return {spec.name: {name: getattr(spec, name) for name in fields} for spec in self._specs}

    def _number(self, name: str) -> int:
        if name not in self.names:
            message = f"there is no adapter {name}."
            raise ConfigError("lora.unknown-adapter", message, fix=f"one of {', '.join(self.names)}")
        return self.names.index(name)

    def _totals(self, rows: Mapping[str, Any], parts: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
        """Returns the weighted losses and the weights of each adapter over all microbatches.

        Raises:
            RunError: `session.weights`.
        """
        losses, weights, below = (reduce(jnp.add, sums) for sums in zip(*parts, strict=True))
        if wrong := [name for name in rows if below[self.names.index(name)]]:
            message = f"the loss of {', '.join(wrong)} has weights below 0."
            why = "a mean is the sum of weight · loss over the sum of the weights"
            raise RunError("session.weights", message, why=why, fix="multiply losses, not weights, by advantages")
        return losses, weights

    def _means(self, rows: Mapping[str, Any], losses: Any, weights: Any) -> dict[str, float]:
        with np.errstate(invalid="ignore"):  # of rows whose losses or weights are infinite
            means = np.asarray(losses) / np.asarray(_divisors(weights))
        return {name: float(means[self._number(name)]) for name in rows}

    def _microbatches(self, rows: Mapping[str, Sequence[Row]]) -> Iterator[tuple[dict[str, np.ndarray], Any, Any]]:
        """Yields arrays of examples, the adapter of each and the number of each among its adapter's since the step.

        Rows of like lengths are together. What is not used is a copy of the last row, without an adapter.
        """
        shapes = self._check_rows(rows)
        examples = [
            (self._number(name), int(self._state["rows"][self._number(name)]) + index, row)
            for name, adapter_rows in rows.items()
            for index, row in enumerate(adapter_rows)
        ]
        examples.sort(key=lambda example: self._length(example[2]))
        for start in range(0, len(examples), self.capacity):
            part = examples[start : start + self.capacity]
            length = max(self._length(row) for _, _, row in part)
            unused = self.capacity - len(part)
            batch = {
                name: np.stack([self._filled(name, row[name], length) for _, _, row in [*part, *part[-1:] * unused]])
                for name in shapes
            }
            table = np.array([adapter for adapter, _, _ in part] + [-1] * unused, np.int32)
            yield batch, table, np.array([index for _, index, _ in part] + [0] * unused, np.uint32)

    def _check_rows(self, rows: Mapping[str, Sequence[Row]]) -> Collection[str]:
        """Returns the names of the rows' arrays, whose shapes are equal but for those that are filled up."""
        if not isinstance(rows, Mapping) or not any(map(len, rows.values())):
            raise ConfigError("session.rows", "there are no rows of adapters.", fix='{"NAME": [row, …]}')
        first: dict[str, tuple[int, ...]] | None = None
        for name, adapter_rows in rows.items():
            self._number(name)
            for index, row in enumerate(adapter_rows):
                shapes = {key: np.shape(array)[key in self.ragged :] for key, array in sorted(row.items())}
                first = shapes if first is None else first
                scalars = [key for key in self.ragged & row.keys() if not np.ndim(row[key])]
                if shapes != first or scalars or not self.ragged <= row.keys():
                    message = f"row {index} of {name} has the arrays {_described(row)}, which do not fit "
                    message += f"ragged={sorted(self.ragged)}, or the others' {first}."
                    fix = "equal names and shapes; ragged=[…] names arrays whose first axis differs between rows"
                    raise ConfigError("session.rows", message, fix=fix)
        assert first is not None
        return first

    def _length(self, row: Row) -> int:
        longest = max((len(row[name]) for name in self.ragged), default=0)
        return -(-longest // self.multiple) * self.multiple

    def _filled(self, name: str, array: Any, length: int) -> np.ndarray:
        array = np.asarray(array)
        if name not in self.ragged:
            return array
        return np.pad(array, [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)])

    def _sum_losses(self, lora, frozen, batch, table, number, steps, *, loss: Loss, train: bool = True):
        step = steps[jnp.maximum(table, 0)]
        with use_adapters(self._specs, table, examples=number, step=step, train=train) as context:
            value = loss(nnx.merge(self._graph, lora, frozen, copy=True), batch)
            losses, weights = value if isinstance(value, tuple) else (value, None)
            if losses.shape[:1] != table.shape:
                message = f"the loss has the shape {losses.shape}, and there are {len(table)} examples."
                raise RunError("session.loss", message, fix="one loss for each example, [N, …]")
            sums, counts = context.sums(losses, weights)
            below = jnp.zeros_like(counts) if weights is None else context.sums(losses, jnp.asarray(weights) < 0)[1]
        return sums.sum(), (sums, counts, below)

    def _add_gradients(self, lora, frozen, gradients, batch, table, number, steps, *, loss: Loss):
        differentiated = jax.grad(self._sum_losses, has_aux=True)
        slopes, sums = differentiated(lora, frozen, batch, table, number, steps, loss=loss)
        return sums, jax.tree.map(jnp.add, gradients, slopes)

    def _step_adapters(self, state, mask):
        weights = _divisors(state["weights"])
        means = state["losses"] / weights
        slopes = _each(lambda leaf, factor: leaf * factor, state["gradients"], 1 / weights)
        norms = _norms(slopes, len(self.names))
        finite = jnp.isfinite(norms)
        steps = mask & finite
        slopes = _each(lambda leaf, on: jnp.where(on, leaf, 0), slopes, steps)
        updates, optimizers = self._optimizer.update(slopes, state["optimizers"], state["adapters"], active=steps)
        cleared = {
            "gradients": _each(lambda leaf, used: jnp.where(used, 0, leaf), state["gradients"], mask),
            "losses": jnp.where(mask, 0, state["losses"]),
            "weights": jnp.where(mask, 0, state["weights"]),
        }
        moved = optax.apply_updates(state["adapters"], updates)
        return state | cleared | {"adapters": moved, "optimizers": optimizers}, norms, means, finite


def _divisors(weights_A: jax.Array) -> jax.Array:
    """Divisors of means; those of no weight are 0."""
    return jnp.where(weights_A == 0, 1.0, weights_A)


def _each(function: Callable[[jax.Array, jax.Array], jax.Array], tree: Any, values_A: jax.Array) -> Any:
    """Applies function(leaf, value) to the part of each adapter in every leaf."""

    def apply(leaf: jax.Array, axis: int) -> jax.Array:
        return function(leaf, values_A.reshape(-1, *(1,) * (leaf.ndim - axis - 1)))

    return jax.tree.map(apply, tree, adapter_axes(tree, len(values_A)))


def _norms(tree: Any, count: int) -> jax.Array:
    """The norm of each adapter's part of all leaves."""

    def squares(leaf: jax.Array, axis: int) -> jax.Array:
        return jnp.square(leaf.astype(jnp.float32)).sum([n for n in range(leaf.ndim) if n != axis])

    return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(squares, tree, adapter_axes(tree, count)))))


def _described(row: Row) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(array) for name, array in row.items()}


def _by_name(state: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _like(leaf: Any, array: np.ndarray) -> Any:
    return placed_like(leaf, array) if isinstance(leaf, jax.Array) else array


def _check_optimizers(optimizers: object, names: Sequence[str]) -> None:
    """Checks that each adapter of a model has an optimizer.

    Raises:
        ConfigError: `session.adapters`.
    """
    fix = "an optimizer for each adapter of apply_lora"
    if not names:
        raise ConfigError("session.adapters", "the model has no adapters.", fix="Session(apply_lora(model, specs), …)")
    if not isinstance(optimizers, Mapping):
        fix = f"{{{', '.join(f'{name!r}: …' for name in names)}}}"
        raise ConfigError("session.adapters", "the optimizers are no mapping of adapters.", fix=fix)
    if set(optimizers) != set(names):
        with_optimizers = ", ".join(map(str, optimizers)) or "nobody"
        message = f"the optimizers are of {with_optimizers}, and the adapters are {', '.join(names)}."
        raise ConfigError("session.adapters", message, fix=fix)
    if wrong := [name for name, optimizer in optimizers.items() if not callable(getattr(optimizer, "update", None))]:
        message = f"the optimizer of {', '.join(wrong)} is none of optax."
        raise ConfigError("session.adapters", message, fix=f"{wrong[0]!r}: optax.adamw(1e-4)")
