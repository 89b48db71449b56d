"""The values of a job file. One rule for all: a value is what its key wants, as it is written.

A number is not in quotes, `yes` is not true, and true is not 1. A text is not empty. A path is not an address.
Nothing is converted, so nothing is taken as something else than its writer meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    ValidationInfo,
    WithJsonSchema,
)

from lorafusion_jax.families.hf_config import shortened

# What the sections of job files share.

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


# Devices flush smaller numbers to zero.
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LARGEST_COUNT = 2**31 - 1
LONGEST_TEXT = 4096  # characters, as many as a path can have
BEGUN = "begun"  # validation context of an existing run

_WITH_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads 1e-4 as a text
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_REVISION = re.compile(r"\w[\w./+-]{0,255}")
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
_HUB_DATA = re.compile(r"hf:\w[\w.-]*(/\w[\w.-]*)?(:\S.*)?")


def as_number(value: object) -> object:
    """Refuses texts and booleans where a number is meant, but for numbers that YAML reads as texts.

    >>> as_number(3), as_number("2e-4")
    (3, '2e-4')
    """
    if isinstance(value, bool) or (isinstance(value, str) and not _WITH_EXPONENT.fullmatch(value)):
        raise ValueError(f"a number, not {_shown(value)}")
    return value


def as_whole_number(value: object) -> object:
    """`as_number` for counts."""
    if isinstance(value, bool | str):
        raise ValueError(f"a whole number, not {_shown(value)}")
    return value


def check_text(text: str) -> str:
    """Refuses texts that say nothing, or that no name and no path can hold."""
    if not text.strip():
        raise ValueError(f"a text that is not empty, not {text!r}")
    if _CONTROL.search(text):
        raise ValueError(f"a text without control characters, not {_shown(text)}")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"a text of at most {LONGEST_TEXT} characters, not {len(text)}")
    return text


def check_folder(text: str) -> str:
    """Refuses texts that only a shell or a browser takes for a path."""
    check_text(text)
    if text.startswith("~"):
        home_path = f": {Path.home() / text[2:]}" if text[1:2] in ("", "/") else ""
        raise ValueError(f"a path without ~, which only a shell expands{home_path}")
    if _ADDRESS.match(text):
        raise ValueError(f"a path or a name on the hub, not the address {_shown(text)}")
    return text


def check_file(text: str) -> str:
    """`check_folder` for a file, folder or glob of rows, or a data set of the hub."""
    check_folder(text)
    if text.startswith("hf:"):
        if not _HUB_DATA.fullmatch(text) or ".." in text.split(":")[1]:
            raise ValueError(f"hf:org/set or hf:org/set:split, not {_shown(text)}")
    elif PurePath(text).name in ("", ".."):
        raise ValueError(f"a file, a folder with a name or a glob as ./*.jsonl, not all that is in {_shown(text)}")
    return text


def check_revision(text: str) -> str:
    """Refuses what names no commit, tag or branch."""
    if not _REVISION.fullmatch(text) or ".." in text:
        raise ValueError(f"a commit, tag or branch, not {_shown(text)}")
    return text


def check_hub_name(text: str) -> str:
    """Refuses what is not the name of a model on the hub."""
    check_text(text)
    if not _HUB_NAME.fullmatch(text) or ".." in text:
        raise ValueError(f"the name of a model on the hub, org/name, not {_shown(text)}")
    return text


def check_project(text: str) -> str:
    """Refuses what Weights & Biases takes for no name of a project."""
    check_text(text)
    entity, slash, project = text.rpartition("/")
    if len(text) > 128 or not project or (slash and not entity) or any(letter in text for letter in "\\#?%:"):
        raise ValueError(f"project or entity/project: at most 128 characters, none of \\ # ? % :, not {_shown(text)}")
    if "/" in entity:
        raise ValueError(f"project or entity/project, with one / at most, not {_shown(text)}")
    return text


def _in_float32(value: float, info: ValidationInfo) -> float:
    """Refuses numbers that are zero or infinite in float32, except in existing runs."""
    if info.context == BEGUN or not value or SMALLEST_FLOAT32 <= abs(value) <= LARGEST_FLOAT32:
        return value
    raise ValueError(f"a number that float32 can hold, 1.2e-38 to 3.4e38, not {value:g}")


def _shown(value: str | bool) -> str:
    text = value if isinstance(value, str) else str(value).lower()
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


Flag = Annotated[bool, Strict()]
Text = Annotated[str, AfterValidator(check_text)]
Folder = Annotated[str, AfterValidator(check_folder)]
Revision = Annotated[str, AfterValidator(check_revision)]
HubName = Annotated[str, AfterValidator(check_hub_name)]
Project = Annotated[str, AfterValidator(check_project)]
Whole = Annotated[int, BeforeValidator(as_whole_number)]
Number = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_in_float32), BeforeValidator(as_number)]
Count = Annotated[Whole, Field(ge=1, le=LARGEST_COUNT)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]


def as_in_file(value: object) -> str:
    """Writes a setting as a job file does.

    >>> as_in_file(None), as_in_file(True), as_in_file(0.0002), as_in_file("adamw"), as_in_file(("q_proj", 2))
    ('null', 'true', '0.0002', 'adamw', '["q_proj", 2]')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)
