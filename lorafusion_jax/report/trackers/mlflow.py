"""MLflow: a run for each adapter, in one experiment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lorafusion_jax.report.trackers.series import RUN, Tracker, Value

TAG = "lorafusion.run"  # the run folder


class Mlflow(Tracker):
    """Logs to an experiment, where MLflow's own settings say: `MLFLOW_TRACKING_URI`, or its default."""

    def __init__(self, package: Any, setting: Any, folder: Any):
        super().__init__(package, setting, folder)
        self._client: Any = None
        self._runs: dict[str, str] = {}

    def open(self, name: str, settings: Mapping[str, Value], *, first_step: int) -> None:
        if self._client is None:
            self._client = self._package.MlflowClient()
        client = self._client
        experiment = client.get_experiment_by_name(self._setting)
        number = client.create_experiment(self._setting) if experiment is None else experiment.experiment_id
        title = f"{self._folder.name}/{'run' if name == RUN else name}"
        of_folder = f"tags.`{TAG}` = '{self._folder.resolve()}' and attributes.run_name = '{title}'"
        before = client.search_runs([number], of_folder, max_results=1) if first_step else []
        if before:
            self._runs[name] = before[0].info.run_id
            return
        run = client.create_run(number, run_name=title, tags={TAG: str(self._folder.resolve())})
        self._runs[name] = run.info.run_id
        for key, value in settings.items():
            client.log_param(run.info.run_id, key, value)

    def log(self, name: str, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        for key, value in values.items():
            self._client.log_metric(self._runs[name], key, value, timestamp=now, step=step)

    def close(self) -> None:
        for run in self._runs.values():
            self._client.set_terminated(run)
