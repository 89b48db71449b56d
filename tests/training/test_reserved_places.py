"""Adapters that join a run in places that it has reserved: nothing compiles, and nothing else changes."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import jax.monitoring
import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from narrow_places import narrow_places

from lorafusion_jax.checkpoint.requests import write_addition
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import read_joining
from lorafusion_jax.config.stack import stack_of, without_places
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, resume, train
from lorafusion_jax.training.verify import verify_exports

COMPILED = "/jax/core/compile/backend_compile_duration"
LORA = {"rank": 3, "dropout": 0.1, "targets": ["up_proj", "k_proj"]}
PATTERN = {"rank_pattern": {"0.self_attn.k_proj": 5}, "alpha_pattern": {"up_proj": 3}}  # its place is that of rank 5
OPTIMIZER_STEP = {f"jit({name})" for name in ("write", "init_optimizer", "copies", "<lambda>", "close_batch", "step")}
OPTIM = {"lr": 2e-3, "schedule": "constant", "warmup": 0.0}
SHARED = {"optim": OPTIM, "data": {"max_length": 32}}


@pytest.fixture(scope="module", autouse=True)
def _few_targets():
    with pytest.MonkeyPatch.context() as patch:
        narrow_places(patch, LORA["targets"])
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reserved")
    for name, count in {"ore": 8, "salt": 5, "coal": 6, "held": 2}.items():
        small_jobs.write_rows(folder, name, count, longest=8)
    return folder


@pytest.fixture(scope="module")
def config(folder, tiny_base):
    entries = [
        {"name": name, "data": {"train": f"{name}.jsonl", "eval": "held.jsonl"}, "lora": LORA, "seed": seed}
        for seed, name in enumerate(("ore", "salt"))
    ]
    batch = {"capacity_tokens": 32, "tile_tokens": 16, "global_samples": 2}
    train_settings = {"places": {3: 1, 5: 1}, "plan_seconds": 0.01}
    save = {"every_steps": 2, "keep": 20}
    return load_config(
        small_jobs.write_job(folder, tiny_base, entries, batch=batch, train=train_settings, save=save, **SHARED)
    )


def joining(folder, config, name, **lora):
    entry = {"name": name, "data": {"train": "coal.jsonl", "eval": "held.jsonl"}, "lora": LORA | lora, "seed": 7}
    (folder / f"{name}.yaml").write_text(json.dumps({"adapters": [entry], **SHARED}))
    return read_joining(folder / f"{name}.yaml", config)


class CompilesWhileJoining:
    """Adds adapters after the second step of `ore`, and counts programs from the request to the end of the run."""

    def __init__(self, run, adapters):
        self.run, self.adapters, self.names, self.asked = run, adapters, Counter(), False

    def __call__(self, event):
        if (event.kind, getattr(event, "adapter", ""), getattr(event, "step", 0)) == ("step", "ore", 2):
            write_addition(self.run, self.adapters)
            self.asked = True

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self.count)
        return self

    def __exit__(self, *problem):
        jax.monitoring.unregister_event_duration_listener(self.count)

    def count(self, event, seconds, **labels):
        if self.asked and event == COMPILED:
            self.names[labels.get("fun_name", "")] += 1


def weights_of(run, name):
    arrays = read_adapter(RunFolder(run).latest(name))[1]
    return {f"{path} {part}": array for path, pair in arrays.items() for part, array in zip("AB", pair, strict=True)}


def losses_of(run, name):
    rows = read_rows(run / "metrics.jsonl")
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "step" and row["adapter"] == name]


def assert_bitwise(run, other, names):
    for name in names:
        assert losses_of(run, name) == losses_of(other, name)
        for key, array in weights_of(run, name).items():
            np.testing.assert_array_equal(array, weights_of(other, name)[key], err_msg=f"{name} {key}")


@pytest.fixture(scope="module")
def joined(folder, config, tmp_path_factory):
    """A run that `coal` and `peat` join in places of their ranks, and what compiled from then on."""
    run = tmp_path_factory.mktemp("joined") / "run"
    several = [*joining(folder, config, "coal"), *joining(folder, config, "peat", **PATTERN)]
    with CompilesWhileJoining(run, several) as compiles:
        result = train(config, run, listeners=[compiles])
    assert {name: adapter.status for name, adapter in result.adapters.items()} == dict.fromkeys(
        ("ore", "salt", "coal", "peat"), "done"
    )
    assert stack_of(RunFolder(run).read_config()).index["peat"] == 3
    return run, compiles.names


def test_an_adapter_in_a_free_place_compiles_nothing(joined):
    """`peat` has a rank that no other has, so its optimizer step is compiled, once; `coal` has programs of others."""
    assert joined[1].keys() <= OPTIMIZER_STEP
    assert max(joined[1].values()) == 1


@pytest.mark.parametrize(("name", "lora"), [("coal", {}), nightly("peat", PATTERN)])
def test_it_trains_as_it_does_alone(name, lora, joined, folder, config, tmp_path):
    run, _ = joined
    (adapter,) = joining(folder, config, name, **lora)
    unevaluated = adapter.model_copy(update={"data": adapter.data.model_copy(update={"eval": None})})
    alone = without_places(config.model_copy(update={"adapters": (unevaluated,)}))
    train(alone, tmp_path / "alone")
    for key, array in weights_of(run, name).items():
        np.testing.assert_allclose(array, weights_of(tmp_path / "alone", name)[key], rtol=0, atol=2e-5)
    assert verify_exports(run)[name].same


@pytest.mark.parametrize("checkpoints", [1, nightly(0), 4])
def test_a_run_resumes_bitwise_with_it(checkpoints, joined, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(joined[0], run, symlinks=True)
    slots = sorted(int(slot.name) for slot in (run / "state").iterdir())
    for slot in slots[checkpoints:]:
        shutil.rmtree(run / "state" / str(slot))
    assert resume(run).exit_code == 0
    assert_bitwise(run, joined[0], ("ore", "salt", "coal", "peat"))


@pytest.mark.nightly  # compiles the run twice
def test_a_narrower_adapter_takes_the_next_place_and_a_wider_one_makes_room(folder, config, tmp_path):
    run = tmp_path / "run"
    several = [
        *joining(folder, config, "thin", rank=2),
        *joining(folder, config, "middle", rank=4, targets=["k_proj"]),
        *joining(folder, config, "wide", rank=6),
    ]
    with CompilesWhileJoining(run, several) as compiles:
        result = train(config, run, listeners=[compiles])
    assert {adapter.status for adapter in result.adapters.values()} == {"done"}
    assert compiles.names
    stack = stack_of(RunFolder(run).read_config())
    assert stack.index == {"ore": 0, "salt": 1, "thin": 2, "middle": 3, "wide": 4}
    assert not stack.vacant
    assert resume(run).exit_code == 0


def test_places_and_experts_exclude_each_other(config):
    (ore, salt) = config.adapters
    experts = ore.model_copy(update={"lora": ore.lora.model_copy(update={"targets": ["experts_up_proj"]})})
    with pytest.raises(ConfigError, match=r"places\.experts|lora\.unknown-target"):
        stack_of(config.model_copy(update={"adapters": (experts, salt)}))
