"""Compares logits of exported adapters with HF PEFT, in float32 on the CPU.

    python -m benchmarks.peft_proof --torch-python /path/to/other/venv/bin/python
    python -m benchmarks.peft_proof --torch-python … --base DIR --adapter DIR           # your own folder
    python -m benchmarks.peft_proof --torch-python … --golden tests/checkpoint/golden   # also the files of a test

The other interpreter needs torch, transformers and peft; this project's does not. The steps run in their own
interpreter and exchange safetensors files:

1. ours:   small random models of every family, three adapters each (ranks 4, 16, 8; rsLoRA; partial targets), all
           three and the plain base in ONE packed microbatch; exports, merges, writes the logits
2. theirs: loads base, adapter folder and merged model with transformers and peft, compares; makes a PEFT folder itself
3. ours:   imports the folder that PEFT made, compares

An error is max |ours - theirs| / max |theirs|. `effect` is the same ratio between adapter and base, to show that the
adapter has an effect.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

LIMIT = 1e-3
MERGED_LIMIT = {"bfloat16": 2e-2, "float16": 4e-3}  # merged weights are rounded to the base's dtype: 8 or 11 bits
ROWS, TILE, VOCABULARY = 32, 16, 96
GOLDEN = ("qwen2", "partial")
RESULT = Path(__file__).parent / "results" / "peft_proof_2026-11-21" / "peft_proof.json"
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
MODELS = {
    "llama": {"family": "llama"},
    "llama3-scaled-tied": {"family": "llama", "tie_embeddings": True, "rope_theta": 500000.0, "llama3": True},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
}
ADAPTERS = {
    "plain": {"rank": 4, "alpha": 8.0},
    "rslora": {"rank": 16, "alpha": 6.0, "rslora": True},
    "partial": {"rank": 8, "alpha": 8.0, "targets": ("q_proj", "v_proj", "down_proj")},
}


def relative_error(actual: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(actual.astype(np.float64) - reference).max() / np.abs(reference).max())


def packages(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in names}


# -- our side ---------------------------------------------------------------------------------------------------------


def our_logits(model, scales: list[float], tokens: np.ndarray) -> np.ndarray:
    """Logits of every adapter, then of the plain base, for the same tokens: [A + 1, rows, V], from one microbatch."""
    import jax.numpy as jnp

    from lorafusion_jax.models import Segments
    from lorafusion_jax.modules import LoRAContext

    parts, rows = len(scales) + 1, len(tokens)
    table = np.repeat([*range(len(scales)), -1], rows // TILE)
    context = LoRAContext(tile_adapter=jnp.asarray(table, jnp.int32), scale=jnp.asarray(scales, jnp.float32))
    logits = model(
        jnp.tile(tokens, parts),
        jnp.tile(jnp.arange(rows), parts),
        Segments.from_lengths([rows] * parts, rows * parts),
        context,
    )
    return np.asarray(logits).reshape(parts, rows, -1)


def lora_leaves(model) -> dict:
    from flax import nnx

    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}


def write_random_case(folder: Path, name: str, seed: int) -> None:
    """Base model with random norms and biases, three adapters with random B, their folders, merged models, logits."""
    import jax.numpy as jnp
    from flax import nnx

    from benchmarks.saved_model import save_decoder
    from lorafusion_jax.models import Decoder, ModelConfig, RopeScaling
    from lorafusion_jax.modules import AdapterSpec
    from lorafusion_jax.peft.folder import export_adapter
    from lorafusion_jax.peft.merge import merge_adapter

    options = dict(MODELS[name])
    if options.pop("llama3", False):
        options["rope_scaling"] = RopeScaling(kind="llama3", factor=8.0, original_max_positions=16)
    specs = [AdapterSpec(name=key, seed=seed, **values) for key, values in ADAPTERS.items()]
    model = Decoder(ModelConfig(**SHAPE, **options), specs, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    draw = np.random.default_rng(seed)
    for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam))):
        if leaf.ndim == 1:  # initial norms of one and biases of zero would hide errors
            leaf[...] = leaf[...] + jnp.asarray(draw.normal(0, 0.2, leaf.shape), jnp.float32)
    for path, leaf in lora_leaves(model).items():
        if path.endswith("lora_b"):
            fresh = draw.normal(0, 0.15, leaf.shape).astype(np.float32)
            for index, spec in enumerate(specs):
                fresh[index, spec.rank if path.split(".")[-2] in spec.targets else 0 :] = 0
            leaf[...] = jnp.asarray(fresh)
    tokens = draw.integers(0, VOCABULARY, ROWS).astype(np.int32)
    save_decoder(model, folder / "base")
    logits = our_logits(model, [spec.scale for spec in specs], tokens)
    leaves = {path: np.asarray(leaf[...]) for path, leaf in lora_leaves(model).items()}
    expected = {"tokens": tokens, "base": logits[-1]}
    for index, spec in enumerate(specs):
        export_adapter(leaves, spec, index, str(folder / "base"), folder / spec.name)
        merge_adapter(folder / "base", folder / spec.name, folder / f"{spec.name}-merged")
        expected[spec.name] = logits[index]
    save_file({key: np.ascontiguousarray(value) for key, value in expected.items()}, folder / "expected.safetensors")


def imported_logits(base: Path, folder: Path, tokens: np.ndarray) -> np.ndarray:
    """[2, rows, V]: with the adapter of a PEFT folder, and without."""
    import jax.numpy as jnp

    from benchmarks.saved_model import load_decoder
    from lorafusion_jax.peft.folder import put_adapter, read_adapter

    spec, arrays = read_adapter(folder)
    model = load_decoder(base, [spec], dtype=jnp.float32)
    leaves = lora_leaves(model)
    for path, value in put_adapter({path: leaf[...] for path, leaf in leaves.items()}, 0, arrays).items():
        leaves[path][...] = jnp.asarray(value)
    return our_logits(model, [spec.scale], tokens)


def write_own_case(folder: Path, base: Path, adapter: Path) -> None:
    """Writes a case for an existing base and adapter folder."""
    from lorafusion_jax.models import ModelConfig
    from lorafusion_jax.peft.merge import merge_adapter

    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, ModelConfig.from_hf(base).vocab_size, ROWS).astype(np.int32)
    logits = imported_logits(base, adapter, tokens)
    (folder / "base").symlink_to(base.resolve())
    (folder / "adapter").symlink_to(adapter.resolve())
    merge_adapter(base, adapter, folder / "adapter-merged")
    save_file({"tokens": tokens, "base": logits[1], "adapter": logits[0]}, folder / "expected.safetensors")


def check_imports(work: Path, rows: list[dict]) -> None:
    """Adds to each row our error with the folder that PEFT wrote."""
    for row in rows:
        folder = work / row["model"]
        native = load_file(folder / f"{row['adapter']}-native.safetensors")
        actual = imported_logits(folder / "base", folder / f"{row['adapter']}-native", native["tokens"])
        row["import_error"] = relative_error(actual[0], native["logits"])


# -- their side -------------------------------------------------------------------------------------------------------


def theirs(work: Path) -> None:
    """Compares every case with transformers and peft; writes theirs.json and PEFT's own folders."""
    from transformers.utils.logging import disable_progress_bar

    warnings.filterwarnings("error", message=".*(missing|unexpected).*")
    disable_progress_bar()
    cases = sorted(file.parent for file in work.glob("*/expected.safetensors"))
    rows = [row for folder in cases for row in compare_case(folder)]
    record = {"rows": rows, "versions": packages("torch", "transformers", "peft")}
    (work / "theirs.json").write_text(json.dumps(record))


def compare_case(folder: Path) -> list[dict]:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.utils import get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    expected = load_file(folder / "expected.safetensors")
    tokens = torch.from_numpy(expected["tokens"].astype(np.int64))[None]

    def load(folder: Path):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(model) -> np.ndarray:
        with torch.no_grad():
            return model(tokens).logits[0].numpy()

    base = logits(load(folder / "base"))
    with safe_open(next((folder / "base").glob("*.safetensors")), framework="pt") as file:
        stored = str(file.get_tensor(next(iter(file.keys()))).dtype).removeprefix("torch.")
    rows = []
    for name in sorted(set(expected) - {"tokens", "base"}):
        adapted = PeftModel.from_pretrained(load(folder / "base"), folder / name).eval()
        reference = logits(adapted)
        config = adapted.peft_config["default"]
        keys = set(get_peft_model_state_dict(adapted))
        rows.append(
            {
                "model": folder.name,
                "adapter": name,
                "rank": config.r,
                "alpha": config.lora_alpha,
                "rslora": config.use_rslora,
                "targets": sorted(config.target_modules),
                "keys_equal": keys == set(load_file(folder / name / "adapter_model.safetensors")),
                "effect": relative_error(reference, base),
                "base_error": relative_error(expected["base"], base),
                "adapter_error": relative_error(expected[name], reference),
                "stored": stored,
                "merged_error": relative_error(logits(load(folder / f"{name}-merged")), expected[name]),
            }
        )
        torch.manual_seed(len(rows))
        native = get_peft_model(
            load(folder / "base"),
            LoraConfig(
                r=config.r,
                lora_alpha=config.lora_alpha,
                use_rslora=config.use_rslora,
                task_type="CAUSAL_LM",
                target_modules=sorted(config.target_modules),
                init_lora_weights=False,
            ),
        ).eval()
        native.save_pretrained(folder / f"{name}-native")
        save_file({"tokens": expected["tokens"], "logits": logits(native)}, folder / f"{name}-native.safetensors")
    return rows


# -- both -------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", type=Path, help="interpreter with torch, transformers and peft")
    parser.add_argument("--base", type=Path, help="HF directory of a model of your own")
    parser.add_argument("--adapter", type=Path, help="PEFT folder of your own")
    parser.add_argument("--golden", type=Path, help="folder to fill with one base, PEFT's adapter and PEFT's logits")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the results")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.theirs:
        theirs(args.theirs)
        return 0
    if args.torch_python is None or (args.base is None) != (args.adapter is None):
        parser.error("--torch-python is needed, and --base and --adapter go together")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if args.base:
            write_own_case(work / "own", args.base, args.adapter)
        else:
            for seed, name in enumerate(MODELS):
                write_random_case(work / name, name, seed)
        subprocess.run([args.torch_python, __file__, "--theirs", work], check=True)
        record = json.loads((work / "theirs.json").read_text())
        check_imports(work, record["rows"])
        if args.golden:
            keep_golden(work, args.golden)
    record["versions"] |= packages("jax", "flax", "numpy", "safetensors") | {"python": sys.version.split()[0]}
    record |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "limit": LIMIT, "dtype": "float32"}
    if not args.base:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return report(record["rows"])


def keep_golden(work: Path, to: Path) -> None:
    """Copies the files for a test without torch."""
    model, adapter = GOLDEN
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(work / model / "base", to / "base")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (to / "adapter").mkdir(exist_ok=True)
        shutil.copyfile(work / model / f"{adapter}-native" / file, to / "adapter" / file)
    config = to / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(work / model / "base"), "tiny-qwen2"))
    shutil.copyfile(work / model / f"{adapter}-native.safetensors", to / "logits.safetensors")


def report(rows: list[dict]) -> int:
    """Prints the table; returns 0 if every error is below the limit and every adapter has an effect."""
    errors = ("base_error", "adapter_error", "merged_error", "import_error")
    print(f"{'model':20}{'adapter':10}{'rank':>4}  {'effect':>8}" + "".join(f"{name:>15}" for name in errors), " keys")
    for row in rows:
        print(
            f"{row['model']:20}{row['adapter']:10}{row['rank']:>4}  {row['effect']:8.3f}"
            + "".join(f"{row[name]:15.1e}" for name in errors)
            + f"  {row['keys_equal']}"
        )
    limits = [{"merged_error": MERGED_LIMIT.get(row.get("stored", "float32"), LIMIT)} for row in rows]
    good = all(
        row["keys_equal"] and row["effect"] > 10 * LIMIT and all(row[name] < limit.get(name, LIMIT) for name in errors)
        for row, limit in zip(rows, limits, strict=True)
    )
    rounded = sorted({row["stored"] for row in rows if row.get("stored") in MERGED_LIMIT})
    note = "".join(f" (merged into {kind}: {MERGED_LIMIT[kind]:g})" for kind in rounded)
    print(f"{'all below' if good else 'NOT all below'} {LIMIT:g}{note}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
