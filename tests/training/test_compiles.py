"""Compilation is what a user waits for: every program of a run compiles once."""

from lorafusion_jax.config import load_config
from lorafusion_jax.training import run as run_module
from lorafusion_jax.training import train
from lorafusion_jax.training.programs import Programs


def test_every_program_compiles_once(write_job, write_rows, tmp_path, monkeypatch):
    made = []

    class Watched(Programs):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(run_module, "Programs", Watched)
    equal = {"lora": {"rank": 4, "dropout": 0.1}, "batch": {"global_samples": 3}}  # two of a sweep share one update
    job = write_job(
        [
            {
                "name": name,
                "data": {"train": write_rows(name, 9, longest=8), "eval": write_rows("held", 3, longest=8)},
                **equal,
            }
            for name in ("law", "med")
        ]
    )
    train(load_config(job), tmp_path / "run")
    (programs,) = made
    assert programs.accumulate._cache_size() == 1
    assert programs.evaluate._cache_size() == 1
    assert [update._cache_size() for update in programs._updates.values()] == [1]
