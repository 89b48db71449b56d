"""Several passes over the next tokens in one program, of a model of one stage.

Otherwise the host calls a program per block of layers with all its weights in each pass: with few rows the device may
wait for that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lorafusion_jax.generation.choose import Chosen
from lorafusion_jax.generation.programs import GenerationPrograms
from lorafusion_jax.generation.stage_functions import Sharing, StageArrays, choose_next, next_activations


class PassLoop:
    """Programs of up to `most` passes.

    Args:
        sharing: see `StagePasses`.
    """

    def __init__(self, programs: GenerationPrograms, sharing: Sharing, most: int):
        self._programs, self._sharing, self.most = programs, sharing, most
        self.program = lru_cache(None)(self._jit)

    def _jit(self, mode: str, listed: int) -> Any:
        parts = _Parts(self._programs)

        def passes(
            steps: Array, arrays: StageArrays, caches: list[Any], start: tuple[Any, ...], choices: Any, slot_B: Array
        ) -> tuple[list[Any], list[Chosen]]:
            def next_pass(step: Array, carry: Any) -> Any:
                caches, newest, number_B, edits, at, by_step = carry
                x, at, caches = next_activations(parts, arrays, self._sharing, caches, newest.tokens_B, at, None)
                options = (choices, slot_B, mode, listed)
                newest, number_B, edits = choose_next(parts, arrays, x, None, newest, number_B, options, edits)
                by_step = jax.tree.map(lambda rows, row: rows.at[step].set(row), by_step, newest)
                return caches, newest, number_B, edits, at, by_step

            empty = jax.tree.map(lambda leaf: jnp.zeros((self.most, *leaf.shape), leaf.dtype), start[0])
            caches, *_, by_step = lax.fori_loop(0, steps, next_pass, (caches, *start, empty))
            return caches, [jax.tree.map(lambda rows, step=step: rows[step], by_step) for step in range(self.most)]

        return self._programs.jit(passes, donate=(2,))


class _Parts:
    """The functions of `GenerationPrograms`, which become parts of the program that is traced."""

    def __init__(self, programs: GenerationPrograms):
        self._programs = programs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name).__wrapped__

    def head(self, *settings: Any) -> Any:
        return self._programs.head(*settings).__wrapped__
