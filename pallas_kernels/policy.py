"""Which implementation serves a call and which one is preferred, on plain integers.

The ops choose their backend here, and planning predicts memory from the same functions, so nothing in this file imports
jax. What depends on a kernel's shared memory is decided beside that kernel, in `unsupported_reason` of its backend.

A table of the device's own measurements decides where it holds a call near enough (`measured`). Otherwise a kernel is
preferred only where it measured at least as fast as XLA on one NVIDIA H200, forward and backward of whole ops
(benchmarks/results/, with two exceptions: 8192 x 14336 -> 4096 with one adapter of rank 64 without dropout, and one row
of 2048 x 5120 x 5120). The Triton backend is the fastest nowhere by more than 6 %. H100 has the same multiprocessors
and is treated alike. On other devices XLA serves until `lorafusion tune` has measured.

T packed tokens · K in features · N out features · D model width · F MLP width · R padded rank
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, cast, get_args

from pallas_kernels.measured import Lookup, OpCall
from pallas_kernels.sizes import power_of_two

Implementation = Literal["xla", "pallas_triton", "pallas_mosaic_gpu"]
AttentionImplementation = Literal["xla", "cudnn", "pallas_triton", "pallas_mosaic_gpu"]
NormImplementation = Literal["xla", "pallas_triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
XLA, TRITON, HOPPER = IMPLEMENTATIONS
HALF_TYPES = ("bfloat16", "float16")
HOPPER_SMS = 132  # multiprocessors of H100 and H200

MIN_RANK = 16  # a tensor-core step: smaller ranks are padded to it
MIN_ROWS = 2048  # fewer rows leave multiprocessors idle in the passes over x and dY
MIN_FEATURES = 1024
MAX_RANK = 64  # of all projections together, in the fused kernels: more leaves no shared memory for deep pipelines
RANK_BLOCK = 64  # extra ranks, beyond those that the fused kernels take, come in blocks of so many
# 2048 x 5120 x 5120 fills its last round of output tiles so badly (0.81) that cuBLAS wins by up to 5 % without dropout.
# With dropout, or with several adapters of rank 64, XLA's passes cost more than that: the kernels are 0.99 to 1.25
# times as fast with dropout (20 rows, two below 1, four runs), 1.09 and 1.18 times with 4 and 16 such adapters.
MIN_WAVE, MIN_WAVE_WITH_COSTLY_PASSES = 0.85, 0.8
COSTLY_RANK = 64

MLP_WIDTH_MULTIPLE = 256  # columns that share keep words
ATTENTION_ROWS = 128  # keys of a block
ATTENTION_WIDTHS = (64, 128)
TRITON_ATTENTION_ROWS = 64
TRITON_ATTENTION_WIDTHS = (16, 32, 64, 128, 256)
MIN_NORM_SIZE = 2**22  # elements; smaller arrays stay in the L2 cache, where one pass saves nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Sizes of one call: one or several projections of one input.

    Args:
        rows: T.
        out_features, ranks: of each projection; rank 0 means no LoRA.
        tile: rows of a tile, which belong to one adapter.
        least_rank: what every adapter is known to have at least; 0 where nothing is known.
        dtype: of the input.

    Example:
        >>> qkv = LinearShape(rows=8192, in_features=4096, out_features=(4096, 1024, 1024), ranks=(8, 8, 8), tile=128)
        >>> qkv.joint_rank, preferred(qkv, hopper=True)
        (64, ('pallas_mosaic_gpu', 'xla'))
    """

    rows: int
    in_features: int
    out_features: tuple[int, ...]
    ranks: tuple[int, ...]
    tile: int
    adapters: int = 1
    least_rank: int = 0
    dropout: bool = False
    dtype: str = "bfloat16"

    @property
    def with_lora(self) -> tuple[int, ...]:
        return tuple(i for i, rank in enumerate(self.ranks) if rank)

    @property
    def joint_rank(self) -> int:
        """Columns of S: the padded ranks of all projections side by side, in a power of two."""
        return joint_rank(self.ranks)

    @property
    def op_call(self) -> OpCall:
        """The call as tables of measurements know it; its tile does not matter."""
        return OpCall(
            op="linear",
            sizes={
                "rows": self.rows,
                "in_features": self.in_features,
                "out_features": sum(self.out_features),
                "rank": max(1, self.joint_rank),
            },
            properties={
                "projections": str(len(self.out_features)),
                "adapters": "several" if self.adapters > 1 else "one",
                "dropout": "yes" if self.dropout else "no",
                "dtype": self.dtype,
            },
        )

    def select_projection(self, i: int) -> LinearShape:
        """The call with a single one of its projections."""
        return dataclasses.replace(self, out_features=(self.out_features[i],), ranks=(self.ranks[i],))


def padded_rank(rank: int) -> int:
    """The rank that the kernels see.

    Example:
        >>> padded_rank(8), padded_rank(20)
        (16, 32)
    """
    return max(MIN_RANK, power_of_two(rank))


def joint_rank(ranks: tuple[int, ...]) -> int:
    """Padded ranks side by side, in a power of two; 0 where there is no LoRA.

    Example:
        >>> joint_rank((16, 8, 0, 20))
        64
    """
    total = sum(padded_rank(rank) for rank in ranks if rank)
    return power_of_two(total) if total else 0


def nothing_measured(call: OpCall) -> None:
    """The lookup of a device without a table."""


def preferred(
    shape: LinearShape, *, hopper: bool, num_sms: int = HOPPER_SMS, measured: Lookup = nothing_measured
) -> tuple[str, ...]:
    """Names of backends, fastest first. The last one serves every call.

    Args:
        measured: what the device's own table says.
    """
    rule = _preferred_by_rule(shape, hopper=hopper, num_sms=num_sms)
    fastest = measured(shape.op_call) if shape.with_lora else None
    return rule if fastest is None else (fastest, *(name for name in rule if name != fastest))


def _preferred_by_rule(shape: LinearShape, *, hopper: bool, num_sms: int) -> tuple[Implementation, ...]:
    if not shape.with_lora or not hopper:
        return (XLA,)
    widest = max(shape.out_features[i] for i in shape.with_lora)
    if shape.dtype not in HALF_TYPES or shape.rows < MIN_ROWS or min(shape.in_features, widest) < MIN_FEATURES:
        return (XLA,)
    rank = joint_rank(first_ranks(shape))
    if not rank:  # plain products
        return (HOPPER, XLA)
    if rank > MAX_RANK:
        return (XLA,)
    costly = shape.dropout or (shape.adapters > 1 and rank >= COSTLY_RANK)
    busy = min(wave(shape.rows, columns, num_sms) for columns in (widest, shape.in_features))
    return (XLA,) if busy < (MIN_WAVE_WITH_COSTLY_PASSES if costly else MIN_WAVE) else (HOPPER, XLA)


def first_ranks(shape: LinearShape) -> tuple[int, ...]:
    """Ranks of each projection that Hopper's fused kernels take; the others are `linear.extra_ranks`'s.

    None where all adapters have large ranks: what the kernels fuse is then less than what splitting the ranks costs.
    Siblings of up to 64 ranks each, too many together, are called one by one instead: see `split_is_faster`.

    Example:
        >>> large = LinearShape(rows=8192, in_features=4096, out_features=(4096, 1024), ranks=(128, 8), tile=128)
        >>> first_ranks(large)
        (16, 8)
    """
    if max(map(padded_rank, shape.ranks), default=0) <= MAX_RANK:
        return shape.ranks
    if min(shape.least_rank, *filter(None, shape.ranks)) > MAX_RANK:
        return (0,) * len(shape.ranks)
    return tuple(min(rank, MIN_RANK) for rank in shape.ranks)


def has_extra_ranks(shape: LinearShape) -> bool:
    """Whether the fused kernels take only the first ranks of a call."""
    return first_ranks(shape) != shape.ranks


def extra_blocks(ranks: tuple[int, ...], first: int) -> int:
    """Blocks of ranks from `first` on, in each of the projections that have any.

    Example:
        >>> extra_blocks((128, 8), first=16), extra_blocks((16, 8), first=16)
        (2, 0)
    """
    return -(-max(0, max(ranks, default=0) - first) // RANK_BLOCK)


def columns_of_s(shape: LinearShape) -> int:
    """Columns that Hopper's kernels keep of S = drop(x) A: those of the first ranks, then the blocks of extra ones.

    Example:
        >>> columns_of_s(LinearShape(rows=8192, in_features=4096, out_features=(4096,), ranks=(128,), tile=128))
        144
    """
    first = first_ranks(shape)
    with_extra = sum(rank > first_rank for rank, first_rank in zip(shape.ranks, first, strict=True))
    return joint_rank(first) + RANK_BLOCK * with_extra * extra_blocks(shape.ranks, max(first, default=0))


def split_is_faster(shape: LinearShape, *, hopper: bool, num_sms: int = HOPPER_SMS) -> bool:
    """True for siblings whose ranks together are too large for one call of the kernels, but not one by one.

    Tables of measurements have no say in it: they decide each of the calls.
    """
    if len(shape.with_lora) < 2 or preferred(shape, hopper=hopper, num_sms=num_sms)[0] != XLA:
        return False
    rankings = (preferred(shape.select_projection(i), hopper=hopper, num_sms=num_sms) for i in shape.with_lora)
    return any(names[0] != XLA for names in rankings)


def wave(rows: int, columns: int, num_sms: int = HOPPER_SMS) -> float:
    """Share of the multiprocessors' time that 128 x 256 output tiles keep busy.

    Example:
        >>> round(wave(2048, 5120), 2)
        0.81
    """
    rounds = -(-rows // 128) * -(-columns // 256) / num_sms
    return rounds / math.ceil(rounds)


def hopper_unsupported_reason(shape: LinearShape) -> str | None:
    """Why Hopper's linear kernels cannot serve these sizes; None if they can, shared memory permitting."""
    if shape.dtype not in HALF_TYPES:
        return f"x is {shape.dtype}; Hopper's matrix units take bfloat16 and float16"
    if shape.tile % 64:
        return f"tiles of {shape.tile} rows: it needs a multiple of 64"
    if shape.in_features % 128:
        return f"{shape.in_features} in features: it needs a multiple of 128"
    odd = [shape.out_features[i] for i in shape.with_lora if shape.out_features[i] % 128]
    return f"{odd[0]} out features: it needs a multiple of 128" if odd else None


def mlp_unsupported_reason(gate_up: LinearShape, down: LinearShape) -> str | None:
    """Why Hopper's passes at the gate cannot serve an MLP whose projections the Hopper backend serves."""
    if len(gate_up.with_lora) < 2 or not down.with_lora:
        return "a projection has no LoRA"
    if not any(first_ranks(gate_up)) or not any(first_ranks(down)):
        return "all adapters have large ranks, whose work is in passes of its own"
    if down.in_features % MLP_WIDTH_MULTIPLE:
        return f"{down.in_features} features after the gate: it needs a multiple of {MLP_WIDTH_MULTIPLE}"
    return None


def mlp_is_fused(
    gate_up: LinearShape, down: LinearShape, wanted: str | None, *, hopper: bool, num_sms: int = HOPPER_SMS,
    measured: Lookup = nothing_measured,
) -> bool:  # fmt: skip
    """Whether the MLP runs as one op, shared memory permitting: its backward recomputes silu(gate) · up."""
    device = {"hopper": hopper, "num_sms": num_sms, "measured": measured}
    names = [wanted or preferred(shape, **device)[0] for shape in (gate_up, down)]
    if names != [HOPPER, HOPPER] or mlp_unsupported_reason(gate_up, down):
        return False
    return not any(hopper_unsupported_reason(shape) for shape in (gate_up, down))


def attention_unsupported_reason(*, rows: int, heads: int, key_heads: int, width: int, dtype: str) -> str | None:
    """Why Hopper's attention kernels cannot serve these sizes, whatever the device; None if they can."""
    if dtype not in HALF_TYPES:
        return f"wants bfloat16 or float16, not {dtype}"
    return _attention_sizes_reason(rows, heads, key_heads, width, ATTENTION_WIDTHS, ATTENTION_ROWS)


def triton_attention_unsupported_reason(*, rows: int, heads: int, key_heads: int, width: int, dtype: str) -> str | None:
    """Why Triton's attention kernels cannot serve these sizes, whatever the device; None if they can."""
    if dtype not in (*HALF_TYPES, "float32"):
        return f"wants bfloat16, float16 or float32, not {dtype}"
    return _attention_sizes_reason(rows, heads, key_heads, width, TRITON_ATTENTION_WIDTHS, TRITON_ATTENTION_ROWS)


def _attention_sizes_reason(
    rows: int, heads: int, key_heads: int, width: int, widths: tuple[int, ...], multiple: int
) -> str | None:
    if width not in widths:
        return f"wants a head width of {' or '.join(map(str, widths))}, not {width}"
    if rows % multiple:
        return f"wants a multiple of {multiple} rows, not {rows}"
    if heads % key_heads:
        return f"wants a multiple of the {key_heads} key heads as query heads, not {heads}"
    return None


def attention_call(*, rows: int, heads: int, key_heads: int, width: int, dtype: str) -> OpCall:
    """Attention as tables of measurements know it."""
    sizes = {"rows": rows, "heads": heads, "key_heads": key_heads}
    return OpCall(op="attention", sizes=sizes, properties={"width": str(width), "dtype": dtype})


def norm_call(*, rows: int, width: int, dtype: str) -> OpCall:
    """A norm as tables of measurements know it."""
    return OpCall(op="norm", sizes={"rows": rows, "width": width}, properties={"dtype": dtype})


def preferred_norm(
    *, rows: int, width: int, dtype: str, hopper: bool, measured: Lookup = nothing_measured
) -> NormImplementation:
    """The implementation of a norm that measured fastest."""
    fastest = measured(norm_call(rows=rows, width=width, dtype=dtype))
    if fastest in get_args(NormImplementation):
        return cast(NormImplementation, fastest)
    large = rows * width >= MIN_NORM_SIZE
    return "pallas_triton" if hopper and dtype in HALF_TYPES and large else "xla"
