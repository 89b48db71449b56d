"""adapter_config.json ↔ AdapterSpec, in PEFT's words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import CheckpointError, LoraFusionError, raise_all
from lorafusion_jax.modules.spec import ALL_LINEAR, TARGETS, AdapterSpec
from lorafusion_jax.weights.table import NONE

CONFIG_FILE = "adapter_config.json"
# Options that do not change what a trained adapter computes. Every other option that is set is refused by name: PEFT
# gains variants with every release, and an unknown one must not be dropped in silence.
_NEUTRAL = frozenset(
    {
        "peft_type",
        "task_type",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "auto_mapping",
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",  # the last four are looked at below
        "eva_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "base_quantize",
    }
)
_OFF: tuple[Any, ...] = (None, False, [], {})
_PLAIN_INIT = (None, True, False, "gaussian", "eva", "orthogonal")  # others (pissa, olora, loftq …) change the base


def config_of(spec: AdapterSpec, base_name: str, base_quantize: str = NONE) -> dict[str, Any]:
    """Says in PEFT's words what an adapter is.

    PEFT has no word for a base that was stored in another form. Where it was, `base_quantize` names the form; PEFT
    ignores keys that it does not know, with a warning.

    >>> config_of(AdapterSpec(name="law", rank=8, alpha=16), "org/base")["target_modules"][:2]
    ['q_proj', 'k_proj']
    """
    quantised = {} if base_quantize == NONE else {"base_quantize": base_quantize}
    return quantised | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "target_modules": list(spec.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "layers_to_transform": None,
        "layers_pattern": None,
        "auto_mapping": None,
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Reads adapter_config.json.

    Raises:
        CheckpointError: `peft.missing-file` or `peft.bad-config`.
    """
    file = folder / CONFIG_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError("peft.missing-file", f"{folder} is no PEFT folder: it has no {CONFIG_FILE}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise CheckpointError(
            "peft.bad-config", f"{CONFIG_FILE} cannot be read.", where=str(file), why=str(problem)
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError("peft.bad-config", f"{CONFIG_FILE} is not a JSON object.", where=str(file))
    return raw


def spec_of(
    raw: Mapping[str, Any], present: Sequence[str], name: str, where: str, known: Sequence[str] = TARGETS
) -> AdapterSpec:
    """Builds the specification of a folder.

    Args:
        raw: adapter_config.json.
        present: names of the projections that the tensors speak of.
        name: of the adapter.
        where: file, for messages.
        known: projections that there can be.

    Raises:
        CheckpointError, ErrorList: every option that is not supported (`peft.unsupported`) and every value that is
            missing or wrong (`peft.bad-config`).
    """
    errors: list[LoraFusionError] = [
        CheckpointError("peft.unsupported", f"this adapter uses {what}, which is not supported.", where=where)
        for what in _unsupported(raw)
    ]
    targets = _targets(raw, present, where, errors, known)
    numbers = {
        key: _number(raw, key, default, where, errors)
        for key, default in (("r", None), ("lora_alpha", None), ("lora_dropout", 0.0))
    }
    raise_all(errors)
    return AdapterSpec(
        name=name,
        rank=int(numbers["r"]),
        alpha=float(numbers["lora_alpha"]),
        rslora=bool(raw.get("use_rslora")),
        dropout=float(numbers["lora_dropout"]),
        targets=targets,
    )


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    found = [] if raw.get("peft_type") == "LORA" else [f"peft_type={raw.get('peft_type')!r}"]
    found += [f"{key}={value!r}" for key, value in raw.items() if key not in _NEUTRAL and value not in _OFF]
    found += [f"bias={raw['bias']!r}"] if raw.get("bias") not in (None, "none") else []
    init = raw.get("init_lora_weights")
    found += [f"init_lora_weights={init!r}"] if init not in _PLAIN_INIT else []
    for key, same in (("rank_pattern", raw.get("r")), ("alpha_pattern", raw.get("lora_alpha"))):
        pattern = raw.get(key) or {}
        if not isinstance(pattern, dict) or any(value != same for value in pattern.values()):
            found.append(f"{key}={pattern!r}")
    return found


def _targets(
    raw: Mapping[str, Any], present: Sequence[str], where: str, errors: list[LoraFusionError], known: Sequence[str]
) -> tuple[str, ...]:
    """The named projections; a pattern ("all-linear", a regular expression) means those that the tensors speak of."""
    said = raw.get("target_modules")
    names = list(present) if isinstance(said, str) and (said == ALL_LINEAR or said not in known) else said
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names:
        errors.append(CheckpointError("peft.bad-config", f"target_modules={said!r} names no projection.", where=where))
        return ()
    others = [name for name in names if str(name).rsplit(".", 1)[-1] not in known]
    errors += [
        CheckpointError(
            "peft.unsupported",
            f"this adapter targets {name!r}, which is not supported.",
            where=where,
            why=f"only {', '.join(known)} carry LoRA here",
        )
        for name in others
    ]
    short = {str(name).rsplit(".", 1)[-1] for name in names}
    return tuple(name for name in known if name in short)


def _number(
    raw: Mapping[str, Any], key: str, default: float | None, where: str, errors: list[LoraFusionError]
) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or (key == "r" and value != int(value)):
        errors.append(
            CheckpointError("peft.bad-config", f"{key}={value!r} is not a number that can be used.", where=where)
        )
        return 1
    return value
