"""Checkpoint names for rematerialisation policies."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name


def named_s(s: jax.Array) -> jax.Array:
    """S, named "lora_s" before anything reads it.

    Named after its readers, they would read the array without a name: under
    `jax.checkpoint(layer, policy=save_only_these_names("lora_s", "lora_bits"))` a y that is computed again would make S
    and the bits again, too, by a pass over x.
    """
    return checkpoint_name(s, "lora_s")


def named_bits(bits: jax.Array | None) -> jax.Array | None:
    """Packed keep bits, named "lora_bits" before anything reads them; None stays None."""
    return None if bits is None else checkpoint_name(bits, "lora_bits")
