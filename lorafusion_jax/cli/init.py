"""lorafusion init: a commented job file to start from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.errors import ConfigError

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
    from lorafusion_jax.config.json_schema import job_schema, reference
    from lorafusion_jax.config.read import read_source

    if schema and (everything or source is not None):
        raise ConfigError("config.options", "--schema stands alone.", fix="lorafusion init --schema > job.schema.json")
    if schema:
        print(json.dumps(job_schema(), indent=2))
    elif source is not None:
        print(convert(read_source(source).values, source.stem, str(source)).text(title_of(source)), end="")
    else:
        print(reference() if everything else TEXT, end="")
    if schema or sys.stdout.isatty():
        return
    print("next: lorafusion check jobs.yaml", file=sys.stderr)
