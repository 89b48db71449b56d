"""What a PEFT folder says of its adapter, without reading its tensors: `lora.init_from` needs no other settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lorafusion_jax.config.peft_config import CONFIG_FILE, Described, describe, read_config
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.layout.layer import PATHS

TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model.model."
_MODULES = dict.fromkeys(path.partition(".")[0] for path in PATHS.values())
KEY = re.compile(re.escape(PREFIX) + rf"(layers\.(\d{{1,6}})\.(?:{'|'.join(_MODULES)})\.(\w+))\.lora_([AB])\.weight")


def describe_folder(folder: Path) -> Described:
    """Reads adapter_config.json and the names of the tensors.

    Raises:
        CheckpointError, ErrorList: see `read_config` and `describe`; `peft.damaged`.
    """
    return describe(read_config(folder), _projections(folder), folder.resolve().name, str(folder / CONFIG_FILE))


def lora_settings(folder: Path) -> dict[str, Any]:
    """The `lora` settings that a folder brings along; none where it cannot be read, which its readers will say."""
    try:
        spec = describe_folder(folder).spec
    except (LoraFusionError, OSError, ValueError):  # names that no system takes are ValueErrors
        return {}
    return {"rank": spec.rank, "alpha": spec.alpha, "rslora": spec.rslora, "targets": list(spec.targets)}


def _projections(folder: Path) -> list[str]:
    file = folder / TENSOR_FILE
    try:
        with safe_open(file, "np") as opened:
            return list(dict.fromkeys(match[1] for key in opened.keys() if (match := KEY.fullmatch(key))))  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(
            "peft.damaged", f"{TENSOR_FILE} cannot be read.", where=str(file), why=str(problem)
        ) from None
