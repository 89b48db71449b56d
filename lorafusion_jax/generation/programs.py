"""The compiled programs of generation on one stage.

A pass runs one program per block of layers, as in training: like blocks share a program, and the device never waits for
the host, which reads tokens a few passes later. Nothing depends on the prompts but the shapes, which come in buckets.
Devices of a stage all compute the same.

T rows of a pass · B sequences · S slots of adapters · W rows whose tokens are scored · D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.adapters.tokens import TABLES, Table
from lorafusion_jax.errors import RunError
from lorafusion_jax.families.per_layer_input import POSITIONS, TABLE
from lorafusion_jax.generation import row_adapters
from lorafusion_jax.generation.capacity import cached_rows
from lorafusion_jax.generation.choose import (
    NOT_FINITE,
    Chosen,
    Edits,
    Listed,
    choose_tokens,
    edit,
    list_likely,
    token_logprobs,
)
from lorafusion_jax.layout.layer import Half
from lorafusion_jax.models.cache import BLOCK, ROWS, Cache, CachedRows
from lorafusion_jax.models.forward import embed, final_norm, layer_inputs, logits, scaled_embedding, with_positions
from lorafusion_jax.models.per_layer_input import own_inputs
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.models.stream import Stream, activations, added
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.leaves import LAYERS, SHARED, TOKENS, Leaves, path_of
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_jit import ROUNDS, gather
from lorafusion_jax.session.stage_weights import StoredWeights, Weights

EVERYWHERE = P()


class Slots(NamedTuple):
    """The adapters of a bank by slot.

    Attributes:
        scale_S: float32.
        kinds: see `Inputs.kinds`.
        tokens: trained tokens of each slot's adapter, int32 [S, m] by table, -1 for none.
    """

    scale_S: Any
    kinds: dict[str, Any]
    tokens: dict[str, Any]


class Position(NamedTuple):
    """Where the rows of decoding are.

    Attributes:
        position_B: of the token of each row; -1 for a row that is not in use.
        limit_B: positions that its blocks hold.
        slot_B: of its adapter; -1 for none.
        tables_BM: its blocks.
    """

    position_B: Any
    limit_B: Any
    slot_B: Any
    tables_BM: Any


class GenerationPrograms:
    """Jitted functions of one stage; they compile when they are called with new shapes.

    Args:
        stage: pieces of the model and their devices.
        options: of the compiler, beside those that the layers of training have.

    Raises:
        RunError: `generate.tensor`.
    """

    def __init__(self, stage: Stage, options: Mapping[str, Any] | None = None):
        if stage.parts.tensor > 1:
            message = f"{stage.parts.tensor} devices share each layer of this base, and such a base makes no text."
            why = "text is made by devices with whole layers"
            fix = "mesh.tensor: 1, or generate from the exported adapter"
            raise RunError("generate.tensor", message, why=why, fix=fix)
        self._options = {**ROUNDS, **stage.parts.compiler_options, **(options or {})}
        self._parts, self._mesh, self._layout = stage.parts, stage.mesh, stage.parts.leaves
        self._operands, ends = stage.programs.operands, stage.programs.ends
        self._table_axis, self._head_axis = ends.table_axis, ends.head_axis
        self._extent = stage.extent
        self._rows = {name: row for row, name in enumerate(self._layout.columns)}
        self._plain = all(spec.kind == PLAIN for spec in self._parts.specs)
        model = self._parts.model
        table = P(*self._mesh.split((model.vocab_size, model.hidden_size)))
        self._head_spec = P(*self._mesh.split((model.num_outputs, model.hidden_size)))
        self.embed = self._jit(self._embed, (table, *(EVERYWHERE,) * 4))
        self._input_axes = ends.input_axes
        input_specs = {
            name: P() if axis is None else P(*[None] * axis, "fsdp") for name, axis in self._input_axes.items()
        }
        self.add_positions = self._jit(self._add_positions, (input_specs.get(POSITIONS), *(EVERYWHERE,) * 2))
        self.own_inputs = self._jit(self._own_inputs, (input_specs, *(EVERYWHERE,) * 2))
        self.prompt_inputs = self._jit(self._prompt_inputs, (EVERYWHERE,) * 4)
        self.next_inputs = self._jit(self._next_inputs, (EVERYWHERE,) * 2)
        self._layer = jax.jit(self._run_layer)  # like layers of a block are traced and lowered once
        blocks = (self._operands.specs_of_block, *(EVERYWHERE,) * 6)
        self.run_block = self._jit(self._run_block, blocks, donate=(2,))
        self.head = lru_cache(None)(self._jit_head)
        self.score = lru_cache(None)(self._jit_score)
        self._put = jax.jit(self._put_leaves, donate_argnums=0, out_shardings=self._mesh.everywhere)
        self.slot_of = jax.jit(self._slot_of)
        self.fill = jax.jit(self._fill, donate_argnums=0, out_shardings=self._mesh.everywhere)
        self.copy = jax.jit(self._copy, donate_argnums=0, out_shardings=self._mesh.everywhere)

    def empty_bank(self, leaves: Leaves, slots: int) -> list[Leaves]:
        """Returns slots without adapters: leaves of zeros for each piece, then those of no layer."""
        windows = jax.ShapeDtypeStruct((2, 1), jnp.int32)

        def zeros(names: Sequence[str]) -> Leaves:
            at, named_leaves = dict.fromkeys(names, jnp.int32(0)), {name: leaves[name] for name in names}
            shapes = jax.eval_shape(self._take_leaves, named_leaves, dict.fromkeys(names, windows), {}, at)
            slot_leaves = {}
            for name, leaf in shapes.items():
                axis = _slot_axis(name, leaf.ndim)
                slot_leaves[name] = jnp.zeros((*leaf.shape[:axis], slots, *leaf.shape[axis + 1 :]), leaf.dtype)
            return slot_leaves

        groups = [names for names, _ in self._names_by_piece(leaves)]
        return jax.jit(lambda: [zeros(names) for names in groups], out_shardings=self._mesh.everywhere)()

    def put(
        self, bank: Sequence[Leaves], leaves: Leaves, adapter: int, spec: AdapterSpec, slot: int
    ) -> tuple[list[Leaves], list[Array]]:
        """Copies the leaves of an adapter to a slot, in the form that layers take.

        A and B of LoRA get the dtype of the model, to which the ops would round them in every pass. What is not finite
        becomes 0.

        Args:
            adapter: its place.
            spec: what is in the place now.

        Returns:
            The bank, and whether all was finite, in parts.
        """
        windows = lv.own_windows(self._layout.columns, adapter, spec)[..., None]
        ratios = self._parts.inputs.ratios_of(spec)
        pieces, finite = [], []
        for piece, (names, number) in zip(bank, self._names_by_piece(leaves), strict=True):
            if not names:
                pieces.append(piece)
                continue
            scales = {name: ratios[name][number] for name in names if name in ratios}
            rows = {name: windows[self._rows[name]] for name in names}
            at = {name: np.int32(self._leaf_row(name, number)) for name in names}
            filled_piece, good = self._put(piece, {n: leaves[n] for n in names}, rows, scales, at, np.int32(slot))
            pieces.append(filled_piece)
            finite.append(good)
        return pieces, finite

    def _names_by_piece(self, leaves: Leaves) -> list[tuple[list[str], int]]:
        """Names of leaves and number of the layer, of each piece and of no layer."""

        def of_piece(number: int, half: Half | None) -> tuple[list[str], int]:
            paths = {linear.path for linear in self._parts.model.layer(number).linears_of(half)}
            return [name for name in leaves if name.startswith(LAYERS) and path_of(name) in paths], number

        others = [name for name in leaves if name.startswith((SHARED, TOKENS))]
        return [*(of_piece(*piece) for piece in self._extent.pieces), (others, 0)]

    def _leaf_row(self, name: str, number: int) -> int:
        """The index of a layer on the first axis of a leaf of this stage."""
        if not name.startswith(LAYERS):
            return 0
        numbers = self._parts.model.some_layers.get(path_of(name))
        return (number if numbers is None else numbers.index(number)) - self._layout.rows_of(name, self._extent).start

    def _slot_of(self, bank: Leaves, slot: Array) -> Leaves:
        """The leaves in a slot."""
        return {
            name: lax.dynamic_slice_in_dim(leaf, slot, 1, _slot_axis(name, leaf.ndim)) for name, leaf in bank.items()
        }

    def _fill(self, bank: Leaves, values: Leaves, slot: Array) -> Leaves:
        """Puts leaves into a slot."""
        return {
            name: lax.dynamic_update_slice_in_dim(leaf, values[name], slot, _slot_axis(name, leaf.ndim))
            for name, leaf in bank.items()
        }

    def _put_leaves(
        self, bank: Leaves, leaves: Leaves, windows: dict[str, Array], ratios: dict[str, Array], at: dict[str, Array],
        slot: Array,
    ) -> tuple[Leaves, Array]:  # fmt: skip
        views, good = self._take_leaves(leaves, windows, ratios, at), []
        bank_leaves = {}
        for name, leaf in views.items():
            good.append(jnp.isfinite(leaf).all())
            leaf = jnp.where(jnp.isfinite(leaf), leaf, 0)
            axis = _slot_axis(name, leaf.ndim)
            bank_leaves[name] = lax.dynamic_update_slice_in_dim(bank[name], leaf, slot, axis)
        return bank_leaves, jnp.stack(good).all()

    def _take_leaves(
        self, leaves: Leaves, windows: dict[str, Any], ratios: dict[str, Any], at: dict[str, Any]
    ) -> Leaves:
        views = {}
        for name, leaf in leaves.items():
            view = lv.view(leaf, self._layout.columns[name], at[name], jnp.asarray(windows[name]))
            if name in ratios:
                view = view * ratios[name].reshape(-1, *(1,) * (view.ndim - 1))
            view = view.astype(self._parts.dtype) if self._plain and not name.startswith(TOKENS) else view
            views[name.removeprefix(LAYERS)] = view.swapaxes(0, _slot_axis(name, view.ndim))
        return views

    def slots(self, specs: Sequence[AdapterSpec | None]) -> Slots:
        """Returns what the adapters in some slots are."""
        return Slots(
            np.array([1.0 if spec is None else spec.scale for spec in specs], np.float32),
            self._parts.inputs.kinds_in(specs),
            {table: self._token_ids(specs, table) for table in TABLES},
        )

    def _token_ids(self, specs: Sequence[AdapterSpec | None], table: Table) -> np.ndarray:
        """The trained tokens of adapters, int32 [S, m], -1 for none."""
        columns = self._layout.columns.get(f"{TOKENS}{table}")
        ids = np.full((len(specs), 0 if columns is None else columns.widest), -1, np.int32)
        for slot, spec in enumerate(specs):
            tokens = () if spec is None or not ids.size else self._layout.token_ids(spec, table)
            ids[slot, : len(tokens)] = tokens
        return ids

    def empty_caches(self, rows: int, blocks: int) -> list[Cache]:
        """Returns a cache of zeros for each piece of the stage.

        Args:
            rows: sequences that have states.
        """
        model, dtype = self._parts.model, self._parts.dtype

        def zeros(number: int, half: Half | None) -> Cache:
            if half == "mlp":
                return {}
            layer = model.layer(number)
            shapes = cached_rows(self._parts, layer)
            pools = {name: jnp.zeros((blocks, BLOCK, *shape), dtype) for name, shape in shapes.items()}
            states = {name: jnp.zeros((rows, *shape), jnp.float32) for name, shape in layer.state_shapes.items()}
            return pools | states

        make = jax.jit(lambda: [zeros(*piece) for piece in self._extent.pieces], out_shardings=self._mesh.everywhere)
        return make()

    def _copy(self, caches: Sequence[Cache], blocks_2X: Array, rows_2X: Array) -> list[Cache]:
        """Copies blocks and states [from, to]; numbers beyond the caches copy nothing."""

        def copied(name: str, array: Array) -> Array:
            source, target = blocks_2X if name in ROWS else rows_2X
            return array.at[target].set(array[jnp.minimum(source, len(array) - 1)], mode="drop")

        return [{name: copied(name, array) for name, array in cache.items()} for cache in caches]

    def _embed(self, table: Array, tokens_T: Array, slot_T: Array, ids_Sm: Array, values_SDm: Array | None) -> Array:
        """Returns the embeddings of tokens, with the trained rows of their adapters."""
        x_TD, scale = embed(gather(table, self._table_axis), tokens_T), self._parts.model.embedding_scale
        if values_SDm is not None:
            is_token_Tm = (ids_Sm[slot_T] == tokens_T[:, None]) & (slot_T >= 0)[:, None]
            trained_TD = values_SDm[slot_T, :, jnp.argmax(is_token_Tm, 1)].astype(x_TD.dtype)
            x_TD = jnp.where(is_token_Tm.any(1)[:, None], trained_TD, x_TD)
        return scaled_embedding(x_TD, scale)

    def _add_positions(self, table: Array, x_TD: Array, position_T: Array) -> Array:
        return with_positions(x_TD, gather(table, self._input_axes[POSITIONS]), position_T)

    def _own_inputs(self, weights: Mapping[str, Array], tokens_T: Array, x_TD: Array) -> Array:
        gathered = {name: gather(leaf, self._input_axes[name]) for name, leaf in weights.items()}
        return own_inputs(gathered.pop(TABLE)[tokens_T], x_TD, gathered, self._parts.model)

    def _prompt_inputs(self, rows: CachedRows, segments: Segments, slots: Slots, tile_slot: Array) -> Inputs:
        return self._inputs(rows, segments, slots, tile_slot, self._parts.settings.implementation)

    def _next_inputs(self, at: Position, slots: Slots) -> tuple[Inputs, Position]:
        """Returns the inputs of the next tokens, and where those after them are."""
        B = len(at.position_B)
        number_B, in_use_B = jnp.arange(B, dtype=jnp.int32), at.position_B >= 0
        at_B = jnp.maximum(at.position_B, 0)
        block_B1 = jnp.minimum(at_B // BLOCK, at.tables_BM.shape[1] - 1)[:, None]
        cell_B = jnp.take_along_axis(at.tables_BM, block_B1, 1)[:, 0] * BLOCK + at_B % BLOCK
        cell_B = jnp.where(in_use_B & (at_B < at.limit_B), cell_B, jnp.iinfo(jnp.int32).max)
        rows = CachedRows(position_T=at.position_B, cell_T=cell_B, tables_GM=at.tables_BM, decoding=True)
        segments = Segments(ids=number_B, offsets=jnp.arange(B + 1, dtype=jnp.int32), lengths=at_B + 1)
        inputs = self._inputs(rows, segments, slots, at.slot_B, row_adapters.NAME)
        return inputs, at._replace(position_B=jnp.where(in_use_B, at_B + 1, -1))

    def _inputs(self, rows: CachedRows, segments: Segments, slots: Slots, table: Array, implementation: Any) -> Inputs:
        lora = None
        if self._parts.specs:
            lora = LoRAContext(tile_adapter=table, scale=slots.scale_S, implementation=implementation)
        positions_T = jnp.maximum(jnp.asarray(rows.position_T), 0)
        layers = layer_inputs(self._parts.model, positions_T, segments, lora)
        return Inputs(replace(layers, cached=rows), jnp.zeros(0), slots.kinds, {})

    def _run_block(
        self,
        frozen: Sequence[StoredWeights],
        lora: Sequence[Leaves],
        caches: Sequence[Cache],
        earlier: dict[str, Cache],
        number: Array,
        x: Array | Stream,
        inputs: Inputs,
    ) -> tuple[Array | Stream, list[Cache]]:
        """Runs some layers.

        Args:
            earlier: caches of layers before them, by the module of the layers that read them.
        """
        assert inputs.layers.cached is not None
        reads_blocks = inputs.layers.cached.reads_blocks
        if earlier and reads_blocks:
            x = Stream(activations(x), {module: {"after": cache} for module, cache in earlier.items()})
        filled_caches, first = [], x
        for offset, (stored, leaves, cache) in enumerate(zip(frozen, lora, caches, strict=True)):
            x, cache = self._layer(stored, leaves, cache, number + offset, x, inputs)
            filled_caches.append(cache)
        return activations(x) if reads_blocks else added(x, first), filled_caches

    def _run_layer(
        self, stored: StoredWeights, leaves: Leaves, cache: Cache, number: Array, x: Array | Stream, inputs: Inputs
    ):
        weights, x = self._operands.materialize(stored, x)
        lora: Weights = {name: leaf.swapaxes(0, _slot_axis(name, leaf.ndim)) for name, leaf in leaves.items()}
        return self._parts.layer_with_cache(weights, lora, x, inputs, number, cache)

    def _jit_head(self, mode: str, edited: bool, listed: int, only_last: bool) -> Any:
        """The program that chooses tokens.

        Args:
            mode: see `Sampling`.
            edited: some logits are edited.
            listed: most probable tokens that are returned.
            only_last: every row is the last one of its sequence; otherwise `last_B` names it, -1 for none.
        """
        function = partial(self._head, mode, edited, listed, only_last)
        return self._jit(function, (EVERYWHERE, self._head_spec, *(EVERYWHERE,) * 9))

    def _head(
        self,
        mode: str,
        edited: bool,
        listed: int,
        only_last: bool,
        norm: Array,
        table: Array,
        x: Array,
        last_B: Array,
        before: Chosen,
        number_B: Array,
        choices: Any,
        edits: Edits | None,
        slot_B: Array,
        ids_Sm: Array,
        values_SDm: Array | None,
    ) -> tuple[Chosen, Array, Edits | None]:
        """Returns the next tokens of all sequences, how many each has generated, and the edits after them.

        Args:
            before: the newest tokens so far.
        """
        x_BD = x if only_last else x[jnp.maximum(last_B, 0)]
        logits_BV = self._logits(norm, table, x_BD, slot_B, ids_Sm, values_SDm)
        edited_BV = edit(logits_BV, edits) if edited and edits is not None else logits_BV
        chosen_B = choose_tokens(edited_BV, choices, number_B, mode=mode)
        chosen_B = jnp.where(jnp.isfinite(logits_BV).all(-1), chosen_B, NOT_FINITE)
        most = list_likely(logits_BV, listed) if listed else None
        chosen = Chosen(chosen_B, token_logprobs(logits_BV, chosen_B), most)
        chooses_B = jnp.ones_like(chosen_B, bool) if only_last else last_B >= 0
        if edited and edits is not None:
            token_B = jnp.where(chooses_B & (chosen_B >= 0), chosen_B, logits_BV.shape[1])
            edits = edits._replace(seen_BV=edits.seen_BV.at[jnp.arange(len(token_B)), token_B].set(True, mode="drop"))
        if only_last:
            return chosen, number_B + 1, edits

        def newest(new: Array, old: Array) -> Array:
            return jnp.where(chooses_B.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(newest, chosen, before), jnp.where(chooses_B, number_B + 1, number_B), edits

    def _logits(
        self, norm: Array, table: Array, x_BD: Array, slot_B: Array, ids_Sm: Array, values_SDm: Array | None
    ) -> Array:
        model = self._parts.model
        hidden_BD = final_norm(x_BD, norm, model)
        logits_BV = logits(hidden_BD, gather(table, self._head_axis).T, model)
        if values_SDm is None:
            return logits_BV
        S, D, m = values_SDm.shape
        values_DSm = values_SDm.swapaxes(0, 1).reshape(D, S * m).astype(hidden_BD.dtype)
        trained_BSm = logits(hidden_BD, values_DSm, model).reshape(-1, S, m)
        rows_B = jnp.arange(len(x_BD))
        ids_Bm = jnp.where((slot_B >= 0)[:, None], ids_Sm[slot_B], -1)
        ids_Bm = jnp.where(ids_Bm >= 0, ids_Bm, model.vocab_size)
        return logits_BV.at[rows_B[:, None], ids_Bm].set(trained_BSm[rows_B, slot_B], mode="drop")

    def _jit_score(self, listed: int) -> Any:
        """The program that scores tokens of prompts, with their most probable ones."""
        return self._jit(partial(self._score, listed), (EVERYWHERE, self._head_spec, *(EVERYWHERE,) * 6))

    def _score(
        self,
        listed: int,
        norm: Array,
        table: Array,
        x: Array,
        row_W: Array,
        targets_Wk: Array,
        slot_W: Array,
        ids_Sm: Array,
        values_SDm: Array | None,
    ) -> tuple[Array, Listed | None]:
        """Returns log p of tokens after some rows."""
        logits_WV = self._logits(norm, table, x[row_W], slot_W, ids_Sm, values_SDm)
        z_Wk = jnp.take_along_axis(logits_WV, jnp.maximum(targets_Wk, 0), -1)
        logprobs_Wk = z_Wk - jax.nn.logsumexp(logits_WV, -1, keepdims=True)
        return logprobs_Wk, list_likely(logits_WV, listed) if listed else None

    def _jit(self, function: Callable, in_specs: tuple, *, donate: tuple[int, ...] = ()) -> Any:
        if self._mesh.replicas == 1:
            return jax.jit(function, donate_argnums=donate, compiler_options=self._options)

        def mapped(*operands: Any) -> Any:
            specs = tuple(
                spec(operand) if callable(spec) else spec for spec, operand in zip(in_specs, operands, strict=True)
            )
            # check_vma is off: all devices compute the same, which it cannot see after a gather.
            local = jax.shard_map(function, mesh=self._mesh.mesh, in_specs=specs, out_specs=EVERYWHERE, check_vma=False)
            return local(*operands)

        return jax.jit(mapped, donate_argnums=donate, compiler_options=self._options)


def _slot_axis(name: str, ndim: int) -> int:
    """The axis of slots in a bank: of A the second, so that a product with all of them reads it as it lies."""
    return 1 if name.endswith(".lora_a") and ndim == 3 else 0
