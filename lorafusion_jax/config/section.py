"""What the sections of job files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, WithJsonSchema

from lorafusion_jax.config.values import check_text
from lorafusion_jax.families.hf_config import shortened

MOST_SAMPLES = 64  # texts of an adapter at one evaluation


def _samples(value: object) -> int | list[str]:
    """Reads a number of held-out samples, or prompts. As a union, each value would get two errors."""
    if isinstance(value, list):
        texts = [text for text in value if isinstance(text, str)]
        if 0 < len(texts) == len(value) == len(set(texts)):
            return [check_text(text) for text in texts]
    elif isinstance(value, int | float) and not isinstance(value, bool) and value in range(MOST_SAMPLES + 1):
        return int(value)
    raise ValueError(f"a whole number from 0 to {MOST_SAMPLES}, or a list of different prompts, not {shortened(value)}")


SAMPLES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": MOST_SAMPLES},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
    ]
}
Samples = Annotated[int | list[str], PlainValidator(_samples), WithJsonSchema(SAMPLES_SCHEMA)]


def check_name(name: str, wrong: str | None) -> str:
    """Returns a name; `wrong` says why it cannot be used."""
    if wrong is not None:
        raise ValueError(wrong)
    return name


def known_name(unknown: Callable[[str], str | None]) -> AfterValidator:
    """Checks a name by a function that says why it cannot be used."""
    return AfterValidator(lambda name: check_name(name, unknown(name)))


class Section(BaseModel):
    """A section of a job file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
