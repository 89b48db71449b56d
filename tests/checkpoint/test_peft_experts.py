"""PEFT's folders of models with experts: names of parameters alone, and ranks that PEFT gives gate and up."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.peft.folder import read_adapter, write_adapter
from lorafusion_jax.peft.settings import lora_settings

RANK, ALPHA, EXPERTS, LAYERS, WIDTH, HIDDEN = 3, 5, 2, 2, 4, 6
PREFIX = "base_model.model.model.layers"
OF_LISTS = {"rank_pattern": {r".*\.gate_up_proj": 2 * RANK}, "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA}}
BARE = ["down_proj", "gate_up_proj"]


def write_theirs(folder, **settings):
    """Writes what PEFT 0.21.2 writes for `target_modules=["o_proj", "w1", "w2", "w3"]` of a Mixtral.

    Returns our path → the sum of the products of each expert, as PEFT adds it.
    """
    draw, tensors, sums = np.random.default_rng(0), {}, {}
    rank = 2 * RANK if settings.get("rank_pattern") else RANK
    for layer in range(LAYERS):
        for ours, theirs, r, sizes in (
            ("self_attn.o_proj", "self_attn.o_proj", RANK, (WIDTH, WIDTH)),
            ("mlp.experts_gate_up_proj", "mlp.experts.base_layer", rank, (WIDTH, 2 * HIDDEN)),
            ("mlp.experts_down_proj", "mlp.experts", RANK, (HIDDEN, WIDTH)),
        ):
            count = EXPERTS if "experts" in ours else 1
            a, b = draw.normal(size=(count * r, sizes[0])), draw.normal(size=(sizes[1], r * count))
            tensors[f"{PREFIX}.{layer}.{theirs}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{PREFIX}.{layer}.{theirs}.lora_B.weight"] = b.astype(np.float32)
            a, b = a.reshape(count, r, -1), b.reshape(-1, r, count)
            product = np.einsum("erk,nre->ekn", a, b) * (ALPHA / RANK)
            sums[f"layers.{layer}.{ours}"] = product if count > 1 else product[0]
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["o_proj"]}
    raw |= {"target_parameters": BARE} | settings
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return sums


@pytest.mark.parametrize(
    "settings",
    [
        OF_LISTS,
        {},
        {"target_parameters": ["experts.gate_up_proj", "1.mlp.experts.down_proj", "0.mlp.experts.down_proj"]},
    ],
    ids=["names of lists", "names alone", "longer names"],
)
def test_experts_of_peft_add_the_same_sums(settings, tmp_path):
    sums = write_theirs(tmp_path / "law", **settings)
    spec, arrays = read_adapter(tmp_path / "law")
    assert arrays.keys() == sums.keys()
    for path, (a, b) in arrays.items():
        assert a.shape[-1] == b.shape[-2] == spec.rank_at(path)
        np.testing.assert_allclose(spec.scale_at(path) * (a @ b), sums[path], rtol=2e-5, atol=1e-5, err_msg=path)
    of_job = lora_settings(tmp_path / "law")  # of a job that begins with it
    assert (of_job["rank"], of_job["alpha"], set(of_job["targets"])) == (spec.rank, spec.alpha, set(spec.targets))
    assert of_job["dropout"] == 0, "adapters of experts have none, and the default is above"
    again, same = read_adapter(write_adapter(arrays, spec, "base", tmp_path / "again"))
    assert again.scale == spec.scale
    assert all((one == other).all() for path in arrays for one, other in zip(arrays[path], same[path], strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        OF_LISTS | {"use_rslora": True},
        OF_LISTS | {"alpha_pattern": {}},
        OF_LISTS | {"alpha_pattern": {".*gate_up_proj": "ten"}},
        OF_LISTS | {"rank_pattern": {"(.*)+gate_up_proj": 2 * RANK}},
        {"r": 5},
    ],
)
def test_experts_of_other_scales_are_refused(settings, tmp_path):
    write_theirs(tmp_path / "law", **settings)
    with pytest.raises(LoraFusionError):
        read_adapter(tmp_path / "law")
    assert isinstance(lora_settings(tmp_path / "law"), dict)


@pytest.mark.parametrize(("module", "adapts_experts"), [("mlp", False), ("mlp", True), ("feed_forward", False)])
def test_an_mlp_where_other_layers_have_experts_is_trained_as_parameters(module, adapts_experts, tmp_path):
    """PEFT reads names of lists as those of experts, so the MLP would lose its adapter without a word."""
    names = ("up_proj", "down_proj") if module == "mlp" else ("w1", "w2")
    paths = [f"layers.{layer}.self_attn.q_proj" for layer in range(3)] + [f"layers.1.{module}.{name}" for name in names]
    draw = np.random.default_rng(0)
    arrays = {path: tuple(draw.random(shape, np.float32) for shape in ((4, 2), (2, 4))) for path in paths}
    if adapts_experts:
        experts = [f"layers.{layer}.mlp.experts_down_proj" for layer in (0, 2)]
        arrays |= {path: tuple(draw.random(shape, np.float32) for shape in ((3, 4, 2), (3, 2, 4))) for path in experts}
    targets = ("q_proj", *names, *["experts_down_proj"][: len(arrays) - len(paths)])
    spec = AdapterSpec(name="law", rank=2, alpha=4, targets=targets)
    folder = write_adapter(arrays, spec, "base", tmp_path / "law")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == (["q_proj"] if module == "mlp" else ["q_proj", *names])
    again, same = read_adapter(folder)
    assert (set(again.targets), same.keys()) == (set(spec.targets), arrays.keys())


def test_tensors_of_each_expert_are_named(tmp_path):
    write_theirs(tmp_path / "law")
    raw = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["o_proj", "w1"]}
    (tmp_path / "law" / "adapter_config.json").write_text(json.dumps(raw))
    names = [
        f"{PREFIX}.0.block_sparse_moe.experts.{expert}.w1.lora_{leaf}.weight" for expert in (0, 1) for leaf in "AB"
    ]
    save_file({name: np.ones((1, 1), np.float32) for name in names}, tmp_path / "law" / "adapter_model.safetensors")
    with pytest.raises(LoraFusionError, match=r"(?s)each expert alone.*save_pretrained"):
        read_adapter(tmp_path / "law")


def test_layers_may_have_another_mixer_than_that_of_the_adapter(tmp_path):
    """A hybrid has attention in some layers, and an adapter may be on that and on the MLPs of all."""
    paths = ["layers.2.self_attn.k_proj", *(f"layers.{layer}.mlp.up_proj" for layer in range(3))]
    arrays = {path: (np.ones((4, 2), np.float32), np.ones((2, 4), np.float32)) for path in paths}
    spec = AdapterSpec(name="law", rank=2, alpha=4, targets=("k_proj", "up_proj"))
    assert read_adapter(write_adapter(arrays, spec, "base", tmp_path / "law"))[1].keys() == arrays.keys()
