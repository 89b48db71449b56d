"""PEFT folders that cannot be used: every problem is told, by name."""

import json
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorafusion_jax.adapters.kind import Head
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import CheckpointError, ErrorList
from lorafusion_jax.objective.reward import REWARD
from lorafusion_jax.peft.folder import export_adapter, put_adapter, read_adapter, take_adapter

SPEC = AdapterSpec(name="law", rank=2, alpha=4, targets=("q_proj", "v_proj"))
KEY = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


def leaves(num_layers=2, in_features=8, rank=2):
    draw = np.random.default_rng(0)
    return {
        f"layers.{layer}.self_attn.{name}.{leaf}": draw.standard_normal(shape).astype(np.float32)
        for layer in range(num_layers)
        for name in SPEC.targets
        for leaf, shape in (("lora_a", (1, in_features, rank)), ("lora_b", (1, rank, 4)))
    }


@pytest.fixture
def folder(tmp_path):
    """A folder as PEFT leaves it: without digests."""
    written = export_adapter(leaves(), SPEC, 0, "org/base-1B", tmp_path / "law")
    (written / "SHA256SUMS").unlink()
    return written


def edit_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def refused(folder):
    with pytest.raises((CheckpointError, ErrorList)) as caught:
        read_adapter(folder)
    return getattr(caught.value, "errors", (caught.value,))


def test_missing_extra_and_misshapen_tensors_come_in_one_error(folder):
    def change(tensors):
        del tensors[KEY.format(1, "q_proj", "B")]
        tensors[KEY.format(0, "k_proj", "A")] = np.zeros((2, 8), np.float32)
        tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((2, 8), np.float32)
        tensors[KEY.format(1, "v_proj", "A")] = np.zeros((3, 8), np.float32)
        tensors[KEY.format(1, "v_proj", "B")] = np.full((4, 2), np.inf, np.float32)

    edit_tensors(folder, change)
    (error,) = refused(folder)
    assert error.code == "peft.tensors"
    for line in (
        f"missing: {KEY.format(1, 'q_proj', 'B')}",
        f"extra: {KEY.format(0, 'k_proj', 'A')}",
        "extra: base_model.model.lm_head.lora_A.weight",
        f"misshapen: {KEY.format(1, 'v_proj', 'A')} is [3, 8], expected [2, 8]",
        f"not finite: {KEY.format(1, 'v_proj', 'B')}",
    ):
        assert line in error.where


def test_a_missing_layer_in_between_is_noticed(folder):
    def change(tensors):
        for key in [key for key in tensors if ".layers.0." in key]:
            tensors[key.replace(".layers.0.", ".layers.123456.")] = tensors.pop(key)

    edit_tensors(folder, change)
    (error,) = refused(folder)
    assert f"missing: {KEY.format(0, 'q_proj', 'A')}" in error.where


def test_every_unsupported_option_is_named(folder):
    edit_config(
        folder,
        bias="all",
        modules_to_save=["lm_head"],
        rank_pattern={"((q|v)_proj)+": 4},
        layers_pattern="blocks",
        target_modules=["q_proj", "v_proj", "embed_tokens"],
        init_lora_weights="pissa",
        new_variant_config={"size": 3},
    )
    errors = refused(folder)
    assert {error.code for error in errors} == {"peft.unsupported"}
    told = " ".join(error.what for error in errors)
    names = (
        "bias='all'",
        "modules_to_save",
        "rank_pattern",
        "layers_pattern",
        "embed_tokens",
        "init_lora_weights='pissa'",
        "new_variant_config",
    )
    assert [name for name in names if name not in told] == []


def test_options_that_change_nothing_are_accepted(folder):
    edit_config(
        folder,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"v_proj": 4},
        modules_to_save=[],
        loftq_config={},
        peft_version="9.9",
        target_modules=r".*\.(q|v)_proj",
    )
    assert read_adapter(folder)[0] == SPEC


@pytest.mark.parametrize(
    "option",
    [
        {"ensure_weight_tying": True},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers", "h"]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["blocks", "layers"]},
        {"modules_to_save": ["classifier", "score"]},  # PEFT adds both to every adapter that classifies
    ],
    ids=str,
)
def test_options_that_change_nothing_of_this_adapter_are_accepted(folder, option):
    before = read_adapter(folder)
    edit_config(folder, **option)
    spec, arrays = read_adapter(folder)
    assert [spec.has(path) for path in arrays] == [True] * 4
    assert (spec.head, spec.scale) == (None, before[0].scale)


@pytest.mark.parametrize(
    "option",
    [
        {"ensure_weight_tying": True, "trainable_token_indices": [1]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["h"]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers", "(x)"]},
        {"layers_to_transform": [0, 1], "layers_pattern": 5},
        {"peft_type": "VERA", "save_projection": False},
    ],
    ids=str,
)
def test_options_that_may_change_it_are_refused_by_name(folder, option):
    edit_config(folder, **option)
    name = list(option)[-1] if "save_projection" in option or "layers_pattern" in option else "ensure_weight_tying"
    assert f"this adapter uses {name}=" in " ".join(error.what for error in refused(folder))


@pytest.mark.parametrize("saved", [["score"], ["classifier", "score"], ["score", "classifier", "score"]], ids=str)
def test_a_score_that_peft_or_trl_wrote_is_continued(folder, saved):
    """PEFT names what it saves of its own accord, too, and again each time it saves."""
    head = Head(name="reward", leaves=REWARD.head, task="SEQ_CLS")
    score = np.arange(8, dtype=np.float32)[None]
    edit_config(folder, modules_to_save=saved, task_type="SEQ_CLS")
    edit_tensors(folder, lambda tensors: tensors.update({"base_model.model.score.weight": score}))
    spec, arrays = read_adapter(folder, head=head)
    assert spec.head == head
    np.testing.assert_array_equal(arrays["head"][0], score.T)
    assert [error.code for error in refused(folder)] == ["peft.unsupported"]  # no objective here has a score


@pytest.mark.parametrize(("key", "value"), [("lora_alpha", 0), ("lora_alpha", -4), ("r", 0), ("lora_dropout", 1)])
def test_numbers_out_of_range_say_the_range(folder, key, value):
    edit_config(folder, **{key: value})
    (error,) = refused(folder)
    assert f"{key}={value} cannot be used: it must be " in error.what


def test_projections_of_different_scales_are_read(folder):
    edit_config(folder, alpha_pattern={r"1\..*\.v_proj": 8})
    spec, _ = read_adapter(folder)
    scales = [spec.scale_at(f"layers.{layer}.self_attn.{name}") for layer in (0, 1) for name in ("q_proj", "v_proj")]
    assert scales == [2, 2, 2, 4]


@pytest.mark.parametrize("pattern", ["(a+)+b", r"(?=q)q_proj", r"(q)\1", "a*b*c*d*e", "q" * 501, "(q"])
def test_patterns_that_may_take_forever_are_refused(folder, pattern):
    edit_config(folder, alpha_pattern={pattern: 8})
    (error,) = refused(folder)
    assert error.code == "peft.unsupported"
    assert "alpha_pattern" in error.what


def test_projections_of_different_ranks_and_one_scale_are_read(folder):
    edit_config(folder, rank_pattern={"layers.0.self_attn.q_proj": 1}, alpha_pattern={"layers.0.self_attn.q_proj": 2})

    def change(tensors):
        tensors[KEY.format(0, "q_proj", "A")] = tensors[KEY.format(0, "q_proj", "A")][:1].copy()
        tensors[KEY.format(0, "q_proj", "B")] = tensors[KEY.format(0, "q_proj", "B")][:, :1].copy()

    edit_tensors(folder, change)
    spec, arrays = read_adapter(folder)
    assert (spec.rank, spec.rank_at("layers.0.self_attn.q_proj"), spec.scale_at("layers.0.self_attn.q_proj")) == (
        2,
        1,
        2,
    )
    assert arrays["layers.0.self_attn.q_proj"][0].shape == (8, 1)
    held = take_adapter(put_adapter(leaves(), 0, arrays), spec, 0)
    a_Kr, b_rN = held["layers.0.self_attn.q_proj"]
    np.testing.assert_array_equal(a_Kr @ b_rN, np.matmul(*arrays["layers.0.self_attn.q_proj"]))


def test_names_of_tensors_in_memory_are_read(folder):
    expected = read_adapter(folder)

    def change(tensors):
        for key in list(tensors):
            tensors[key.replace(".weight", ".default.weight")] = tensors.pop(key)

    edit_tensors(folder, change)
    spec, arrays = read_adapter(folder)
    assert spec == expected[0]
    for path, pair in arrays.items():
        for array, other in zip(pair, expected[1][path], strict=True):
            np.testing.assert_array_equal(array, other)
    edit_tensors(folder, lambda tensors: tensors.update({KEY.format(0, "q_proj", "A"): np.zeros((2, 8), np.float32)}))
    (error,) = refused(folder)
    assert "extra: " in error.where  # both names of one tensor


def test_targets_that_match_nothing_are_as_in_peft(folder):
    edit_config(folder, target_modules=["wqkv", "q_proj", "v_proj", "model.layers.0.self_attn.query"])
    assert read_adapter(folder)[0].targets == SPEC.targets
    edit_config(folder, target_modules=["wqkv"])
    (error,) = refused(folder)
    assert "targets 'wqkv', which is not supported" in error.what


def keep_layer_1(folder):
    def change(tensors):
        for key in [key for key in tensors if ".layers.0." in key]:
            del tensors[key]

    edit_tensors(folder, change)


@pytest.mark.parametrize(
    "settings",
    [{"layers_to_transform": [1], "layers_pattern": "layers"}, {"target_modules": r"model\.layers\.1\..*\.(q|v)_proj"}],
    ids=["list", "expression"],
)
def test_an_adapter_of_some_layers_is_read(folder, settings):
    keep_layer_1(folder)
    edit_config(folder, **settings)
    spec, arrays = read_adapter(folder)
    assert spec.targets == SPEC.targets
    assert set(arrays) == {f"layers.1.self_attn.{name}" for name in SPEC.targets}


def test_a_listed_layer_that_is_missing_is_told(folder):
    keep_layer_1(folder)
    edit_config(folder, layers_to_transform=[0, 1])
    (error,) = refused(folder)
    assert f"missing: {KEY.format(0, 'q_proj', 'A')}" in error.where


@pytest.mark.parametrize("changes", [{"r": "two"}, {"lora_alpha": None}, {"r": 2.5}, {"target_modules": []}])
def test_wrong_values_are_told(folder, changes):
    edit_config(folder, **changes)
    (error,) = refused(folder)
    assert error.code == "peft.bad-config"
    assert next(iter(changes)) in error.what


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1" + "0" * 400, "-4", "true", "[[]]"])
def test_numbers_that_no_adapter_has_are_told(folder, key, value):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: "HERE"}).replace('"HERE"', value))
    (error,) = refused(folder)
    assert error.code == "peft.bad-config"
    assert key in error.what


@pytest.mark.parametrize("content", ["[" * 100_000, '{"r": ' + "9" * 5000 + "}", "[]", "5", "\xff"], ids=len)
def test_a_config_that_is_no_config_is_told(folder, content):
    (folder / "adapter_config.json").write_bytes(content.encode("latin-1"))
    (error,) = refused(folder)
    assert error.code == "peft.bad-config"


def test_an_expression_of_targets_costs_no_time(folder):
    """The tensors say what the targets are, so an expression that matching would never end is not matched."""
    edit_config(folder, target_modules=r"(([a-z_.0-9])*)*!")
    began = time.process_time()
    assert read_adapter(folder)[0] == SPEC
    assert time.process_time() - began < 2


def test_another_kind_of_adapter_is_told(folder):
    edit_config(folder, peft_type="LOHA")
    assert "LOHA" in refused(folder)[0].what


def test_a_pickle_is_refused_with_the_way_out(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    (error,) = refused(folder)
    assert error.code == "peft.pickle"
    assert "safe_serialization" in error.fix


def test_missing_and_damaged_files_have_their_own_codes(folder, tmp_path):
    assert refused(tmp_path)[0].code == "peft.missing-file"
    content = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(content[:-8])
    assert refused(folder)[0].code == "peft.damaged"
    (folder / "adapter_model.safetensors").unlink()
    assert refused(folder)[0].code == "peft.missing-file"
    (folder / "adapter_config.json").write_text("{")
    assert refused(folder)[0].code == "peft.bad-config"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (leaves(num_layers=1), "layers.1.self_attn.q_proj is not in the model"),
        (leaves(num_layers=3), "the adapter has no layers.2.self_attn.v_proj"),
        (leaves(in_features=16), "layers.0.self_attn.q_proj is 8 → 4, the model has 16 → 4"),
        (leaves(rank=1), "layers.0.self_attn.q_proj has rank 2, the model has room for 1"),
    ],
    ids=["fewer layers", "more layers", "wider", "lower rank"],
)
def test_a_folder_of_another_base_is_told_by_shape(folder, model, told):
    with pytest.raises(CheckpointError) as caught:
        put_adapter(model, 0, read_adapter(folder)[1])
    assert caught.value.code == "peft.other-base"
    assert told in caught.value.where
