"""Writes the adapter folders of a run: PEFT files, tokenizer, model card and a record of how it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config.specs import adapter_spec, model_targets, tokenizer_file
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.session.export import write_adapter
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.state import Progress


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
        record = self._folder.read_record()
        record.pop("config", None)  # paths and settings of other adapters
        write_adapter(
            config,
            config.adapter(name),
            spec,
            weights,
            target,
            record | {"step": step, "failed": failure or None, "data": self._job.prepared.adapters[name].digest},
            plan=self._job.plan.digest,
        )
        self._written.add(target)
        if best:
            self._folder.mark_best(name, step, keep)
        else:
            self._folder.mark_latest(name, keep)  # also of one that a killed process left without its link
        return target
