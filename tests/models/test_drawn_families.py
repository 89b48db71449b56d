"""Drawn models of families: logits, loss and gradients against transformers and PEFT in float64.

`tests/peers/drawn_families.py` writes `drawn_families.jsonl`; weights are drawn from names, so that no file holds them.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import drawn
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity
from drawn import CASES_FILE, TOKENS, tokens
from more_cases import mostly_nightly, nightly
from safetensors.numpy import load_file, save_file

from benchmarks.saved_model import load_frozen
from lorafusion_jax.checkpoint.base_weights import header_problems
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.generation.generator import Generator
from lorafusion_jax.generation.load import load_stage
from lorafusion_jax.generation.packing import BASE
from lorafusion_jax.generation.requests import Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.sources import AdapterSource, Source
from lorafusion_jax.models import ModelConfig, Segments
from lorafusion_jax.models.checkpoint import as_published, list_tensors, read_slice
from lorafusion_jax.models.experts import choose_experts
from lorafusion_jax.peft.folder import read_adapter, write_adapter
from lorafusion_jax.peft.merge import merge_adapter
from lorafusion_jax.peft.settings import text_name
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.weights.checkpoint_formats import SINGLE

FILE = Path(os.environ.get("DRAWN", Path(__file__).parent / CASES_FILE))
ROWS = drawn.read_rows(FILE)
VALUES, GRADIENTS = 1e-5, 1e-4  # relative, as in `test_parity`
# The first model of each family; of every run those with a mechanism that no other has, forward only.
EVERY_DAY = ("hunyuan_v1_dense", "glm4", "apertus1p5_text_head", "starcoder2", "cohere2", "granitemoehybrid", "lfm2",
             "nemotron_h", "falcon_h1", "gpt_neox", "llama4", "olmo_hybrid", "gpt2")  # fmt: skip
FORWARD = {ModelConfig.from_hf(row["config"]).family: case for case, row in reversed(ROWS.items())}


def write(case: str, folder: Path) -> Path:
    return drawn.write(ROWS[case], folder)


@cache
def folder_of(case: str, home: Path) -> Path:
    return write(case, home / case)


def compared(case: str, folder: Path, *, gradients: bool) -> dict[str, float]:
    """Differences of the probes, relative to the length of what they probe."""
    row, size = ROWS[case], ModelConfig.from_hf(ROWS[case]["config"]).num_outputs
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only the text part")
        values = test_parity.computed_of(folder, tokens(TOKENS, size), gradients=gradients)
    in_file = {f"grad.{text_name(key)[0]}": f"grad.{key}" for key in row["adapter"]}
    values = {in_file.get(name, name): array for name, array in values.items()}
    assert not gradients or values.keys() - {"loss"} == row["probes"].keys(), values.keys() ^ row["probes"].keys()
    return drawn.distances(row, values)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("drawn")


@pytest.mark.parametrize("case", EVERY_DAY)
def test_a_drawn_model_computes_what_transformers_and_peft_do(case, home):
    differences = compared(case, folder_of(case, home), gradients=False)
    assert differences.keys() == {"loss", "logits", "adapted"}
    assert max(differences.values()) < VALUES, differences


@pytest.mark.parametrize("case", [nightly(case) for case in ROWS])
def test_gradients_of_a_drawn_model_are_those_of_peft(case, home):
    differences = compared(case, folder_of(case, home), gradients=True)
    values = {name: error for name, error in differences.items() if not name.startswith("grad")}
    assert max(values.values()) < VALUES, values
    assert max(differences.values()) < GRADIENTS, differences


@pytest.mark.parametrize("case", FORWARD.values())
def test_an_adapter_that_is_written_again_has_the_names_of_peft(case, home):
    folder = folder_of(case, home) / "adapter"
    spec, arrays = read_adapter(folder)
    multimodal = bool(ModelConfig.from_hf(ROWS[case]["config"]).wrapper)
    again = write_adapter(arrays, spec, "base", home / f"{case}-again", multimodal=multimodal)
    before, after = (load_file(path / "adapter_model.safetensors") for path in (folder, again))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    row, settings = ROWS[case]["adapter_config"], json.loads((again / "adapter_config.json").read_text())
    assert {*settings.get("target_parameters", ())} == {*row.get("target_parameters", ())} or multimodal


@pytest.mark.parametrize("case", [nightly(case) for case in FORWARD.values()])
def test_packed_samples_of_a_drawn_model_are_computed_as_alone(case, home):
    folder = folder_of(case, home)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only the text part")
        run, leaves = test_parity.program_of(folder, gradients=False)
    ids = tokens(TOKENS, ModelConfig.from_hf(folder).vocab_size)

    def logits(lengths: tuple[int, ...], ids: np.ndarray) -> np.ndarray:
        positions = np.concatenate([np.arange(length) for length in lengths])
        return np.asarray(run(leaves, ids, positions, Segments.from_lengths(lengths, TOKENS))[0][1])

    lengths, stop = (14, 5, TOKENS - 19), 0
    packed = logits(lengths, ids)
    for length in lengths:
        start, stop = stop, stop + length
        rest = TOKENS - length
        alone = logits((length, rest), np.concatenate([ids[start:stop], np.zeros(rest, np.int32)]))[:length]
        np.testing.assert_allclose(packed[start:stop], alone, rtol=0, atol=4e-6 * np.abs(alone).max())


def test_a_gpt_2_of_older_names_is_the_same_and_is_merged(home):
    """Published files have no "transformer." and tables of a mask, which are left out."""
    folder, older = folder_of("gpt2", home), home / "gpt2-older"
    shutil.copytree(folder, older)
    tensors = {
        name.removeprefix("transformer."): array for name, array in load_file(folder / "model.safetensors").items()
    }
    masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for layer in range(2)}
    save_file(tensors | masks, older / "model.safetensors")
    before, after = (dict[str, Any](load_frozen(path, dtype="float32")) for path in (folder, older))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    report = merge_adapter(older, folder / "adapter", home / "gpt2-merged")
    merged = load_file(home / "gpt2-merged" / "model.safetensors")
    assert merged.keys() == (tensors | masks).keys()
    assert report.deltas.keys() == {name for name in tensors if not np.array_equal(tensors[name], merged[name])}
    assert len(report.deltas) == 8


OF_CLASS = {  # names in files → those of the class that transformers has, which is another family's
    "exaone": {
        "transformer.wte": "model.embed_tokens", "transformer.h.": "model.layers.", "transformer.ln_f": "model.norm",
        "attn.attention.out_proj": "self_attn.o_proj", "attn.attention": "self_attn", "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm", "c_fc_0": "gate_proj", "c_fc_1": "up_proj", "c_proj": "down_proj",
    },
    "sarvam_moe_biased": {
        "word_embeddings": "embed_tokens", "attention.dense": "self_attn.o_proj",
        "expert_bias": "e_score_correction_bias",
    },
}  # fmt: skip


def as_class(tensors: dict[str, np.ndarray], names: dict[str, str], config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a file as `save_pretrained(save_original_format=False)` of transformers writes them."""
    attention, renamed = config.layers[0].attention, {}
    for name, array in tensors.items():
        joined = ".attention.query_key_value." in name
        cuts = [attention.queries, attention.queries + attention.keys] if joined else []
        for part, rows in zip("qkv", np.split(array, cuts), strict=False):
            new = name.replace("attention.query_key_value", f"self_attn.{part}_proj")
            for old, other in names.items():
                new = new.replace(old, other)
            renamed[new] = rows
    experts = sorted(name for name in renamed if ".experts." in name)
    for layer in {name.partition(".experts.")[0] for name in experts}:
        kernels = {
            part: np.stack([renamed.pop(f"{layer}.experts.{expert}.{part}_proj.weight") for expert in range(6)])
            for part in ("gate", "up", "down")
        }
        renamed[f"{layer}.experts.gate_up_proj"] = np.concatenate([kernels["gate"], kernels["up"]], axis=1)
        renamed[f"{layer}.experts.down_proj"] = kernels["down"]
    return renamed


@pytest.mark.parametrize("case", OF_CLASS)
def test_a_base_under_the_names_of_its_class_is_the_same_and_is_merged(case, home):
    """Published files have other names, and q, k and v of Sarvam in one tensor."""
    folder, other, config = folder_of(case, home), home / f"{case}-class", ModelConfig.from_hf(ROWS[case]["config"])
    shutil.copytree(folder, other)
    save_file(as_class(load_file(folder / SINGLE), OF_CLASS[case], config), other / SINGLE)
    arrays, reports = [], []
    for base in (folder, other):
        assert header_problems(base, config) == []
        reports.append(merge_adapter(base, folder / "adapter", Path(f"{base}-merged")))
        arrays += [dict[str, Any](load_frozen(path, dtype="float32")) for path in (base, Path(f"{base}-merged"))]
        assert load_file(Path(f"{base}-merged") / SINGLE).keys() == load_file(base / SINGLE).keys()
    before, merged, *others = arrays
    for name in before:
        assert np.array_equal(before[name], others[0][name]), name
        assert np.array_equal(merged[name], others[1][name]), name
    assert max(reports[0].deltas.values()) == max(reports[1].deltas.values()) > 0
    changed = {name for name in before if not np.array_equal(before[name], merged[name])}
    assert changed == {f"{path}.kernel" for path in read_adapter(folder / "adapter")[1]}


def test_columns_of_joined_projections_are_read_alone(home):
    folder = folder_of("sarvam_moe_biased", home)
    tensors, config = list_tensors(folder), ModelConfig.from_hf(folder)
    joined, stored = "model.layers.1.attention.query_key_value.", as_published(tensors, config)
    whole, first = load_file(folder / SINGLE), 0
    for name, rows in (("q_proj", 32), ("k_proj", 8), ("v_proj", 8)):
        name = f"model.layers.1.self_attn.{name}."
        part = read_slice(stored[f"{name}weight"], f"{name}weight", (slice(1, 5), slice(3, 9)))
        assert np.array_equal(part, whole[f"{joined}weight"][first + 1 : first + 5, 3:9])
        bias = read_slice(stored[f"{name}bias"], f"{name}bias", (slice(0, rows),))
        assert np.array_equal(bias, whole[f"{joined}bias"][first : first + rows])
        first += rows


def test_joined_projections_of_another_size_are_an_error(home):
    folder, other = folder_of("sarvam_moe_biased", home), home / "sarvam-of-other-heads"
    shutil.copytree(folder, other)
    raw = ROWS["sarvam_moe_biased"]["config"]
    (other / "config.json").write_text(json.dumps(raw | {"num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match=r"not of this model: model\.layers\.0\.attention\.query_key_value"):
        load_frozen(other)


def test_half_a_layer_of_parallel_halves_is_refused():
    config = ModelConfig.from_hf(ROWS["cohere2"]["config"])
    assert [stage.count for stage in stage_layers(config, 2)] in ([1, 2], [2, 1])
    with pytest.raises(ConfigError, match=r"attention and MLP of this base .cohere2. read one input"):
        stage_layers(config, 2, [1.5, 1.5])


@pytest.mark.parametrize(("value", "wanted"), [("best", {0, 1}), ("best two", {2, 3})])
def test_the_best_group_is_that_of_the_best_expert_or_of_the_best_two(value, wanted):
    router = Router(groups=2, top_groups=1, group_value=value, normalise=False)
    experts = Experts(width=4, inner=4, count=4, active=2, router=router)
    chosen, weights = choose_experts(jnp.log(jnp.array([[0.4, 0.05, 0.3, 0.25]])), experts)
    assert {*chosen[0].tolist()} == wanted
    np.testing.assert_allclose(weights.sum(), 0.45 if value == "best" else 0.55, rtol=1e-6)


# Of every run those whose states no other has: a state space, a short convolution.
@pytest.mark.parametrize("case", mostly_nightly([*FORWARD.values()], ("granitemoehybrid", "lfm2")))
def test_generated_tokens_are_the_most_probable_of_a_forward_pass(case, home):
    """Prompts shorter and longer than a convolution, of the adapter and of the base, in one batch."""
    folder = folder_of(case, home)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only the text part")
        run, leaves = test_parity.program_of(folder, gradients=False)
        source = Source(base=folder, adapters=(AdapterSource(name="a", folder=folder / "adapter"),), asked=(),
                        dtype="float32")  # fmt: skip
        generator = Generator([load_stage(source)])
    size, new = ModelConfig.from_hf(folder).vocab_size, TOKENS - 21
    prompts = [tokens(TOKENS, size)[:length].tolist() for length in (2, 9, 20)]
    sampling = Sampling(max_tokens=new, logprobs=2)
    answers = generator([Request(tokens=p, adapter=a, sampling=sampling) for a in (0, BASE) for p in prompts])
    assert answers[0].tokens != answers[3].tokens or answers[0].logprobs != answers[3].logprobs
    for prompt, answer in zip(prompts, answers, strict=False):
        ids = np.zeros(TOKENS, np.int32)
        ids[: len(prompt) + new] = prompt + answer.tokens
        segments = Segments.from_lengths((len(prompt) + new, TOKENS - len(prompt) - new), TOKENS)
        logits = np.asarray(run(leaves, ids, np.arange(TOKENS), segments)[0][1])[len(prompt) - 1 :][:new]
        wanted = logits[np.arange(new), answer.tokens] - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(answer.logprobs, wanted, rtol=1e-4, atol=1e-5)
        assert (logits.max(-1) - logits[np.arange(new), answer.tokens] < 1e-5).all()
