"""LoRA: y = x W + scale · (drop(x) A) B, with A and B trained.

Source: Hu et al. 2021, arXiv:2106.09685; initial values as in PEFT.
"""

from __future__ import annotations

import math

import numpy as np

from lorafusion_jax.adapters.kind import AdapterKind, Draw, Leaf


def kaiming(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """U(-1/sqrt(K), 1/sqrt(K)) (Kaiming uniform with a = sqrt 5)."""
    bound = np.float32(1 / math.sqrt(shape[0]))
    return ((2 * draw(math.prod(shape)) - 1) * bound).reshape(shape)


def zeros(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    del draw  # unused
    return np.zeros(shape, np.float32)


LORA_A = Leaf(name="lora_a", axes=("K", "R"), init=kaiming, peft_name="lora_A.weight")
LORA_B = Leaf(name="lora_b", axes=("R", "N"), init=zeros, lr_group="b", peft_name="lora_B.weight")
LORA = AdapterKind(
    leaves=(LORA_A, LORA_B),
    low_rank=lambda tensors, sizes: (tensors["lora_a"], tensors["lora_b"]),
    scaled=("lora_b",),
    peft={},
    splits=True,
    starts_as_base=True,
)

# y + scale · bias: PEFT adds the bias of its second linear layer to the product before the scale.
# Weight decay leaves it alone, as that of transformers' Trainer leaves every bias.
BIAS = Leaf(name="lora_bias", axes=("N",), init=zeros, decay=False, lr_group="b", peft_name="lora_B.bias")
LORA_BIASED = AdapterKind(
    leaves=(LORA_A, LORA_B, BIAS),
    low_rank=lambda tensors, sizes: (tensors["lora_a"], tensors["lora_b"]),
    shift=lambda tensors, sizes: sizes.scale * tensors["lora_bias"],
    scaled=("lora_b", "lora_bias"),
    peft={"lora_bias": True},
    starts_as_base=True,
)

# LoRA-FA with a plain constant A: B alone is trained. PEFT's optimizer of that name also rescales B's gradient.
FROZEN_A = Leaf(name="constant_a", axes=("K", "R"), init=kaiming, trainable=False, peft_name="lora_A.weight")
LORA_FA = AdapterKind(
    leaves=(FROZEN_A, LORA_B),
    low_rank=lambda tensors, sizes: (tensors["constant_a"], tensors["lora_b"]),
    scaled=("lora_b",),
    peft={},
    splits=True,
    starts_as_base=True,
)
