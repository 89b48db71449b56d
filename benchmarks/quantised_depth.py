"""Gradients of adapters on a quantised base against those on its unrounded weights, layer by layer, at 8B's widths.

    python -m benchmarks.quantised_depth --out results/quantised_depth              # a CPU with 32 GB, 4 minutes
    python -m benchmarks.quantised_depth --out build/quantised_depth --small        # to try the script

Random weights and random tokens in float32. The only differences are the rounding of weights to the stored kind and, in
fp8, of the inputs of products. Rows of `quantised_depth.csv` are of a kind and a layer, from the first:

    cosine    of the gradients of all adapters' A and B in the layer to those on the unrounded base
    error     norm of their difference over the norm of the latter
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.csv_rows import append_row
from benchmarks.measured_code import write_measured
from benchmarks.quantised_loss import FORMS, SPECS, stored
from lorafusion_jax.models import Decoder, ModelConfig, Segments
from lorafusion_jax.modules import LoRAContext

WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
VOCABULARY = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=FORMS[1:], default=FORMS[1:])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of each of the four adapters")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    write_measured(given.out)
    shape = SMALL if given.small else WIDE
    config = ModelConfig(family="llama", vocab_size=VOCABULARY, num_layers=given.layers, **shape)
    graph, lora, frozen = nnx.split(Decoder(config, SPECS, dtype=jnp.float32), nnx.LoRAParam, ...)
    drawn = np.random.default_rng(0)
    lora = jax.tree.map(lambda leaf: leaf + jnp.asarray(drawn.normal(0, 0.01, leaf.shape), leaf.dtype), lora)
    tokens = drawn.integers(0, VOCABULARY, (2, len(SPECS) * given.length))  # inputs, targets
    slope = jax.jit(lambda lora, frozen: jax.grad(lambda lora: loss(nnx.merge(graph, lora, frozen), tokens))(lora))
    plain = by_layer(slope(lora, frozen))
    for kind in given.kinds:
        slopes = by_layer(slope(lora, jax.jit(lambda frozen, kind=kind: stored(kind, frozen))(frozen)))
        for layer, (actual, want) in enumerate(zip(slopes, plain, strict=True)):
            row = {"kind": kind, "layers": given.layers, "layer": layer + 1, **compared(actual, want)}
            append_row(given.out / "quantised_depth.csv", row)
            print(row, flush=True)


def loss(model: Decoder, tokens: np.ndarray) -> jax.Array:
    """Sum over adapters of the mean loss of their segment."""
    rows = tokens.shape[1]
    length = rows // len(SPECS)
    positions = np.tile(np.arange(length, dtype=np.int32), len(SPECS))
    context = LoRAContext.of(SPECS, list(range(len(SPECS))))
    logits = model(tokens[0], positions, Segments.from_lengths([length] * len(SPECS), rows), context)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1]).sum() / length


def by_layer(gradient: Any) -> list[np.ndarray]:
    """Gradients of all adapters, one vector for each layer."""
    layers: dict[int, list[np.ndarray]] = {}
    for path, leaf in nnx.to_flat_state(gradient):
        layers.setdefault(path[path.index("layers") + 1], []).append(np.asarray(leaf[...], np.float64).ravel())
    return [np.concatenate(layers[layer]) for layer in sorted(layers)]


def compared(actual: np.ndarray, want: np.ndarray) -> dict[str, float]:
    cosine = actual @ want / (np.linalg.norm(actual) * np.linalg.norm(want))
    return {
        "cosine": round(float(cosine), 5),
        "error": round(float(np.linalg.norm(actual - want) / np.linalg.norm(want)), 5),
    }


if __name__ == "__main__":
    main()
