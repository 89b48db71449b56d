"""Folders of trained adapters of every kind, loaded by PEFT: log p of every token is that of our own adapter.

PEFT trains them further and saves them, and we read its folders.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import small_jobs

from lorafusion_jax.adapters.table import KINDS as BUILT_IN
from lorafusion_jax.config import load_config
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.peft.leaves import exported_spec
from lorafusion_jax.session.references import SetPass, finish
from lorafusion_jax.session.session import Session
from lorafusion_jax.training import train

PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with torch and peft; make test-peers"),
]
ADAPTERS = {  # name → its LoRA settings
    "plain": {"rank": 4},
    "rslora": {"rank": 3, "rslora": True},
    "pattern": {
        "rank": 3,
        "rank_pattern": {r"0\.self_attn\..*": 5, "q_proj": 1},
        "alpha_pattern": {"down_proj": 7},
        "exclude": ".*1.mlp.*",
    },
    "layers": {"rank": 2, "layers_to_transform": [1]},
    "bias": {"rank": 2, "lora_bias": True},
    "dora": {"rank": 3, "kind": "dora"},
    "doralayers": {"rank": 3, "kind": "dora", "layers_to_transform": [1], "exclude": ["self_attn.q_proj"]},
    "vera": {"rank": 3, "kind": "vera"},
    "fa": {"rank": 3, "kind": "lora-fa"},
    "pissa": {"rank": 3, "kind": "pissa"},
    "tokens": {"rank": 2, "trainable_tokens": [2482, 272, "<|end|>"]},
}
LOGITS = 1e-4  # float32, another library's order of sums through all layers


@pytest.fixture(scope="module")
def both(make_base, tmp_path_factory):
    """log p of all tokens: ours of our folders and of PEFT's, and PEFT's of the same."""
    home = tmp_path_factory.mktemp("kinds")
    base = make_base(home / "base")
    rows = small_jobs.write_rows(home, "rows", 8, longest=12)
    entries = [
        {"name": name, "data": {"train": rows}, "lora": {"dropout": 0.0} | lora, "batch": {"global_samples": 4}}
        for name, lora in ADAPTERS.items()
    ]
    usual = {"optim": {"lr": 0.02, "schedule": "constant", "warmup": 0}, "data": {"max_length": 64, "loss": "all"}}
    config = load_config(small_jobs.write_job(home, base, entries, **usual, train={"max_steps": 3}))
    assert train(config, home / "run").exit_code == 0
    folders = {name: str(home / "run" / "adapters" / name / "latest") for name in ADAPTERS}
    texts = prepare(config).adapters["plain"].train
    job = {"base": str(base), "adapters": folders, "trained": str(home / "trained")}
    job["texts"] = [texts.sample(number)[0].tolist() for number in range(len(texts))]
    (home / "job.json").write_text(json.dumps(job))
    script = [PEERS, str(Path(__file__).parent / "peft_logprobs.py"), str(home / "job.json"), str(home / "theirs.npz")]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    further = {name: home / "trained" / name for name in ADAPTERS}
    ours = ours_of(config, {name: Path(folder) for name, folder in folders.items()})
    ours |= {f"{name} trained": values for name, values in ours_of(config, further).items()}
    return ours, np.load(home / "theirs.npz")


def ours_of(config, folders: dict[str, Path]) -> dict[str, np.ndarray]:
    """log p under the folders' weights, computed by a session of the run's adapters."""
    prepared, exported = prepare(config), [exported_spec(spec) for spec in adapter_specs(config)]
    starts = {index: read_adapter(folders[spec.name], spec.kind)[1] for index, spec in enumerate(exported)}
    session = Session.open(config, prepared, exported)
    try:
        session.start_all(starts)
        session.finish_loading()
        result = {}
        for index, name in enumerate(ADAPTERS):
            alone = config.model_copy(update={"adapters": (config.adapter(name),)})
            samples = prepared.adapters[name].train
            forward = SetPass.alone(
                alone,
                "train",
                samples,
                stages=session.executor.stages,
                position=index,
                state=None,
                describe=session.executor.describe,
            )
            result[name] = finish(forward.run(session.executor))[samples.loss_mask]
        return result
    finally:
        session.close()


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_computes_what_we_trained(name, both):
    ours, theirs = both
    assert np.abs(theirs[name] - theirs["base"]).max() > 100 * LOGITS  # the adapter has an effect
    np.testing.assert_allclose(ours[name], theirs[name], atol=LOGITS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_we_compute_what_peft_trained_further(name, both):
    ours, theirs = both
    assert np.abs(theirs[f"{name} trained"] - theirs[name]).max() > 100 * LOGITS
    np.testing.assert_allclose(ours[f"{name} trained"], theirs[f"{name} trained"], atol=LOGITS)


def test_every_built_in_kind_is_among_them():
    kinds = {lora.get("kind", "lora-bias" if lora.get("lora_bias") else "lora") for lora in ADAPTERS.values()}
    assert kinds == set(BUILT_IN)
