"""Training on a list of sources: equal to the joined file, and resumed bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import small_jobs
from small_jobs import exported

from lorafusion_jax.config import load_config
from lorafusion_jax.training import resume, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    for name in "ab":
        small_jobs.write_rows(folder, name, 6, longest=8)
    (folder / "whole.jsonl").write_text((folder / "a.jsonl").read_text() + (folder / "b.jsonl").read_text())
    return folder


@pytest.fixture(scope="module")
def trained(folder, tiny_base, kept_programs):
    def run(name, sources, stop_at=None):
        adapters = [{"name": "law", "data": {"train": sources}, "epochs": 2, "batch": {"global_samples": 2}}]
        config = load_config(small_jobs.write_job(folder, tiny_base, adapters, save={"every_steps": 2}))

        def listen(event):
            if event.kind == "step" and event.step == stop_at:
                raise KeyboardInterrupt

        if stop_at is None:
            train(config, folder / name)
        else:
            with pytest.raises(KeyboardInterrupt):
                train(config, folder / name, listeners=[listen])
            resume(folder / name)
        return exported(folder / name, "law")

    return run


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_a_list_trains_like_the_joined_file(trained):
    assert same(trained("list", ["a.jsonl", "b.jsonl"]), trained("whole", "whole.jsonl"))


def test_weighted_sources_are_resumed_bit_for_bit(trained, saves_wait):
    sources = ["a.jsonl", {"path": "b.jsonl", "weight": 0.5}]
    assert same(trained("cut", sources, stop_at=5), trained("unbroken", sources))
