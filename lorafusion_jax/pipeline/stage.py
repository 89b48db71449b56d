"""One stage of the pipeline: its arrays, and the effect of each event on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.layout.extent import Extent, Piece
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.objective.batch import metric_names
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.optim.step import Hyper, hyper, unchanging_hyper
from lorafusion_jax.pipeline import leaves as lv
from lorafusion_jax.pipeline.adapter_step import BatchSummary, Totals
from lorafusion_jax.pipeline.end_programs import of_heads
from lorafusion_jax.pipeline.first_weights import first_weights
from lorafusion_jax.pipeline.leaves import Leaves
from lorafusion_jax.pipeline.mesh import StageMesh
from lorafusion_jax.pipeline.move import replicate, to_host
from lorafusion_jax.pipeline.parts import Parts
from lorafusion_jax.pipeline.programs import StagePrograms
from lorafusion_jax.pipeline.stage_weights import StageWeights

NO_SLOT = -1  # slot of a pass outside of a plan


class _InFlight(NamedTuple):
    """Arrays of a microbatch between its forward and its backward pass on a stage."""

    inputs: Any
    xs: list[Array]  # input of each block
    residuals: list[Any]
    dy: Array | None  # on the last stage, from the head
    rows: tuple[Any, Any] | None = None  # tokens and their adapters, where rows of the embedding are trained


class Stepped(NamedTuple):
    """Result of an adapter's step on one stage."""

    alive: Array  # [A], whether each adapter's last step was taken; ready when the step is done
    finite: Array  # whether the new values are finite: per leaf in order of `leaf_names`, then the optimizer state
    before: tuple[Leaves, Any] | None  # weights and optimizer state before the step; None with one stage


class Stage:
    """One stage of the pipeline. Methods dispatch and return at once unless their docstring says that they wait.

    Args:
        parts: pieces of the model.
        weights: frozen arrays on this stage's devices; `replace_base` replaces them.
        mesh: its devices.
        adapters: settings of the adapters, in stacking order.
        remat: rematerialisation policy.
        block: layers per program.
    """

    def __init__(
        self,
        parts: Parts,
        weights: StageWeights,
        mesh: StageMesh,
        adapters: Sequence[AdapterConfig],
        *,
        remat: RematPolicy,
        block: int,
    ):
        self.mesh = mesh
        self.remat: RematPolicy = remat
        self.programs = StagePrograms(parts, mesh, weights.extent, remat)
        self._columns = self.programs.columns
        self._parts, self._adapters, self._specs = parts, list(adapters), list(parts.specs)
        self._groups = _groups(weights.extent.pieces, block)
        self.replace_base(weights)
        firsts = [weights.extent.pieces[group[0]].layer for group in self._groups]
        self._numbers = [replicate(np.int32(first), mesh) for first in firsts]  # first layer of each block
        trained = self._columns.trained
        self._own = [lv.own_columns(trained, index, spec) for index, spec in enumerate(parts.specs)]
        self._places = [replicate(lv.place_of(trained, index, spec), mesh) for index, spec in enumerate(parts.specs)]
        self._random_activations, self._random_gradients = (
            jax.jit(made, static_argnums=(1, 2), out_shardings=mesh.by_replica)
            for made in (_random_activations, _random_gradients)
        )
        self._in_flight: dict[int, _InFlight] = {}
        self._gradients: dict[int, Leaves] = {}
        self.lora: Leaves = {}
        self.constants: Leaves = {}  # of adapters, not changed by training
        self.prepared: Leaves = {}  # of adapters, computed again after each of their steps
        self._stale: set[int] = set()  # adapters that have changed since
        self._preparing = threading.Lock()  # a stage compiles passes and evaluations in two threads
        self.sums: Leaves = {}
        self.optimizers: dict[str, Any] = {}
        self.totals: Totals | None = None  # on the last stage
        self.alive: Array = replicate(np.ones(len(adapters), bool), mesh)
        self.vacant: frozenset[int] = frozenset()  # places that no adapter has now; they have no optimizer state

    def replace_base(self, weights: StageWeights) -> None:
        """Replaces the frozen arrays, which may have been placeholders."""
        self.weights = weights
        self._stale = self._with_prepared
        self._blocks = [tuple(weights.pieces[number] for number in group) for group in self._groups]

    @property
    def extent(self) -> Extent:
        return self.weights.extent

    def layers_of(self, leaf: str) -> range:
        """The part of a leaf's first axis that this stage has: its layers, or all of what is not of layers."""
        return self._parts.leaves.rows_of(leaf, self.extent)

    def layer_numbers(self, leaf: str) -> list[int]:
        """Numbers of this stage's layers that have a leaf."""
        numbers = self._parts.model.layers_with(lv.path_of(leaf))
        return [numbers[row] for row in self.layers_of(leaf)]

    @property
    def parts(self) -> Parts:
        return self._parts

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in stacking order."""
        return [spec.name for _, spec in self.occupied]

    @property
    def all_names(self) -> list[str]:
        """Names by position, those of stand-ins in vacant places."""
        return [spec.name for spec in self._specs]

    @property
    def occupied(self) -> list[tuple[int, AdapterSpec]]:
        """The adapters with their positions."""
        return [(index, spec) for index, spec in enumerate(self._specs) if index not in self.vacant]

    def first_lora(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the initial weights of each adapter in all layers of the model."""
        return {spec.name: first_weights(self._parts.leaves, spec) for spec in self._parts.specs}

    def start(self, lora: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Sets each adapter's initial weights, given for all layers of the model, and resets all other state."""
        self._in_flight, self._gradients, self.totals = {}, {}, None
        self.alive = replicate(np.ones(len(self._adapters), bool), self.mesh)
        self.take_weights(lora)
        rows, replicas = self.mesh.by_replica, self.mesh.replicas
        shapes = {name: (replicas, *leaf.shape) for name, leaf in self.lora.items()}

        def zeros():
            return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}

        self.sums, self.totals = jax.jit(zeros, out_shardings=rows)(), self._more_totals()
        self.optimizers = self._new_optimizers()

    def replace_objectives(self, chosen: Sequence[Chosen]) -> None:
        """Replaces the objectives of a session whose adapters change; sums of metrics that exist stay.

        Args:
            chosen: as in `totals_of`.
        """
        if self.weights.head is not None:
            self.programs.ends.replace_objectives(chosen)
            self.totals = self._more_totals()

    def _more_totals(self) -> Totals | None:
        """Returns the sums with zeros for metrics that had none."""
        if self.weights.head is None:
            return None
        names = [name for name in ("loss", *metric_names(self.programs.ends.chosen)) if name not in (self.totals or {})]
        shape = (self.mesh.replicas, len(self._specs))
        zeros = jax.jit(
            lambda: {name: jnp.zeros(shape, jnp.float32) for name in names}, out_shardings=self.mesh.by_replica
        )
        return (self.totals or {}) | zeros()

    def take_weights(self, lora: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Sets each adapter's leaves, given for all layers of the model."""

        def put(columns: Mapping[str, lv.Columns]) -> Leaves:
            whole: Leaves = {}
            shapes = self.leaf_shapes
            for name, at in columns.items():  # leaf by leaf, so that the host does not hold all of them twice
                layers = self.layers_of(name)
                of_specs = [lora.get(spec.name, {}) for spec in self._specs]
                by_adapter = [{name: leaves[name][layers]} if name in leaves else {} for leaves in of_specs]
                stacked = lv.stack_adapters({name: at}, by_adapter, shapes)
                whole[name] = replicate(stacked[name], self.mesh)
            return whole

        self.lora, self.constants = put(self._columns.trained), put(self._columns.constants)
        self.prepared, self._stale = self._no_prepared(), self._with_prepared

    @property
    def leaf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the leaves of all adapters on this stage."""
        shapes = self._parts.leaves.lora_shapes(1)
        return {name: (len(self.layers_of(name)), *shape[1:]) for name, shape in shapes.items()}

    def start_from_base(self, index: int) -> None:
        """Sets an adapter's initial values that depend on the frozen kernels. Waits for them."""
        spec = self._specs[index]
        leaves = {name: np.array(to_host(leaf)) for name, leaf in self.adapter(index).items()}
        shared = {name.removeprefix(lv.SHARED): leaf[0] for name, leaf in leaves.items() if name.startswith(lv.SHARED)}
        starts = adapter_kind(spec.kind).start is not None
        for piece, weights in zip(self.extent.pieces, self.weights.pieces if starts else (), strict=starts):
            for linear in self._parts.model.layer(piece.layer).linears_of(piece.half):
                if not spec.has(f"{lv.LAYERS}{piece.layer}.{linear.path}"):
                    continue
                path = f"{lv.LAYERS}{linear.path}."
                layer = self.layer_numbers(path).index(piece.layer)
                tensors = {name.removeprefix(path): leaves[name][layer] for name in leaves if name.startswith(path)}
                kernel = weights[f"{linear.path}.kernel"]
                for leaf, value in self.programs.kinds.start_from_base(spec, linear, kernel, shared | tensors).items():
                    leaves[f"{path}{leaf}"][layer] = to_host(value)
        for name, table in ((lv.EMBED_ROWS, self.weights.embed), (lv.HEAD_ROWS, self.weights.head)):
            if table is not None and name in leaves:
                tokens = self._parts.leaves.token_ids(spec, "embed" if name == lv.EMBED_ROWS else "head")
                leaves[name] = to_host(self.programs.adapters.first_rows(table, tokens))
        self.lora = self._with_own(self._columns.trained, self.lora, index, leaves)
        self.constants = self._with_own(self._columns.constants, self.constants, index, leaves)
        self._stale |= self._with_prepared & {index}

    def _no_prepared(self) -> Leaves:
        shapes = self._parts.leaves.lora_shapes(self._parts.model.num_layers)
        return {
            name: replicate(np.ones((len(self.layers_of(name)), *shapes[name][1:]), np.float32), self.mesh)
            for name in self._columns.prepared
        }

    @property
    def _with_prepared(self) -> set[int]:
        """The adapters whose kinds prepare tensors."""
        return {index for index, spec in enumerate(self._specs) if adapter_kind(spec.kind).prepare is not None}

    def _prepare(self) -> None:
        """Computes what kinds prepare for the adapters that have changed, see `AdapterKind.prepare`."""
        with self._preparing:
            for index in sorted(self._stale):
                for block, number in zip(self._blocks, self._numbers, strict=True):
                    leaves, number_of_adapter = self.lora | self.constants, self._places[index].index
                    self.prepared = self.programs.kinds.prepare(
                        self._specs[index], block, leaves, number, number_of_adapter, self.prepared
                    )
            self._stale.clear()

    def _with_own(
        self, columns: Mapping[str, lv.Columns], leaves: Leaves, index: int, values: Mapping[str, np.ndarray]
    ) -> Leaves:
        """Returns the leaves with an adapter's replaced."""
        names = [name for name, _ in lv.own_columns(columns, index, self._specs[index])]
        if not names:
            return leaves
        adapter = lv.place_of(columns, index, self._specs[index])
        first, arrays = replicate((adapter.first, {name: values[name] for name in names}), self.mesh)
        return self.programs.adapters.put(leaves, first, arrays)

    @property
    def all_leaves(self) -> Leaves:
        """The leaves of all adapters on this stage, with what their kinds prepare."""
        self._prepare()
        return self.lora | self.constants | self.prepared

    def assign(self, index: int, adapter: AdapterConfig, spec: AdapterSpec) -> None:
        """Gives a place to another adapter, of at most the rank and targets that the place was made for."""
        self._adapters[index], self._own[index] = adapter, lv.own_columns(self._columns.trained, index, spec)
        self._places[index] = replicate(lv.place_of(self._columns.trained, index, spec), self.mesh)
        # Not in place: a snapshot that is still read has the specifications and places of its time.
        self._specs = [*self._specs[:index], spec, *self._specs[index + 1 :]]
        self.vacant -= {index}
        self._stale |= self._with_prepared & {index}

    def write(
        self, index: int, weights: Mapping[str, np.ndarray], optimizer: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Writes the weights of a place's adapter and clears its sums. Other adapters do not change.

        Args:
            weights: for all layers of the model.
            optimizer: arrays of its state by path, for all layers (None: the initial state).
        """
        spec, adapter = self._specs[index], self._places[index]
        known = self._columns.trained | self._columns.constants
        new_leaves = {name: np.asarray(leaf)[self.layers_of(name)] for name, leaf in weights.items() if name in known}
        trained = replicate(
            {name: leaf for name, leaf in new_leaves.items() if name in self._columns.trained}, self.mesh
        )
        self._gradients.pop(index, None)
        self.lora, self.sums, self.totals, self.alive = self.programs.adapters.write(
            self._own[index], adapter, self.lora, self.sums, self.totals, self.alive, trained
        )
        self.constants = self._with_own(self._columns.constants, self.constants, index, new_leaves)
        self._stale |= self._with_prepared & {index}
        optim = self._adapters[index].optim
        if optimizer is None:
            first = self.programs.adapters.first_optimizer(self._own[index], optim, adapter, self.lora)
            self.optimizers[spec.name] = first
        else:
            init = partial(self.programs.adapters.init_optimizer, self._own[index], optim)
            shapes = jax.eval_shape(init, adapter, self.lora)
            self.optimizers[spec.name] = replicate(self.part_of_state(shapes, optimizer), self.mesh)

    def part_of_state(self, state: Any, arrays: Mapping[str, Any]) -> Any:
        """Returns an optimizer state of this stage with arrays of the whole model in it, which are given by path."""

        def fill(path: tuple, before: Any) -> np.ndarray:
            name = lv.path_text(path)
            array, leaf = np.asarray(arrays[name]), lv.leaf_of(name)
            return array if leaf is None or not before.ndim else array[self.layers_of(leaf)]

        return jax.tree_util.tree_map_with_path(fill, state)

    def _new_optimizers(self) -> dict[str, Any]:
        """Creates the initial states of all optimizers, with a program that makes one of each kind per call."""
        occupied = [[index for index in members if index not in self.vacant] for members in self._by_kind().values()]
        kinds = [members for members in occupied if members]

        def new(places: list[lv.Place], lora: Leaves) -> list[Any]:
            return [
                self.programs.adapters.init_optimizer(
                    self._own[members[0]], self._adapters[members[0]].optim, adapter, lora
                )
                for members, adapter in zip(kinds, places, strict=True)
            ]

        program, states = jax.jit(new, out_shardings=self.mesh.everywhere), {}
        for turn in range(max(map(len, kinds))):
            chosen = [
                members[min(turn, len(members) - 1)] for members in kinds
            ]  # a kind with fewer adapters repeats its last
            made = program([self._places[index] for index in chosen], self.lora)
            states |= {self._specs[index].name: state for index, state in zip(chosen, made, strict=True)}
        return {name: states[name] for name in self.names}

    def _by_kind(self) -> dict[tuple, list[int]]:
        """Groups adapters whose optimizer steps share one program."""
        kinds: dict[tuple, list[int]] = {}
        for index, settings in enumerate(self._adapters):
            optim = settings.optim
            kind = (self._own[index], optim.name, optim.clip > 0, *optim.lr_ratios)
            kinds.setdefault(kind, []).append(index)
        return kinds

    def one_of_every_kind(self) -> list[int]:
        """Returns adapters that together use all programs of adapters."""
        return [members[0] for members in self._by_kind().values()]

    def trainable_arrays(self) -> list[Any]:
        """Returns all arrays that training changes."""
        return [self.lora, self.sums, self.optimizers]

    def count_elements(self) -> dict[str, int]:
        """Counts the elements stored for training on one replica: weights, gradients, moments."""
        moments = [leaf for leaf in jax.tree.leaves(self.optimizers) if leaf.ndim]
        return {
            "weights": sum(leaf.size for leaf in self.lora.values()),
            "gradients": sum(leaf.size for leaf in self.sums.values()) // self.mesh.replicas,
            "moments": sum(leaf.size for leaf in moments),
        }

    def forward(self, slot: int, batch: Microbatch, x: Array | None) -> Array:
        """Runs a microbatch through this stage.

        Returns:
            Activations for the next stage; on the last stage the loss sums [R, A] of the microbatch.
        """
        programs, weights = self.programs, self.weights
        inputs = programs.layers.inputs(batch)
        hidden = self._entered(batch, x)
        xs: list[Array] = []
        residuals: list[Any] = []
        for block, number in zip(self._blocks, self._numbers, strict=True):
            xs.append(hidden)
            hidden, rest = programs.layers.forward(block, self.all_leaves, number, hidden, inputs)
            residuals.append(rest)
        rows = (batch.tokens, batch.row_adapter) if lv.EMBED_ROWS in self.lora else None
        if weights.head is None:
            self._in_flight[slot] = _InFlight(inputs, xs, residuals, None, rows)
            return hidden
        dy, losses, self.totals, sums = programs.ends.head(
            weights.norm, weights.head, hidden, batch, of_heads(self.all_leaves), self.totals, of_heads(self.sums)
        )
        self.sums = self.sums | sums
        self._in_flight[slot] = _InFlight(inputs, xs, residuals, dy, rows)
        return losses

    def _entered(self, batch: Microbatch, x: Array | None) -> Any:
        """Returns what enters the first layer: activations of the stage before, or the embeddings."""
        table = self.weights.embed
        if table is None:
            assert x is not None, "only the first stage begins with tokens"
            return x
        if lv.EMBED_ROWS in self.lora:
            return self.programs.ends.embed_rows(table, batch.tokens, batch.row_adapter, self.lora[lv.EMBED_ROWS])
        return self.programs.ends.embed(table, batch.tokens)

    def backward(self, slot: int, dy: Array | None) -> Array:
        """Adds a microbatch's gradients to the sums and returns the gradient of its input."""
        inputs, xs, residuals, loss_gradient, rows = self._in_flight.pop(slot)
        gradient: Any = loss_gradient if dy is None else dy
        assert gradient is not None, "a stage that is not the last waits for the gradient of the next"
        del loss_gradient  # donated below
        for block, number in zip(reversed(self._blocks), reversed(self._numbers), strict=True):
            gradient, self.sums = self.programs.layers.backward(
                block, self.all_leaves, number, xs.pop(), inputs, residuals.pop(), gradient, self.sums
            )
        if rows is not None:
            sums = self.programs.ends.add_row_gradients(gradient, *rows, self.sums[lv.EMBED_ROWS])
            self.sums = self.sums | {lv.EMBED_ROWS: sums}
        return gradient

    def close_batch(self, index: int) -> tuple[BatchSummary, Array]:
        """Closes an adapter's global batch: moves its gradient from the sums to where `step` takes it.

        Returns:
            (BatchSummary, finite per leaf in order of `leaf_names`)
        """
        self._gradients[index], summary, finite, self.sums, self.totals = self.programs.adapters.close_batch(
            self._own[index], self._places[index], self.sums, self.totals, self.alive
        )
        return summary, finite

    @property
    def with_twins(self) -> set[int]:
        """The adapters that train rows of a table that is both embedding and head."""
        if not self._columns.twins:
            return set()
        return {index for index, spec in enumerate(self._specs) if spec.tokens is not None}

    def twin_gradient(self, index: int, name: str) -> Array:
        """Returns this stage's part of the gradient of trained rows of a tied table."""
        return self._gradients[index][name]

    def join_twins(self, index: int, embed: Array, head: Array, summary: BatchSummary) -> BatchSummary:
        """Gives the next step of an adapter the whole gradient of its trained rows, see `StagePrograms.join_twins`.

        Returns:
            The summary of this stage. Only the first stage counts these rows.
        """
        total, counted = self.programs.adapters.join_twins(embed, head, summary)
        gradient = self._gradients[index]
        self._gradients[index] = gradient | dict.fromkeys(self._columns.twins & gradient.keys(), total)
        return counted if self.weights.embed is not None else summary

    def gradient(self, index: int) -> Leaves:
        """Returns the gradient of an adapter whose global batch is closed, until its next step."""
        return self._gradients[index]

    def replace_gradient(self, index: int, gradient: Mapping[str, np.ndarray]) -> None:
        """Gives the next step of an adapter another gradient, in all layers of the model."""
        stage_gradient = {
            name: leaf[self.layers_of(name)] for name, leaf in gradient.items() if name in self._columns.trained
        }
        self._gradients[index] = replicate(stage_gradient, self.mesh)

    def step(self, index: int, summaries: Sequence[BatchSummary], numbers: Hyper) -> Stepped:
        """Steps an adapter whose global batch is closed on every stage."""
        spec, optim = self._specs[index], self._adapters[index].optim
        state = self.optimizers[spec.name]
        self.lora, self.optimizers[spec.name], self.alive, finite, previous = self.programs.adapters.step(
            self._own[index],
            optim,
            self._places[index],
            self.lora,
            self._gradients.pop(index),
            state,
            self.alive,
            summaries,
            numbers,
        )
        self._stale |= self._with_prepared & {index}
        return Stepped(self.alive, finite, None if previous is None else (previous, state))

    def put_back(self, index: int, before: tuple[Leaves, Any]) -> None:
        """Undoes a step that another stage refused, and all later steps of the adapter."""
        previous, self.optimizers[self._specs[index].name] = before
        self.lora, self.alive = self.programs.adapters.put_back(self._places[index], self.lora, previous, self.alive)
        self._stale |= self._with_prepared & {index}

    def unchanging_hyper(self, index: int) -> Hyper:
        """Returns hyperparameters with which `step` does not change the weights, for timing it."""
        return unchanging_hyper(self._adapters[index].optim)

    def time_passes(self, batch: Microbatch) -> tuple[float, float]:
        """Runs forward and backward without the other stages, with random inputs, and waits for them.

        The inputs are not zeros: products of zeros draw so little power that an H200 keeps a higher clock, and stages
        of a 70B model seemed 15 % faster than they were. But padding rows are as in a run, all alike and without a
        gradient: on random ones, plans with more padding seemed slower than they are. There is no pause before a pass,
        because an idle GPU cools and then runs at a higher clock.

        Returns:
            Seconds of forward and of backward.
        """
        sent = None if self.weights.embed is not None else self.noise(batch)
        received = None if self.weights.head is not None else self.gradient_noise(batch)
        jax.block_until_ready((sent, received))
        began = time.perf_counter()
        jax.block_until_ready(self.forward(NO_SLOT, batch, sent))
        forward_s = time.perf_counter() - began
        began = time.perf_counter()
        jax.block_until_ready(self.backward(NO_SLOT, received))
        return forward_s, time.perf_counter() - began

    def compile_steps(self, num_stages: int, only: int | None = None) -> None:
        """Compiles the optimizer steps of all adapters by running them on temporary copies, and waits for them.

        Args:
            only: place of the only adapter to compile for.

        Waiting is necessary: later work does not depend on these copies, so one process could start a real all-reduce
        while another still runs one of these, and the two would be matched.
        """
        chosen = self.one_of_every_kind() if only is None else [only]
        optimizers = {index: self._optimizer_to_compile(index) for index in chosen}
        lora, sums, totals, alive, optimizers = _copy((self.lora, self.sums, self.totals, self.alive, optimizers))
        for index, optimizer in optimizers.items():
            own_columns, optim, adapter = self._own[index], self._adapters[index].optim, self._places[index]
            if self.vacant:  # an adapter like this one may join
                self.programs.adapters.first_optimizer(own_columns, optim, adapter, lora)
                zeros = self.programs.adapters.zeros(own_columns, adapter, lora)
                lora, sums, totals, alive = self.programs.adapters.write(
                    own_columns, adapter, lora, sums, totals, alive, zeros
                )
            gradient, summary, _, sums, totals = self.programs.adapters.close_batch(
                own_columns, adapter, sums, totals, alive
            )
            if twins := sorted(self._columns.twins & gradient.keys()):
                self.programs.adapters.join_twins(gradient[twins[0]], gradient[twins[-1]], summary)
            summaries = [summary.without_metrics] * num_stages
            lora, _, alive, _, _ = self.programs.adapters.step(
                own_columns, optim, adapter, lora, gradient, optimizer, alive, summaries, hyper(optim, 0.0)
            )
        jax.block_until_ready((lora, sums, totals, alive))

    def _optimizer_to_compile(self, index: int) -> Any:
        if index in self.vacant:
            optim, adapter = self._adapters[index].optim, self._places[index]
            return self.programs.adapters.first_optimizer(self._own[index], optim, adapter, self.lora)
        return self.optimizers[self._specs[index].name]

    def try_evaluation(self, batch: Microbatch) -> None:
        """Compiles an evaluation by running it without the other stages, and waits for it."""
        sent = None if self.weights.embed is not None else self.noise(batch)
        jax.block_until_ready(self.evaluate(batch, sent))

    def noise(self, batch: Microbatch) -> Array:
        """Returns random, normally distributed activations of a microbatch; all padding rows are alike."""
        return self._random_activations(batch.row_adapter, self._parts.model.hidden_size, self._parts.dtype)

    def gradient_noise(self, batch: Microbatch) -> Array:
        """Returns random gradients of a microbatch's activations; those of padding rows are zero."""
        return self._random_gradients(batch.row_adapter, self._parts.model.hidden_size, self._parts.dtype)

    def evaluate(self, batch: Microbatch, x: Array | None) -> Array | Totals:
        """Runs a held-out microbatch without dropout. The last stage returns sums [A] over all replicas."""
        hidden, weights = self._run_forward(batch, x), self.weights
        if weights.head is None:
            return hidden
        return self.programs.ends.totals(weights.norm, weights.head, hidden, batch, of_heads(self.all_leaves))

    def token_logprobs(self, batch: Microbatch, x: Array | None) -> Array:
        """Like `evaluate`; the last stage returns log p of the learned targets of all replicas, [R, T]."""
        hidden, weights = self._run_forward(batch, x), self.weights
        if weights.head is None:
            return hidden
        return self.programs.ends.token_logprobs(weights.norm, weights.head, hidden, batch, of_heads(self.all_leaves))

    def states(self, batch: Microbatch, x: Array | None) -> Array:
        """Like `evaluate`; the last stage returns the final-normed states of all replicas, [R, T, D]."""
        hidden, weights = self._run_forward(batch, x), self.weights
        return hidden if weights.head is None else self.programs.ends.states(weights.norm, hidden)

    def _run_forward(self, batch: Microbatch, x: Array | None) -> Any:
        programs = self.programs
        inputs = programs.layers.inputs_without_dropout(batch)
        hidden = self._entered(batch, x)
        for block, number in zip(self._blocks, self._numbers, strict=True):
            hidden = programs.layers.evaluate(block, self.all_leaves, number, hidden, inputs)
        return hidden

    def adapter(self, index: int) -> Leaves:
        """Copies one adapter's leaves. Later steps do not change the copy."""
        columns = self._columns.trained | self._columns.constants
        adapter, spec = self._places[index], self._specs[index]
        if self.constants:
            adapter = replicate(lv.place_of(columns, index, spec), self.mesh)
        return self.programs.adapters.take(lv.own_columns(columns, index, spec), adapter, self.lora | self.constants)

    def leaf_names(self, index: int) -> list[str]:
        """Returns the trainable leaves of one adapter in the order in which `close_batch` reports them."""
        return [name for name, _ in self._own[index]]


def _groups(pieces: Sequence[Piece], block: int) -> list[list[int]]:
    """Groups the pieces by program: up to `block` layers, or one half layer."""
    groups: list[list[int]] = []
    for position, piece in enumerate(pieces):
        joins = groups and piece.half is None and pieces[groups[-1][0]].half is None and len(groups[-1]) < block
        groups[-1].append(position) if joins else groups.append([position])
    return groups


def _copy(arrays: Any) -> Any:
    places = jax.tree.map(lambda leaf: leaf.sharding, arrays)
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)(arrays)


def _random_activations(row_adapter: Array, width: int, dtype: Any) -> Array:
    x = jax.random.normal(jax.random.key(0), (*row_adapter.shape, width), dtype)
    return jnp.where(row_adapter[..., None] < 0, x[..., :1, :], x)


def _random_gradients(row_adapter: Array, width: int, dtype: Any) -> Array:
    x = jax.random.normal(jax.random.key(1), (*row_adapter.shape, width), dtype)
    return jnp.where(row_adapter[..., None] < 0, 0, x)
