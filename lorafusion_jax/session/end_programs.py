"""The compiled programs of the ends of the model: the embedding on the first stage, head and losses on the last.

A adapters · C columns of all adapters · D model width · R replicas · T packed tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.families.per_layer_input import POSITIONS
from lorafusion_jax.families.per_layer_input import TABLE as INPUT_TABLE
from lorafusion_jax.models.forward import embed, scaled_embedding, with_positions
from lorafusion_jax.models.per_layer_input import own_inputs
from lorafusion_jax.models.stream import activations
from lorafusion_jax.modules.tensor_sums import TENSOR, on_first, part_start
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.objective.replaced_rows import ReplacedRows, replace_rows, row_gradients
from lorafusion_jax.session.adapter_step import Totals
from lorafusion_jax.session.leaves import Leaves
from lorafusion_jax.session.mesh import REPLICAS, VOCABULARY, StageMesh
from lorafusion_jax.session.parts import Carried, Parts
from lorafusion_jax.session.stage_columns import StageColumns
from lorafusion_jax.session.stage_jit import DEVICES, REPLICATED, ROWS, gather, jit_on_stage, row_of_device, split_axis


class EndPrograms:
    """Embedding, head and losses.

    Args:
        parts: pieces of the model.
        stage: devices of the stage.
        columns: leaves of the stage.

    Attributes:
        table_axis, head_axis: axis of the embedding and of the head, [V, D], that is split over fsdp.
        input_axes: the same of what makes the inputs that layers have of their own.
    """

    def __init__(self, parts: Parts, stage: StageMesh, columns: StageColumns):
        self._parts, self._stage, self._columns = parts, stage, columns
        self._jit = partial(jit_on_stage, stage)
        self._table_spec = stage.split((parts.model.vocab_size, parts.model.hidden_size), VOCABULARY)
        self._head_spec = stage.split((parts.model.num_outputs, parts.model.hidden_size), VOCABULARY)
        self.table_axis, self.head_axis = split_axis(self._table_spec), split_axis(self._head_spec)
        self.embed = self._jit(self._embed, (self._table_spec, ROWS), ROWS)
        input_specs = {name: stage.split(shape) for name, shape in parts.model.input_shapes.items()}
        if INPUT_TABLE in input_specs:
            input_specs[INPUT_TABLE] = stage.columns(parts.model.input_shapes[INPUT_TABLE]).spec
        self.input_axes = {name: split_axis(spec) for name, spec in input_specs.items()}
        self.add_positions = self._jit(self._add_positions, (input_specs.get(POSITIONS), ROWS, ROWS), ROWS)
        self.own_inputs = self._jit(self._own_inputs, (input_specs, ROWS, ROWS), ROWS)
        self.no_choices = self._jit(self._no_choices, (ROWS,), ROWS)
        self.embed_rows = self._jit(self._embed_rows, (self._table_spec, ROWS, ROWS, REPLICATED), ROWS)
        self.add_row_gradients = self._jit(self._add_row_gradients, (ROWS, ROWS, ROWS, DEVICES), DEVICES, donate=(3,))
        self.replace_objectives(parts.chosen)
        self.states = self._jit(self._states, (REPLICATED, ROWS), REPLICATED)
        logprobs = (REPLICATED, self._head_spec, ROWS, ROWS, REPLICATED)
        self.token_logprobs = self._jit(self._token_logprobs, logprobs, REPLICATED)
        self.row_logprobs = self._jit(self._row_logprobs, logprobs[:-1], ROWS)

    def replace_objectives(self, chosen: Sequence[Chosen]) -> None:
        """Replaces the objectives; the programs that compute losses compile at their next call.

        Args:
            chosen: as in `totals_of`.
        """
        self.chosen = tuple(chosen)
        ends = (REPLICATED, self._head_spec, ROWS, ROWS, REPLICATED)
        head, totals = partial(self._head, self.chosen), partial(self._totals, self.chosen)
        self.head = self._jit(head, (*ends, ROWS, DEVICES), (ROWS, ROWS, ROWS, DEVICES, ROWS), donate=(5, 6))
        self.totals = self._jit(totals, ends, REPLICATED)

    def _embed(self, table: Array, tokens: Array) -> Array:
        return scaled_embedding(self._looked_up(table, tokens[0]), self._parts.model.embedding_scale)[None]

    def _looked_up(self, table: Array, tokens_T: Array) -> Array:
        """Returns the embeddings of tokens without their scale, from a table whose rows devices may share."""
        table = gather(table, self.table_axis)
        if TENSOR not in self._table_spec:
            return embed(table, tokens_T)
        rows = tokens_T - part_start(len(table))
        is_here = (rows >= 0) & (rows < len(table))
        x_TD = jnp.where(is_here[:, None], embed(table, jnp.where(is_here, rows, 0)), 0)
        return lax.psum(x_TD, TENSOR)

    def _add_positions(self, table: Array, x: Array, positions: Array) -> Array:
        return with_positions(x[0], gather(table, self.input_axes[POSITIONS]), positions[0])[None]

    def _own_inputs(self, weights: Mapping[str, Array], tokens: Array, x: Array) -> Array:
        """Returns the inputs that layers have of their own, [1, L, T, P]."""
        projections = {
            name: gather(leaf, self.input_axes[name]) for name, leaf in weights.items() if name != INPUT_TABLE
        }
        table = weights[INPUT_TABLE]
        if self.input_axes[INPUT_TABLE] is None:
            return own_inputs(table[tokens[0]], x[0], projections, self._parts.model)[None]
        # Devices look up their columns for all tokens, and exchange them: the table is never gathered.
        columns_FTC = table[lax.all_gather(tokens[0], "fsdp")]
        rows = lax.all_to_all(columns_FTC, "fsdp", split_axis=0, concat_axis=2, tiled=True)[0]
        return own_inputs(rows, x[0], projections, self._parts.model)[None]

    def _no_choices(self, lengths: Array) -> Array:
        """Returns the choices of the routers before the first layer, zeros [1, 2, M, E]."""
        experts = self._parts.model.experts
        assert experts is not None, "a model without experts has no routers"
        return jnp.zeros((1, 2, lengths.shape[1], experts.count), jnp.float32)

    def _embed_rows(self, table: Array, tokens: Array, row_adapter: Array, values: Array) -> Array:
        """`_embed` with the trained rows of adapters, [1, D, C]."""
        rows = ReplacedRows(values[0], self._parts.leaves.token_columns("embed"), row_adapter[0])
        x_TD = replace_rows(self._looked_up(table, tokens[0]), tokens[0], rows)
        return scaled_embedding(x_TD, self._parts.model.embedding_scale)[None]

    def _add_row_gradients(self, dx: Array, tokens: Array, row_adapter: Array, sums: Array) -> Array:
        """Adds the gradient of trained rows of the embedding to their sums, [1, 1, D, C]."""
        gradient = row_gradients(dx[0], tokens[0], self._parts.leaves.token_columns("embed"), row_adapter[0])
        scale = jnp.asarray(self._parts.model.embedding_scale, dx.dtype).astype(jnp.float32)
        return sums + self._once(scale * gradient)[None, None]

    def _once(self, gradient: Array) -> Array:
        """Leaves a gradient that all devices of a replica have to the first one: sums are added up over devices."""
        return gradient if self._stage.tensor == 1 else on_first(gradient)

    def _head(
        self, chosen: Sequence[Chosen], norm: Array, table: Array, x: Carried, batch: Microbatch, heads: Leaves,
        before: Totals, sums: Leaves,
    ):  # fmt: skip
        """Returns the gradient of x, losses, totals, sums of the gradients of the objectives' heads, log-probabilities.

        The last are of clients' rows, [1, T, K]; None if the microbatch has no table of them.
        """
        table, batch = gather(table, self.head_axis), row_of_device(batch)
        constant = {name: leaf for name, leaf in heads.items() if name in self._columns.constants}

        def loss(x: Carried, trained: Leaves):
            x_TD, choices = x if isinstance(x, tuple) else (activations(x), None)
            totals, logprobs = self._parts.head.totals(norm, table, x_TD, batch, trained | constant, chosen)
            if choices is not None:
                totals["loss"] += self._parts.head.balance(choices, batch)
            return jnp.sum(totals["loss"]), (totals, logprobs)

        trained = {name: leaf for name, leaf in heads.items() if name in self._columns.trained}
        (dx, slopes), (totals, logprobs) = jax.grad(loss, argnums=(0, 1), has_aux=True)(row_of_device(x), trained)
        sums = {name: sums[name] + self._once(slopes[name]) for name in sums}
        dx = jax.tree.map(lambda leaf: leaf[None], dx)
        logprobs = None if logprobs is None else logprobs[None]
        return dx, totals["loss"][None], jax.tree.map(jnp.add, before, totals), sums, logprobs

    def _totals(
        self, chosen: Sequence[Chosen], norm: Array, table: Array, x: Array, batch: Microbatch, heads: Leaves
    ) -> Totals:
        table, x, batch = gather(table, self.head_axis), x[0], row_of_device(batch)
        totals, _ = self._parts.head.totals(norm, table, x, batch, heads, chosen)
        return totals if self._stage.replicas == 1 else lax.psum(totals, REPLICAS)

    def _states(self, norm: Array, x: Array) -> Array:
        """Returns the final-normed states of all replicas, [R, T, D]."""
        states = self._parts.head.states(norm, x[0])
        return states[None] if self._stage.replicas == 1 else lax.all_gather(states, REPLICAS)

    def _token_logprobs(self, norm: Array, table: Array, x: Array, batch: Microbatch, heads: Leaves) -> Array:
        """Returns log p of the learned targets of all replicas, [R, T]."""
        table, x, batch = gather(table, self.head_axis), x[0], row_of_device(batch)
        logprobs = self._parts.head.token_logprobs(norm, table, x, batch, heads)
        return logprobs[None] if self._stage.replicas == 1 else lax.all_gather(logprobs, REPLICAS)

    def _row_logprobs(self, norm: Array, table: Array, x: Array, batch: Microbatch) -> Array:
        """Returns the log-probabilities of clients' rows, [1, T, K]."""
        table, batch = gather(table, self.head_axis), row_of_device(batch)
        return self._parts.head.row_logprobs(norm, table, x[0], batch)[None]
