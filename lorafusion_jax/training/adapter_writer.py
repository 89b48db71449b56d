"""Writes the adapter folders of a run: PEFT files, tokenizer, model card and a record of how it was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.base_model import base_directory, exported_base
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.peft import export_adapter
from lorafusion_jax.checkpoint.peft_leaves import with_adapter_axis
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.specs import adapter_spec, model_targets, tokenizer_file
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.state import Progress
from lorafusion_jax.weights.table import NONE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class AdapterWriter:
    """Writes `adapters/<name>/step-…` folders of a run.

    A process that crashed may have left folders of the step at which this one starts, and of later steps. They are
    written again, because on another layout the results differ by rounding.

    Args:
        progress: progress at the start of this process.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        progress: Progress,
    ):
        self._job, self._folder = job, folder
        self._since = {name: adapter.step for name, adapter in progress.adapters.items()}
        self._written: set[Path] = set()
        self._model = ModelConfig.from_hf(base_directory(job.config))

    def write(
        self,
        name: str,
        step: int,
        weights: Mapping[str, np.ndarray],
        *,
        failure: str = "",
        best: bool = False,
        last: bool = False,
    ) -> Path:
        """Writes one adapter and returns its folder. Keeps a folder from this process or of an earlier step.

        Args:
            weights: its weights, "layers.self_attn.q_proj.lora_a" → [L, K, r], and other leaves.
            failure: why the adapter failed after this step (empty: it did not); recorded in the folder.
            best: whether `best` links to the folder from here on.
            last: whether the adapter is done at this step; folders of later steps are removed.
        """
        target = self._write(name, step, weights, failure, best)
        if last:
            self._folder.remove_later(name, step)
        return target

    def _write(self, name: str, step: int, weights: Mapping[str, np.ndarray], failure: str, best: bool) -> Path:
        target = self._folder.adapter_step(name, step)
        keep = self._job.config.save.keep
        if target.exists() and not failure and (step < self._since.get(name, 0) or target in self._written):
            if best:
                self._folder.mark_best(name, step, keep)
            return target
        config = self._job.config
        spec = adapter_spec(config.adapter(name), model_targets(config), tokenizer_file(config))
        self._export(spec, step, weights, target, failure)
        self._written.add(target)
        if best:
            self._folder.mark_best(name, step, keep)
        else:
            self._folder.mark_latest(name, keep)  # also of one that a killed process left without its link
        return target

    def _export(
        self, spec: AdapterSpec, step: int, weights: Mapping[str, np.ndarray], target: Path, failure: str
    ) -> None:
        base, revision = exported_base(self._job.config)
        export_adapter(
            with_adapter_axis(weights),
            spec,
            0,
            base,
            target,
            base_quantize=self._job.config.base.quantize,
            base_revision=revision,
            replace=True,
            finish=lambda draft: self._describe(draft, self._job.config.adapter(spec.name), step, failure),
            shapes=self._model.saved_shapes,
            layers=self._model.some_layers,
        )

    def _describe(self, target: Path, adapter: AdapterConfig, step: int, failure: str) -> None:
        base = base_directory(self._job.config)
        for file in TOKENIZER_FILES:
            if (base / file).is_file():
                shutil.copyfile(base / file, target / file)
        of_run = self._folder.read_record()
        of_run.pop("config", None)  # paths and settings of other adapters
        record = of_run | {
            "adapter": adapter.model_dump(mode="json"),
            "step": step,
            "failed": failure or None,
            "base": exported_base(self._job.config)[0],
            "data": self._job.prepared.adapters[adapter.name].digest,
        }
        (target / "run.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        card = model_card(adapter, step, self._job.config, plan=self._job.plan.digest, failure=failure)
        (target / "README.md").write_text(card, encoding="utf-8")


def model_card(adapter: AdapterConfig, step: int, config: JobConfig, *, plan: str = "", failure: str = "") -> str:
    """Returns the README.md of an adapter folder."""
    lora, optim, settings = adapter.lora, adapter.optim, config.base
    base, revision = exported_base(config)
    at = f', revision="{revision}"' if revision else ""
    longer = "".join(f" and {part.samples} samples" for part in adapter.extended)
    planned = f"\n| plan | {plan} |" if plan else ""
    stored = "" if settings.quantize == NONE else f", quantised as {settings.quantize}"
    chosen = adapter.objective.chosen
    scored = chosen.head is not None and chosen.objective.task == "SEQ_CLS"
    model = "AutoModelForSequenceClassification" if scored else "AutoModelForCausalLM"
    labels = f", num_labels={chosen.head.leaves[0].axes[-1]}" if scored and chosen.head else ""
    belongs = f"""
The base was quantised as `{settings.quantize}` in training, and the adapter belongs to that base: on the original
weights its outputs differ a little.
"""
    warning = f"\n**Training failed after this step**: {failure}. These are the last good weights.\n" if failure else ""
    on_hub = f"base_model: {base}\n" if "/" in base else ""
    loaded = base if on_hub else f"path/to/{base}"
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
| global batch, epochs, seed | {adapter.global_samples}, {adapter.epochs}{longer}, {adapter.seed} |{planned}

`run.json` holds the complete record.

```python
from peft import PeftModel
from transformers import {model}
model = PeftModel.from_pretrained({model}.from_pretrained("{loaded}"{at}{labels}), "path/to/this/folder")
```
"""
