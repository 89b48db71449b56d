"""PEFT folders: names, shapes and numbers out and in."""

import dataclasses
import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.tokens import TokenRows
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.peft.folder import export_adapter, put_adapter, read_adapter, take_adapter, write_adapter
from lorafusion_jax.peft.settings import lora_settings

WIDE = AdapterSpec(name="wide", rank=6, alpha=12, dropout=0.1, targets=("q_proj", "down_proj"))
THIN = AdapterSpec(name="thin", rank=2, alpha=3.5, rslora=True, targets=("q_proj",))
SHAPES = {"self_attn.q_proj": (8, 10), "mlp.down_proj": (12, 8)}
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def stacked():
    """Leaves of two adapters in three layers; "thin" has zeros beyond rank 2 and in down_proj."""
    draw = np.random.default_rng(0)
    leaves = {}
    for path, (in_features, out_features) in SHAPES.items():
        a = draw.standard_normal((NUM_LAYERS, 2, in_features, 6)).astype(np.float32)
        b = draw.standard_normal((NUM_LAYERS, 2, 6, out_features)).astype(np.float32)
        rank = 2 if path.endswith("q_proj") else 0
        a[:, 1, :, rank:], b[:, 1, rank:] = 0, 0
        leaves |= {f"layers.{path}.lora_a": a, f"layers.{path}.lora_b": b}
    return leaves


@pytest.fixture(scope="module")
def unrolled(stacked):
    return {
        name.replace("layers.", f"layers.{layer}."): leaf[layer]
        for name, leaf in stacked.items()
        for layer in range(NUM_LAYERS)
    }


def tensors_of(folder):
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)


def test_every_file_can_be_read_by_whom_the_umask_lets(unrolled, tmp_path):
    before = os.umask(0o027)
    try:
        export_adapter(unrolled, THIN, 1, "org/base", tmp_path / "thin")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "thin").iterdir()} == {0o640}


def test_keys_shapes_and_configuration_are_those_of_peft(unrolled, tmp_path):
    export_adapter(unrolled, THIN, 1, "org/base", tmp_path / "thin")
    tensors = tensors_of(tmp_path / "thin")
    prefix = "base_model.model.model.layers"
    assert {key: value.shape for key, value in tensors.items()} == {
        f"{prefix}.{layer}.self_attn.q_proj.lora_{part}.weight": shape
        for layer in range(NUM_LAYERS)
        for part, shape in (("A", (2, 8)), ("B", (10, 2)))
    }
    np.testing.assert_array_equal(
        tensors[f"{prefix}.2.self_attn.q_proj.lora_A.weight"], unrolled["layers.2.self_attn.q_proj.lora_a"][1, :, :2].T
    )
    config = json.loads((tmp_path / "thin" / "adapter_config.json").read_text())
    wanted = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": 2,
        "lora_alpha": 3.5,
        "lora_dropout": 0.0,
        "use_rslora": True,
        "target_modules": ["q_proj"],
        "bias": "none",
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
    }
    assert config.items() >= wanted.items()


def test_stacked_and_unrolled_leaves_give_the_same_file(stacked, unrolled, tmp_path):
    for index, spec in enumerate((WIDE, THIN)):
        export_adapter(stacked, spec, index, "base", tmp_path / f"s{index}")
        export_adapter(unrolled, spec, index, "base", tmp_path / f"u{index}")
        files = [(tmp_path / f"{kind}{index}" / "adapter_model.safetensors").read_bytes() for kind in "su"]
        assert files[0] == files[1]


@pytest.mark.parametrize("form", ["stacked", "unrolled"])
def test_out_and_in_again_is_the_same_bits(form, request, tmp_path):
    leaves = request.getfixturevalue(form)
    export_adapter(leaves, WIDE, 0, "base", tmp_path / "wide")
    spec, arrays = read_adapter(tmp_path / "wide")
    assert spec == WIDE  # named after the folder; the seed of both is the default
    emptied = {name: np.zeros_like(leaf) for name, leaf in leaves.items()}
    back = put_adapter(put_adapter(emptied, 0, arrays), 1, take_adapter(leaves, THIN, 1))
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(back[name], leaf)
        assert not emptied[name].any()


@pytest.mark.parametrize("targets", [("all-linear",), ("self_attn.q_proj",), ("k_proj",)])
def test_an_adapter_without_any_weights_is_refused(unrolled, targets):
    other = dataclasses.replace(THIN, targets=targets)
    with pytest.raises(CheckpointError, match=r"(?s)peft\.no-weights.* thin targets .*down_proj, q_proj.*last part"):
        take_adapter(unrolled, other, 1)


def test_putting_an_adapter_clears_what_was_in_its_place_and_leaves_others_alone(unrolled):
    full = {name: np.ones_like(leaf) for name, leaf in unrolled.items()}
    changed = put_adapter(full, 1, take_adapter(unrolled, THIN, 1))
    for name, leaf in changed.items():
        np.testing.assert_array_equal(leaf[0], 1)
        np.testing.assert_array_equal(leaf[1], unrolled[name][1])


def test_bfloat16_folders_round_once_and_read_back(unrolled, tmp_path):
    export_adapter(unrolled, WIDE, 0, "base", tmp_path / "half", dtype="bfloat16")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "half").values()} == {np.dtype(ml_dtypes.bfloat16)}
    _, arrays = read_adapter(tmp_path / "half")
    for path, (a, b) in arrays.items():
        for part, leaf in ((a, "lora_a"), (b, "lora_b")):
            rounded = unrolled[f"{path}.{leaf}"][0].astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(part, rounded)


def test_folders_appear_whole_or_not_at_all(unrolled, tmp_path):
    def add_card(folder):
        assert not (tmp_path / "wide").exists()
        (folder / "README.md").write_text("card")

    def fail(folder):
        raise RuntimeError("tokenizer files are gone")

    export_adapter(unrolled, WIDE, 0, "base", tmp_path / "wide", finish=add_card)
    with pytest.raises(RuntimeError):
        export_adapter(unrolled, WIDE, 0, "base", tmp_path / "other", finish=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]
    assert sorted(path.name for path in (tmp_path / "wide").iterdir()) == [
        "README.md",
        "SHA256SUMS",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_file_that_the_disk_does_not_take_is_told(tmp_path, no_large_files):
    leaves = {f"layers.0.self_attn.q_proj.lora_{part}": np.ones((1, 128, 128), np.float32) for part in "ab"}
    spec = AdapterSpec(name="big", rank=128, alpha=1, targets=("q_proj",))
    with pytest.raises(RunError, match=r"save\.failed") as caught:
        export_adapter(leaves, spec, 0, "base", tmp_path / "big")
    assert "File too large" in caught.value.why
    assert "lorafusion resume" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_not_overwritten(unrolled, tmp_path):
    (tmp_path / "empty").mkdir()
    export_adapter(unrolled, WIDE, 0, "base", tmp_path / "empty")
    before = (tmp_path / "empty" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"export\.exists"):
        export_adapter(unrolled, THIN, 1, "base", tmp_path / "empty")
    assert (tmp_path / "empty" / "adapter_model.safetensors").read_bytes() == before


def test_weights_that_are_not_finite_are_not_exported(unrolled, tmp_path):
    broken = {name: leaf.copy() for name, leaf in unrolled.items()}
    broken["layers.1.self_attn.q_proj.lora_b"][1, 0, 0] = np.nan
    with pytest.raises(CheckpointError, match=r"export.not-finite[\s\S]*layers.1.self_attn.q_proj"):
        export_adapter(broken, THIN, 1, "base", tmp_path / "thin")
    export_adapter(broken, WIDE, 0, "base", tmp_path / "wide")  # another adapter's NaN is its own business
    assert not (tmp_path / "thin").exists()


def test_a_decoder_takes_a_folder_in_and_computes_with_it(tmp_path):
    import jax.numpy as jnp
    from flax import nnx

    from lorafusion_jax.models import Decoder, ModelConfig, Segments
    from lorafusion_jax.modules import LoRAContext

    config = ModelConfig(
        family="llama",
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
    )
    draw = np.random.default_rng(1)

    def leaves_of(model):
        return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}

    @nnx.jit
    def computed(model, context):
        return model(np.arange(6), np.arange(6), Segments.from_lengths([6], 6), context)

    def logits(model, scale):
        context = LoRAContext(tile_adapter=np.array([0]), scale=np.array([scale], np.float32))
        return np.asarray(computed(model, context))

    trained = Decoder(config, [WIDE], dtype=jnp.float32)
    for leaf in leaves_of(trained).values():
        leaf[...] = jnp.asarray(draw.standard_normal(leaf.shape), jnp.float32)
    export_adapter({name: leaf[...] for name, leaf in leaves_of(trained).items()}, WIDE, 0, "base", tmp_path / "wide")
    spec, arrays = read_adapter(tmp_path / "wide")
    fresh = Decoder(config, [spec], dtype=jnp.float32)
    new = put_adapter({name: leaf[...] for name, leaf in leaves_of(fresh).items()}, 0, arrays)
    for name, leaf in leaves_of(fresh).items():
        leaf[...] = jnp.asarray(new[name])
    np.testing.assert_array_equal(logits(fresh, spec.scale), logits(trained, WIDE.scale))
    assert np.abs(logits(fresh, spec.scale) - logits(fresh, 0.0)).max() > 1e-3


@pytest.mark.parametrize("multimodal", [False, True])
def test_patterns_reach_mlps_beside_experts_in_peft(multimodal, tmp_path):
    """PEFT trains them as parameters, and compares patterns with "….up_proj.weight": the first that matches counts."""
    patterns = Patterns(rank=2, alpha=5, ranks=(("down_proj", 3),), alphas=(("layers.1.mlp.*", 7.0), ("q_proj", 9.0)))
    spec = AdapterSpec(name="a", rank=3, alpha=5, targets=("q_proj", "up_proj", "down_proj"), patterns=patterns)
    names = ["self_attn.q_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"]
    paths = [f"layers.{layer}.{name}" for layer in range(2) for name in names]
    arrays = {
        path: (np.ones((8, spec.rank_at(path)), np.float32), np.ones((spec.rank_at(path), 8), np.float32))
        for path in paths
    }
    folder = write_adapter(arrays, spec, "org/base", tmp_path / "a", multimodal=multimodal)
    config = json.loads((folder / "adapter_config.json").read_text())
    again, _ = read_adapter(folder)
    for path in paths:
        module = f"model.language_model.{path}" if multimodal else f"model.{path}"
        trained = any(f"{module}.weight".endswith(name) for name in config["target_parameters"])
        key = f"{module}.weight" if trained else module
        for name, default, number, read in (
            ("rank_pattern", config["r"], spec.rank_at(path), again.rank_at(path)),
            ("alpha_pattern", config["lora_alpha"], patterns.alpha_of(path), again.patterns.alpha_of(path)),
        ):
            matching = [value for pattern, value in config[name].items() if re.match(rf"(.*\.)?({pattern})$", key)]
            assert [*matching, default][0] == number == read, (name, key)


def test_a_target_that_the_adapter_lets_out_everywhere_is_read_again(tmp_path):
    patterns = Patterns(rank=2, alpha=4, layers=(1, 3), exclude=("mlp.up_proj", "v_proj"))
    spec = AdapterSpec(name="law", rank=2, alpha=4, targets=("q_proj", "v_proj", "up_proj"), patterns=patterns)
    arrays = {f"layers.{layer}.self_attn.q_proj": (np.ones((4, 2)), np.ones((2, 4))) for layer in (1, 3)}
    again, same = read_adapter(write_adapter(arrays, spec, "base", tmp_path / "law"))
    assert (again.targets, same.keys()) == (spec.targets, arrays.keys())


@pytest.mark.parametrize("exclude", [(), r".*language_model\.layers\.1\..*proj"])
def test_patterns_of_a_whole_model_reach_its_text_part(exclude, tmp_path):
    """Such as those of an adapter that went on from one of the whole model, and has a score: its base is the text."""
    ranks = (("model.language_model.layers.0.self_attn.q_proj", 1), (".*shared_expert.up_proj", 3))
    alphas = (("language_model.*q_proj", 9.0),)
    patterns = Patterns(rank=2, alpha=5, ranks=ranks, alphas=alphas, exclude=exclude)
    spec = AdapterSpec(name="a", rank=3, alpha=5, targets=("q_proj", "up_proj", "o_proj"), patterns=patterns)
    paths = [
        f"layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.shared_expert.up_proj")
    ]
    arrays = {
        path: (np.ones((8, spec.rank_at(path)), np.float32), np.ones((spec.rank_at(path), 8), np.float32))
        for path in paths
        if spec.has(path)
    }
    assert len(arrays) == (2 if exclude else 4)
    folder = write_adapter(arrays, spec, "org/base", tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert "language_model" not in json.dumps(config)
    names = config["target_modules"] + config["target_parameters"]
    trained = [path for path in paths if any(f"model.{path}{end}" in names for end in ("", ".weight"))]
    assert trained == list(arrays)
    again, _ = read_adapter(folder)
    assert [again.scale_at(path) for path in arrays] == [spec.scale_at(path) for path in arrays]


@pytest.mark.parametrize(
    ("alphas", "of_module", "of_parameter"),
    [
        ({"up_proj": 12, "q_proj": 20}, 20, 4),
        ({"up_proj.weight": 12, "q_proj.weight": 20}, 4, 12),
        ({"layers.*": 12}, 12, 12),
        ({r".*(up|q)_proj\..*": 12, ".*_proj": 6}, 6, 12),
        ({"mlp.up_proj": 12}, 4, 4),
    ],
)
def test_patterns_of_a_folder_reach_parameters_as_in_peft(alphas, of_module, of_parameter, tmp_path):
    """PEFT 0.21.2 computes with these alphas: it compares patterns with "….up_proj.weight" where that is trained."""
    spec = AdapterSpec(name="a", rank=2, alpha=4, targets=("q_proj", "up_proj"))
    arrays = {
        path: (np.ones((8, 2), np.float32), np.ones((2, 8), np.float32))
        for path in ("layers.0.self_attn.q_proj", "layers.0.mlp.up_proj")
    }
    file = write_adapter(arrays, spec, "org/base", tmp_path / "a") / "adapter_config.json"
    changed = {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"], "alpha_pattern": alphas}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    (tmp_path / "a" / "SHA256SUMS").unlink()
    read, _ = read_adapter(tmp_path / "a")
    assert [read.scale_at(path) for path in arrays] == [of_module / 2, of_parameter / 2]

    settings = lora_settings(tmp_path / "a")  # of a job that begins with it
    patterns = Patterns(rank=2, alpha=4, alphas=tuple(settings.get("alpha_pattern", {}).items()))
    assert [patterns.alpha_of(path) for path in arrays] == [of_module, of_parameter]


def test_names_that_match_nothing_in_the_base_are_ignored(unrolled, tmp_path):
    """As in PEFT: the usual list of names, for a base whose attention or MLP has others."""
    file = export_adapter(unrolled, WIDE, 0, "org/base", tmp_path / "wide") / "adapter_config.json"
    raw = json.loads(file.read_text())
    for names in (["k_proj", *raw["target_modules"], "gate_proj", "w1"], ["k_proj", "w1"]):
        file.write_text(json.dumps(raw | {"target_modules": names}))
        (file.parent / "SHA256SUMS").unlink(missing_ok=True)
        if "q_proj" in names:
            assert read_adapter(file.parent)[0].targets == WIDE.targets
            assert tuple(lora_settings(file.parent)["targets"]) == WIDE.targets
        else:
            with pytest.raises(CheckpointError, match=r"missing: .*k_proj"):
                read_adapter(file.parent)


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("layers.0.attention.query_key_value", "gpt_neox.embed_in"),
        ("layers.0.mlp.dense_4h_to_h", "gpt_neox.embed_in"),
        ("layers.0.mixer.in_proj", "model.embeddings"),
        ("layers.0.mlp.mlp_c_fc", "transformer.wte"),
        ("layers.0.attention.attention_dense", "model.word_embeddings"),
        ("layers.0.mlp.up_proj", "model.embed_tokens"),
    ],
)
@pytest.mark.parametrize("head", [(), (3,)])
def test_trained_tokens_have_the_name_that_peft_gives_the_embedding(path, module, head, tmp_path):
    tokens = TokenRows(embed=(7, 1), head=head)
    spec = AdapterSpec(name="law", rank=2, alpha=4, targets=(path.rpartition(".")[2],), tokens=tokens)
    draw = np.random.default_rng(0)
    arrays = {path: tuple(draw.random(shape, np.float32) for shape in ((6, 2), (2, 5)))}
    arrays["tokens"] = tuple(draw.random((6, len(ids)), np.float32) for ids in tokens.stored.values())
    folder = write_adapter(arrays, spec, "base", tmp_path / "law")
    names = {f"base_model.model.{module}.token_adapter.trainable_tokens_delta"}
    names |= {"base_model.model.lm_head.token_adapter.trainable_tokens_delta"} if head else set()
    assert {name for name in tensors_of(folder) if "token_adapter" in name} == names
    indices = json.loads((folder / "adapter_config.json").read_text())["trainable_token_indices"]
    assert indices == ({module.rpartition(".")[2]: [7, 1], "lm_head": [3]} if head else [7, 1])
    again, values = read_adapter(folder)
    assert again.tokens == tokens
    for before, after in zip(arrays["tokens"], values["tokens"], strict=True):
        np.testing.assert_array_equal(before, after)
