"""One stage of the pipeline: the effect of each event on its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.families.per_layer_input import POSITIONS
from lorafusion_jax.families.per_layer_input import TABLE as INPUT_TABLE
from lorafusion_jax.models.stream import activations, joined
from lorafusion_jax.optim.step import Hyper
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.adapter_step import BatchSummary, Totals
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.leaves import Leaves
from lorafusion_jax.session.move import first_of, replicate
from lorafusion_jax.session.parts import Carried
from lorafusion_jax.session.stage_state import InFlight, StageState


class Stepped(NamedTuple):
    """Result of an adapter's step on one stage."""

    alive: Array  # [A], whether each adapter's last step was taken; ready when the step is done
    bad: Array  # number of the first leaf whose new values are not finite, see `JoinedLeaves.first_not_finite`
    before: tuple[Leaves, Any] | None  # weights and optimizer state before the step; None with one stage


class Stage(StageState):
    """One stage of the pipeline. Methods dispatch and return at once unless their docstring says that they wait."""

    @property
    def all_leaves(self) -> Leaves:
        """The leaves of all adapters on this stage, with what their kinds prepare."""
        trained = self.lora | self.constants
        if not self.programs.columns.prepared:  # most kinds: nothing to look up in every pass
            return trained
        return trained | self._prepared.read(self._specs, trained, self.blocks, self.positions, self.places)

    def forward(self, slot: int, batch: Microbatch, x: Carried | None) -> Carried:
        """Runs a microbatch through this stage.

        Returns:
            What the next stage's layers read; on the last stage the loss sums [R, A] of the microbatch, and the
            log-probabilities of its clients' rows [R, T, K], if it has a table of them.
        """
        programs, weights = self.programs, self.weights
        hidden = self._entered(batch, x)
        inputs = self._with_own_inputs(programs.layers.inputs(batch), batch, hidden)
        if batch.balance is not None and self.weights.embed is not None:
            hidden = hidden, programs.ends.no_choices(batch.balance.length)
        leaves, shares_keys = self.all_leaves, programs.layers.shares_keys
        xs: list[Carried] = []
        residuals: list[Any] = []
        for block, position in zip(self.blocks, self.positions, strict=True):
            # Apart from the residuals, which leave out what is an input of the block.
            xs.append(hidden)
            passed_on, block_residuals = programs.layers.forward(block, leaves, position, hidden, inputs)
            # Of keys that later layers read, a block returns only its own; those of earlier blocks are added again.
            hidden = joined(passed_on, hidden) if shares_keys else passed_on
            residuals.append(block_residuals)
        rows = (batch.tokens, batch.row_adapter) if lv.EMBED_ROWS in self.lora else None
        if weights.head is None:
            self._in_flight[slot] = InFlight(inputs, xs, residuals, None, rows)
            return hidden
        # Loss and gradient in one program, so that no logits are kept for the backward pass.
        dy, losses, self.totals, sums, logprobs = programs.ends.head(
            weights.norm, weights.head, hidden, batch, _of_heads(leaves), self.totals, _of_heads(self.sums)
        )
        self.sums = self.sums | sums
        self._in_flight[slot] = InFlight(inputs, xs, residuals, dy, rows)
        return losses if logprobs is None else (losses, logprobs)

    def _with_own_inputs(self, inputs: Inputs, batch: Microbatch, hidden: Any) -> Inputs:
        """Adds the inputs that layers have of their own, if they have some."""
        weights = self.weights.own_inputs
        if INPUT_TABLE not in weights:
            return inputs
        of_layers = self.programs.ends.own_inputs(weights, batch.tokens, hidden)
        return inputs._replace(layers=replace(inputs.layers, of_layers=of_layers))

    def _entered(self, batch: Microbatch, x: Carried | None) -> Any:
        """Returns what enters the first layer: activations of the stage before, or the embeddings."""
        table = self.weights.embed
        if table is None:
            assert x is not None, "only the first stage begins with tokens"
            return x
        ends = self.programs.ends
        if lv.EMBED_ROWS in self.lora:
            embedded = ends.embed_rows(table, batch.tokens, batch.row_adapter, self.lora[lv.EMBED_ROWS])
        else:
            embedded = ends.embed(table, batch.tokens)
        positions = self.weights.own_inputs.get(POSITIONS)
        return embedded if positions is None else ends.add_positions(positions, embedded, batch.positions)

    def backward(self, slot: int, dy: Carried | None) -> Carried:
        """Adds a microbatch's gradients to the sums and returns the gradient of its input."""
        inputs, xs, residuals, loss_gradient, rows = self._in_flight.pop(slot)
        layers, leaves = self.programs.layers, self.all_leaves
        gradient: Any = loss_gradient if dy is None else dy
        assert gradient is not None, "a stage that is not the last waits for the gradient of the next"
        del loss_gradient  # donated below
        for block, position in zip(reversed(self.blocks), reversed(self.positions), strict=True):
            # Popped, so that a block's arrays are freed after its own pass and not after that of all blocks.
            x = xs.pop()
            backward = layers.backward_of(x, gradient) if layers.shares_keys else layers.backward
            gradient, self.sums = backward(block, leaves, position, x, inputs, residuals.pop(), gradient, self.sums)
        if rows is not None:
            sums = self.programs.ends.add_row_gradients(first_of(gradient), *rows, self.sums[lv.EMBED_ROWS])
            self.sums = self.sums | {lv.EMBED_ROWS: sums}
        return gradient

    def close_batch(self, index: int) -> tuple[BatchSummary, Array]:
        """Closes an adapter's global batch: moves its gradient from the sums to where `step` takes it.

        Returns:
            (BatchSummary, number of the first leaf that is not finite, see `JoinedLeaves.first_not_finite`)
        """
        self._gradients[index], summary, bad, self.sums, self.totals = self.programs.adapters.close_batch(
            self.own_columns[index], self.joined(index), self.places[index], self.sums, self.totals, self.alive
        )
        return summary, bad

    @property
    def with_twins(self) -> set[int]:
        """The adapters that train rows of a table that is both embedding and head."""
        if not self.programs.columns.twins:
            return set()
        return {index for index, spec in enumerate(self._specs) if spec.tokens is not None}

    def twin_gradient(self, index: int, name: str) -> Array:
        """Returns this stage's part of the gradient of trained rows of a tied table."""
        return self._gradients[index][name]

    def join_twins(self, index: int, embed: Array, head: Array, summary: BatchSummary) -> BatchSummary:
        """Gives the next step of an adapter the whole gradient of its trained rows, see `AdapterPrograms.join_twins`.

        Returns:
            The summary of this stage. Only the first stage counts these rows.
        """
        total, counted = self.programs.adapters.join_twins(embed, head, summary)
        gradient = self._gradients[index]
        # Embedding and head step their own copies of the rows: with the same gradient these stay equal.
        self._gradients[index] = gradient | dict.fromkeys(self.programs.columns.twins & gradient.keys(), total)
        return counted if self.weights.embed is not None else summary

    def gradient(self, index: int) -> Leaves:
        """Returns the gradient of an adapter whose global batch is closed, until its next step."""
        return self.joined(index).split(self._gradients[index])

    def replace_gradient(self, index: int, gradient: Mapping[str, np.ndarray]) -> None:
        """Gives the next step of an adapter another gradient, in all layers of the model."""
        stage_gradient = {
            name: leaf[self.layers_of(name)] for name, leaf in gradient.items() if name in self.programs.columns.trained
        }
        self._gradients[index] = replicate(self.joined(index).join(stage_gradient), self.mesh)

    def step(self, index: int, summaries: Sequence[BatchSummary], numbers: Hyper) -> Stepped:
        """Steps an adapter whose global batch is closed on every stage."""
        spec, optim = self._specs[index], self.settings[index].optim
        state = self.optimizers[spec.name]
        self.lora, self.optimizers[spec.name], self.alive, bad, previous = self.programs.adapters.step(
            self.own_columns[index],
            self.joined(index),
            optim,
            self.places[index],
            self.lora,
            self._gradients.pop(index),
            state,
            self.alive,
            summaries,
            numbers,
        )
        if self.programs.columns.prepared:
            self._prepared.mark(index)
        # `state` is still valid: with several stages the program does not donate the optimizer state.
        return Stepped(self.alive, bad, None if previous is None else (previous, state))

    def put_back(self, index: int, before: tuple[Leaves, Any]) -> None:
        """Undoes a step that another stage refused, and all later steps of the adapter."""
        previous, self.optimizers[self._specs[index].name] = before
        self.lora, self.alive = self.programs.adapters.put_back(
            self.own_columns[index], self.joined(index), self.places[index], self.lora, previous, self.alive
        )
        if self.programs.columns.prepared:
            self._prepared.mark(index)

    def revive(self, index: int) -> None:
        """Lets an adapter step again after a step that was refused."""
        self.alive = self.programs.adapters.revive(self.places[index], self.alive)

    def evaluate(self, batch: Microbatch, x: Array | None) -> Array | Totals:
        """Runs a held-out microbatch without dropout. The last stage returns sums [A] over all replicas."""
        hidden, weights = self._run_forward(batch, x), self.weights
        if weights.head is None:
            return hidden
        return self.programs.ends.totals(weights.norm, weights.head, hidden, batch, _of_heads(self.all_leaves))

    def token_logprobs(self, batch: Microbatch, x: Array | None) -> Array:
        """Like `evaluate`; the last stage returns log p of the learned targets of all replicas, [R, T]."""
        hidden, weights = self._run_forward(batch, x), self.weights
        if weights.head is None:
            return hidden
        return self.programs.ends.token_logprobs(weights.norm, weights.head, hidden, batch, _of_heads(self.all_leaves))

    def row_logprobs(self, batch: Microbatch, x: Array | None) -> Array:
        """Like `evaluate`; the last stage returns the log-probabilities of clients' rows, [R, T, K]."""
        hidden, weights = self._run_forward(batch, x), self.weights
        return (
            hidden
            if weights.head is None
            else self.programs.ends.row_logprobs(weights.norm, weights.head, hidden, batch)
        )

    def states(self, batch: Microbatch, x: Array | None) -> Array:
        """Like `evaluate`; the last stage returns the final-normed states of all replicas, [R, T, D]."""
        hidden, weights = self._run_forward(batch, x), self.weights
        return hidden if weights.head is None else self.programs.ends.states(weights.norm, hidden)

    def _run_forward(self, batch: Microbatch, x: Array | None) -> Any:
        programs, leaves = self.programs, self.all_leaves
        hidden = self._entered(batch, x)
        inputs = self._with_own_inputs(programs.layers.inputs_without_dropout(batch), batch, hidden)
        for block, position in zip(self.blocks, self.positions, strict=True):
            hidden = joined(programs.layers.evaluate(block, leaves, position, hidden, inputs), hidden)
        return activations(hidden)


def _of_heads(leaves: Leaves) -> Leaves:
    """Returns the leaves of the heads of objectives, and trained rows of the head."""
    return {name: leaf for name, leaf in leaves.items() if name.startswith((lv.HEAD, lv.HEAD_ROWS))}
