"""Rematerialisation: splits a layer into forward and backward programs and chooses the residuals between them.

`jax.vjp` inside a jitted forward would return the frozen weights among its residuals, and jit would copy them for every
microbatch in flight. Here forward drops residuals that are inputs of the layer, and backward inserts them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from lorafusion_jax.layout.layer import RematPolicy


class Split:
    """Splits a differentiable function into a forward and a backward pass that run in different programs.

    Args:
        function: (given, lora, x) → y; differentiated with respect to lora and x.
        remat: "everything": save all residuals; "gemm_inputs": save the named tensors and recompute elementwise work;
            "nothing": recompute forward.
        names: checkpoint names of the tensors to save.

    `forward(given, lora, x)` → (y, kept) and `backward(given, lora, x, kept, dy)` → (dlora, dx) are called inside
    traced functions.
    """

    def __init__(self, function: Callable[[Any, Any, Any], Any], remat: RematPolicy, names: Sequence[str]):
        self._remat = remat
        self._function = function
        if remat == "gemm_inputs":
            self._function = jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*names))
        self._structure: Any = None
        self._sources: list[Any] = []  # per residual: n for input n, ~n for kept array n, or the constant

    def forward(self, constants: Any, lora: Any, x: Any) -> tuple[Any, tuple[Array, ...]]:
        if self._remat == "nothing":
            return self._function(constants, lora, x), ()
        y, pullback = jax.vjp(lambda lora, x: self._function(constants, lora, x), lora, x)
        residuals, self._structure = jax.tree.flatten(pullback)
        inputs = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves((constants, lora, x)))}
        self._sources, kept, places = [], [], {}
        for leaf in residuals:
            if not isinstance(leaf, Tracer):
                self._sources.append(leaf)
            elif id(leaf) in inputs:
                self._sources.append(inputs[id(leaf)])
            else:
                if id(leaf) not in places:
                    places[id(leaf)] = len(kept)
                    kept.append(leaf)
                self._sources.append(~places[id(leaf)])
        return y, tuple(kept)

    def backward(self, constants: Any, lora: Any, x: Any, kept: tuple[Array, ...], dy: Any) -> tuple[Any, Any]:
        if self._remat == "nothing":
            return jax.vjp(lambda lora, x: self._function(constants, lora, x), lora, x)[1](dy)
        if self._structure is None:  # forward was not traced in this process: its lowered form was kept
            jax.eval_shape(self.forward, constants, lora, x)
        inputs = jax.tree.leaves((constants, lora, x))
        residuals = [
            (inputs[source] if source >= 0 else kept[~source]) if isinstance(source, int) else source
            for source in self._sources
        ]
        return jax.tree.unflatten(self._structure, residuals)(dy)
