"""Exports an adapter as a PEFT folder: tensors, tokenizer, model card and a record of how it was trained."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.checkpoint.base_model import base_directory, exported_base
from lorafusion_jax.config.chat_templates import template_text
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.multimodal import auto_class, loads_whole, root_in_peft
from lorafusion_jax.peft.folder import export_adapter
from lorafusion_jax.peft.leaves import with_adapter_axis
from lorafusion_jax.report.record import versions
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.task import Task
from lorafusion_jax.weights.table import NONE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
Problem = LoraFusionError | OSError


class AdapterExport[T]:
    """An adapter on its way to its folder: it is read from the devices, then written.

    A problem of the folder is its result. What else goes wrong, a device above all, is raised.

    Args:
        step: that the adapter comes to.
        read: waits for the adapter, which is read while others train.
        write: writes what was read and returns the folder.
    """

    def __init__(self, step: int, read: Callable[[], T], write: Callable[[T], Path]):
        self.step, self._read, self._write = step, read, write
        self._result: Future[Path | Problem] | None = None
        self._not_before = 0.0

    def run(self) -> Path | Problem:
        """Returns the folder, or why it was not written."""
        content = self._read()
        try:
            return self._write(content)
        except (LoraFusionError, OSError) as problem:
            return problem

    @property
    def is_due(self) -> bool:
        """Whether it shall be written now: for the first time, or because a disk took nothing."""
        return self._result is None and time.monotonic() >= self._not_before

    @property
    def has_ended(self) -> bool:
        return self._result is not None and self._result.done()

    @property
    def result(self) -> Path | Problem:
        """What `run` returned, once it has ended."""
        assert self._result is not None
        return self._result.result()

    def begin(self, threads: Executor) -> None:
        self._result = threads.submit(self.run)

    def begin_later(self, seconds: float) -> None:
        """Makes it due again after a disk that took nothing."""
        self._result, self._not_before = None, time.monotonic() + seconds


def export_task(task: Task, state: AdapterState, target: Path, *, name: str = "") -> Path:
    """Writes the state of a task as a new folder; see `write_adapter`.

    Args:
        name: name of the adapter in its files, if another one than in the session.
    """
    adapter = task.adapter.model_copy(update={"name": name or task.name})
    record = {"step": state.step, "data": state.data, "versions": versions()}
    return write_adapter(task.config, adapter, task.spec, state.weights, target, record)


def write_adapter(
    config: JobConfig,
    adapter: AdapterConfig,
    spec: AdapterSpec,
    weights: Mapping[str, np.ndarray],
    target: Path,
    record: dict[str, Any],
    *,
    plan: str = "",
) -> Path:
    """Writes a new folder atomically: PEFT files, tokenizer, model card, run.json and digests.

    Args:
        config: gives the base.
        weights: "layers.self_attn.q_proj.lora_a" → [L, K, r], and other leaves.
        record: content of run.json; `step` and, if the adapter has failed, `failed` are also in the model card.
        plan: digest of the plan, for the model card.

    Raises:
        CheckpointError: `export.not-finite`.
        RunError: `save.no-space`, `save.failed`.
    """
    base, revision = exported_base(config)
    model = ModelConfig.from_hf(base_directory(config))
    if spec.head is not None and not spec.head.is_exported:
        spec = replace(spec, head=None)
    record = record | {"adapter": adapter.model_dump(mode="json"), "base": base}
    card = model_card(adapter, record["step"], config, plan=plan, failure=record.get("failed") or "")
    return export_adapter(
        with_adapter_axis(weights),
        spec,
        0,
        base,
        target,
        base_quantize=config.base.quantize,
        base_revision=revision,
        replace=True,
        finish=partial(
            _describe, base=base_directory(config), record=record, card=card, template=adapter.data.chat_template
        ),
        shapes=model.saved_shapes,
        multimodal=loads_whole(model.wrapper, scored=_is_scored(adapter)),
        root=root_in_peft(model.wrapper),
        layers=model.some_layers,
    )


def _describe(folder: Path, base: Path, record: dict[str, Any], card: str, template: str | None) -> None:
    for file in TOKENIZER_FILES:
        if (base / file).is_file():
            shutil.copyfile(base / file, folder / file)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template_text(template), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(adapter: AdapterConfig, step: int, config: JobConfig, *, plan: str = "", failure: str = "") -> str:
    """Returns the README.md of an adapter folder."""
    lora, optim, settings = adapter.lora, adapter.optim, config.base
    base, revision = exported_base(config)
    at = f', revision="{revision}"' if revision else ""
    longer = "".join(f" and {part.samples} samples" for part in adapter.extended)
    plan_row = f"\n| plan | {plan} |" if plan else ""
    stored = "" if settings.quantize == NONE else f", quantised as {settings.quantize}"
    objective = adapter.objective.chosen
    scored = _is_scored(adapter)
    wrapper = ModelConfig.from_hf(base_directory(config)).wrapper
    model = auto_class(wrapper, scored=scored)
    labels = f", num_labels={objective.head.leaves[0].axes[-1]}" if scored and objective.head else ""
    belongs = f"""
The base was quantised as `{settings.quantize}` in training, and the adapter belongs to that base: on the original
weights its outputs differ a little.
"""
    warning = f"\n**Training failed after this step**: {failure}. These are the last good weights.\n" if failure else ""
    on_hub = f"base_model: {base}\n" if "/" in base else ""
    origin = base if on_hub else f"path/to/{base}"
    return f"""---
{on_hub}library_name: peft
tags: [lora]
---
# {adapter.name}

LoRA adapter of `{base}`{stored}, {step} optimizer steps. Trained with lorafusion-jax.
{warning}{belongs if stored else ""}
| | |
|---|---|
| rank, alpha, dropout | {lora.rank}, {lora.alpha:g}{" (rsLoRA)" if lora.rslora else ""}, {lora.dropout:g} |
| optimizer | {optim.name}, lr {optim.lr:g}, {optim.schedule}, warm-up {optim.warmup:g} |
| global batch, epochs, seed | {adapter.global_samples}, {adapter.epochs}{longer}, {adapter.seed} |{plan_row}

`run.json` holds the complete record.
{_loading(adapter, model, f'"{origin}"{at}{labels}', in_whole=not wrapper or loads_whole(wrapper, scored=scored))}"""


def _is_scored(adapter: AdapterConfig) -> bool:
    objective = adapter.objective.chosen
    return objective.head is not None and objective.objective.task == "SEQ_CLS"


def _loading(adapter: AdapterConfig, model: str, base: str, *, in_whole: bool) -> str:
    kind = adapter.lora.adapter_kind
    if adapter_kind(kind).merge_only:
        return f"""
PEFT has no adapters of kind `{kind}`; `lorafusion export RUN {adapter.name} --merge` writes the model with it.
"""
    part = (
        ""
        if in_whole
        else "\ntransformers has no class with a score for this base: the adapter is for its text part.\n"
    )
    return f"""{part}
```python
from peft import PeftModel
from transformers import {model}
model = PeftModel.from_pretrained({model}.from_pretrained({base}), "path/to/this/folder")
```
"""
