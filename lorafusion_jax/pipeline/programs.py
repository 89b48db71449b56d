"""The compiled programs of one stage. Shapes are the same in every slot of a capacity: each compiles once for it.

A program runs one block: one or a few layers, or half a layer. Large models use one layer per program: the host can
dispatch 32 calls without delaying the device, while an unrolled 8B model compiles for minutes and a scanned one copies
every layer's weights.
Every array of a microbatch has a leading replica axis. Inside a program each device sees its own row.
A adapters · L layers of the stage · R replicas · P places for the adapters of a microbatch
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from lorafusion_jax.adapters.bank import prepare_tensors, start_tensors
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import KINDS as ADAPTER_KINDS
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.schema import OptimSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import Linear, RematPolicy
from lorafusion_jax.models.forward import embed, scaled_embedding
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.objective.replaced_rows import ReplacedRows, replace_rows, row_gradients
from lorafusion_jax.optim.step import Hyper, transformation, zero_hyper
from lorafusion_jax.pipeline import adapter_step
from lorafusion_jax.pipeline import leaves as lv
from lorafusion_jax.pipeline.adapter_step import BatchSummary, Totals
from lorafusion_jax.pipeline.leaves import (
    EMBED_ROWS,
    HEAD,
    HEAD_ROWS,
    LAYERS,
    SHARED,
    Columns,
    Leaves,
    Own,
    Place,
    on_stage,
    path_of,
)
from lorafusion_jax.pipeline.lowered import kept
from lorafusion_jax.pipeline.mesh import REPLICAS, StageMesh
from lorafusion_jax.pipeline.parts import Inputs, LayerWeights, Parts, StoredWeights, Weights, layer_kind
from lorafusion_jax.pipeline.remat import Split
from lorafusion_jax.weights.table import KINDS as STORED_KINDS
from lorafusion_jax.weights.table import NONE
from pallas_kernels import compiler_options

ROWS, REPLICATED = P(REPLICAS), P()
OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"


class StagePrograms:
    """Jitted functions of one stage.

    Args:
        parts: pieces of the model.
        stage: devices of the stage.
        extent: its layers.
        remat: rematerialisation policy.

    Attributes:
        columns: the trainable leaves of the stage.
        twins: leaves of trained rows of a table that is both embedding and head. They are equal, and so are their
            gradients, see `join_twins`.
        constants: its leaves that do not change in training.
        prepared: its leaves that `prepare` computes.
    """

    def __init__(self, parts: Parts, stage: StageMesh, extent: Extent, remat: RematPolicy):
        self._parts, self._stage, self._extent = parts, stage, extent
        self._remat: RematPolicy = remat
        self._rows = {name: row for row, name in enumerate(parts.columns)}
        self._leaf_rows = {name: parts.rows_of(name, extent) for name in parts.columns if name.startswith(LAYERS)}
        ends = {"first": extent.start == 0, "last": extent.stop == 2 * parts.model.num_layers}
        columns = on_stage(parts.columns, self._leaf_rows, **ends)
        self.columns = {name: at for name, at in columns.items() if at.leaf.trainable}
        self.prepared = {name: at for name, at in columns.items() if name in parts.prepared}
        self.constants = {
            name: at for name, at in columns.items() if not at.leaf.trainable and name not in self.prepared
        }
        self._columns = self.columns | self.constants | self.prepared
        self._splits: dict[tuple, Split] = {}  # by kind, half, and shapes of the microbatch
        self._steps: dict[tuple, Any] = {}
        self._frozen_specs = [
            jax.tree.map(
                lambda shape: P(*stage.split(shape)),
                parts.stored_shapes(layer_kind=kind),
                is_leaf=lambda node: isinstance(node, tuple),
            )
            for kind in range(len(parts.model.kinds))
        ]
        self._forward_layer = jax.jit(self._run_forward_layer)
        self._backward_layer = jax.jit(self._run_backward_layer)
        self._evaluate_layer = jax.jit(self._run_evaluate_layer)
        table = (parts.model.vocab_size, parts.model.hidden_size)
        self.table_axis = _axis(P(*stage.split(table)))
        table_spec = P(*stage.split(table))
        block = (self.specs_of_block, REPLICATED, REPLICATED, ROWS, ROWS)
        self.inputs = self._jit(partial(self._inputs, dropout=True), (ROWS,), ROWS)
        self.inputs_without_dropout = self._jit(partial(self._inputs, dropout=False), (ROWS,), ROWS)
        self.embed = self._jit(self._embed, (table_spec, ROWS), ROWS)
        self.embed_rows = self._jit(self._embed_rows, (table_spec, ROWS, ROWS, REPLICATED), ROWS)
        self.add_row_gradients = self._jit(self._add_row_gradients, (ROWS, ROWS, ROWS, ROWS), ROWS, donate=(3,))
        self.twins = frozenset({EMBED_ROWS, HEAD_ROWS} if parts.model.tie_embeddings else ())
        kernels = {} if parts.settings.implementation == "xla" else compiler_options()
        gradients = (*block, ROWS, ROWS, ROWS)
        layers = partial(self._jit, options=kernels, identity=self._identity())
        self.forward = layers(self._forward, block, (ROWS, ROWS))
        self.backward = layers(self._backward, gradients, (ROWS, ROWS), donate=(6, 7))
        self.evaluate = layers(self._evaluate, block, ROWS)
        self.table_spec = table_spec
        self.replace_objectives(parts.chosen)
        self.states = self._jit(self._states, (REPLICATED, ROWS), REPLICATED)
        logprobs = (REPLICATED, table_spec, ROWS, ROWS, REPLICATED)
        self.token_logprobs = self._jit(self._token_logprobs, logprobs, REPLICATED)

    def replace_objectives(self, chosen: Sequence[Chosen]) -> None:
        """Replaces the objectives; the programs that compute losses compile at their next call.

        Args:
            chosen: as in `totals_of`.
        """
        self.chosen = tuple(chosen)
        ends = (REPLICATED, self.table_spec, ROWS, ROWS, REPLICATED)
        head, totals = partial(self._head, self.chosen), partial(self._totals, self.chosen)
        self.head = self._jit(head, (*ends, ROWS, ROWS), (ROWS, ROWS, ROWS, ROWS), donate=(5, 6))
        self.totals = self._jit(totals, ends, REPLICATED)

    def close_batch(self, own_columns: Own, adapter: Place, sums: Leaves, totals: Totals | None, alive: Array):
        """Extracts an adapter's gradient from the sums and adds it up over replicas. Reads only its own columns.

        Args:
            own: its trainable leaves, see `own_columns`.

        Returns:
            (gradient, BatchSummary, finite per leaf in order of names, sums and totals with the adapter's part cleared)
        """
        kind = ("close", own_columns)
        if kind not in self._steps:
            whole, rows = self._stage.everywhere, self._stage.by_replica
            self._steps[kind] = jax.jit(
                partial(adapter_step.close_batch, self.columns, own_columns, self.twins),
                donate_argnums=(1, 2),
                out_shardings=(whole, whole, whole, rows, rows),
            )
        return self._steps[kind](adapter, sums, totals, alive)

    def join_twins(self, embed: Array, head: Array, summary: BatchSummary) -> tuple[Array, BatchSummary]:
        """Adds up the gradients of trained rows as embedding and as head, which is all of their gradient.

        Returns:
            (the sum; the summary of a stage with its part)
        """
        kind = ("join",)
        if kind not in self._steps:
            self._steps[kind] = jax.jit(adapter_step.join_twins, out_shardings=self._stage.everywhere)
        return self._steps[kind](embed, head, summary)

    def first_rows(self, table: Array, tokens: Sequence[int]) -> Array:
        """Returns rows of a token table, which an adapter starts from, float32 [1, D, C]."""
        kind = ("rows", len(tokens))
        if kind not in self._steps:
            self._steps[kind] = jax.jit(
                lambda table, tokens: table[tokens].T.astype(jnp.float32)[None], out_shardings=self._stage.everywhere
            )
        return self._steps[kind](table, np.array(tokens, np.int32))

    def step(
        self, own_columns: Own, optim: OptimSettings, adapter: Place, lora: Leaves, gradient: Leaves, optimizer: Any,
        alive: Array, summaries: Sequence[BatchSummary], numbers: Hyper,
    ):  # fmt: skip
        """Steps one adapter. Other adapters do not change.

        This step and all later ones are refused if a gradient, the loss or the norm is not finite on any stage, or if
        this stage would write a number that is not finite. What other stages would write is not known here. So with
        several stages the caller also gets the arrays from before the step, see `put_back`.

        Returns:
            (lora, optimizer, alive, finite per written leaf in order of names and for the optimizer state, the
            adapter's weights before the step; None with one stage)
        """
        alone = len(summaries) == 1
        kind = ("step", own_columns, optim.name, optim.clip > 0, *optim.lr_ratios, alone)
        if kind not in self._steps:
            donated = (1, 3) if alone else (1,)
            self._steps[kind] = jax.jit(
                partial(adapter_step.step, self.columns, own_columns, optim),
                donate_argnums=donated,
                out_shardings=self._stage.everywhere,
            )  # `alive` is not donated: it is a few bytes, and others wait for it to know that the step is done
        return self._steps[kind](adapter, lora, gradient, optimizer, alive, tuple(summaries), numbers)

    def take(self, own_columns: Own, adapter: Place, lora: Leaves) -> Leaves:
        """Copies one adapter's leaves.

        One program serves all leaves, and all adapters of a shape. Slicing leaf by leaf compiled 45 programs for four
        adapters on two stages.
        """
        kind = ("take", own_columns)
        if kind not in self._steps:
            columns = self._columns
            self._steps[kind] = jax.jit(
                lambda adapter, lora: lv.take(lora, columns, own_columns, adapter.first),
                out_shardings=self._stage.everywhere,
            )
        return self._steps[kind](adapter, lora)

    def put(self, leaves: Leaves, first: Array, adapter_leaves: Leaves) -> Leaves:
        """Writes some leaves of one adapter, trainable or constant ones."""
        kind = ("put",)
        if kind not in self._steps:
            columns = self._columns
            self._steps[kind] = jax.jit(
                lambda leaves, first, adapter_leaves: lv.put(leaves, columns, first, adapter_leaves),
                out_shardings=self._stage.everywhere,
            )
        return self._steps[kind](leaves, first, adapter_leaves)

    def put_back(self, adapter: Place, lora: Leaves, earlier: Leaves, alive: Array):
        """Restores earlier weights of an adapter and marks it as not alive, so that later steps are refused.

        Returns:
            (lora, alive)
        """
        kind = ("put back", tuple(earlier), tuple(leaf.shape for leaf in earlier.values()))
        if kind not in self._steps:
            put_back = partial(adapter_step.put_back, self.columns)
            self._steps[kind] = jax.jit(put_back, donate_argnums=(1,), out_shardings=self._stage.everywhere)
        return self._steps[kind](adapter, lora, earlier, alive)

    def write(
        self, owned: Own, adapter: Place, lora: Leaves, sums: Leaves, totals: Totals | None, alive: Array,
        new_weights: Leaves,
    ):  # fmt: skip
        """Writes an adapter's trainable leaves and clears its sums. Other adapters do not change.

        Args:
            owned: its trainable leaves, see `own_columns`.

        Returns:
            (lora, sums, totals, alive)
        """
        kind = ("write", owned)
        if kind not in self._steps:
            whole, rows = self._stage.everywhere, self._stage.by_replica
            self._steps[kind] = jax.jit(
                partial(adapter_step.write, self.columns, owned),
                donate_argnums=(1, 2, 3),
                out_shardings=(whole, rows, rows, whole),
            )
        return self._steps[kind](adapter, lora, sums, totals, alive, new_weights)

    def zeros(self, owned: Own, adapter: Place, lora: Leaves) -> Leaves:
        """Returns zeros for an adapter's trainable leaves."""
        return jax.tree.map(jnp.zeros_like, self.take(owned, adapter, lora))

    def first_optimizer(self, own_columns: Own, optim: OptimSettings, adapter: Place, lora: Leaves) -> Any:
        """Computes the initial optimizer state of one adapter with a compiled program."""
        kind = ("first optimizer", own_columns, optim.name, *optim.lr_ratios)
        if kind not in self._steps:
            made = partial(self.init_optimizer, own_columns, optim)
            self._steps[kind] = jax.jit(made, out_shardings=self._stage.everywhere)
        return self._steps[kind](adapter, lora)

    def init_optimizer(self, own_columns: Own, optim: OptimSettings, adapter: Place, lora: Leaves) -> Any:
        """Returns the initial optimizer state of one adapter."""
        groups = adapter_step.groups(self.columns, own_columns)
        return transformation(optim, zero_hyper(optim), groups).init(
            lv.take(lora, self.columns, own_columns, adapter.first)
        )

    def start_from_base(self, spec: AdapterSpec, linear: Linear, kernel: Weight, tensors: Leaves) -> Leaves:
        """Returns the initial values of an adapter's leaves in one projection that depend on its kernel.

        Args:
            kernel: as it is stored.
            tensors: by name, [K, r] and so on.
        """
        shape = linear.shape
        kind = ("start", spec.kind, spec.rank, shape)
        if kind not in self._steps:

            def start(kernel: Weight, tensors: Leaves, scale: Array) -> Leaves:
                whole = self._parts.usable({linear.name: kernel})[linear.name]
                return start_tensors(adapter_kind(spec.kind), whole, tensors, (*shape, spec.rank), scale)

            self._steps[kind] = jax.jit(start, out_shardings=self._stage.everywhere)
        return self._steps[kind](kernel, tensors, np.float32(spec.scale))

    def prepare(
        self, spec: AdapterSpec, block: Sequence[StoredWeights], leaves: Leaves, number: Array, index: Array,
        prepared: Leaves,
    ) -> Leaves:  # fmt: skip
        """Computes what an adapter's kind prepares in the layers of a block. That of other adapters does not change.

        Args:
            leaves: of all adapters.
            number: first layer of the block.
            index: the adapter's place.
            prepared: leaves of all adapters that kinds prepare.
        """
        kind = ("prepare", spec.kind, spec.targets, spec.rank)
        if kind not in self._steps:
            operands = (self.specs_of_block, *(REPLICATED,) * 5)
            program = partial(self._prepare, spec.kind, spec.targets, spec.rank)
            self._steps[kind] = self._jit(program, operands, REPLICATED)
        return self._steps[kind](block, leaves, number, index, np.float32(spec.scale), prepared)

    def _prepare(
        self, kind_name: str, targets: Sequence[str], rank: int, block: Sequence[StoredWeights], leaves: Leaves,
        number: Array, index: Array, scale: Array, prepared: Leaves,
    ) -> Leaves:  # fmt: skip
        kind, inputs, changed = adapter_kind(kind_name), self._parts.inputs_of(index), dict(prepared)
        for offset, stored in enumerate(block):
            whole, scale = self.materialize(stored, scale)
            trained, constant = self._lora_views(leaves, stored, number + offset, inputs)
            views: dict[str, Any] = trained | constant
            layer = self._parts.model.kinds[layer_kind(stored)]
            for linear in layer.linears_of(self._parts.half(stored)):
                if linear.name not in targets:
                    continue
                size = (*linear.shape, rank)
                paths = {leaf: SHARED if leaf.shared else f"{linear.path}." for leaf in kind.leaves}
                tensors = {
                    leaf.name: leaf.cut(views[f"{path}{leaf.name}"][0], dict(zip("KNR", size, strict=True)))
                    for leaf, path in paths.items()
                }
                kernel = whole[f"{linear.path}.kernel"]
                for leaf, value in prepare_tensors(kind, kernel, tensors, size, scale, self._parts.dtype).items():
                    name = f"{LAYERS}{linear.path}.{leaf}"
                    _, row, window = self._leaf_place(name, number + offset, inputs)
                    start = (row, window[0, 0], *(0 for _ in value.shape))
                    changed[name] = lax.dynamic_update_slice(changed[name], value[None, None], start)
        return changed

    def _jit(
        self, function: Callable, in_specs: tuple, out_specs: Any, *,
        donate: tuple[int, ...] = (), options: dict[str, bool] | None = None, identity: str | None = None,
    ) -> Any:  # fmt: skip
        """Compiles a function of this stage.

        Args:
            identity: of programs that are worth keeping, see `kept`.
        """
        if self._stage.replicas == 1:
            function = function if identity is None else kept(function, identity)
            return jax.jit(function, donate_argnums=donate, compiler_options=options or None)

        @wraps(function)  # profiles show its name
        def mapped(*operands: Any) -> Any:
            specs = tuple(
                spec(operand) if callable(spec) else spec for spec, operand in zip(in_specs, operands, strict=True)
            )
            # check_vma is off: sums and losses differ by replica, as their specs declare.
            local = jax.shard_map(function, mesh=self._stage.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
            return local(*operands)

        options = (options or {}) | hidden_gathers(self._stage.fsdp)
        return jax.jit(mapped, donate_argnums=donate, compiler_options=options or None)

    def _identity(self) -> str | None:
        """Everything but the operands that decides what the programs of layers compute.

        None where code of other packages takes part: a change there would not be seen.
        """
        parts, settings = self._parts, self._parts.settings
        if parts.quantize not in (NONE, *STORED_KINDS) or any(spec.kind not in ADAPTER_KINDS for spec in parts.specs):
            return None
        specs = [replace(spec, name="", seed=0, head=None, spare_heads=(), tokens=None) for spec in parts.specs]
        columns = [(name, at.first, at.width) for name, at in parts.columns.items()]
        sizes = (parts.model, specs, columns, str(parts.dtype), parts.quantize)
        return repr((*sizes, settings.implementation, settings.attention, self._extent, self._remat))

    def _inputs(self, batch: Microbatch, *, dropout: bool) -> Any:
        return _row(self._parts.inputs(_own(batch), dropout=dropout))

    def _embed(self, table: Array, tokens: Array) -> Array:
        scale = self._parts.model.embedding_scale
        return embed(gather(table, self.table_axis), tokens[0], scale)[None]

    def _embed_rows(self, table: Array, tokens: Array, row_adapter: Array, values: Array) -> Array:
        """`_embed` with the trained rows of adapters, [1, D, C]."""
        rows = ReplacedRows(values[0], self._parts.token_columns("embed"), row_adapter[0])
        x_TD = replace_rows(embed(gather(table, self.table_axis), tokens[0]), tokens[0], rows)
        return scaled_embedding(x_TD, self._parts.model.embedding_scale)[None]

    def _add_row_gradients(self, dx: Array, tokens: Array, row_adapter: Array, sums: Array) -> Array:
        """Adds the gradient of trained rows of the embedding to their sums, [1, 1, D, C]."""
        gradient = row_gradients(dx[0], tokens[0], self._parts.token_columns("embed"), row_adapter[0])
        scale = jnp.asarray(self._parts.model.embedding_scale, dx.dtype).astype(jnp.float32)
        return sums + scale * gradient[None, None]

    def _forward(self, frozen: Sequence[StoredWeights], lora: Leaves, number: Array, x: Array, inputs: Any):
        x, inputs = x[0], _own(inputs)
        residuals = []
        for offset, weights in enumerate(frozen):
            before = x
            x, rest = self._forward_layer(weights, lora, number + offset, x, inputs)
            residuals.append(((before,) if offset else (), rest))
        return x[None], _row(residuals)

    def _backward(
        self, frozen: Sequence[StoredWeights], lora: Leaves, number: Array, x: Array, inputs: Any, residuals: Any,
        dy: Array, sums: Leaves,
    ):  # fmt: skip
        x, inputs, residuals, dy = x[0], _own(inputs), _own(residuals), dy[0]
        for offset in reversed(range(len(frozen))):
            before, rest = residuals[offset]
            entered = before[0] if offset else x
            dy, sums = self._backward_layer(frozen[offset], lora, number + offset, entered, inputs, rest, dy, sums)
        return dy[None], sums

    def _evaluate(self, frozen: Sequence[StoredWeights], lora: Leaves, number: Array, x: Array, inputs: Any):
        x, inputs = x[0], _own(inputs)
        for offset, weights in enumerate(frozen):
            x = self._evaluate_layer(weights, lora, number + offset, x, inputs)
        return x[None]

    # The next three are jitted: like layers of a program are traced and lowered once, and XLA inlines the calls.

    def _run_forward_layer(self, weights: StoredWeights, lora: Leaves, number: Array, x: Array, inputs: Inputs):
        given, views, x = self._layer_operands(weights, lora, number, inputs, x)
        return self._split(weights, inputs).forward(given, views, x)

    def _run_backward_layer(
        self, weights: StoredWeights, lora: Leaves, number: Array, x: Array, inputs: Inputs, rest: Any, dy: Array,
        sums: Leaves,
    ):  # fmt: skip
        given, views, dy = self._layer_operands(weights, lora, number, inputs, dy)
        gradient, dy = self._split(weights, inputs).backward(given, views, x, rest, dy)
        added = {f"{LAYERS}{short}": leaf for short, leaf in gradient.items()}
        return dy, sums | {
            name: lv.add(sums[name], *self._leaf_place(name, number, inputs), scaled(name, leaf, number, inputs))
            for name, leaf in added.items()
        }

    def _run_evaluate_layer(self, weights: StoredWeights, lora: Leaves, number: Array, x: Array, inputs: Inputs):
        given, views, x = self._layer_operands(weights, lora, number, inputs, x)
        return self._layer(given, views, x)

    def _layer_operands(
        self, weights: StoredWeights, lora: Leaves, number: Array, inputs: Inputs, x: Array
    ) -> tuple[tuple, Weights, Array]:
        """Returns what `_layer` takes; x waits for nothing, and the weights are made for it, see `materialize`."""
        whole, x = self.materialize(weights, x)
        views, constant = self._lora_views(lora, weights, number, inputs)
        return (whole, inputs, number, constant), views, x

    def _split(self, weights: StoredWeights, inputs: Inputs) -> Split:
        """What forward leaves is shaped like the microbatch: a backward finds the forward of its own capacity."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(inputs))
        layer = layer_kind(weights)
        kind = (layer, self._parts.half(weights), shapes)
        names = self._parts.model.kinds[layer].checkpoints
        return self._splits.setdefault(kind, Split(self._layer, self._remat, names))

    def _lora_views(
        self, lora: Leaves, weights: StoredWeights, number: Array, inputs: Inputs
    ) -> tuple[Weights, Weights]:
        """Returns the leaves of the microbatch's adapters in the layer or half layer of `weights`.

        Names are relative to the layer, but for those of shared leaves.

        Returns:
            (trainable, constant)
        """
        layer = self._parts.model.kinds[layer_kind(weights)]
        paths = {linear.path for linear in layer.linears_of(self._parts.half(weights))}
        views = {
            name: scaled(name, lv.view(leaf, *self._leaf_place(name, number, inputs)), number, inputs)
            for name, leaf in lora.items()
            if name.startswith(SHARED) or (name.startswith(LAYERS) and path_of(name) in paths)
        }
        return (
            {name.removeprefix(LAYERS): view for name, view in views.items() if name in self.columns},
            {name.removeprefix(LAYERS): view for name, view in views.items() if name not in self.columns},
        )

    def _leaf_place(self, name: str, number: Array, inputs: Inputs) -> tuple[Columns, Array, Array]:
        """Returns a leaf's columns, the layer's index on this stage and the windows of the microbatch's adapters."""
        layer = number - self._leaf_rows[name].start if name.startswith(LAYERS) else jnp.int32(0)
        if (numbers := self._parts.model.some_layers.get(path_of(name))) is not None:
            index_L = np.searchsorted(numbers, np.arange(self._parts.model.num_layers)).astype(np.int32)
            layer = jnp.asarray(index_L)[number] - self._leaf_rows[name].start
        return self._columns[name], layer, inputs.windows[self._rows[name]]

    def _layer(self, given: tuple, lora: Weights, x: Array) -> Array:
        frozen, inputs, number, constant = given
        return self._parts.layer(frozen, lora | constant, x, inputs, number)

    def _head(
        self, chosen: Sequence[Chosen], norm: Array, table: Array, x: Array, batch: Microbatch, heads: Leaves,
        before: Totals, sums: Leaves,
    ):  # fmt: skip
        """Returns (gradient of x, losses, totals, sums of the gradients of the objectives' heads)."""
        table, batch = gather(table, self.table_axis), _own(batch)
        constant = {name: leaf for name, leaf in heads.items() if name in self.constants}

        def loss(x: Array, trained: Leaves):
            totals = self._parts.totals(norm, table, x, batch, trained | constant, chosen)
            return jnp.sum(totals["loss"]), totals

        trained = {name: leaf for name, leaf in heads.items() if name in self.columns}
        (dx, slopes), totals = jax.grad(loss, argnums=(0, 1), has_aux=True)(x[0], trained)
        sums = {name: sums[name] + slopes[name] for name in sums}
        return dx[None], totals["loss"][None], jax.tree.map(jnp.add, before, totals), sums

    def _totals(
        self, chosen: Sequence[Chosen], norm: Array, table: Array, x: Array, batch: Microbatch, heads: Leaves
    ) -> Totals:
        totals = self._parts.totals(norm, gather(table, self.table_axis), x[0], _own(batch), heads, chosen)
        return totals if self._stage.replicas == 1 else lax.psum(totals, REPLICAS)

    def _states(self, norm: Array, x: Array) -> Array:
        """Returns the final-normed states of all replicas, [R, T, D]."""
        states = self._parts.states(norm, x[0])
        return states[None] if self._stage.replicas == 1 else lax.all_gather(states, REPLICAS)

    def _token_logprobs(self, norm: Array, table: Array, x: Array, batch: Microbatch, heads: Leaves) -> Array:
        """Returns log p of the learned targets of all replicas, [R, T]."""
        logprobs = self._parts.token_logprobs(norm, gather(table, self.table_axis), x[0], _own(batch), heads)
        return logprobs[None] if self._stage.replicas == 1 else lax.all_gather(logprobs, REPLICAS)

    def specs_of_block(self, block: Sequence[StoredWeights]) -> tuple[StoredWeights, ...]:
        return tuple(map(self._specs_of, block))

    def _specs_of(self, weights: StoredWeights) -> StoredWeights:
        """Returns the sharding of each array of a layer or half layer, as a tree of the same structure."""
        kind = layer_kind(weights)
        specs = {name: self._frozen_specs[kind][name] for name in weights}
        return LayerWeights(specs, kind) if isinstance(weights, LayerWeights) else specs

    def materialize(self, stored: StoredWeights, x: Array) -> tuple[Weights, Array]:
        """Returns the weights of a layer or half layer in the form that its ops use.

        Devices gather the stored arrays. Dequantisation of a layer waits for its input x (in backward: for the gradient
        of its output). Otherwise XLA could dequantise all layers of a program at once.
        """
        specs = self._specs_of(stored)
        stored = jax.tree.map(lambda leaf, spec: gather(leaf, _axis(spec)), stored, specs)
        if self._parts.dequantises:
            stored, x = lax.optimization_barrier((stored, x))
        return self._parts.usable(stored), x


def hidden_gathers(fsdp: int) -> dict[str, bool]:
    """Returns the XLA option that overlaps gathering weights with compute, with fsdp. XLA_FLAGS takes precedence."""
    return {OVERLAP: True} if fsdp > 1 and OVERLAP not in os.environ.get("XLA_FLAGS", "") else {}


def scaled(name: str, view: Array, number: Array, inputs: Inputs) -> Array:
    """Multiplies the adapters' leaves in a layer, [P, ...], by their ratios."""
    if name not in inputs.ratios:
        return view
    return view * inputs.ratios[name][number].reshape(-1, *(1,) * (view.ndim - 1))


def of_heads(leaves: Leaves) -> Leaves:
    """Returns the leaves of the heads of objectives, and trained rows of the head."""
    return {name: leaf for name, leaf in leaves.items() if name.startswith((HEAD, HEAD_ROWS))}


def _own(rows: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], rows)


def _row(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def _axis(spec: P) -> int | None:
    return next((number for number, name in enumerate(spec) if name == "fsdp"), None)


def gather(leaf: Array, axis: int | None) -> Array:
    return leaf if axis is None else lax.all_gather(leaf, "fsdp", axis=axis, tiled=True)
