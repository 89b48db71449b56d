"""Calls of every kind lower for CUDA without a GPU: types, ranks, biases, odd shapes, one adapter, siblings."""

from functools import partial

import jax
import pytest
from cuda_lowering import A100, H200, chosen_kernels, lowered, num_kernels
from more_cases import mostly_nightly, nightly

from benchmarks.kernel_calls import draw_case, gradients

SIZES = {"rows": 2048, "num_in": 1024, "tile": 128, "adapters": 2, "ranks": (16,), "widths": (1024,), "rate": 0.1}
PLAIN = {"rate": 0.0}
ONE = {"adapters": 1, "single": True}
ODD = {"num_in": 1000, "widths": (300,)}
LARGE = {"ranks": (256,), "tile": 64}  # plain products, and passes of all ranks
MIXED = LARGE | {"own_ranks": (16, 256)}  # the first ranks in the products, the others in passes of their own
QKV = {"ranks": (16, 16, 16), "widths": (1024, 256, 256)}

# what differs from SIZES, Triton's kernels, and Hopper's (Triton's, Mosaic's) or words of its unsupported_reason
CASES = {
    "float16": ({"dtype": "float16"}, 9, (5, 4)),
    "float32": ({"dtype": "float32"}, 9, "x is float32"),
    "float32, rank 256": ({"dtype": "float32", "ranks": (256,)}, 9, "x is float32"),
    "rank 256": (LARGE, 9, (9, 0)),
    "rank 256, plain": (LARGE | PLAIN, 8, (8, 0)),
    "ranks 16 and 256": (MIXED, 9, (13, 4)),
    "ranks 16 and 256, plain": (MIXED | PLAIN, 8, (14, 2)),
    "ranks 16 and 256, tall tiles": (MIXED | {"tile": 128}, 9, (13, 4)),
    "bias": ({"bias": True}, 9, (5, 4)),
    "odd features": (ODD, 9, "1000 in features: it needs a multiple of 128"),
    "odd features, plain": (ODD | PLAIN, 8, "1000 in features"),
    "one adapter": (ONE, 7, (3, 4)),
    "one adapter, plain": (ONE | PLAIN, 6, (4, 2)),
    "one adapter, bias": (ONE | {"bias": True}, 7, (3, 4)),
    "one adapter, odd rows": (ONE | {"rows": 1001}, 7, "tiles of 1001 rows: it needs a multiple of 64"),
    "one adapter, few rows": (ONE | ODD | {"rows": 5}, 7, "tiles of 5 rows"),
    "siblings": (QKV, 15, (10, 5)),
    "siblings, plain": (QKV | PLAIN, 14, (10, 4)),
    "siblings, one without LoRA": (QKV | {"ranks": (16, None, 8)}, 12, (8, 4)),
    "wide": ({"widths": (8192,)}, 9, (4, 5)),
}


def lower(device, backend, changes) -> tuple[int, int]:
    """Kernels of forward and backward."""
    shapes = jax.eval_shape(lambda: draw_case(**SIZES | changes))
    return num_kernels(lowered(device, partial(gradients, backend), *shapes))


def choose(device, backend, changes) -> tuple[int, int]:
    """The same without lowering them."""
    shapes = jax.eval_shape(lambda: draw_case(**SIZES | changes))
    return chosen_kernels(device, partial(gradients, backend), *shapes)


# other cases combine the same parts, and Hopper has a backend of its own
TRITON_PARTS = {"float16", "rank 256, plain", "ranks 16 and 256, tall tiles", "odd features", "siblings"}
TRITON_PARTS |= {"one adapter", "one adapter, bias", "one adapter, odd rows"}


@pytest.mark.parametrize("device", [A100, nightly(H200)])
@pytest.mark.parametrize("case", mostly_nightly(CASES, CASES.keys() - TRITON_PARTS))
def test_triton_kernels(device, case):
    changes, kernels, _ = CASES[case]
    assert lower(device, "pallas_triton", changes) == (kernels, 0)


PARTS = {
    "float16",
    "rank 256, plain",
    "rank 256",
    "ranks 16 and 256",
    "ranks 16 and 256, plain",
    "bias",
    "one adapter",
    "one adapter, plain",
    "one adapter, bias",
    "siblings",
    "siblings, plain",
}


@pytest.mark.parametrize("case", [case for case in CASES if not isinstance(CASES[case][2], str)])
def test_hopper_is_served_by_these_kernels(case):
    changes, _, kernels = CASES[case]
    assert choose(H200, "pallas_mosaic_gpu", changes) == kernels


@pytest.mark.parametrize("case", mostly_nightly(CASES, CASES.keys() - PARTS))  # other cases combine the same parts
def test_hopper_kernels(case):
    changes, _, kernels = CASES[case]
    if isinstance(kernels, str):
        with pytest.raises(NotImplementedError, match=kernels):
            lower(H200, "pallas_mosaic_gpu", changes)
    else:
        assert lower(H200, "pallas_mosaic_gpu", changes) == kernels
    with pytest.raises(NotImplementedError, match="it needs a Hopper GPU"):
        lower(A100, "pallas_mosaic_gpu", changes)
