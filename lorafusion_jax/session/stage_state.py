"""The arrays of one stage: its frozen weights, and what its adapters train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.layout.extent import Extent, Piece
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.objective.batch import metric_names
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.optim.step import Hyper, unchanging_hyper
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.adapter_step import Totals
from lorafusion_jax.session.device_copy import never_used_bytes
from lorafusion_jax.session.first_weights import first_weights_of
from lorafusion_jax.session.joined_leaves import JoinedLeaves
from lorafusion_jax.session.kind_programs import PreparedLeaves
from lorafusion_jax.session.leaves import Leaves
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.move import replicate, to_devices, to_host, to_stage
from lorafusion_jax.session.parts import Carried, Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.session.stage_weights import StageWeights


class InFlight(NamedTuple):
    """Arrays of a microbatch between its forward and its backward pass on a stage."""

    inputs: Any
    xs: list[Carried]  # input of each block
    residuals: list[Any]
    dy: Carried | None  # on the last stage, from the head
    rows: tuple[Any, Any] | None = None  # tokens and their adapters, where rows of the embedding are trained


class PlaceArrays(NamedTuple):
    """What a place gets on a stage, see `StageState.place_arrays`.

    Attributes:
        trained: leaves on the devices.
        constants: leaves on the host.
        optimizer: its state on the devices (None: the initial one).
    """

    trained: Leaves
    constants: Mapping[str, np.ndarray]
    optimizer: Any


class StageState:
    """The arrays of one stage.

    Args:
        parts: pieces of the model.
        weights: frozen arrays on this stage's devices; `replace_base` replaces them.
        mesh: its devices.
        adapters: settings of the adapters, in stacking order.
        remat: rematerialisation policy.
        block: layers per program.

    Attributes:
        settings, own_columns, places: of each adapter: its settings, its trainable leaves, and where they are.
        blocks: weights of the layers of each program.
        positions: of the first layer of each block.
        lora: trainable leaves of all adapters.
        constants: leaves that training does not change.
        sums: of gradients, since each adapter's last step.
        totals: sums of losses and metrics, on the last stage.
        optimizers: state of each adapter's optimizer, by name.
        alive: [A], whether each adapter's last step was taken.
        vacant: places that no adapter has now; they have no optimizer state.
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
        self.parts, self.mesh = parts, mesh
        self.remat: RematPolicy = remat
        self.programs = StagePrograms(parts, mesh, weights.extent, remat)
        self.settings, self._specs = list(adapters), list(parts.specs)
        self._groups = _groups(weights.extent.pieces, block)
        firsts = [weights.extent.pieces[group[0]].layer for group in self._groups]
        # Arguments of the programs, not constants in them: so equal stages have equal programs.
        self.positions = [replicate(Position.of(weights.extent, first), mesh) for first in firsts]
        trained = self.programs.columns.trained
        self.own_columns = [lv.own_columns(trained, index, spec) for index, spec in enumerate(parts.specs)]
        self.places = [replicate(lv.place_of(trained, index, spec), mesh) for index, spec in enumerate(parts.specs)]
        self._prepared = PreparedLeaves(self.programs.kinds, mesh)
        self.replace_base(weights)
        self._in_flight: dict[int, InFlight] = {}
        self._gradients: dict[int, Leaves] = {}
        self._joined: dict[int, JoinedLeaves] = {}  # by place, until it has another adapter
        self.lora: Leaves = {}
        self.constants: Leaves = {}
        self.sums: Leaves = {}
        self.optimizers: dict[str, Any] = {}
        self.totals: Totals | None = None
        self.alive: Array = replicate(np.ones(len(adapters), bool), mesh)
        self.vacant: frozenset[int] = frozenset()

    def replace_base(self, weights: StageWeights) -> None:
        """Replaces the frozen arrays, which may have been placeholders."""
        self.weights = weights
        self.blocks = [tuple(weights.pieces[number] for number in group) for group in self._groups]
        self._prepared.mark(*range(len(self._specs)))

    @property
    def extent(self) -> Extent:
        return self.weights.extent

    def layers_of(self, leaf: str) -> range:
        """The part of a leaf's first axis that this stage has: its layers, or all of what is not of layers."""
        return self.parts.leaves.rows_of(leaf, self.extent)

    def layer_numbers(self, leaf: str) -> list[int]:
        """Numbers of this stage's layers that have a leaf."""
        numbers = self.parts.model.layers_with(lv.path_of(leaf))
        return [numbers[row] for row in self.layers_of(leaf)]

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

    @property
    def leaf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the leaves of all adapters on this stage."""
        shapes = self.parts.leaves.lora_shapes(1)
        return {name: (len(self.layers_of(name)), *shape[1:]) for name, shape in shapes.items()}

    def leaf_names(self, index: int) -> list[str]:
        """Returns the trainable leaves of one adapter in the order in which `close_batch` reports them."""
        return [name for name, _ in self.own_columns[index]]

    def first_lora(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the initial weights of each adapter in all layers of the model."""
        return first_weights_of(self.parts.leaves, self.parts.specs)

    def start(self, lora: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Sets each adapter's initial weights, given for all layers of the model, and resets all other state."""
        self._in_flight, self._gradients, self.totals = {}, {}, None
        self.alive = replicate(np.ones(len(self.settings), bool), self.mesh)
        self.take_weights(lora)
        rows, devices = self.mesh.by_device, self.mesh.mesh.size
        shapes = {name: (devices, *leaf.shape) for name, leaf in self.lora.items()}

        # A program creates them in their layout: the host never holds the sums of all devices together.
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
            stage_leaves: Leaves = {}
            shapes = self.leaf_shapes
            for name, at in columns.items():  # leaf by leaf, so that the host does not hold all of them twice
                layers = self.layers_of(name)
                of_specs = [lora.get(spec.name, {}) for spec in self._specs]
                by_adapter = [{name: leaves[name][layers]} if name in leaves else {} for leaves in of_specs]
                stacked = lv.stack_adapters({name: at}, by_adapter, shapes)
                stage_leaves[name] = replicate(stacked[name], self.mesh)
            return stage_leaves

        self.lora, self.constants = put(self.programs.columns.trained), put(self.programs.columns.constants)
        self._prepared.reset({name: self.leaf_shapes[name] for name in self.programs.columns.prepared})
        self._prepared.mark(*range(len(self._specs)))

    def start_from_base(self, index: int) -> None:
        """Sets an adapter's initial values that depend on the frozen kernels. Waits for them."""
        spec = self._specs[index]
        # Copies, because host views of device arrays are read-only, and layers are written below.
        leaves = {name: np.array(to_host(leaf)) for name, leaf in self.adapter(index).items()}
        shared = {name.removeprefix(lv.SHARED): leaf[0] for name, leaf in leaves.items() if name.startswith(lv.SHARED)}
        starts = adapter_kind(spec.kind).start is not None
        for piece, weights in zip(self.extent.pieces, self.weights.pieces if starts else (), strict=starts):
            for linear in self.parts.model.layer(piece.layer).linears_of(piece.half):
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
                tokens = self.parts.leaves.token_ids(spec, "embed" if name == lv.EMBED_ROWS else "head")
                leaves[name] = to_host(self.programs.adapters.first_rows(table, tokens))
        self.lora = self._replaced(self.programs.columns.trained, self.lora, index, leaves)
        self.constants = self._replaced(self.programs.columns.constants, self.constants, index, leaves)
        self._prepared.mark(index)

    def _replaced(
        self, columns: Mapping[str, lv.Columns], leaves: Leaves, index: int, values: Mapping[str, np.ndarray]
    ) -> Leaves:
        """Returns the leaves with an adapter's replaced."""
        names = [name for name, _ in lv.own_columns(columns, index, self._specs[index])]
        if not names:
            return leaves
        adapter = lv.place_of(columns, index, self._specs[index])
        first, arrays = replicate((adapter.first, {name: values[name] for name in names}), self.mesh)
        return self.programs.adapters.put(leaves, first, arrays)

    def adapter(self, index: int) -> Leaves:
        """Copies one adapter's leaves. Later steps do not change the copy."""
        return self.programs.adapters.take(*self._where(index), self.lora | self.constants)

    def copy_state(self, index: int) -> tuple[Any, Any]:
        """Copies one adapter's leaves, see `all_joined`, and its optimizer state, as `InParts`.

        Later steps do not change the copy.
        """
        optimizer = self.optimizers[self._specs[index].name]
        return self.programs.adapters.copy_state(*self._where(index), self.lora | self.constants, optimizer)

    def joined(self, index: int) -> JoinedLeaves:
        """Returns the vectors in which an adapter's gradient and optimizer state are."""
        if index not in self._joined:
            self._joined[index] = self.programs.adapters.joined(
                self.own_columns[index], self.settings[index].optim, self.lora
            )
        return self._joined[index]

    def all_joined(self, index: int) -> JoinedLeaves:
        """Returns the vectors of `copy_state`."""
        return self.programs.adapters.all_joined(self._where(index)[0], self.lora | self.constants)

    def adapter_sums(self, index: int) -> tuple[Leaves, Totals]:
        """Copies what an adapter has summed up since its last step; totals on the last stage."""
        return self.programs.adapters.take_sums(self.own_columns[index], self.places[index], self.sums, self.totals)

    def write_sums(self, index: int, sums: Mapping[str, np.ndarray], totals: Mapping[str, np.ndarray]) -> None:
        """Writes what an adapter has summed up: sums of all layers [devices, L, ...], totals [devices]."""
        devices, mesh = self.mesh.mesh.size, self.mesh
        device_sums = {
            name: lv.spread_rows(sums[name], devices)[np.asarray(mesh.local_devices)][:, self.layers_of(name)]
            for name in self.leaf_names(index)
        }
        zeros = np.zeros(devices, np.float32)
        # Totals have a row per replica, and `tensor` devices in a row are one replica.
        rows = {name: lv.spread_rows(totals.get(name, zeros), devices)[:: mesh.tensor] for name in self.totals or {}}
        stage_totals = to_stage({name: total[np.asarray(mesh.local_replicas)] for name, total in rows.items()}, mesh)
        self.sums, self.totals = self.programs.adapters.put_sums(
            self.places[index], self.sums, self.totals, to_devices(device_sums, mesh), stage_totals
        )

    def _where(self, index: int) -> tuple[lv.Own, lv.Place]:
        """Returns what an adapter has of the leaves, constant ones included, and where."""
        columns = self.programs.columns.trained | self.programs.columns.constants
        adapter, spec = self.places[index], self._specs[index]
        if self.constants:
            # `places` covers the trained leaves only.
            adapter = replicate(lv.place_of(columns, index, spec), self.mesh)
        return lv.own_columns(columns, index, spec), adapter

    def assign(self, index: int, adapter: AdapterConfig, spec: AdapterSpec) -> None:
        """Gives a place to another adapter, of at most the rank and targets that the place was made for."""
        trained = self.programs.columns.trained
        self.places[index] = replicate(lv.place_of(trained, index, spec), self.mesh)
        # Not in place: a snapshot that is still read has the adapters of its time.
        self._joined = {place: joined for place, joined in self._joined.items() if place != index}
        self.settings = [*self.settings[:index], adapter, *self.settings[index + 1 :]]
        self._specs = [*self._specs[:index], spec, *self._specs[index + 1 :]]
        columns = lv.own_columns(trained, index, spec)
        self.own_columns = [*self.own_columns[:index], columns, *self.own_columns[index + 1 :]]
        self.vacant -= {index}
        self._prepared.mark(index)

    def write(
        self, index: int, weights: Mapping[str, np.ndarray], optimizer: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Writes the weights of a place's adapter and clears its sums. Other adapters do not change.

        Args:
            weights: for all layers of the model.
            optimizer: arrays of its state by path, for all layers (None: the initial state).
        """
        self.write_arrays(index, self.place_arrays(index, self.settings[index], self._specs[index], weights, optimizer))

    def place_arrays(
        self,
        index: int,
        adapter: AdapterConfig,
        spec: AdapterSpec,
        weights: Mapping[str, np.ndarray],
        optimizer: Mapping[str, np.ndarray] | None,
    ) -> PlaceArrays:
        """Puts what `write_arrays` needs onto the devices. Any thread may call it while adapters train.

        Args:
            index: a place that is large enough for the adapter, whichever it comes to.
        """
        columns = self.programs.columns
        leaves = {name: np.asarray(leaf)[self.layers_of(name)] for name, leaf in weights.items() if name in columns.all}
        trained = replicate({name: leaf for name, leaf in leaves.items() if name in columns.trained}, self.mesh)
        constants = {name: leaf for name, leaf in leaves.items() if name in columns.constants}
        if optimizer is None:
            return PlaceArrays(trained, constants, None)
        own_columns = lv.own_columns(columns.trained, index, spec)
        joined = self.programs.adapters.joined(own_columns, adapter.optim, self.lora)
        # Only the structure is needed, as the arrays are given: nothing compiles or runs.
        shapes = self.programs.adapters.optimizer_shapes(own_columns, adapter.optim, self.places[index], self.lora)
        return PlaceArrays(trained, constants, replicate(self.part_of_state(joined, shapes, optimizer), self.mesh))

    def write_arrays(self, index: int, arrays: PlaceArrays) -> None:
        """As `write`, of arrays that are on the devices."""
        spec, adapter = self._specs[index], self.places[index]
        # A batch that was closed but not stepped belongs to the weights that are replaced.
        self._gradients.pop(index, None)
        self.lora, self.sums, self.totals, self.alive = self.programs.adapters.write(
            self.own_columns[index], adapter, self.lora, self.sums, self.totals, self.alive, arrays.trained
        )
        self.constants = self._replaced(self.programs.columns.constants, self.constants, index, arrays.constants)
        self._prepared.mark(index)
        self.optimizers[spec.name] = (
            self.programs.adapters.first_optimizer(
                self.own_columns[index], self.settings[index].optim, adapter, self.lora
            )
            if arrays.optimizer is None
            else arrays.optimizer
        )

    def part_of_state(self, joined: JoinedLeaves, state: Any, arrays: Mapping[str, Any]) -> Any:
        """Returns an optimizer state of this stage with arrays of the whole model in it, which are given by path."""

        def part(name: str, ndim: int) -> np.ndarray:
            array, leaf = np.asarray(arrays[name]), lv.leaf_of(name)
            # Step counts are scalars that belong to no layer.
            return array if leaf is None or not ndim else array[self.layers_of(leaf)]

        def fill(path: tuple, before: Any) -> np.ndarray:
            parts = [part(name, before.ndim) for name in joined.paths(lv.path_text(path))]
            return parts[0] if parts[0].shape == before.shape else np.concatenate([leaf.ravel() for leaf in parts])

        return jax.tree_util.tree_map_with_path(fill, state)

    def _new_optimizers(self) -> dict[str, Any]:
        """Creates the initial states of all optimizers, with a program that makes one of each kind per call."""
        occupied = [[index for index in members if index not in self.vacant] for members in self._by_kind().values()]
        kinds = [members for members in occupied if members]

        def new(places: list[lv.Place], lora: Leaves) -> list[Any]:
            return [
                self.programs.adapters.init_optimizer(
                    self.own_columns[members[0]], self.settings[members[0]].optim, adapter, lora
                )
                for members, adapter in zip(kinds, places, strict=True)
            ]

        program, states = jax.jit(new, out_shardings=self.mesh.everywhere), {}
        for turn in range(max(map(len, kinds))):
            indices = [
                members[min(turn, len(members) - 1)] for members in kinds
            ]  # a kind with fewer adapters repeats its last
            optimizers = program([self.places[index] for index in indices], self.lora)
            states |= {self._specs[index].name: state for index, state in zip(indices, optimizers, strict=True)}
        return {name: states[name] for name in self.names}

    def _by_kind(self) -> dict[tuple, list[int]]:
        """Groups adapters whose optimizer steps share one program."""
        kinds: dict[tuple, list[int]] = {}
        for index, settings in enumerate(self.settings):
            optim = settings.optim
            # Whether it clips, not at what norm: that is an argument of the program, as the learning rate is.
            kind = (self.own_columns[index], optim.name, optim.clip > 0, *optim.lr_ratios)
            kinds.setdefault(kind, []).append(index)
        return kinds

    def one_of_every_kind(self) -> list[int]:
        """Returns adapters that together use all programs of adapters."""
        return [members[0] for members in self._by_kind().values()]

    def trainable_arrays(self) -> list[Any]:
        """Returns all arrays that training changes."""
        return [self.lora, self.sums, self.optimizers]

    @property
    def place_bytes(self) -> int:
        """Bytes of the largest adapter's weights and of a state of its optimizer with two moments, on a device."""
        columns, shapes = self.programs.columns.trained, self.leaf_shapes
        own_columns = lv.own_columns(columns, len(self._specs) - 1, self._specs[-1])
        return 12 * sum(prod(lv.own_shape(shapes[name], columns[name], width)) for name, width in own_columns)

    @property
    def free_bytes(self) -> float:
        """Bytes that training has never used on the fullest device; infinity if unknown (CPU)."""
        return min(map(never_used_bytes, self.mesh.mesh.local_devices))

    def count_elements(self) -> dict[str, int]:
        """Counts the elements stored for training on one replica: weights, gradients, moments."""
        moments = [leaf for leaf in jax.tree.leaves(self.optimizers) if leaf.ndim]
        return {
            "weights": sum(leaf.size for leaf in self.lora.values()),
            "gradients": sum(leaf.size for leaf in self.sums.values()) // self.mesh.mesh.size,
            "moments": sum(leaf.size for leaf in moments),
        }

    def unchanging_hyper(self, index: int) -> Hyper:
        """Returns hyperparameters with which `step` does not change the weights, for timing it."""
        return unchanging_hyper(self.settings[index].optim)


def _groups(pieces: Sequence[Piece], block: int) -> list[list[int]]:
    """Groups the pieces by program: up to `block` layers, or one half layer."""
    groups: list[list[int]] = []
    for position, piece in enumerate(pieces):
        joins = groups and piece.half is None and pieces[groups[-1][0]].half is None and len(groups[-1]) < block
        groups[-1].append(position) if joins else groups.append([position])
    return groups
