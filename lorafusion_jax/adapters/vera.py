"""VeRA: y = x W + ((x A · d) B) · b, with a constant pair A, B that all projections share, and d, b trained.

The pair is written to the PEFT folder (`save_projection`), because PEFT's generator would draw other numbers.

Source: Kopiczko et al. 2024, arXiv:2310.11454.
"""

from __future__ import annotations

import math

import numpy as np

from lorafusion_jax.adapters.kind import AdapterKind, Draw, Leaf
from lorafusion_jax.adapters.lora import zeros

D_INITIAL = 0.1


def _uniform(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """U(-sqrt(6 / K), sqrt(6 / K)) for A, and for B the same of R: Kaiming uniform."""
    bound = np.float32(math.sqrt(6 / shape[0]))
    return ((2 * draw(math.prod(shape)) - 1) * bound).reshape(shape)


def _initial_d(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    del draw  # unused
    return np.full(shape, D_INITIAL, np.float32)


VERA = AdapterKind(
    leaves=(
        Leaf(name="vera_a", axes=("K", "R"), init=_uniform, trainable=False, shared=True, peft_name="vera_A"),
        Leaf(name="vera_b", axes=("R", "N"), init=_uniform, trainable=False, shared=True, peft_name="vera_B"),
        Leaf(name="vera_lambda_d", axes=("R",), init=_initial_d, peft_name="vera_lambda_d"),
        Leaf(name="vera_lambda_b", axes=("N",), init=zeros, lr_group="b", peft_name="vera_lambda_b"),
    ),
    low_rank=lambda tensors, sizes: (
        tensors["vera_a"] * tensors["vera_lambda_d"],
        tensors["vera_b"] * tensors["vera_lambda_b"],
    ),
    scale=1.0,
    starts_as_base=True,
    peft={
        "peft_type": "VERA",
        "save_projection": True,
        "projection_prng_key": lambda spec: 0,
        "d_initial": lambda spec: D_INITIAL,
        "vera_dropout": lambda spec: spec.dropout,
    },
)
