"""However a run is laid out over devices, it is the run of one device."""

from __future__ import annotations

import pytest
from mixed import ADAPTERS, assert_equal, read_trained, write_mixed_job
from more_cases import mostly_nightly

from lorafusion_jax.config import load_config
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import train

# float32: sums over replicas and packings come in another order, about 1e-7 each; few steps carry them on
TOLERANCE = 1e-5

FEWER = ("law", "chat")  # every stage compiles the steps of every adapter
SIMILAR = (  # to law: they share programs
    "adapters.chat.lora.rank=4",
    "adapters.chat.lora.targets=[q_proj, down_proj]",
    "adapters.chat.optim={name: adamw, lr: 0.01, eps: 0.001, clip: 0.1}",
)
LAYOUTS = {  # tied embeddings, mesh, train, capacity
    "3 uneven stages, blocks and a rest, some slots empty": (
        False, {"stages": 3, "layers": [1, 3, 1]}, {"block_layers": 2}, 64,  # layers alone as on one device
    ),
    "2 fsdp, blocks and a rest": (False, {"fsdp": 2}, {"block_layers": 2, "remat": "everything"}, 128),
    "3 stages with halves": (True, {"stages": 3, "layers": [1.5, 2, 1.5]}, {"remat": "nothing"}, 128),
    "2 data x 2 fsdp": (True, {"data": 2, "fsdp": 2}, {"remat": "nothing"}, 64),
    "2 stages x 2 data": (True, {"stages": 2, "data": 2}, {"remat": "gemm_inputs"}, 128),
    "2 stages x 2 data x 2 fsdp": (False, {"stages": 2, "data": 2, "fsdp": 2}, {}, 128),
}  # fmt: skip

# test_processes.py has stages and replicas; test_resume_layouts.py has halves of layers
ALWAYS = ["3 uneven stages, blocks and a rest, some slots empty"]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, deep_base, kept_programs):
    """one_device(tied, held_out) → the run of a single device that compiles one layer and calls it five times."""
    done = {}

    def trained(tied: bool, held_out):
        if (tied, held_out) not in done:
            folder = tmp_path_factory.mktemp("one")
            names, overrides = (tuple(ADAPTERS), ()) if tied else (FEWER, SIMILAR)
            config = load_config(write_mixed_job(folder, deep_base(tied), names, held_out), overrides)
            assert train(config, folder / "run").exit_code == 0
            done[tied, held_out] = run = read_trained(folder / "run")
            assert all(max(abs(leaf).max() for leaf in leaves.values()) > 1e-4 for leaves in run.weights.values())
        return done[tied, held_out]

    return trained


@pytest.mark.parametrize("layout", mostly_nightly(LAYOUTS, ALWAYS))
def test_a_layout_does_not_change_the_run(layout, one_device, mixed_job, tmp_path):
    tied, mesh, settings, capacity = LAYOUTS[layout]
    names = FEWER if "stages" in mesh or not tied else tuple(ADAPTERS)
    held_out = () if "stages" in mesh else FEWER  # of stages, test_resume_layouts.py compares evaluations
    sections = {"mesh": mesh, "train": settings, "batch": {"capacity_tokens": capacity}}
    config = mixed_job(tied, names, held_out, () if tied else SIMILAR, **sections)
    result = train(config, tmp_path / "run")
    assert result.exit_code == 0
    assert_equal(one_device(tied, held_out).of(names), read_trained(tmp_path / "run"), TOLERANCE)
    last = {name: max(slot for slot, n, _ in result.plan.batches_ending() if n == name) for name in result.adapters}
    assert min(last.values()) < result.plan.num_slots - 1, "no adapter ends early, so the comparison says less"
    if "empty" in layout:
        assert result.plan.num_noops > 0, "no slot is empty, so the comparison says less"
    started = next(row for row in read_rows(tmp_path / "run" / "events.jsonl") if row["kind"] == "started")
    assert sum(started["layers"]) == 5
    assert len(started["layers"]) == mesh.get("stages", 1)
