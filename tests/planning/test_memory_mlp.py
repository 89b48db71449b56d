"""The memory model counts silu(gate) · up as saved, unless one op runs the whole MLP."""

import pytest

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.memory import MemoryProblem, kept_per_layer

GATED = "silu(gate) · up"
USUAL = {
    "width": 4096, "hidden": 14336, "tokens": 8192, "tile": 128, "rank": 16, "implementation": None, "hopper": True,
    "item": 2, "least": None,
}  # fmt: skip


def keeps_gated(*, width, hidden, tokens, tile, rank, implementation, hopper, item, least) -> bool:
    model = ModelConfig(
        family="llama", vocab_size=32000, hidden_size=width, intermediate_size=hidden, num_layers=2,
        num_heads=width // 128, num_kv_heads=width // 128, head_dim=128,
    )  # fmt: skip
    ranks = {"law": rank, "med": least or rank}
    adapters = tuple(AdapterSpec(name=name, rank=rank_of, alpha=rank_of) for name, rank_of in ranks.items())
    problem = MemoryProblem(
        model=model, adapters=adapters, optimizers=("adamw",) * 2, layers=(Extent(0, 2),), capacity_tokens=tokens,
        remat="everything", implementation=implementation, tile_tokens=tile, hopper=hopper, item=item,
    )  # fmt: skip
    return GATED in kept_per_layer(problem)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rank": 32},
        {"tile": 64},
        {"rank": 65, "least": 16},  # more than the fused kernels take: the rest has passes of its own
        {"rank": 256, "least": 16},
        {"width": 2048, "hidden": 8192},
        {"width": 2048, "hidden": 8192, "tokens": 1024, "implementation": "pallas_mosaic_gpu"},  # asked for by name
    ],
)
def test_one_op_saves_no_gated_array(changes):
    assert not keeps_gated(**USUAL | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1024},  # too few rows
        {"tokens": 2048, "width": 5120, "hidden": 13824},  # the last round of output tiles leaves many idle
        {"width": 512, "hidden": 1024},
        {"tile": 32},
        {"rank": 33},
        {"rank": 65},  # all large: plain products
        {"item": 4},
        {"hopper": False},
        {"implementation": "xla", "hopper": False},
        {"implementation": "pallas_triton"},
    ],
)
def test_three_ops_save_the_gated_array(changes):
    assert keeps_gated(**USUAL | changes)
