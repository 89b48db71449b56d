"""PiSSA: LoRA that starts from the principal part of W. Other adapters share W, so W stays as it is:

    y = x W + scale · (x [A, A0]) [B; -B0],  A0, B0: A and B at the start, constant

    W = U S Vᵀ,  A0 = U_r (S_r / scale)^½,  B0 = (S_r / scale)^½ V_rᵀ

Thus W - scale · A0 B0 is PiSSA's residual. The pair has twice the rank; it is exported as LoRA of that rank, as PEFT's
conversion of PiSSA writes it. The decomposition of a projection is computed once, when the adapter starts.

Source: Meng et al. 2024, arXiv:2404.02948.
"""

from __future__ import annotations

from typing import Any

from lorafusion_jax.adapters.kind import AdapterKind, Leaf, Sizes, Tensors
from lorafusion_jax.adapters.lora import LORA_A, LORA_B, zeros

FIRST_A = Leaf(name="first_a", axes=("K", "R"), init=zeros, trainable=False)
FIRST_B = Leaf(name="first_b", axes=("R", "N"), init=zeros, trainable=False)


def start(kernel: Any, tensors: Tensors, sizes: Sizes) -> Tensors:
    """Returns A, B, A0 and B0 from the singular vectors of the largest singular values."""
    del tensors  # unused: all come from the kernel
    u, values, right = sizes.np.linalg.svd(kernel, full_matrices=False)
    root = (values[: sizes.R] / sizes.scale) ** 0.5
    a_KR, b_RN = u[:, : sizes.R] * root, root[:, None] * right[: sizes.R]
    return {"lora_a": a_KR, "lora_b": b_RN, "first_a": a_KR, "first_b": b_RN}


def low_rank(tensors: Tensors, sizes: Sizes) -> tuple[Any, Any]:
    """Returns [A, A0] and [B; -B0], with columns in turn: those beyond an adapter's rank are the last."""
    a = sizes.np.stack([tensors["lora_a"], tensors["first_a"]], 2).reshape(sizes.K, 2 * sizes.R)
    b = sizes.np.stack([tensors["lora_b"], -tensors["first_b"]], 1).reshape(2 * sizes.R, sizes.N)
    return a, b


PISSA = AdapterKind(leaves=(LORA_A, LORA_B, FIRST_A, FIRST_B), low_rank=low_rank, columns=2, start=start)
