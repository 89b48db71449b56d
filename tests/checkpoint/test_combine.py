"""Combined adapters against PEFT's `add_weighted_adapter`, and adapters that do not go together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.peft.combine import Combination, combine_adapters, combined_arrays
from lorafusion_jax.peft.folder import read_adapter, write_adapter

with safe_open(Path(__file__).parent / "combined.safetensors", "np") as opened:
    NOTES = json.loads(opened.metadata()["notes"])
    TENSORS = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)


def arrays_of(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Our arrays of an adapter of PEFT."""
    start = f"{name}/base_model.model.model."
    ours = {key.removeprefix(start): tensor.T for key, tensor in TENSORS.items() if key.startswith(start)}
    paths = dict.fromkeys(key.rpartition(".lora_")[0] for key in ours)
    return {path: (ours[f"{path}.lora_A.weight"], ours[f"{path}.lora_B.weight"]) for path in paths}


def specs() -> dict[str, AdapterSpec]:
    return {
        name: AdapterSpec(name=name, rank=3, alpha=alpha, rslora=rslora, targets=tuple(targets))
        for name, (alpha, rslora, targets) in NOTES["adapters"].items()
    }


def kept(shape: tuple[int, ...], density: float) -> np.ndarray:
    """What make_combined.py keeps instead of drawing."""
    return (np.arange(np.prod(shape)).reshape(shape) * 7919 % 1009) / 1009 < density


@pytest.mark.parametrize("case", NOTES["cases"])
def test_tensors_are_those_of_peft(case):
    method, density, majority = NOTES["cases"][case]
    factors = [weight * spec.scale for weight, spec in zip(NOTES["weights"], specs().values(), strict=True)]
    how = Combination(method=method, density=density, majority=majority)
    ours = combined_arrays([arrays_of(name) for name in specs()], factors, how, kept)
    theirs = arrays_of(case)
    assert ours.keys() == theirs.keys()
    for path, pair in ours.items():
        for tensor, wanted in zip(pair, theirs[path], strict=True):
            np.testing.assert_allclose(tensor, wanted, rtol=1e-6, atol=1e-6)  # sums of three float32 numbers


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(arrays_of(name), spec, "org/base", root / name) for name, spec in specs().items()}


def test_side_by_side_is_the_exact_sum(folders, tmp_path):
    spec, arrays = read_adapter(combine_adapters({folders["red"]: 2.0, folders["blue"]: -0.5}, tmp_path / "sum"))
    assert (spec.rank, spec.scale, set(spec.targets)) == (6, 1.0, {"q_proj", "k_proj", "down_proj"})
    red, blue = specs()["red"].scale * 2.0, specs()["blue"].scale * -0.5
    path = "layers.1.mlp.down_proj"
    wanted = red * np.matmul(*arrays_of("red")[path]) + blue * np.matmul(*arrays_of("blue")[path])
    np.testing.assert_allclose(spec.scale * np.matmul(*arrays[path]), wanted, rtol=1e-5, atol=1e-5)


def test_draws_depend_on_the_seed(folders, tmp_path):
    def drawn(seed: int, name: str) -> np.ndarray:
        both = dict.fromkeys([folders["red"], folders["green"]], 1.0)
        written = combine_adapters(both, tmp_path / name, method="dare_linear", density=0.5, seed=seed)
        return read_adapter(written)[1]["layers.0.self_attn.q_proj"][0]

    first = drawn(4, "a")
    assert (first == drawn(4, "b")).all()
    assert (first != drawn(5, "c")).any()


def test_what_does_not_go_together_is_refused(folders, tmp_path):
    other = write_adapter(
        {path: (a[:, :2], b[:2]) for path, (a, b) in arrays_of("red").items()},
        AdapterSpec(name="other", rank=2, alpha=2, targets=("q_proj", "down_proj")), "org/other", tmp_path / "other",
    )  # fmt: skip
    with pytest.raises(LoraFusionError) as caught:
        combine_adapters({folders["red"]: 1.0, other: float("nan")}, tmp_path / "new", method="linear")
    for text in ("weight nan", "has rank 2, and red 3", "org/other"):
        assert text in str(caught.value)
    assert not (tmp_path / "new").exists()
    for wrong in ({"method": "tie"}, {"method": "ties"}, {"density": 0.5}, {"method": "ties", "density": 1.5}):
        with pytest.raises(LoraFusionError, match=r"combine\.setting"):
            combine_adapters({folders["red"]: 1.0, folders["blue"]: 1.0}, tmp_path / "new", **wrong)
    with pytest.raises(LoraFusionError, match=r"export\.exists"):
        combine_adapters({folders["red"]: 1.0, folders["blue"]: 1.0}, folders["green"])
