"""A planted fault of XLA's form of LoRA: another dropout scale in a few rows."""

from __future__ import annotations

from lorafusion_jax.training import compare_alone
from pallas_kernels.linear import xla


def scale_a_row_of_each_tile(monkeypatch, factor: float) -> None:
    """Multiplies what dropout leaves of the first row of each tile, in the joint training of `compare_job` only."""
    original, follow = xla._dropped_tiles, compare_alone._follow

    def dropped(static, ops):
        tiles = original(static, ops)
        return tiles if ops.dropout is None else tiles.at[:, 0].multiply(factor)

    def follow_without_fault(*arguments):
        monkeypatch.setattr(xla, "_dropped_tiles", original)
        return follow(*arguments)

    monkeypatch.setattr(xla, "_dropped_tiles", dropped)
    monkeypatch.setattr(compare_alone, "_follow", follow_without_fault)
