"""How fast are texts of 16 adapters in one batch, beside transformers with PEFT and beside the bound of memory?

    python -m benchmarks.generate --out DIR [--budget 150] [--small]

Qwen3-8B's shape with random weights in bfloat16; 16 adapters of rank 16 on all projections, four prompts of 128 tokens
for each, 128 new tokens, greedy. The first row checks our tokens against a forward pass without a cache, in float32.
PEFT runs one adapter after another with four prompts each (three adapters are timed, and all 16 cost as much each), and
the rows of all adapters in one batch (`adapter_names`). Bytes per step are those of the base's projections and head,
of all A and B, and of the filled cache; the bound is their time at the bandwidth that a plain read reaches here.
Seconds contain the prompts. Rows are also written to DIR/generate.jsonl.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import conditions
from benchmarks.harness import write_within_budget
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.generation import passes
from lorafusion_jax.generation.generator import Generator, Request
from lorafusion_jax.generation.places import BASE
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import Decoder, ModelConfig, Segments
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import LayerWeights, StageWeights

SHAPE = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_heads": 32,
    "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "max_positions": 4096,
}  # fmt: skip
SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "max_positions": 512,
}  # fmt: skip
ADAPTERS, RANK, EACH, PROMPT, NEW = 16, 16, 4, 128, 128
PEFT_ADAPTERS = 3  # that are timed one after another


def main() -> int:
    return write_within_budget("generate", __doc__ or "", 150, _rows)


def _rows(small: bool) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    yield _check()
    shape = SMALL if small else SHAPE
    adapters, new = (4, 16) if small else (ADAPTERS, NEW)
    config = ModelConfig(family="qwen3", qk_norm=True, **shape)
    bandwidth = _read_bandwidth(2**24 if small else 2**32)
    yield {"section": "read", "gb_per_s": bandwidth / 1e9}
    stage = random_stage(config, adapters, jnp.bfloat16)
    prompts = np.random.default_rng(0).integers(1, config.vocab_size, (adapters, EACH, PROMPT)).tolist()
    joint = [Request(tokens=p, adapter=k, sampling=_greedy(new)) for k in range(adapters) for p in prompts[k]]
    row = _our_row(stage, joint, "all adapters", bandwidth)
    yield row
    yield from _peft_rows(config, prompts, new, row["tokens_per_s"])
    flat = [p for of_adapter in prompts for p in of_adapter]
    base = [Request(tokens=p, adapter=BASE, sampling=_greedy(new)) for p in flat]
    yield _our_row(stage, base, "base alone", bandwidth)
    yield _our_row(stage, [Request(tokens=p, adapter=0, sampling=_greedy(new)) for p in flat], "one adapter", bandwidth)
    for block in (1, 12):
        passes.BLOCK = block
        yield _our_row(stage, joint, f"all adapters, {block} layers per program", bandwidth)


def _greedy(new: int) -> Sampling:
    return Sampling(max_tokens=new)


def random_stage(config: ModelConfig, adapters: int, dtype: Any) -> Stage:
    """A model with random weights and adapters, drawn on the device."""
    specs = tuple(AdapterSpec(name=f"a{n}", rank=RANK, alpha=16) for n in range(adapters))
    parts = Parts(model=config, specs=specs, settings=TrainSettings(), dtype=dtype)
    (mesh,) = stage_meshes()
    draw = jax.jit(
        lambda key, shape, dtype: (jax.random.normal(key, shape, jnp.float32) * max(shape[-2:][0], 1) ** -0.5).astype(
            dtype
        ),
        static_argnums=(1, 2),
        out_shardings=mesh.everywhere,
    )
    keys = iter(jax.random.split(jax.random.key(1), 40 * config.num_layers))
    ones = lambda shape: jnp.ones(shape, dtype, device=mesh.everywhere)  # noqa: E731
    pieces = [
        LayerWeights(
            {
                name: draw(next(keys), shape, dtype) if len(shape) == 2 else ones(shape)
                for name, shape in parts.frozen_shapes().items()
            }
        )
        for _ in range(config.num_layers)
    ]
    table = (config.vocab_size, config.hidden_size)
    weights = StageWeights(
        extent=Extent(0, 2 * config.num_layers), pieces=pieces, embed=draw(next(keys), table, dtype),
        norm=ones((config.hidden_size,)), head=draw(next(keys), table[::-1], dtype).T,
    )  # fmt: skip
    stage = Stage(parts, weights, mesh, [], remat="everything", block=1)
    stage.lora = {
        name: draw(next(keys), shape, jnp.float32)
        for name, shape in parts.leaves.lora_shapes(config.num_layers).items()
    }
    return stage


def _check() -> dict[str, Any]:
    """Compares tokens with a forward pass without a cache, on this device, in float32."""
    config = ModelConfig(family="qwen3", qk_norm=True, **SMALL)
    stage = random_stage(config, 2, jnp.float32)
    prompts = np.random.default_rng(1).integers(1, config.vocab_size, (2, 9)).tolist()
    answers = Generator([stage])([Request(tokens=p, adapter=BASE, sampling=_greedy(12)) for p in prompts])
    decoder = Decoder(config, dtype=jnp.float32)
    for number, layer in enumerate(decoder.layers):
        for name, array in stage.weights.pieces[number].items():
            node: Any = layer
            for part in name.split(".")[:-1]:
                node = getattr(node, part)
            getattr(node, name.split(".")[-1])[...] = array
    weights = stage.weights
    decoder.embed_tokens.weight[...], decoder.lm_head.weight[...] = weights.embed, weights.head
    run = jax.jit(lambda tokens: decoder(tokens, jnp.arange(64), Segments.from_lengths([64], 64)))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [*prompt]
        for _ in range(12):
            padded = jnp.array(ids + [0] * (64 - len(ids)))
            ids.append(int(jnp.argmax(run(padded)[len(ids) - 1])))
        assert answer.tokens == ids[len(prompt) :], (answer.tokens, ids)
    return {"section": "check", "equal_tokens": 24}


def _our_row(stage: Stage, requests: list[Request], name: str, bandwidth: float) -> dict[str, Any]:
    generator = Generator([stage])
    began = time.perf_counter()
    first = generator(requests)
    first_s = time.perf_counter() - began
    times = []
    for _ in range(2):
        began = time.perf_counter()
        again = generator(requests)
        times.append(time.perf_counter() - began)
    assert [a.tokens for a in first] == [a.tokens for a in again]
    prefill_s = _seconds(
        lambda: generator([Request(tokens=r.tokens, adapter=r.adapter, sampling=_greedy(1)) for r in requests])
    )
    new, seconds = requests[0].sampling.max_tokens, min(times)
    step_s = (seconds - prefill_s) / (new - 1)
    adapters = {r.adapter for r in requests if r.adapter >= 0}
    step_bytes = _bytes(stage, len(adapters), len(requests), new)
    return {
        "section": "ours", "variant": name, "sequences": len(requests), "adapters": len(adapters), "new_tokens": new,
        "first_s": first_s, "seconds": seconds, "tokens_per_s": len(requests) * new / seconds, "prompts_s": prefill_s,
        "step_ms": 1e3 * step_s, "decode_tokens_per_s": len(requests) / step_s, "step_gb": step_bytes / 1e9,
        "bound_ms": 1e3 * step_bytes / bandwidth, "of_bound": step_bytes / bandwidth / step_s,
    }  # fmt: skip


def _bytes(stage: Stage, adapters: int, sequences: int, new: int) -> float:
    """Bytes that one step must read: weights, the adapters in the model's dtype, and the filled cache."""
    config, size = stage.parts.model, jnp.dtype(stage.parts.dtype).itemsize
    assert stage.weights.head is not None
    base = sum(leaf.nbytes for piece in stage.weights.pieces for leaf in piece.values()) + stage.weights.head.nbytes
    pair = sum(leaf.size for leaf in stage.lora.values()) / len(stage.parts.specs) * size
    row = sum(layer.attention.keys * 2 for layer in config.layers) * size
    return base + adapters * pair + sequences * row * (PROMPT + new / 2)


def _read_bandwidth(count: int) -> float:
    """Bytes per second of a sum over an array."""
    x = jnp.ones(count, jnp.bfloat16)
    run = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    return x.nbytes / _seconds(lambda: jax.block_until_ready(run(x)))


def _peft_rows(config: ModelConfig, prompts: list, new: int, ours: float) -> Iterator[dict[str, Any]]:
    try:
        import peft
        import torch
        import transformers
    except ImportError as missing:
        yield {"section": "peft", "failed": str(missing)}
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    shape = {key: value for key, value in config.to_hf().items() if key not in ("architectures", "model_type")}
    hf = transformers.Qwen3Config(**shape | {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(hf)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.02)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora, adapter_name="a0", autocast_adapter_dtype=False)
    for number in range(1, len(prompts)):
        adapted.add_adapter(f"a{number}", lora, autocast_adapter_dtype=False)
    adapted.to(device).eval()
    ids = torch.tensor(prompts, device=device)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}

    def run(rows: Any, **options: Any) -> None:
        with torch.inference_mode():
            out = adapted.generate(
                input_ids=rows, attention_mask=torch.ones_like(rows), max_new_tokens=new, min_new_tokens=new,
                do_sample=False, **options,
            )  # fmt: skip
        assert out.shape[1] == rows.shape[1] + new
        wait()

    def one_after_another() -> float:
        began = time.perf_counter()
        for number in range(PEFT_ADAPTERS):
            adapted.set_adapter(f"a{number}")
            run(ids[number])
        return (time.perf_counter() - began) / PEFT_ADAPTERS * len(prompts)

    adapted.set_adapter("a0")
    run(ids[0][:, :8])  # what torch sets up at first
    total = len(prompts) * EACH * new
    seconds = one_after_another()
    yield {
        "section": "peft", "variant": "one adapter after another", "seconds": seconds, "tokens_per_s": total / seconds,
        "ours_over_it": ours / (total / seconds), "timed_adapters": PEFT_ADAPTERS, **versions,
    }  # fmt: skip
    names = [f"a{number}" for number in range(len(prompts)) for _ in range(EACH)]
    try:
        began = time.perf_counter()
        run(ids.reshape(-1, PROMPT), adapter_names=names)
        seconds = time.perf_counter() - began
        yield {
            "section": "peft", "variant": "adapters of all rows in one batch", "seconds": seconds,
            "tokens_per_s": total / seconds, "ours_over_it": ours / (total / seconds), **versions,
        }  # fmt: skip
    except Exception as problem:  # a variant that fails is a row, too
        yield {"section": "peft", "variant": "adapters of all rows in one batch", "failed": str(problem)[:300]}


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    raise SystemExit(main())
