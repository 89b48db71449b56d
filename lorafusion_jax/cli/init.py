"""lorafusion init: a commented job file to start from."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lorafusion_jax.config.schema import DEFAULTS, SHARED, SINGLE_DEFAULTS, AdapterConfig
from lorafusion_jax.errors import ConfigError

COLUMN, WIDTH = 34, 120  # start and end columns of comments
HEAD = """\
# lorafusion job file: every key with its default. Keep only the keys that you change.
# Only base.model, adapters[].name and data.train have no default."""
OWN = "data, lora, optim, objective, batch: {global_samples: 8}, epochs, seed, weight, priority"
EXAMPLES = {"model": "path/to/model", "train": "data/law.jsonl", "name": "law"}  # keys without a default
TEXT = """\
# lorafusion job file. Every key except base.model, adapters[].name and data.train has a default. Common keys are shown
# with their defaults; lorafusion init --all shows all keys.
# PEFT names: rank = r, alpha = lora_alpha, dropout = lora_dropout, targets = target_modules, rslora = use_rslora.

base:    {model: path/to/model, dtype: bfloat16}   # HF directory, or org/name of a hub (hf extra)

# Shared defaults; every adapter may override any of them.
data:
  max_length: 4096           # tokens of one sample
  on_long: cut               # cut | drop | error
  loss: auto                 # auto | assistant | completion | all: which tokens are learned
lora:    {rank: 16, alpha: 32, dropout: 0.05, targets: all-linear, rslora: false}
optim:   {name: adamw, lr: 2e-4, schedule: cosine, warmup: 0.03, weight_decay: 0.0, clip: 1.0}
epochs:  1
seed:    0

# The whole run.
batch:
  global_samples: 16         # samples per optimizer step of an adapter (an adapter may override it)
  capacity_tokens: 8192      # tokens of one microbatch; memory depends on it, results do not
  tile_tokens: 128
save:    {every_minutes: 15, keep: 3}
mesh:    {stages: 1, data: 1, fsdp: 1}   # devices: pipeline stages × replicas (fsdp: replicas that share the base)
train:   {remat: auto}       # for the backward pass: everything, gemm_inputs, nothing (a third slower); auto: what fits

adapters:
  - name: law
    data: {train: data/law.jsonl, eval: data/law_eval.jsonl}
  - name: chat
    data: {train: data/chat.jsonl}
    lora: {rank: 32, alpha: 64}
    optim: {lr: [1e-4, 2e-4]}      # a list makes several adapters: chat-lr1e-4, chat-lr2e-4
    batch: {global_samples: 8}
    epochs: 3
"""


def command(
    everything: Annotated[bool, typer.Option("--all", help="show all keys")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="a JSON schema instead, for editors that complete keys")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", exists=True, dir_okay=False, help="a file of axolotl, LLaMA-Factory or TRL to convert"),
    ] = None,
) -> None:
    """Prints a commented job file, to start from or converted from a file of another program.

    Example: lorafusion init > jobs.yaml
    """
    from lorafusion_jax.config.convert import convert, title_of
    from lorafusion_jax.config.json_schema import job_schema
    from lorafusion_jax.config.read import read_source

    if schema and (everything or source is not None):
        raise ConfigError("config.options", "--schema stands alone.", fix="lorafusion init --schema > job.schema.json")
    if schema:
        print(json.dumps(job_schema(), indent=2))
    elif source is not None:
        print(convert(read_source(source).values, source.stem).text(title_of(source)), end="")
    else:
        print(reference() if everything else TEXT, end="")
    if schema or sys.stdout.isatty():
        return
    print("next: lorafusion check jobs.yaml", file=sys.stderr)


def reference() -> str:
    """Returns a job file with every key."""
    lines = [HEAD]
    for title, sections in (("The whole run.", SHARED), ("Shared defaults; an adapter may override any.", DEFAULTS)):
        lines += ["", f"# {title}"]
        for key, model in sections.items():
            lines += [f"{key}:  # {model.__doc__}", *_fields(model, required=key == "base")]
    for key in SINGLE_DEFAULTS:
        lines += _line("", key, AdapterConfig.model_fields[key])
    lines += ["", f"# The adapters; each may also have its own {OWN}."]
    lines += ["adapters:", *_line("  - ", "name", AdapterConfig.model_fields["name"])]
    lines += ["    data:", *_line("      ", "train", DEFAULTS["data"].model_fields["train"])]
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel], *, required: bool) -> Iterator[str]:
    for key, field in model.model_fields.items():
        if required or not field.is_required():
            yield from _line("  ", key, field)


def _line(indent: str, key: str, field: FieldInfo) -> list[str]:
    """`key: default` with its comment; long comments continue on the next lines."""
    value = EXAMPLES[key] if field.is_required() else field.default
    value_text = yaml.safe_dump(value, default_flow_style=True, width=WIDTH).removesuffix("...\n").strip()
    comment = "; ".join(text for text in (field.description, " | ".join(_options(field.annotation))) if text)
    first, *more = textwrap.wrap(comment, WIDTH - COLUMN - 2) or [""]
    start = f"{indent}{key}: {value_text}"
    return [f"{start:<{COLUMN - 1}} # {first}" if first else start, *(f"{'':{COLUMN}}# {text}" for text in more)]


def _options(annotation) -> list[str]:
    """The values of an enumerated key."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [option for part in inner for option in _options(part)]
