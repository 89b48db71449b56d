"""How the programs at the gate are built."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from pallas_kernels.dropout import WORDS
from pallas_kernels.linear.chunks import Chunks
from pallas_kernels.linear.hopper.tiling import ROWS, SMEM_BYTES
from pallas_kernels.policy import HOPPER_SMS

WIDTH = 64  # columns of a tile
RANK = 16  # of each projection, in the pass that makes all gradients: its registers suffice for no more
PART = 32  # columns in registers at a time: takes 128 of a thread's registers, where a whole tile takes up to 228

type Place = tuple[int, int]  # first column of S, rank
type Places = tuple[Place, Place]  # of gate and of up


class BackwardInputs(NamedTuple):
    """What both backward passes over the gate read.

    Attributes:
        gate, up, s, b, a, bits: arguments and result of `gate_forward`.
        dh: [T, F], the frozen part dY W^T of the gradient of h.
        ds: [T, R], of the projection after the gate.
        chunks: of 64-row blocks.
    """

    gate: jax.Array
    up: jax.Array
    dh: jax.Array
    s: jax.Array
    ds: jax.Array
    b: jax.Array
    a: jax.Array
    bits: jax.Array | None
    chunks: Chunks


class Rounding(NamedTuple):
    """Factors of dgate and dup, before they are rounded to e4m3.

    Attributes:
        factor: float32 [2, F], scales of the out features of the weights of gate and up.
        inverse: float32 [2, T], of the scales of rows.
    """

    factor: jax.Array
    inverse: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """How a program is built.

    Attributes:
        warpgroups: of a program; each has its own unit of work. With one, a thread takes 100 to 130 registers, so four
            programs could share a multiprocessor; shared memory leaves room for two or three.
        forward_stages, backward_stages: slots of tiles, two or more: a slot is filled while another is in use. The
            backward pass only serves ranks that `WideGateConfig`'s does not.
    """

    warpgroups: int = 1
    forward_stages: int = 4
    backward_stages: int = 3

    def smem_bytes(self, both: int, rank: int) -> int:
        """Shared memory of the larger program with 2-byte operands; both: ranks of gate and up, rank: of down."""
        forward = self.forward_stages * 2 * WIDTH * (2 * ROWS + both + rank) + 2 * ROWS * both
        stage = 2 * WIDTH * (3 * ROWS + rank) + 2 * ROWS * (both + rank) + 4 * ROWS * WORDS
        backward = self.backward_stages * stage + 2 * WIDTH * (both + rank)
        return self.warpgroups * max(forward, backward)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WideGateConfig:
    """How a block of the pass that makes all gradients is built.

    Attributes:
        gating: warpgroups that gate, beside the one that sums and the one that streams.
        stages: slots of tiles, two or more, and a multiple of `gating`: a slot always has the same gating warpgroup.
        parts: blocks that share the columns of a chunk.
        blocks_per_chunk: 64-row blocks of a chunk. dS of four takes 64 of the registers of a thread that sums.
    """

    gating: int = 2
    stages: int = 6
    parts: int = 8
    blocks_per_chunk: int = 4

    def __post_init__(self):
        if self.stages < 2 or self.stages % self.gating:
            raise ValueError(
                f"{self.stages} stages for {self.gating} warpgroups that gate: two or more, and a multiple"
            )


def gate_config(both: int, rank: int, *, drops: bool) -> GateConfig | None:
    """The most stages with which two programs share a multiprocessor, else with which one fits; None if none does.

    Forward with dropout is the exception. Making bits takes instructions, and a third program, where it fits, issues
    them meanwhile: 223 us with three stages, 230 with four; without dropout 215 and 206 (8192 x 14336, H200).

    Args:
        both: ranks of gate and up together; rank: of the projection after the gate.
        drops: whether that projection has dropout.
    """
    for room in (SMEM_BYTES // 2, SMEM_BYTES):
        for forward, backward in ((3 if drops else 4, 3), (3, 2), (2, 2)):
            config = GateConfig(forward_stages=forward, backward_stages=backward)
            if config.smem_bytes(both, rank) <= room:
                return config
    return None


def wide_gate_config(num_rows: int, both: int, rank: int) -> WideGateConfig | None:
    """As many parts as leave few multiprocessors idle at the end; None where ranks are too large for the pass.

    A block fills a multiprocessor. Only the number of rows decides: the order of an adapter's sums must not depend on
    the other adapters of the call: 8 parts 480 us with four adapters and 453 with one, 15 parts 472 and 475
    (8192 x 14336 with all sums, H200).
    """
    if (both, rank) != (2 * RANK, RANK):
        return None

    def busy(parts: int) -> float:
        blocks = -(-num_rows // (ROWS * WideGateConfig().blocks_per_chunk)) * parts
        return blocks / (-(-blocks // HOPPER_SMS) * HOPPER_SMS)

    return WideGateConfig(parts=max(range(6, 17), key=busy))  # more were not measured: each has a partial sum of dS


def gate_blocks(num_rows: int) -> int:
    """64-row blocks of a chunk in the backward pass over the gate for ranks above 16."""
    return max(1, min(num_rows // 8, 1024) // ROWS)
