"""DoRA: y = f · (x W + scale · (x A) B) + bias, f = m / ‖W + scale · A B‖, with A, B and the magnitude m trained.

The norm is that of each column. It is constant in the gradient, as in PEFT, so it changes only when A and B step. It is
computed without the product A B:

    ‖w + scale · A b‖² = ‖w‖² + 2 scale · b · (Aᵀ w) + scale² · b · (Aᵀ A) b

With dropout it is PEFT's form, x W + (f - 1) · drop(x) W + f · scale · (drop(x) A) B. This takes a second product with
W in each direction, so the default is no dropout.

Source: Liu et al. 2024, arXiv:2402.09353.
"""

from __future__ import annotations

from typing import Any

from lorafusion_jax.adapters.kind import AdapterKind, Leaf, Sizes, Tensors
from lorafusion_jax.adapters.lora import LORA_A, LORA_B, zeros

MAGNITUDE = Leaf(name="magnitude", axes=("N",), init=zeros, lr_group="magnitude", peft_name="lora_magnitude_vector")


NORM = Leaf(name="column_norm", axes=("N",), init=zeros, trainable=False)


def column_scale(kernel: Any, tensors: Tensors, sizes: Sizes) -> Any:
    """m / ‖W + scale · A B‖."""
    del kernel, sizes  # unused: they are in the norm
    return tensors["magnitude"] / tensors["column_norm"]


def prepare(kernel: Any, tensors: Tensors, sizes: Sizes) -> Tensors:
    """‖W + scale · A B‖ of each column."""
    return {"column_norm": _norms(kernel, tensors["lora_a"], tensors["lora_b"], sizes)}


def start(kernel: Any, tensors: Tensors, sizes: Sizes) -> Tensors:
    """m = ‖W + scale · A B‖, so that f = 1 at first."""
    return {"magnitude": _norms(kernel, tensors["lora_a"], tensors["lora_b"], sizes)}


def _norms(kernel_KN: Any, a_KR: Any, b_RN: Any, sizes: Sizes) -> Any:
    w2_N = sizes.np.sum(sizes.np.square(kernel_KN.astype(a_KR.dtype)), 0)
    aw_RN = sizes.product(a_KR.T, kernel_KN)
    gram_RR = a_KR.T @ a_KR
    scale = sizes.scale
    return (w2_N + (b_RN * (2 * scale * aw_RN + scale * scale * (gram_RR @ b_RN))).sum(0)) ** 0.5


DORA = AdapterKind(
    leaves=(LORA_A, LORA_B, MAGNITUDE),
    low_rank=lambda tensors, sizes: (tensors["lora_a"], tensors["lora_b"]),
    column_scale=column_scale,
    prepare=prepare,
    prepared=(NORM,),
    start=start,
    scaled=("lora_b",),
    peft={"use_dora": True},
)
