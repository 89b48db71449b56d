"""Runs prompts and next tokens through the stages of a model. Methods dispatch and return at once.

B sequences · S slots of adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array

from lorafusion_jax.adapters.tokens import Table
from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.per_layer_input import POSITIONS, TABLE
from lorafusion_jax.generation.choose import Chosen, Listed, seen_tokens
from lorafusion_jax.generation.packing import PromptPass, Scored
from lorafusion_jax.generation.programs import GenerationPrograms, Position
from lorafusion_jax.generation.row_settings import RowSettings
from lorafusion_jax.generation.slots import Sampler
from lorafusion_jax.models.cache import CachedRows
from lorafusion_jax.models.stream import activations, joined
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.leaves import TOKENS
from lorafusion_jax.session.move import replicate, transfer
from lorafusion_jax.session.stage import Stage

BLOCK = 4  # layers of a program: few calls per token, and a program that compiles in seconds
SCORED = 512  # rows whose tokens are scored at a time: each has logits of the whole vocabulary


class StagePasses:
    """One stage's part of every pass.

    Args:
        programs: of this stage.
        slots: of adapters.
        rows: sequences that have states.
        blocks: of the cache.
    """

    def __init__(self, stage: Stage, programs: GenerationPrograms, slots: int, rows: int, blocks: int):
        self.stage, self._programs = stage, programs
        pieces = stage.weights.pieces
        self._bank = programs.empty_bank(stage.all_leaves, slots) if stage.parts.specs else [{} for _ in [*pieces, 0]]
        self.hold([None] * slots)
        self._starts = range(0, len(pieces), BLOCK)
        self._numbers = [replicate(np.int32(stage.extent.pieces[start].layer), stage.mesh) for start in self._starts]
        caches = programs.empty_caches(rows, blocks)
        self._weights, self._caches = self._in_blocks(pieces), self._in_blocks(caches)
        self._share_bank()
        self._given = [self._sharing(start) for start in self._starts]

    def _in_blocks(self, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [tuple(values[start : start + BLOCK]) for start in range(0, len(values), BLOCK)]

    def _sharing(self, start: int) -> dict[str, tuple[int, int]]:
        """Block and number of the layer whose cache layers of a block read, by their module."""
        mixers = [self.stage.parts.model.layer(piece.layer).attention for piece in self.stage.extent.pieces]
        shared = [mixer if isinstance(mixer, Attention) else None for mixer in mixers]
        reads = {mixer.module for mixer in shared[start : start + BLOCK] if mixer is not None and mixer.reads}
        return {
            mixer.module: divmod(index, BLOCK)
            for index, mixer in enumerate(shared[:start])
            if mixer is not None and mixer.sharing == "gives" and mixer.module in reads
        }

    def hold(self, samplers: Sequence[Sampler | None]) -> None:
        """Says which samplers are in the slots."""
        specs = [None if sampler is None else sampler.spec for sampler in samplers]
        self._slots = replicate(self._programs.slots(specs), self.stage.mesh)

    def put(self, adapter: int, slot: int) -> list[Array]:
        """Copies an adapter's weights of this moment to a slot. Returns whether they are finite, in parts."""
        spec = dict(self.stage.occupied)[adapter]
        self._bank, finite = self._programs.put(self._bank, self.stage.all_leaves, adapter, spec, slot)
        self._share_bank()
        return finite

    def read(self, slot: int) -> list[dict[str, np.ndarray]]:
        """Copies a slot to the host."""
        return jax.device_get([self._programs.slot_of(part, slot) for part in self._bank])

    def write(self, slot: int, values: Sequence[dict[str, np.ndarray]]) -> None:
        """Puts what `read` has returned into a slot."""
        self._bank = [self._programs.fill(part, value, slot) for part, value in zip(self._bank, values, strict=True)]
        self._share_bank()

    def _share_bank(self) -> None:
        shared = {name: leaf for name, leaf in self._bank[-1].items() if not name.startswith(TOKENS)}
        self._leaves = self._in_blocks([part | shared for part in self._bank[:-1]])

    def copy(self, blocks: np.ndarray, rows: np.ndarray) -> None:
        """Copies blocks and states, [from, to] each."""
        numbers = replicate((blocks, rows), self.stage.mesh)
        self._caches = [tuple(self._programs.copy(caches, *numbers)) for caches in self._caches]

    def read_prompts(self, prompts: PromptPass, x: Array | None) -> Array:
        """Runs prompts through the stage and fills its caches. The first stage begins with their tokens."""
        rows = CachedRows(
            position_T=prompts.position_T,
            cell_T=prompts.cell_T,
            tables_GM=prompts.tables_GM,
            state_M=prompts.state_M,
        )
        rows, segments, table = replicate((rows, prompts.segments, prompts.tile_slot), self.stage.mesh)
        inputs = self._programs.prompt_inputs(rows, segments, self._slots, table)
        if self.stage.weights.embed is not None:
            tokens, slot_T = replicate((prompts.tokens_T, prompts.slot_T), self.stage.mesh)
            x = self._embed(tokens, slot_T, rows.position_T)
            inputs = self._with_own_inputs(inputs, tokens, x)
        return self._run(x, inputs)

    def next_tokens(self, tokens_B: Array, at: Position, x: Array | None) -> tuple[Array, Position]:
        """Runs the next token of every sequence. Returns activations and the positions after it."""
        inputs, after = self._programs.next_inputs(at, self._slots)
        if self.stage.weights.embed is not None:
            x = self._embed(tokens_B, at.slot_B, at.position_B)
            inputs = self._with_own_inputs(inputs, tokens_B, x)
        return self._run(x, inputs), after

    def _with_own_inputs(self, inputs: Inputs, tokens_T: Array, x: Array) -> Inputs:
        weights = self.stage.weights.own_inputs
        if TABLE not in weights:
            return inputs
        return inputs._replace(layers=replace(inputs.layers, of_layers=self._programs.own_inputs(weights, tokens_T, x)))

    def _embed(self, tokens_T: Array, slot_T: Array, position_T: Array) -> Array:
        x_TD = self._programs.embed(self.stage.weights.embed, tokens_T, slot_T, *self._token_rows("embed"))
        table = self.stage.weights.own_inputs.get(POSITIONS)
        return x_TD if table is None else self._programs.add_positions(table, x_TD, position_T)

    def _token_rows(self, table: Table) -> tuple[Array, Array | None]:
        return self._slots.tokens[table], self._bank[-1].get(f"{TOKENS}{table}")

    def choose(
        self, x: Any, last_B: Array | None, before: Chosen, number_B: Array, options: tuple[Any, ...], edits: Any
    ) -> tuple[Chosen, Array, Any]:
        """Chooses tokens on the last stage, see `GenerationPrograms`."""
        weights, only_last = self.stage.weights, last_B is None
        last_B = number_B if last_B is None else last_B
        choices, slot_B, mode, listed = options
        head = self._programs.head(mode, edits is not None, listed, only_last)
        return head(
            weights.norm, weights.head, x, last_B, before, number_B, choices, edits, slot_B, *self._token_rows("head")
        )

    def score(self, x: Array, scored: Scored) -> list[tuple[Array, Listed | None]]:
        """Scores tokens of prompts on the last stage, some rows at a time."""
        weights, run, results = self.stage.weights, self._programs.score(scored.listed), []
        for part in scored.parts(SCORED):
            arrays = replicate((part.row_W, part.targets_Wk, part.slot_W), self.stage.mesh)
            results.append(run(weights.norm, weights.head, x, *arrays, *self._token_rows("head")))
        return results

    def _run(self, x: Any, inputs: Any) -> Array:
        for index, (weights, leaves, number) in enumerate(zip(self._weights, self._leaves, self._numbers, strict=True)):
            earlier = {module: self._caches[block][layer] for module, (block, layer) in self._given[index].items()}
            caches = self._caches[index]
            output, self._caches[index] = self._programs.run_block(weights, leaves, caches, earlier, number, x, inputs)
            x = joined(output, x)
        return activations(x)


class Passes:
    """Runs passes over sequences through all stages.

    Args:
        stages: of a model, with the programs of each.
        slots, rows, blocks: see `StagePasses`.

    Attributes:
        newest: tokens of all rows, on the last stage.
    """

    def __init__(
        self, stages: Sequence[Stage], programs: Sequence[GenerationPrograms], *, slots: int, rows: int, blocks: int
    ):
        self._stages = [StagePasses(*pair, slots, rows, blocks) for pair in zip(stages, programs, strict=True)]
        self.newest = replicate(np.zeros(rows, np.int32), stages[-1].mesh)

    def put(self, adapter: int, slot: int) -> bool:
        """Copies an adapter's weights of this moment to a slot. Waits; returns whether they are finite."""
        return all(jax.device_get([part for stage in self._stages for part in stage.put(adapter, slot)]))

    def read(self, slot: int) -> list[Any]:
        """Copies a slot to the host."""
        return [stage.read(slot) for stage in self._stages]

    def write(self, slot: int, values: Sequence[Any]) -> None:
        """Puts what `read` has returned into a slot."""
        for stage, value in zip(self._stages, values, strict=True):
            stage.write(slot, value)

    def hold(self, samplers: Sequence[Sampler | None]) -> None:
        """Says which adapters are in the slots."""
        for stage in self._stages:
            stage.hold(samplers)

    def copy(self, blocks: np.ndarray, rows: np.ndarray) -> None:
        """Copies blocks and states, [from, to] each."""
        for stage in self._stages:
            stage.copy(blocks, rows)

    def read_prompts(self, passes: Sequence[PromptPass], rows: RowSettings) -> tuple[Chosen, list[Any]]:
        """Fills the caches with prompts. Returns the first token after each, and what is scored of each pass.

        Tokens of other sequences stay.
        """
        last = self._stages[-1]
        newest, number, options, edits = self._start(rows)
        scores = []
        for prompts in passes:
            x: Any = None
            for stage in self._stages:
                x = stage.read_prompts(prompts, None if x is None else transfer(x, stage.stage.mesh))
            last_B = replicate(prompts.last_B, last.stage.mesh)
            newest, number, edits = last.choose(x, last_B, newest, number, options, edits)
            scores.append([] if prompts.scored is None else last.score(x, prompts.scored))
        self.newest = _put(self.newest, newest.tokens_B)
        return _sent_to_host((newest, scores))

    def next_tokens(self, steps: int, at: Position, rows: RowSettings) -> list[Chosen]:
        """Runs some passes over the newest tokens. Returns those of each. Sequences at position -1 are not in use."""
        first, last = self._stages[0], self._stages[-1]
        newest, number, options, edits = self._start(rows)
        tokens = transfer(newest.tokens_B, first.stage.mesh)
        positions = [replicate(at, stage.stage.mesh) for stage in self._stages]
        chosen = []
        for _ in range(steps):
            x = None
            for index, stage in enumerate(self._stages):
                x = None if x is None else transfer(x, stage.stage.mesh)
                x, positions[index] = stage.next_tokens(tokens, positions[index], x)
            newest, number, edits = last.choose(x, None, newest, number, options, edits)
            chosen.append(newest)
            tokens = transfer(newest.tokens_B, first.stage.mesh)
        self.newest = _put(self.newest, newest.tokens_B)
        return _sent_to_host(chosen)

    def _start(self, rows: RowSettings) -> tuple[Chosen, Array, tuple[Any, ...], Any]:
        """Puts settings on the devices of the last stage."""
        mesh, vocabulary = self._stages[-1].stage.mesh, self._stages[-1].stage.parts.model.num_outputs
        B = len(rows.number_B)
        listed = None
        if rows.listed:
            listed = Listed(np.zeros((B, rows.listed), np.int32), np.zeros((B, rows.listed), np.float32))
        first = (np.zeros(B, np.float32), listed)
        others, number, choices, slot = replicate((first, rows.number_B, rows.choices, rows.slot_B), mesh)
        newest = Chosen(_first(self.newest, B), *others)
        edits = None
        if rows.seen_BL is not None:
            seen, edits = replicate((rows.seen_BL, rows.edits), mesh)
            edits = edits._replace(seen_BV=_seen(seen, vocabulary))
        return newest, number, (choices, slot, rows.mode, rows.listed), edits


def _sent_to_host(arrays: Any) -> Any:
    """Starts copies to the host, which do not wait for later passes."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays


_seen = jax.jit(seen_tokens, static_argnums=1)
_first = jax.jit(lambda tokens_R, B: tokens_R[:B], static_argnums=1)
_put = jax.jit(lambda tokens_R, tokens_B: tokens_R.at[: len(tokens_B)].set(tokens_B))
