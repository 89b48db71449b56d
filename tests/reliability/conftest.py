"""One small finished run, copied for every attempt to spoil it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_jobs
from campaigns.quick_runs import command, listening, quick_runs

from lorafusion_jax.config import load_config
from lorafusion_jax.training import train


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run with its job, data and base in one folder."""

    home: Path

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def slots(self) -> list[int]:
        return sorted(int(folder.name) for folder in (self.run / "state").iterdir())

    def newest(self) -> Path:
        return self.run / "state" / str(self.slots[-1])

    def adapter(self, name: str = "law") -> Path:
        return self.run / "adapters" / name / "latest"

    def cut_to(self, count: int) -> None:
        """Takes the newest checkpoints away, so that the run has something left to do."""
        for slot in self.slots[count:]:
            shutil.rmtree(self.run / "state" / str(slot))

    def weights(self) -> dict[str, bytes]:
        return {
            path.parts[-3]: path.read_bytes()
            for path in sorted(self.run.glob("adapters/*/latest/adapter_model.safetensors"))
        }


@pytest.fixture(autouse=True)
def _quick(kept_programs):
    """Every test here runs programs of a tiny model."""


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """The programs of a module are those of the next one: nearly all train one job."""


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, tiny_base, kept_programs) -> Iterator[Finished]:
    """The finished run; nobody changes it."""
    home = tmp_path_factory.mktemp("whole")
    shutil.copytree(tiny_base, home / "base")
    adapters = [
        {
            "name": name,
            "data": {
                "train": small_jobs.write_rows(home, name, 8, longest=8),
                "eval": small_jobs.write_rows(home, f"{name}_eval", 3, longest=8),
            },
            "batch": {"global_samples": 2},
        }
        for name in ("law", "med")
    ]
    batch = {"capacity_tokens": 64, "tile_tokens": 16}  # programs as those of tests/cli, which are on the disk
    lora = {"rank": 4, "dropout": 0.1}
    job = small_jobs.write_job(home, Path("base"), adapters, lora=lora, batch=batch, save={"every_steps": 2})
    assert train(load_config(job), home / "run").exit_code == 0
    return Finished(home=home)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, tiny_base) -> Iterator[Path]:
    """A run of one adapter that stands still after its first step, when its adapter has been exported."""
    home = tmp_path_factory.mktemp("hostile")
    entry = {"name": "law", "data": {"train": small_jobs.write_rows(home, "law", 6)}, "batch": {"global_samples": 2}}
    small_jobs.write_job(home, tiny_base, [entry], save={"every_steps": 1})

    def stop(event):
        if event.kind == "step":
            signal.raise_signal(signal.SIGTERM)

    with quick_runs():
        with listening(stop):
            assert command("train", home / "jobs.yaml", "--out", home / "run").code == 130
        yield home / "run"


@pytest.fixture
def copied(whole_run, tmp_path) -> Callable[[], Finished]:
    """copied() → the run, free to be spoilt; config.yaml names the folder of the original job."""

    def copy() -> Finished:
        shutil.copytree(whole_run.run, tmp_path / "run", symlinks=True)
        return Finished(home=tmp_path)

    return copy


@pytest.fixture(scope="module")
def healthy(make_config, tmp_path_factory):
    """healthy(mesh) → folder of a run of the module's `make_config` in which nothing happens."""
    runs = {}

    def run(mesh):
        key = tuple(mesh.items())
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("healthy") / "run"
            assert train(make_config(mesh), runs[key]).exit_code == 0
        return runs[key]

    return run
