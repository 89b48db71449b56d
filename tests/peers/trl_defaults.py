"""Prints the defaults of TRL's own classes as JSON: class → field → value, those that a YAML file could say."""

import dataclasses
import json

from trl import DPOConfig, KTOConfig, ModelConfig, SFTConfig


def defaults(cls: type) -> dict:
    values = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(cls)
    }
    values = {name: str(value) if hasattr(value, "value") else value for name, value in values.items()}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool | list)}


print(json.dumps({cls.__name__: defaults(cls) for cls in (SFTConfig, DPOConfig, KTOConfig, ModelConfig)}))
