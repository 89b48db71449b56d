"""Writes the adapter of a live session as a PEFT folder, like that of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lorafusion_jax.checkpoint.base_model import base_directory, exported_base
from lorafusion_jax.checkpoint.peft import export_adapter
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.engine.state import AdapterState
from lorafusion_jax.engine.task import Task
from lorafusion_jax.report.record import versions
from lorafusion_jax.training.adapter_writer import TOKENIZER_FILES, model_card


def export_task(task: Task, state: AdapterState, target: Path, *, name: str = "") -> Path:
    """Writes a new folder atomically: PEFT files, tokenizer, model card, run.json and digests.

    Args:
        name: name of the adapter in its files, if another one than in the session.

    Raises:
        CheckpointError: `export.not-finite`.
        RunError: `save.no-space`, `save.failed`.
    """
    base, revision = exported_base(task.config)
    model = ModelConfig.from_hf(base_directory(task.config))
    return export_adapter(
        {leaf: array[:, None] for leaf, array in state.weights.items()},
        task.spec,
        0,
        base,
        target,
        base_quantize=task.config.base.quantize,
        base_revision=revision,
        replace=True,
        finish=lambda draft: _describe(draft, task, state, name or task.name),
        shapes=model.saved_shapes,
        layers=model.some_layers,
    )


def _describe(folder: Path, task: Task, state: AdapterState, name: str) -> None:
    adapter = task.adapter.model_copy(update={"name": name})
    base = base_directory(task.config)
    for file in TOKENIZER_FILES:
        if (base / file).is_file():
            shutil.copyfile(base / file, folder / file)
    record = {
        "adapter": adapter.model_dump(mode="json"),
        "step": state.step,
        "base": exported_base(task.config)[0],
        "data": state.data,
        "versions": versions(),
    }
    (folder / "run.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    (folder / "README.md").write_text(model_card(adapter, state.step, task.config), encoding="utf-8")
