"""The memory model knows where the kernels run an MLP as one op: it must agree with the choice that they make."""

from itertools import product

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_kernels as pk
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.planning.memory import MemoryProblem, kept_per_layer
from pallas_kernels import mlp

WIDTHS = {"1b": (2048, 8192), "3b": (3072, 8192), "7b": (3584, 18944), "8b": (4096, 14336), "tiny": (512, 1024)}
TOKENS = (1024, 2048, 3072, 4096, 5120, 6144, 8192)


def chosen(monkeypatch, width, hidden, tokens, tile, rank, implementation) -> bool:
    """Whether the op, traced for an H200, takes its fused path."""
    taken = []

    def record(static, ops, down):
        taken.append(True)
        return jnp.zeros((tokens, width), jnp.bfloat16)

    monkeypatch.setattr(mlp, "_fused", record)
    shape, sizes = jax.ShapeDtypeStruct, ((width, hidden), (width, hidden), (hidden, width))

    def run(x, ws, as_, bs, table, scale):
        return pk.multi_lora_mlp(x, ws, as_, bs, tile_adapter=table, scale=scale, implementation=implementation)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jax.eval_shape(
            run,
            shape((tokens, width), jnp.bfloat16),
            [shape(size, jnp.bfloat16) for size in sizes],
            [shape((2, k, rank), jnp.float32) for k, _ in sizes],
            [shape((2, rank, n), jnp.float32) for _, n in sizes],
            shape((tokens // tile,), jnp.int32),
            shape((2,), jnp.float32),
        )
    return bool(taken)


def modelled(width, hidden, tokens, tile, rank, implementation) -> bool:
    model = ModelConfig(
        family="llama", vocab_size=32000, hidden_size=width, intermediate_size=hidden, num_layers=2,
        num_heads=width // 128, num_kv_heads=width // 128, head_dim=128,
    )  # fmt: skip
    adapters = tuple(AdapterSpec(name=name, rank=rank, alpha=rank) for name in ("law", "med"))
    problem = MemoryProblem(
        model=model, adapters=adapters, optimizers=("adamw",) * 2, layers=(Extent(0, 2),), capacity_tokens=tokens,
        remat="everything", implementation=implementation, tile_tokens=tile,
    )  # fmt: skip
    return "silu(gate) · up" not in kept_per_layer(problem)


CASES = [
    *((*WIDTHS[name], tokens, 128, 16, None) for name, tokens in product(WIDTHS, TOKENS)),
    *((*WIDTHS["8b"], 8192, tile, 16, None) for tile in (32, 64)),
    *((*WIDTHS["8b"], 8192, 128, rank, None) for rank in (32, 33, 64)),
    (*WIDTHS["8b"], 8192, 128, 16, "xla"),
    (*WIDTHS["1b"], 1024, 128, 16, "pallas_mosaic_gpu"),
]


def test_the_model_agrees_with_the_choice(monkeypatch):
    wrong = [case for case in CASES if modelled(*case) != chosen(monkeypatch, *case)]
    assert not wrong
    assert {modelled(*case) for case in CASES} == {True, False}


def test_other_dtypes_and_backends_keep_the_gated_array():
    case = (*WIDTHS["8b"], 8192, 128, 16)
    assert not modelled(*case, "pallas_triton")
    assert modelled(*case, None)
