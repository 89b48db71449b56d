"""TensorBoard: a folder for each adapter, with the same tags, and its settings as hparams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafusion_jax.report.trackers.series import RUN, Tracker, Value

SHOWN = "eval_loss"  # the tag whose last value stands beside the hparams


class TensorBoard(Tracker):
    """Writes `tensorboard/<adapter>/` in the run folder."""

    def __init__(self, package: Any, setting: Any, folder: Any):
        super().__init__(package, setting, folder)
        self._writers: dict[str, Any] = {}
        self._settings: dict[str, Mapping[str, Value]] = {}

    def open(self, name: str, settings: Mapping[str, Value], *, first_step: int) -> None:
        more = {"purge_step": first_step + 1} if first_step else {}  # steps after it are told again
        self._writers[name] = self._package.SummaryWriter(str(self._folder / "tensorboard" / name), **more)
        self._settings[name] = settings

    def log(self, name: str, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writers[name].add_scalar(tag, value, step)

    def close(self) -> None:
        for name, writer in self._writers.items():
            if name != RUN:  # `add_hparams` would begin another folder
                for part in self._package.summary.hparams(dict(self._settings[name]), {SHOWN: 0.0}):
                    writer.file_writer.add_summary(part)
            writer.close()
