"""The table of adapter kinds. Never imports jax, because planning needs sizes.

To add one, add a row to `KINDS`. Other packages can install an entry point of the group
`lorafusion_jax.adapter_kinds` that loads an `AdapterKind`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lorafusion_jax.adapters.dora import DORA
from lorafusion_jax.adapters.kind import AdapterKind, Leaf
from lorafusion_jax.adapters.lora import LORA, LORA_BIASED, LORA_FA
from lorafusion_jax.adapters.pissa import PISSA
from lorafusion_jax.adapters.vera import VERA
from lorafusion_jax.plugins import find, not_known

GROUP = "lorafusion_jax.adapter_kinds"
PLAIN = "lora"  # the kind of a job file that names none; others are exported as it if PEFT lacks them
BIASED = "lora-bias"  # the kind of a job file with lora.lora_bias
KINDS: Mapping[str, AdapterKind] = {
    PLAIN: LORA,
    BIASED: LORA_BIASED,
    "dora": DORA,
    "vera": VERA,
    "lora-fa": LORA_FA,
    "pissa": PISSA,
}


def adapter_kind(name: str) -> AdapterKind:
    """Finds a kind by its name in a job file.

    Raises:
        ConfigError: `plugin.unknown`, `plugin.broken`.
    """
    return find(GROUP, KINDS, name, AdapterKind).with_form(name)


def unknown_kind(name: str) -> str | None:
    """Explains an unknown `lora.kind`; None if the name exists."""
    return not_known(GROUP, KINDS, name)


def leaves_of(kinds: Sequence[str]) -> tuple[Leaf, ...]:
    """The tensors of all these kinds in order, each name once."""
    leaves = {leaf.name: leaf for name in kinds for leaf in adapter_kind(name).leaves}
    return tuple(leaves.values())


def prepared_by(kinds: Sequence[str]) -> tuple[Leaf, ...]:
    """The tensors that these kinds prepare, each name once; see `AdapterKind.prepare`."""
    leaves = {leaf.name: leaf for name in kinds for leaf in adapter_kind(name).prepared}
    return tuple(leaves.values())
