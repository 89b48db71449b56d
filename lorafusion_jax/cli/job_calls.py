"""The calls of ops that a job makes in each layer, or those of a typical model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.memory import memory_problem, site_shape
from pallas_kernels.policy import LinearShape

if TYPE_CHECKING:
    from pallas_kernels.tuning.ops import OpCase

TYPICAL_MODEL = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128,
)  # fmt: skip
TYPICAL_RANK, TYPICAL_ADAPTERS, TYPICAL_TOKENS = 16, 4, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """What one layer calls for a microbatch of one size.

    Args:
        linears: the call of each site: "qkv", "o", "gate_up", "down".
    """

    model: ModelConfig
    rows: int
    dtype: str
    linears: dict[str, LinearShape]

    @property
    def attention(self) -> dict:
        model = self.model
        sizes = {"rows": self.rows, "heads": model.num_heads, "key_heads": model.num_kv_heads}
        return sizes | {"width": model.head_dim, "dtype": self.dtype}

    @property
    def norm(self) -> dict:
        return {"rows": self.rows, "width": self.model.hidden_size, "dtype": self.dtype}


def calls_of_job(config: JobConfig, model: ModelConfig) -> list[LayerCalls]:
    """One for each size of microbatch."""
    problem = memory_problem(config, model)
    return [
        LayerCalls(
            model=model, rows=rows, dtype=config.base.dtype,
            linears={
                site: replace(
                    site_shape(replace(problem, capacity_tokens=rows), site, model.layers.index(layer)),
                    dtype=config.base.dtype,
                )
                for layer in model.kinds
                for site, linears in layer.sites.items()
                if not linears[0].experts
            },
        )
        for rows in config.batch.sizes
    ]  # fmt: skip


def typical_calls(*, rows: int = TYPICAL_TOKENS, rank: int = TYPICAL_RANK, adapters: int = TYPICAL_ADAPTERS,
                  dropout: bool = True) -> LayerCalls:  # fmt: skip
    """A layer of Llama-3.1-8B."""
    linears = {
        site: LinearShape(
            rows=rows,
            in_features=of_site[0].in_features,
            out_features=tuple(linear.out_features for linear in of_site),
            ranks=(rank,) * len(of_site),
            tile=128,
            adapters=adapters,
            least_rank=rank,
            dropout=dropout,
        )
        for site, of_site in TYPICAL_MODEL.layer(0).sites.items()
    }
    return LayerCalls(model=TYPICAL_MODEL, rows=rows, dtype="bfloat16", linears=linears)


def named_calls(*, quick: bool) -> list[LayerCalls]:
    """What `lorafusion tune` measures without a job. Rows of a table reach factors of two, so these serve 1024 to 16384
    tokens, ranks 8 to 128, and models from half to twice the width of Llama-3.1-8B."""
    return [
        typical_calls(rows=rows, rank=rank, adapters=adapters, dropout=dropout)
        for rows in ((8192,) if quick else (2048, 8192))
        for rank in ((16,) if quick else (16, 64))
        for adapters in ((4,) if quick else (4, 1))
        for dropout in (True, False)
    ]


def op_cases(calls: Sequence[LayerCalls]) -> Iterator[OpCase]:
    """Every different call, as the tuner times it."""
    from lorafusion_jax.models.attention.tuning_case import attention_case
    from pallas_kernels.tuning.op_cases import calls_of, linear_case, norm_case

    linears = (shape for call in calls for site in call.linears.values() for shape in calls_of(site))
    for shape in dict.fromkeys(shape for shape in linears if shape.with_lora):
        yield linear_case(shape)
    for sizes in _different([call.attention for call in calls]):
        yield attention_case(**sizes)
    for sizes in _different([call.norm for call in calls]):
        yield norm_case(**sizes)


def _different(dictionaries: list[dict]) -> list[dict]:
    return [sizes for index, sizes in enumerate(dictionaries) if sizes not in dictionaries[:index]]
