"""Runs prompts and next tokens through the stages of a model. Methods dispatch and return at once.

B sequences · P places
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array

from lorafusion_jax.generation.choose import Choices, Chosen
from lorafusion_jax.generation.packing import PromptPass
from lorafusion_jax.generation.places import Places
from lorafusion_jax.generation.programs import GenerationPrograms, PlacedAdapters
from lorafusion_jax.models.cache import CachedRows
from lorafusion_jax.models.stream import activations, joined
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.leaves import EMBED_ROWS, HEAD_ROWS
from lorafusion_jax.session.move import replicate, transfer
from lorafusion_jax.session.stage import Stage

BLOCK = 4  # layers of a program: few calls per token, and a program that compiles in seconds


class StagePasses:
    """One stage's part of every pass over a batch.

    Args:
        programs: of this stage.
        places: the adapters of the batch.
        tokens: of a sequence at most.
    """

    def __init__(self, stage: Stage, programs: GenerationPrograms, places: Places, tokens: int):
        self.stage, self._programs = stage, programs
        adapters = np.array(places.adapters, np.int32)
        specs = stage.parts.specs
        scale = np.array([specs[index].scale if index >= 0 else 1.0 for index in adapters], np.float32)
        adapter_B = np.repeat(adapters, places.rows)
        self._adapters = replicate(PlacedAdapters(scale, adapter_B, stage.parts.inputs.kinds_in(adapters)), stage.mesh)
        self._adapter_of = np.append(adapter_B, np.int32(-1))  # of a row of no sequence, too
        pieces = stage.weights.pieces
        leaves = programs.leaves_of(stage.all_leaves, adapters) if specs else [{} for _ in pieces]
        caches = programs.empty_caches(places.count, tokens)
        starts = range(0, len(pieces), BLOCK)
        self._numbers = [replicate(np.int32(stage.extent.pieces[start].layer), stage.mesh) for start in starts]
        self._weights, self._leaves, self._caches = (
            [tuple(values[start : start + BLOCK]) for start in starts] for values in (pieces, leaves, caches)
        )

    def read_prompts(self, prompts: PromptPass, x: Array | None) -> Array:
        """Runs prompts through the stage and fills its caches. The first stage begins with their tokens."""
        rows = CachedRows(
            sequence_T=prompts.sequence_T,
            position_T=prompts.position_T,
            length_T=prompts.length_T,
            decoding=False,
            continued=prompts.continued,
        )
        rows, segments, table = replicate((rows, prompts.segments, prompts.tile_place), self.stage.mesh)
        inputs = self._programs.prompt_inputs(rows, segments, (self._adapters, table))
        if self.stage.weights.embed is not None:
            tokens, adapter = prompts.tokens_T, self._adapter_of[prompts.sequence_T]
            tokens, adapter = replicate((tokens, adapter), self.stage.mesh)
            x = self._embed(tokens, adapter)
            inputs = self._with_own_inputs(inputs, tokens, x)
        return self._run(x, inputs)

    def next_tokens(self, tokens_B: Array, position_B: Array, x: Array | None) -> tuple[Array, Array]:
        """Runs the next token of every sequence. Returns activations and the positions after it."""
        inputs, after_B = self._programs.next_inputs(position_B, self._adapters)
        if self.stage.weights.embed is not None:
            x = self._embed(tokens_B, self._adapters.adapter_B)
            inputs = self._with_own_inputs(inputs, tokens_B, x)
        return self._run(x, inputs), after_B

    def _with_own_inputs(self, inputs: Inputs, tokens_T: Array, x: Array) -> Inputs:
        weights = self.stage.weights.own_inputs
        if not weights:
            return inputs
        return inputs._replace(layers=replace(inputs.layers, of_layers=self._programs.own_inputs(weights, tokens_T, x)))

    def _embed(self, tokens_T: Array, adapter_T: Array) -> Array:
        rows = self.stage.all_leaves.get(EMBED_ROWS)
        return self._programs.embed(self.stage.weights.embed, tokens_T, adapter_T, rows)

    def choose(self, x: Any, last_B: Array | None, before: Chosen, number_B: Array, choices: Any, mode: str) -> Any:
        """Chooses tokens on the last stage, see `GenerationPrograms`."""
        weights, only_last = self.stage.weights, last_B is None
        last_B = number_B if last_B is None else last_B
        head = self._programs.head[mode, only_last]
        rows = self.stage.all_leaves.get(HEAD_ROWS)
        adapter_B = self._adapters.adapter_B
        return head(weights.norm, weights.head, x, last_B, before, number_B, choices, adapter_B, rows)

    def _run(self, x: Any, inputs: Any) -> Array:
        blocks = zip(self._weights, self._leaves, self._numbers, strict=True)
        for index, (weights, leaves, number) in enumerate(blocks):
            new, self._caches[index] = self._programs.run_block(weights, leaves, self._caches[index], number, x, inputs)
            x = joined(new, x)
        return activations(x)


class Batch:
    """Runs passes over a batch of sequences through all stages.

    Args:
        stages: of a model, with the programs of each.
        places: the adapters of the sequences.
        tokens: of a sequence at most.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        programs: Sequence[GenerationPrograms],
        places: Places,
        tokens: int,
    ):
        self._stages = [StagePasses(*pair, places, tokens) for pair in zip(stages, programs, strict=True)]
        self._count = places.count

    def read_prompts(
        self, passes: Sequence[PromptPass], tokens_B: np.ndarray, number_B: np.ndarray, choices: Choices, mode: str
    ) -> Chosen:
        """Fills the caches with prompts, and waits for the first token after each; other tokens stay."""
        last = self._stages[-1]
        newest = Chosen(tokens_B, np.zeros(len(tokens_B), np.float32))
        newest, number, options = replicate((newest, number_B, choices), last.stage.mesh)
        for prompts in passes:
            x = None
            for stage in self._stages:
                x = stage.read_prompts(prompts, None if x is None else transfer(x, stage.stage.mesh))
            last_B = replicate(prompts.last_B, last.stage.mesh)
            newest, number = last.choose(x, last_B, newest, number, options, mode)
        return jax.device_get(newest)

    def next_tokens(
        self,
        steps: int,
        tokens_B: np.ndarray,
        position_B: np.ndarray,
        number_B: np.ndarray,
        choices: Choices,
        mode: str,
    ) -> list[Chosen]:
        """Runs some passes, and waits for the tokens of each. Sequences at position -1 are not in use."""
        first, last = self._stages[0], self._stages[-1]
        number, options = replicate((number_B, choices), last.stage.mesh)
        newest = replicate(Chosen(tokens_B, np.zeros(len(tokens_B), np.float32)), last.stage.mesh)
        tokens = replicate(tokens_B, first.stage.mesh)
        positions = [replicate(position_B, stage.stage.mesh) for stage in self._stages]
        chosen = []
        for _ in range(steps):
            x = None
            for index, stage in enumerate(self._stages):
                x = None if x is None else transfer(x, stage.stage.mesh)
                x, positions[index] = stage.next_tokens(tokens, positions[index], x)
            newest, number = last.choose(x, None, newest, number, options, mode)
            chosen.append(newest)
            tokens = transfer(newest.tokens_B, first.stage.mesh)
        return jax.device_get(chosen)
