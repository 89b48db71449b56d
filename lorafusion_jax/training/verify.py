"""Reads the exported adapters of a finished run back and evaluates them on a newly loaded base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config.references import adapters_with_references
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import without_places
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.peft.leaves import exported_spec
from lorafusion_jax.report.summary import final_rows
from lorafusion_jax.session.session import Session
from lorafusion_jax.training.references import read_references


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Held-out loss at the end of training and of the exported folder.

    Attributes:
        delta: absolute difference of the two.
    """

    trained: float
    exported: float

    @property
    def delta(self) -> float:
        return abs(self.trained - self.exported)

    @property
    def same(self) -> bool:
        return self.delta == 0  # float32 files hold the float32 master weights exactly


def verify_exports(run: Path) -> dict[str, Check]:
    """Evaluates every exported adapter that has held-out data. Returns adapter → check."""
    folder = RunFolder(run)
    config = folder.read_config()
    prepared = read_references(run, folder.read_record(), config, prepare(config), adapters_with_references(config))
    trained = adapter_specs(config)
    specs = [exported_spec(spec) for spec in trained]
    config = config if specs == trained else without_places(config)  # places are of the kinds that were trained
    session = Session.open(config, prepared, specs)
    folder_by_index = {index: folder.latest(spec.name) for index, spec in enumerate(specs)}
    losses = {name: row["after"] for name, row in final_rows(run).items() if "after" in row}
    try:
        session.start_all(
            {
                index: read_adapter(path, specs[index].kind, specs[index].head)[1]
                for index, path in folder_by_index.items()
                if path is not None
            }
        )
        session.finish_loading()
        evaluations = {name: session.evaluate(name) for name in losses}
        return {
            name: Check(trained=losses[name], exported=evaluation.loss)
            for name, evaluation in evaluations.items()
            if evaluation is not None
        }
    finally:
        session.close()
