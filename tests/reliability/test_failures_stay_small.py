"""What goes wrong with one adapter costs that adapter: its folder, its start, its rows, its settings."""

from __future__ import annotations

import errno
import json
import shutil

import jax
import numpy as np
import pytest

from lorafusion_jax.config import load_config
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.errors import CheckpointError, LoraFusionError, RunError
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session.assembler import mask_adapters
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.training import RunFolder, resume, train
from lorafusion_jax.training.exports import AdapterWriter


@pytest.fixture
def make_config(write_job, write_rows):
    def make(lora=None, **optim):
        entries = [
            {"name": name, "data": {"train": write_rows(name, 6)}, "batch": {"global_samples": 2}}
            for name in ("law", "med")
        ]
        entries[0] |= {"optim": optim} if optim else {}
        entries[0] |= {"lora": lora} if lora else {}
        return load_config(
            write_job(
                entries,
                lora={"rank": 4, "dropout": 0.1},
                batch={"capacity_tokens": 64, "tile_tokens": 16},  # programs as in tests/cli
                save={"every_steps": 2, "keep": 9},
            )
        )

    return make


def refuse_law(monkeypatch, problem):
    original = AdapterWriter.write

    def write(self, name, *args, **options):
        if name == "law":
            raise problem
        return original(self, name, *args, **options)

    monkeypatch.setattr(AdapterWriter, "write", write)


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (CheckpointError("export.not-finite", "law: 3 weights are NaN or infinite."), "export.not-finite"),
        (RunError("export.differs", "law: the written folder reads back differently."), "export.differs"),
        (RunError("save.failed", "law could not be written.", why="no permission"), "save.failed"),
        (PermissionError(errno.EACCES, "Permission denied", "adapters/law/latest"), "save.failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_that_cannot_be_written_costs_its_adapter_only(problem, code, make_config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    refuse_law(monkeypatch, problem)
    result = train(make_config(), run)
    assert result.exit_code == 3
    assert {name: adapter.status for name, adapter in result.adapters.items()} == {"law": "failed", "med": "done"}
    assert result.adapters["law"].reason.startswith("its folder could not be written: ")
    events = read_rows(run / "events.jsonl")
    assert {row["code"] for row in events if row["kind"] == "export-failed"} == {code}
    assert RunFolder(run).latest("law") is None
    assert RunFolder(run).latest("med") is not None
    monkeypatch.undo()
    again = resume(run)  # its last weights are in the checkpoint
    assert again.exit_code == 0
    assert RunFolder(run).latest("law").name == f"step-{again.adapters['law'].num_steps:06d}"


def test_a_full_disk_still_ends_the_run(make_config, tmp_path, monkeypatch):
    refuse_law(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        train(make_config(), tmp_path / "run")


def test_resume_does_not_need_the_start_that_a_checkpoint_replaces(make_config, tmp_path):
    assert train(make_config(), tmp_path / "first").exit_code == 0
    start = tmp_path / "start"
    shutil.copytree(RunFolder(tmp_path / "first").latest("law"), start)
    run = tmp_path / "second"
    assert train(make_config(lora={"init_from": str(start)}), run).exit_code == 0
    slots = sorted(int(slot.name) for slot in (run / "state").iterdir())
    for slot in slots[1:]:
        shutil.rmtree(run / "state" / str(slot))
    shutil.rmtree(start)
    assert resume(run).exit_code == 0
    shutil.rmtree(run / "state")
    with pytest.raises(LoraFusionError, match=r"peft\.missing-file"):  # from its start, it is needed
        resume(run)


@pytest.mark.parametrize("setting", [{"lr": 1e39}, {"eps": 1e-50}, {"eps": 1e-320}, {"clip": 1e39}])
def test_settings_beyond_float32_are_refused(setting, make_config):
    (name,) = setting
    with pytest.raises(LoraFusionError, match="float32") as caught:
        make_config(**setting)
    assert caught.value.exit_code == 2
    assert name in str(caught.value)


def test_slots_of_failed_adapters_only_are_not_computed(make_config, tmp_path, monkeypatch):
    original, issued = Executor.issue, []

    def issue(self, event, adapters=()):
        issued.append((event.slot, event.kind, adapters))
        original(self, event, adapters)

    monkeypatch.setattr(Executor, "issue", issue)
    config = make_config(lr=1e38, schedule="constant", clip=0)
    result = train(config, tmp_path / "run")
    assert {name: adapter.status for name, adapter in result.adapters.items()} == {"law": "failed", "med": "done"}
    failed = next(row for row in read_rows(tmp_path / "run" / "events.jsonl") if row["kind"] == "adapter-failed")
    late = {slot: names for slot, _, names in issued if slot > failed["slot"] + 2}  # what was queued then has run
    assert all("med" in names for names in late.values())
    plan = result.plan
    skipped = [slot for slot in range(failed["slot"] + 3, plan.num_slots) if slot not in late]
    assert skipped
    assert all({ref.adapter for ref in plan.slots[slot].samples} <= {"law"} for slot in skipped)


def test_rows_of_failed_adapters_become_padding_where_they_stand():
    rows = np.array([[0, 0, 1, 1, 2, 2, -1, -1]])
    counted = np.arange(8)[None] + 1
    batch = Microbatch(
        tokens=counted, targets=counted, positions=counted, segment_ids=counted, segment_offsets=counted,
        segment_lengths=counted, tile_adapter=rows[:, ::2], row_adapter=rows, row_key=counted,
        weights=counted.astype(np.float32), adapters=np.arange(3)[None],
    )  # fmt: skip
    padded = mask_adapters(batch, [1])
    assert padded.tokens.tolist() == [[1, 2, 0, 0, 5, 6, 7, 8]]
    assert padded.weights.tolist() == [[1, 2, 0, 0, 5, 6, 7, 8]]
    assert padded.tile_adapter.tolist() == [[0, -1, 2, -1]]
    assert padded.row_adapter.tolist() == [[0, 0, -1, -1, 2, 2, -1, -1]]
    kinds = [[leaf.dtype for leaf in jax.tree.leaves(rows)] for rows in (padded, batch)]
    assert kinds[0] == kinds[1]  # else the programs compile again
    for name in ("segment_ids", "segment_offsets", "segment_lengths", "positions", "row_key"):
        assert getattr(padded, name) is getattr(batch, name)
    assert mask_adapters(batch, []) is batch


def test_the_folder_of_a_failed_adapter_says_so(make_config, tmp_path):
    result = train(make_config(lr=1e38, schedule="constant", clip=0), tmp_path / "run")
    law = result.adapters["law"]
    assert (law.status, law.step) == ("failed", 1)
    folder = RunFolder(tmp_path / "run").latest("law")
    assert json.loads((folder / "run.json").read_text())["failed"] == law.reason
    assert law.reason in (folder / "README.md").read_text()
    other = RunFolder(tmp_path / "run").latest("med")
    assert json.loads((other / "run.json").read_text())["failed"] is None

    (weights,) = folder.glob("*.safetensors")  # lost later, it is written again with the last good weights
    content = weights.read_bytes()
    weights.unlink()
    assert resume(tmp_path / "run").adapters["law"].status == "failed"
    assert weights.read_bytes() == content
