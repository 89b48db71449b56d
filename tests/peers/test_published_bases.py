"""What leaves a run works with the base as it is published: every family, multimodal models included.

The adapter of each golden model is written by us, loaded by the published class with PEFT, and merged by us. Logits are
those of `expected.safetensors`, which the decoder gives, too (`models/test_parity.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from lorafusion_jax.families.multimodal import WRAPPERS, auto_class, root_in_peft
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.peft.folder import read_adapter, write_adapter
from lorafusion_jax.peft.merge import merge_arrays

sys.path.append(str(Path(__file__).parents[1] / "models"))
from drawn import GOLDEN, TOKENS, golden, golden_tokens, probe, tokens
from test_drawn_families import FORWARD, ROWS, write

PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with torch and peft; make test-peers"),
]
TEXT = (
    "llama3", "mistral_window", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma4",
    "gemma4_shared", "gemma4_unified", "olmo2", "olmo3", "smollm3", "granite", "seed_oss", "phi3_long", "mixtral",
    "gpt_oss", "qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite_groups", "deepseek_v3_experts", "qwen3_next",
    "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
WHOLE = {  # a multimodal model → the golden or drawn model that is its text part
    "gemma3": "gemma3", "gemma3 windows": "gemma3_all_windows", "gemma4": "gemma4", "gemma4 experts": "gemma4_experts",
    "gemma4 per layer": "gemma4_per_layer", "gemma4_unified": "gemma4_unified", "mistral3": "mistral_window",
    "mistral3 ministral": "ministral3", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe", "llama4": "llama4",
}  # fmt: skip
WITHOUT_CLASS = ("bailing_moe_v2",)  # in transformers
LOADED = [case for case in FORWARD.values() if case not in WITHOUT_CLASS]
CLASSES = {"mistral4": "Mistral4ForCausalLM"}  # of which transformers has no Auto class
CASES = {case: case for case in TEXT} | {f"whole {name}": case for name, case in WHOLE.items()}
LOGITS = 1e-4  # relative; float32, another library's order of sums through all layers


def script(*arguments: object) -> None:
    path = Path(__file__).parent / "published_bases.py"
    done = subprocess.run([PEERS, str(path), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # PEFT says so where an adapter does not reach the model
    assert "missing adapter keys" not in done.stderr, done.stderr[-3000:]


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    home = tmp_path_factory.mktemp("published")
    bases = {name: golden(case) if name == case else home / "bases" / name for name, case in CASES.items()}
    wholes = [
        {"text": str(golden(case)), "type": name.split()[1], "folder": str(bases[name])}
        for name, case in CASES.items()
        if name != case
    ]
    (home / "job.json").write_text(json.dumps({"wholes": wholes}))
    script("make", home / "job.json")
    runs = []
    bases |= {case: write(case, home / "drawn" / case) for case in LOADED}
    for name, case in (CASES | {case: case for case in LOADED}).items():
        base, model = str(bases[name]), ModelConfig.from_hf(bases[name])
        assert bool(model.wrapper) == (name != case) or name in FORWARD.values()
        spec, arrays = read_adapter((bases[case] if name == case else golden(case)) / "adapter")
        whole = {"multimodal": bool(model.wrapper), "root": root_in_peft(model.wrapper)}
        folder = write_adapter(arrays, spec, base, home / "adapters" / name, **whole)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the towers that are left out
            merge_arrays(base, spec, arrays, home / "merged" / name)
        ids = golden_tokens(case) if case in GOLDEN else tokens(TOKENS, model.num_outputs)
        every = {"class": CLASSES.get(model.family, auto_class(model.wrapper)), "tokens": ids.tolist()}
        runs += [
            every | {"name": f"{name} base", "base": base, "adapter": None},
            every | {"name": name, "base": base, "adapter": str(folder)},
            every | {"name": f"{name} merged", "base": str(home / "merged" / name), "adapter": None},
        ]
    (home / "job.json").write_text(json.dumps({"runs": runs}))
    script("run", home / "job.json", home / "results.npz")
    with np.load(home / "results.npz") as results:
        return dict(results)


@pytest.mark.parametrize("name", [*CASES, *LOADED])
def test_an_adapter_changes_the_published_base_as_it_was_trained(name, computed):
    probes = (GOLDEN | ROWS)[CASES.get(name, name)]["probes"]
    for run, what in ((f"{name} base", "logits"), (name, "adapted"), (f"{name} merged", "adapted")):
        error = np.abs(np.subtract(probe(what, computed[run]), probes[what])).max()
        assert error < LOGITS * probes[what][0], run
    assert np.linalg.norm(computed[name] - computed[f"{name} base"]) > 100 * LOGITS * probes["logits"][0]


@pytest.mark.parametrize("case", ["llama3", "gemma2_untied"])
def test_stored_results_are_those_of_installed_transformers(case):
    path = Path(__file__).parent / "drawn_families.py"
    done = subprocess.run([PEERS, str(path), "--golden", "--only", case], capture_output=True, text=True, check=True)
    again, stored = json.loads(done.stdout), GOLDEN[case]
    again["config"]["transformers_version"] = stored["config"]["transformers_version"]
    assert again.keys() == stored.keys()
    assert all(again[key] == stored[key] for key in ("config", "tensors", "adapter"))
    again_settings, settings = (
        row["adapter_config"] | {"target_modules": sorted(row["adapter_config"]["target_modules"])}  # a set of PEFT
        for row in (again, stored)
    )
    assert again_settings == settings
    np.testing.assert_allclose(again["loss"], stored["loss"], rtol=1e-6)
    for name, numbers in stored["probes"].items():
        np.testing.assert_allclose(again["probes"][name], numbers, rtol=0, atol=1e-5 * numbers[0], err_msg=name)


def test_every_family_and_every_multimodal_model_is_among_them():
    families = {ModelConfig.from_hf(GOLDEN[case]["config"]).family for case in TEXT}
    assert families | {*FORWARD} == set(FAMILIES)
    wrappers = {ROWS[case]["config"]["model_type"] for case in FORWARD.values()} & {*WRAPPERS}
    assert {name.split()[0] for name in WHOLE} | wrappers == set(WRAPPERS)
