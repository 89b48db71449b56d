"""Where a job file has a key that stands in the wrong place."""

from __future__ import annotations

from collections.abc import Mapping

from lorafusion_jax.config.read import Keys
from lorafusion_jax.config.schema import ADAPTER_KEYS, DEFAULTS, SHARED, SINGLE_DEFAULTS

# A list makes an adapter per value. Not of `data`, where a list is an error.
SWEPT = ("lora", "optim", "objective", "batch", "epochs", "seed")


def right_place(keys: Keys, value: object = None) -> str:
    """Says where a misplaced key belongs; empty if no section has it.

    >>> right_place(("eval", "every_steps"))
    'write train.eval_every_steps'
    >>> right_place(("train", "epochs"))
    'epochs is a key of an adapter, or of the whole file: it stands in no section'
    >>> right_place(("adapters", 0, "train"), {"max_steps": 9})
    'train holds for the whole run: write it beside adapters, not in one'

    Args:
        keys: the key and the sections above it.
        value: what the file has there.
    """
    *above, key = map(str, keys)
    if keys[0] == "adapters" and len(keys) == 3 and key in SHARED and isinstance(value, Mapping):
        return f"{key} holds for the whole run: write it beside adapters, not in one"
    if len(above) and (key in SINGLE_DEFAULTS or (key in ADAPTER_KEYS and len(keys) == 2)):
        whole_file = ", or of the whole file" if key != "name" else ""
        return f"{key} is a key of an adapter{whole_file}: it stands in no section"
    sections = [section for section in (*DEFAULTS, *SHARED) if section != (above[-1] if above else "")]
    fields = {section: (DEFAULTS | SHARED)[section].model_fields for section in sections}
    names = (f"{above[-1]}_{key}", key) if above else (key,)  # eval.every_steps is eval_every_steps
    field_name = next((name for name in names if any(name in fields[section] for section in sections)), "")
    dotted_names = [f"{section}.{field_name}" for section in sections if field_name in fields[section]]
    whole_run = (
        keys[0] == "adapters"
        and dotted_names
        and all(dotted_name.split(".")[0] in SHARED for dotted_name in dotted_names)
    )
    return f"write {' or '.join(dotted_names)}{', for the whole run' if whole_run else ''}" if dotted_names else ""
