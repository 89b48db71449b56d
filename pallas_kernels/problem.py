"""The one description of a call that the public ops, the differentiation rule and every backend share.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax

from pallas_kernels.dropout import Dropout
from pallas_kernels.frozen_weight import FrozenWeight, is_quantised
from pallas_kernels.policy import LinearShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfigs:
    """Explicit tile sizes by kernel; None takes the measured ones or the heuristic's.

    Each is an instance of the configuration class beside its kernel.
    """

    down: Any = None  # small passes, in `linear/passes/config.py`
    dsdb: Any = None
    da: Any = None
    forward: Any = None  # products, in the `GemmConfig` of the backend
    dx: Any = None
    drop_down: Any = None  # Hopper's passes
    drop_da: Any = None
    wide_dsdb: Any = None
    gate: Any = None
    wide_gate: Any = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What is known while tracing: hashable, decides which program is built."""

    tile: int  # rows of a tile
    num_adapters: int
    single: bool  # every row belongs to adapter 0: no table, no selection
    ranks: tuple[int, ...] | None = None  # those of `Operands` where they are known
    interpret: bool = False
    in_order: bool = False  # tile i belongs to adapter i: nothing is gathered, and no tile is padding
    y_dtype: Any = None  # of y; None: that of x
    config: KernelConfigs = KernelConfigs()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Arrays of one call: projections ws[i], as_[i], bs[i] of one input; as_[i] is None where there is no LoRA."""

    x: jax.Array  # [T, K]
    ws: tuple[FrozenWeight, ...]  # [K, N_i]
    as_: tuple[jax.Array | None, ...]  # [A, K, R_i]
    bs: tuple[jax.Array | None, ...]  # [A, R_i, N_i]
    biases: tuple[jax.Array | None, ...]  # [N_i]
    tile_adapter: jax.Array  # int32 [T / tile]
    scale: jax.Array  # float32 [A]
    dropout: Dropout | None
    ranks: jax.Array | None = None  # int32 [A]: columns of A and rows of B beyond are zero; None: unknown

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The weights of a call that has no others."""
        assert not self.quantised
        return cast(tuple[jax.Array, ...], self.ws)

    @property
    def quantised(self) -> bool:
        """Whether a weight multiplies by itself, see `pallas_kernels.quantised`."""
        return any(is_quantised(w) for w in self.ws)

    @property
    def with_lora(self) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(self.as_) if a is not None)

    def lora(self, i: int) -> tuple[jax.Array, jax.Array]:
        """A and B of a projection that has LoRA."""
        a, b = self.as_[i], self.bs[i]
        assert a is not None, i
        assert b is not None, i
        return a, b


def select_projections(ops: Operands, numbers: Sequence[int]) -> Operands:
    """The call with some of its projections only."""
    lists = {name: tuple(getattr(ops, name)[i] for i in numbers) for name in ("ws", "as_", "bs", "biases")}
    return dataclasses.replace(ops, **lists)


def _least_rank(static: Static, ops: Operands) -> int:
    """What every adapter has at least, as far as is known while tracing."""
    if static.ranks is not None:
        return min(static.ranks)
    return max((ops.lora(i)[0].shape[2] for i in ops.with_lora), default=0) if ops.ranks is None else 0


def linear_shape(static: Static, ops: Operands) -> LinearShape:
    """The sizes by which `policy` decides."""
    rows, num_in = ops.x.shape
    return LinearShape(
        rows=rows,
        in_features=num_in,
        out_features=tuple(w.shape[1] for w in ops.ws),
        ranks=tuple(0 if a is None else a.shape[2] for a in ops.as_),
        tile=static.tile,
        adapters=static.num_adapters,
        least_rank=_least_rank(static, ops),
        dropout=ops.dropout is not None,
        dtype=str(ops.x.dtype),
    )
