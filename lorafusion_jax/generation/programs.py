"""The compiled programs of generation on one stage.

A pass runs one program per block of layers, as in training: like blocks share a program, and the device never waits for
the host, which reads tokens a few passes later. Nothing depends on the prompts but the shapes, which come in buckets.
Devices of a stage all compute the same.

T rows of a pass · B sequences · P places · D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.families.per_layer_input import TABLE
from lorafusion_jax.generation.choose import Choices, Chosen, choose_tokens, token_logprobs
from lorafusion_jax.layout.layer import Half
from lorafusion_jax.models.cache import Cache, CachedRows
from lorafusion_jax.models.forward import embed, final_norm, layer_inputs, logits, scaled_embedding
from lorafusion_jax.models.per_layer_input import own_inputs
from lorafusion_jax.models.segments import Segments
from lorafusion_jax.models.stream import Stream, added
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.objective.replaced_rows import ReplacedRows, replace_rows, replaced_tokens
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.leaves import LAYERS, SHARED, Leaves, path_of
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_jit import gather
from lorafusion_jax.session.stage_weights import StoredWeights, Weights

EVERYWHERE = P()


class PlacedAdapters(NamedTuple):
    """The adapters of a batch by place.

    Attributes:
        scale_P: float32.
        adapter_B: int32, index of each sequence's adapter, -1 for none.
        kinds: see `Inputs.kinds`.
    """

    scale_P: Any
    adapter_B: Any
    kinds: dict[str, Any]


class GenerationPrograms:
    """Jitted functions of one stage; they compile when they are called with new shapes.

    Args:
        stage: pieces of the model and their devices.
    """

    def __init__(self, stage: Stage):
        self._parts, self._mesh, self._layout = stage.parts, stage.mesh, stage.parts.leaves
        self._operands, self._table_axis = stage.programs.operands, stage.programs.ends.table_axis
        self._extent = stage.extent
        self._rows = {name: row for row, name in enumerate(self._layout.columns)}
        self._plain = all(spec.kind == PLAIN for spec in self._parts.specs)
        table = P(*self._mesh.split((self._parts.model.vocab_size, self._parts.model.hidden_size)))
        self.embed = self._jit(self._embed, (table, *(EVERYWHERE,) * 3))
        ends = stage.programs.ends
        self._input_axes = ends.input_axes
        input_specs = {
            name: P() if axis is None else P(*[None] * axis, "fsdp") for name, axis in self._input_axes.items()
        }
        self.own_inputs = self._jit(self._own_inputs, (input_specs, *(EVERYWHERE,) * 2))
        self.prompt_inputs = self._jit(self._prompt_inputs, (EVERYWHERE,) * 3)
        self.next_inputs = self._jit(self._next_inputs, (EVERYWHERE,) * 2)
        self._layer = jax.jit(self._run_layer)  # like layers of a block are traced and lowered once
        blocks = (self._operands.specs_of_block, *(EVERYWHERE,) * 5)
        self.run_block = self._jit(self._run_block, blocks, donate=(2,))
        self.head = {
            (mode, only_last): self._jit(partial(self._head, mode, only_last), (EVERYWHERE, table, *(EVERYWHERE,) * 7))
            for mode in ("greedy", "sampled", "filtered")
            for only_last in (False, True)
        }
        self._take = jax.jit(self._take_leaves, out_shardings=self._mesh.everywhere)

    def leaves_of(self, leaves: Leaves, places: np.ndarray) -> list[Weights]:
        """Copies the leaves of the adapters in places, for each piece of the stage, in the form that layers take.

        A and B of LoRA get the dtype of the model, to which the ops would round them in every pass.

        Args:
            places: index of the adapter, -1 for places without one, whose leaves are zero.
        """
        parts = self._parts
        windows = np.asarray(lv.windows(parts.leaves.columns, jnp.asarray(places, jnp.int32)))
        ratios = parts.inputs.ratios_in(places)

        def take(names: Sequence[str], number: int) -> Weights:
            taken = {name: leaves[name] for name in names}
            rows = {name: np.int32(self._leaf_row(name, number)) for name in names}
            scales = {name: ratios[name][number] for name in names if name in ratios}
            return self._take(taken, {name: windows[self._rows[name]] for name in names}, rows, scales)

        shared = take([name for name in leaves if name.startswith(SHARED)], 0)

        def of_piece(number: int, half: Half | None) -> Weights:
            paths = {linear.path for linear in parts.model.layer(number).linears_of(half)}
            names = [name for name in leaves if name.startswith(LAYERS) and path_of(name) in paths]
            return take(names, number) | shared

        return [of_piece(*piece) for piece in self._extent.pieces]

    def _leaf_row(self, name: str, number: int) -> int:
        """The index of a layer on the first axis of a leaf of this stage."""
        if not name.startswith(LAYERS):
            return 0
        numbers = self._parts.model.some_layers.get(path_of(name))
        return (number if numbers is None else numbers.index(number)) - self._layout.rows_of(name, self._extent).start

    def _take_leaves(
        self, leaves: Leaves, windows: dict[str, Array], rows: dict[str, Array], ratios: dict[str, Array]
    ) -> Weights:
        taken = {}
        for name, leaf in leaves.items():
            view = lv.view(leaf, self._layout.columns[name], rows[name], windows[name])
            if name in ratios:
                view = view * ratios[name].reshape(-1, *(1,) * (view.ndim - 1))
            taken[name.removeprefix(LAYERS)] = view.astype(self._parts.dtype) if self._plain else view
        return taken

    def empty_caches(self, sequences: int, tokens: int) -> list[Cache]:
        """Returns a cache of zeros for each piece of the stage."""
        model, dtype = self._parts.model, self._parts.dtype

        def zeros() -> list[Cache]:
            return [
                {}
                if half == "mlp"
                else {
                    name: jnp.zeros((sequences, *shape), dtype)
                    for name, shape in model.layer(number).cache_shapes(tokens).items()
                }
                for number, half in self._extent.pieces
            ]

        return jax.jit(zeros, out_shardings=self._mesh.everywhere)()

    def _embed(self, table: Array, tokens_T: Array, adapter_T: Array, rows: Array | None) -> Array:
        """Returns the embeddings of tokens, with the trained rows of their adapters, [1, D, C]."""
        x_TD, scale = embed(gather(table, self._table_axis), tokens_T), self._parts.model.embedding_scale
        if rows is not None:
            x_TD = replace_rows(x_TD, tokens_T, ReplacedRows(rows[0], self._layout.token_columns("embed"), adapter_T))
        return scaled_embedding(x_TD, scale)

    def _own_inputs(self, weights: Mapping[str, Array], tokens_T: Array, x_TD: Array) -> Array:
        gathered = {name: gather(leaf, self._input_axes[name]) for name, leaf in weights.items()}
        return own_inputs(gathered.pop(TABLE)[tokens_T], x_TD, gathered, self._parts.model)

    def _prompt_inputs(self, rows: CachedRows, segments: Segments, placed: tuple[PlacedAdapters, Array]) -> Inputs:
        adapters, tile_place = placed
        return self._inputs(rows, segments, adapters, tile_place)

    def _next_inputs(self, position_B: Array, adapters: PlacedAdapters) -> tuple[Inputs, Array]:
        """Returns the inputs of the next tokens, and the positions of those after them; -1 stays."""
        B = len(position_B)
        number_B, used_B = jnp.arange(B, dtype=jnp.int32), position_B >= 0
        at_B = jnp.maximum(position_B, 0)
        rows = CachedRows(sequence_T=jnp.where(used_B, number_B, B), position_T=at_B, length_T=at_B + 1, decoding=True)
        segments = Segments(ids=number_B, offsets=jnp.arange(B + 1, dtype=jnp.int32), lengths=at_B + 1)
        table = jnp.arange(len(adapters.scale_P), dtype=jnp.int32)
        return self._inputs(rows, segments, adapters, table), jnp.where(used_B, position_B + 1, -1)

    def _inputs(self, rows: CachedRows, segments: Segments, adapters: PlacedAdapters, table: Array) -> Inputs:
        lora = None
        if self._parts.specs:
            implementation = self._parts.settings.implementation
            lora = LoRAContext(tile_adapter=table, scale=adapters.scale_P, implementation=implementation)
        layers = layer_inputs(self._parts.model, jnp.asarray(rows.position_T), segments, lora)
        return Inputs(replace(layers, cached=rows), jnp.zeros(0), adapters.kinds, {})

    def _run_block(
        self,
        frozen: Sequence[StoredWeights],
        lora: Sequence[Weights],
        caches: Sequence[Cache],
        number: Array,
        x: Array | Stream,
        inputs: Inputs,
    ) -> tuple[Array | Stream, list[Cache]]:
        written, first = [], x
        for offset, (stored, leaves, cache) in enumerate(zip(frozen, lora, caches, strict=True)):
            x, cache = self._layer(stored, leaves, cache, number + offset, x, inputs)
            written.append(cache)
        return added(x, first), written

    def _run_layer(
        self, stored: StoredWeights, leaves: Weights, cache: Cache, number: Array, x: Array | Stream, inputs: Inputs
    ):
        layers = inputs.layers
        if layers.lora is not None and layers.cached is not None and layers.cached.decoding:
            table = np.arange(len(layers.lora.scale), dtype=np.int32)  # a constant: the ops gather no A and B
            inputs = inputs._replace(layers=replace(layers, lora=replace(layers.lora, tile_adapter=table)))
        weights, x = self._operands.materialize(stored, x)
        return self._parts.layer_with_cache(weights, leaves, x, inputs, number, cache)

    def _head(
        self,
        mode: str,
        only_last: bool,
        norm: Array,
        table: Array,
        x: Array,
        last_B: Array,
        before: Chosen,
        number_B: Array,
        choices: Choices,
        adapter_B: Array,
        rows: Array | None,
    ) -> tuple[Chosen, Array]:
        """Returns the next tokens of all sequences, and how many each has generated.

        Args:
            before: the newest tokens so far.
            only_last: every row is the last one of its sequence; otherwise `last_B` names it, -1 for none.
            rows: trained rows of the head, [1, D, C].
        """
        model = self._parts.model
        x_BD = x if only_last else x[jnp.maximum(last_B, 0)]
        head_DV = gather(table, self._table_axis).T
        hidden_BD = final_norm(x_BD, norm, model)
        logits_BV = logits(hidden_BD, head_DV, model)
        if rows is not None:
            replaced_BC = replaced_tokens(self._layout.token_columns("head"), adapter_B, model.vocab_size)
            new_BC = logits(hidden_BD, rows[0].astype(hidden_BD.dtype), model)
            logits_BV = logits_BV.at[jnp.arange(len(x_BD))[:, None], replaced_BC].set(new_BC, mode="drop")
        chosen_B = choose_tokens(logits_BV, choices, number_B, mode=mode)
        chosen = Chosen(chosen_B, token_logprobs(logits_BV, chosen_B))
        if only_last:
            return chosen, number_B + 1
        chosen = jax.tree.map(lambda new_B, old_B: jnp.where(last_B >= 0, new_B, old_B), chosen, before)
        return chosen, jnp.where(last_B >= 0, number_B + 1, number_B)

    def _jit(self, function: Callable, in_specs: tuple, *, donate: tuple[int, ...] = ()) -> Any:
        if self._mesh.replicas == 1:
            return jax.jit(function, donate_argnums=donate)

        def mapped(*operands: Any) -> Any:
            specs = tuple(
                spec(operand) if callable(spec) else spec for spec, operand in zip(in_specs, operands, strict=True)
            )
            # check_vma is off: all devices compute the same, which it cannot see after a gather.
            local = jax.shard_map(function, mesh=self._mesh.mesh, in_specs=specs, out_specs=EVERYWHERE, check_vma=False)
            return local(*operands)

        return jax.jit(mapped, donate_argnums=donate)
