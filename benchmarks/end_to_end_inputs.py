"""What `end_to_end.py` runs on: random weights and random tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.data.prepare import AdapterData
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.pipeline.mesh import StageMesh
from lorafusion_jax.weights.table import NONE, stored_kind
from scheduling import AdapterJob


class Draw:
    """Random tensors of a stage: norms 1, biases 0, kernels scaled by their input size."""

    def __init__(self, stage: StageMesh, dtype: Any, quantize: str = NONE):
        self._stage, self._dtype, self._key, self._made = stage, dtype, 0, {}
        self._kind, self._stored = stored_kind(quantize), {}

    def stored(self, name: str, shape: tuple[int, ...]) -> Any:
        """The same, a projection's kernel as the stage stores it."""
        array, kind = self(name, shape), self._kind
        if kind is None or not name.endswith(".kernel"):
            return array
        if shape not in self._stored:
            targets = {name: self._stage.weight(each.shape) for name, each in kind.arrays(*shape).items()}
            self._stored[shape] = jax.jit(lambda w: dict(kind.quantise(w.astype(jnp.float32))), out_shardings=targets)
        return jax.block_until_ready(self._stored[shape](array))  # one kernel of the wide type at a time

    def __call__(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        self._key += 1
        kind = (name.rsplit(".", 1)[-1] if len(shape) < 2 else "kernel", shape)
        if kind not in self._made:
            target = self._stage.weight(shape)

            def make(seed: jax.Array) -> jax.Array:
                if kind[0] != "kernel":
                    return jnp.full(shape, 0.0 if kind[0] == "bias" else 1.0, self._dtype)
                key = jax.random.wrap_key_data(jnp.full(4, seed, jnp.uint32), impl="unsafe_rbg")
                return jax.random.normal(key, shape, self._dtype) * jnp.asarray(shape[0] ** -0.5, self._dtype)

            self._made[kind] = jax.jit(make, out_shardings=target)
        return self._made[kind](self._key)


def random_data(job: AdapterJob, vocab: int, seed: int) -> AdapterData:
    lengths = np.asarray(job.sample_tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], bool)
    mask[offsets[:-1]] = False
    tokens = np.random.default_rng(seed).integers(0, vocab, offsets[-1]).astype(np.int32)
    held = TokenizedSet(tokens=tokens, loss_mask=mask, offsets=offsets, rows=np.arange(len(lengths)), report=None)  # type: ignore[arg-type]
    return AdapterData(train=held, eval=None, order=np.arange(len(lengths)))
