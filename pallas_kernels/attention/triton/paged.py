"""Attention of one row of each sequence to its keys and values in blocks: the kernel of decoding.

A program has the queries of one key head and walks over a part of the sequence's keys, `tile` of them at a time, whose
rows it gathers by the sequence's table. Long sequences of small batches are split over several programs, whose results
are joined by their log-sum-exp. Sinks join there, too.

B sequences · H query heads · K key heads · R query heads of a key head · M blocks of a table · N blocks · S positions
of a block · Z parts · C head width
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.triton.kernels import LOG2E, MASKED, _scores2
from pallas_kernels.device import interprets, num_sms, target_platform, wide_integers
from pallas_kernels.policy import HALF_TYPES, TRITON_ATTENTION_WIDTHS
from pallas_kernels.triton_call import call, dot

ROWS = 16  # queries of a program: a tensor core multiplies no fewer
MOST_PARTS = 16
WAVES = 2  # programs for each multiprocessor; more parts cost more to join than they gain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedConfig:
    """Sizes of the kernel.

    Attributes:
        tile: keys that a program takes at a time.
        parts: programs that share a sequence (None: as many as fill the device).
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    parts: int | None = None


def paged_unsupported_reason(q_BHC: jax.Array, keys_NSKC: jax.Array) -> str | None:
    """Why the kernel does not serve these arrays on this device; None if it does."""
    H, C = q_BHC.shape[1:]
    if target_platform() not in ("gpu", "cuda", "cpu"):
        return f"needs an NVIDIA GPU, not {target_platform()!r}"
    if wide_integers():
        return "counts in 32 bits: turn jax_enable_x64 off"
    if str(q_BHC.dtype) not in HALF_TYPES:
        return f"wants bfloat16 or float16, not {q_BHC.dtype}"
    if C not in TRITON_ATTENTION_WIDTHS:
        return f"wants a head width of {' or '.join(map(str, TRITON_ATTENTION_WIDTHS))}, not {C}"
    group = H // keys_NSKC.shape[2]
    return None if group <= ROWS else f"wants at most {ROWS} query heads of a key head, not {group}"


def paged_attention_kernel(
    q_BHC: Float[Array, "B H C"],
    keys_NSKC: Float[Array, "N S K C"],
    values_NSKC: Float[Array, "N S K C"],
    tables_BM: Int[Array, "B M"],
    position_B: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    config: PagedConfig | None = None,
) -> Float[Array, "B H C"]:
    """o[b] = Σ_s softmax_s(cap(scale · q[b]·k[s])) v[s] over the positions p - window < s ≤ p of sequence b.

    Args:
        keys_NSKC, values_NSKC: finite.
        position_B: p, whose key and value are in their block already; -1 for a sequence without any: its o is 0.
    Raises:
        NotImplementedError: see `paged_unsupported_reason`.
    """
    if reason := paged_unsupported_reason(q_BHC, keys_NSKC):
        raise NotImplementedError(f"paged attention by Triton {reason}")
    config = config or PagedConfig()
    (B, H, C), (_, S, K, _), M = q_BHC.shape, keys_NSKC.shape, tables_BM.shape[1]
    group, tile = H // K, config.tile
    parts = config.parts or _parts(B * K, M * S, tile)

    def kernel(q_ref, k_ref, v_ref, table_ref, position_ref, o_ref, lse2_ref):
        sequence, head, part = (pl.program_id(axis) for axis in range(3))
        position = position_ref[sequence]
        first = 0 if window is None else jnp.maximum(position - (window - 1), 0)
        begin, end = lax.div(first, tile), lax.div(position + tile, tile)
        share = lax.div(end - begin + (parts - 1), parts)
        begin = begin + part * share
        end = jnp.minimum(begin + share, end)
        number = lax.iota(jnp.int32, ROWS)
        q = q_ref[(sequence * K + head) * group + jnp.minimum(number, group - 1), :]

        def step(at, carry):
            m_before, total, o = carry
            keys = at * tile + lax.iota(jnp.int32, tile)
            blocks = table_ref[sequence, lax.div(jnp.minimum(keys, M * S - 1), S)]
            row = (blocks * S + lax.rem(keys, S)) * K + head
            s2 = _scores2(dot(q, k_ref[row, :], trans_rhs=True), scale, soft_cap)
            visible = (keys <= position) & (keys >= first)
            s = jnp.where(visible[None, :], s2, MASKED)
            m = jnp.maximum(m_before, jnp.max(s, axis=1))
            safe = jnp.where(m == MASKED, 0.0, m)
            p, fade = jnp.exp2(s - safe[:, None]), jnp.exp2(m_before - safe)
            v = v_ref[row, :]
            return m, total * fade + jnp.sum(p, axis=1), o * fade[:, None] + dot(p.astype(v.dtype), v)

        empty = (jnp.full(ROWS, MASKED, jnp.float32), *(jnp.zeros(shape, jnp.float32) for shape in (ROWS, (ROWS, C))))
        m, total, o = lax.fori_loop(begin, end, step, empty)
        some = total > 0
        total = jnp.where(some, total, 1.0)
        row, inside = ((sequence * K + head) * parts + part) * group + number, number < group
        cells = jnp.broadcast_to(row[:, None], (ROWS, C)), jnp.broadcast_to(lax.iota(jnp.int32, C)[None], (ROWS, C))
        plt.store(o_ref.at[cells], (o / total[:, None]).astype(o_ref.dtype), mask=inside[:, None])
        plt.store(lse2_ref.at[row], jnp.where(some, m + jnp.log2(total), MASKED), mask=inside)

    alone = parts == 1 and sinks is None
    o, lse2 = call(
        kernel,
        [q_BHC.reshape(-1, C), keys_NSKC.reshape(-1, C), values_NSKC.reshape(-1, C), tables_BM, position_B],
        name="paged_attention",
        grid=(B, K, parts),
        out_shape=(
            jax.ShapeDtypeStruct((B * parts * H, C), q_BHC.dtype if alone else jnp.float32),
            jax.ShapeDtypeStruct((B * parts * H,), jnp.float32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interprets(),
    )
    if alone:
        return o.reshape(B, H, C)
    o_BKZRC, lse2_BKZR = o.reshape(B, K, parts, group, C), lse2.reshape(B, K, parts, group)
    return _join(o_BKZRC, lse2_BKZR, sinks).reshape(B, H, C).astype(q_BHC.dtype)


def _join(o_BKZRC: Array, lse2_BKZR: Array, sinks: Array | None) -> Array:
    """Joins the parts of each sequence by their log-sum-exp, with the sinks."""
    # Finite also where no part has a key: their weights are then 2^(MASKED - most) = 0, not 2^(-inf + inf).
    most = jnp.maximum(lse2_BKZR.max(2, keepdims=True), jnp.finfo(jnp.float32).min)
    sink_weight = 0.0
    if sinks is not None:  # a key without a value
        sink2 = sinks.astype(jnp.float32).reshape(1, lse2_BKZR.shape[1], 1, -1) * LOG2E
        most = jnp.maximum(most, sink2)
        sink_weight = jnp.exp2(sink2 - most)
    weight = jnp.exp2(lse2_BKZR - most)
    total = weight.sum(2, keepdims=True) + sink_weight
    weight = weight / jnp.where(total == 0, 1.0, total)
    return (o_BKZRC * weight[..., None]).sum(2)


def _parts(programs: int, keys: int, tile: int) -> int:
    """Programs that share a sequence: a power of two that fills the device, with two tiles each at least."""
    parts = 1
    while parts < MOST_PARTS and programs * parts < WAVES * num_sms() and keys >= 4 * parts * tile:
        parts *= 2
    return parts
