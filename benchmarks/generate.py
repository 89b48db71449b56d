"""How fast are texts of 16 adapters in continuous batches, beside transformers with PEFT and the bound of memory?

    python -m benchmarks.generate --out DIR [--budget 150] [--small] [--parts runs fp8 …]

Qwen3-8B's shape with random weights in bfloat16; 16 adapters of rank 16 on all projections, greedy. 64 and 256 rows:
twice as many prompts of 256 tokens, with answers of 128 to 896 tokens (512 on average), so that rows end and others
take their places. The first row checks our tokens against a forward pass without a cache, in float32. PEFT runs one
adapter after another with four prompts each (three adapters are timed, and all 16 cost as much each); the continuous
batches of transformers have one adapter. Bytes of a pass
are those of the base's projections and head, of all A and B, and of the filled cache; the bound is their time at the
bandwidth that a plain read reaches here. A pass is timed while all rows run and none starts; the bound of a whole run
sums that of its passes, without prompts. Rows are also written to DIR/generate.jsonl. Parts: `runs` of both sizes or of
`few` rows, `passes` of both sizes and the copy of an adapter to a sampler, `fp8`: passes with a base of fp8 beside
those of bfloat16, `peers`, and `variants` of passes.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too

import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from benchmarks.saved_model import config_json
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.generation import packing, passes, row_adapters
from lorafusion_jax.generation.engine import PROMPT_TOKENS, Engine
from lorafusion_jax.generation.generator import Generator
from lorafusion_jax.generation.programs import GenerationPrograms
from lorafusion_jax.generation.requests import Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import Decoder, ModelConfig, Segments, cache
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import LayerWeights, StageWeights
from lorafusion_jax.weights.table import NONE, stored_kind
from pallas_kernels.attention.triton import paged

SHAPE = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_heads": 32,
    "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "max_positions": 4096,
}  # fmt: skip
SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "max_positions": 512,
}  # fmt: skip
PARTS = ("runs", "few", "passes", "fp8", "peers", "variants")
ADAPTERS, RANK, EACH, PROMPT, NEW = 16, 16, 4, 256, 512
PEFT_NEW, STEPS = 64, 8
PEFT_ADAPTERS = 3  # that are timed one after another


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    stop = time.monotonic() + options.budget
    for row in _rows(options.small, options.parts):
        add_row(options.out / "generate.jsonl", row)
        if time.monotonic() > stop:
            break
    return 0


def _rows(small: bool, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    yield _check()
    shape = SMALL if small else SHAPE
    adapters, new, prompt = (4, 16, 24) if small else (ADAPTERS, NEW, PROMPT)
    config = ModelConfig(family="qwen3", qk_norm=True, **shape)
    bandwidth = read_bandwidth(2**24 if small else 2**32)
    yield {"section": "read", "gb_per_s": bandwidth / 1e9}
    stage = random_stage(config, adapters, jnp.bfloat16)
    sizes = few, many = (8, 16) if small else (64, 256)
    filled, rates, pass_ms = prompt + new // 2, [0.0], dict[int, float]()
    for rows in (many, few) if "runs" in parts else (few,) if "few" in parts else ():
        requests = _requests(config, rows, adapters, prompt, new)
        for row in guarded(f"{rows} rows", _our_rows(stage, requests, rows, bandwidth)):
            rates.append(row.get("tokens_per_s", 0.0))
            yield row
    for rows in sizes if {"passes", "fp8"} & {*parts} else ():
        for row in guarded("as it is", _pass_rows(stage, "as it is", rows, filled, bandwidth)):
            pass_ms |= {rows: row["pass_ms"]} if row["section"] == "pass" else {}
            yield row
    if "passes" in parts:
        yield from guarded("snapshot", _snapshot_rows(stage))
    if "fp8" in parts:
        _PROGRAMS.clear()
        del stage
        stage = random_stage(config, adapters, jnp.bfloat16, "fp8")
        for rows in sizes:
            for row in guarded("fp8", _pass_rows(stage, "fp8", rows, filled, bandwidth)):
                speed = {"over_bf16": pass_ms[rows] / row["pass_ms"]} if row["section"] == "pass" else {}
                yield row | speed
    if "peers" in parts:
        draw = np.random.default_rng(0)
        prompts = draw.integers(1, config.vocab_size, (adapters, EACH, prompt)).tolist()
        yield from _peft_rows(config, prompts, 4 if small else PEFT_NEW, 4 if small else new, few, max(rates))
    if "variants" in parts:
        _PROGRAMS.clear()
        stage = random_stage(config, adapters, jnp.bfloat16)
        for variant in VARIANTS:
            yield from guarded(variant, _pass_rows(stage, variant, few, filled, bandwidth))


def guarded(name: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, or why there are no more: the others are made all the same."""
    try:
        yield from rows
    except Exception as problem:
        traceback.print_exc()
        yield {"section": "failed", "variant": name, "failed": f"{type(problem).__name__}: {problem}"[:500]}


def _requests(config: ModelConfig, rows: int, adapters: int, prompt: int, new: int) -> list[Request]:
    """Twice as many requests as rows, of adapters in turn, with answers of unequal lengths."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(new // 4, 2 * new - new // 4 + 1, 2 * rows)
    return [
        Request(
            tokens=draw.integers(1, config.vocab_size, prompt).tolist(),
            adapter=number % adapters,
            sampling=Sampling(max_tokens=int(length)),
        )
        for number, length in enumerate(lengths)
    ]


def random_stage(config: ModelConfig, adapters: int, dtype: Any, quantize: str = NONE) -> Stage:
    """A model with random weights and adapters, drawn on the device."""
    specs = tuple(AdapterSpec(name=f"a{n}", rank=RANK, alpha=16) for n in range(adapters))
    parts = Parts(model=config, specs=specs, settings=TrainSettings(), dtype=dtype, quantize=quantize)
    quantise = (
        (lambda leaf: leaf) if quantize == NONE else jax.jit(lambda leaf: dict(stored_kind(quantize).quantise(leaf)))
    )
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
                name: quantise(draw(next(keys), shape, dtype)) if len(shape) == 2 else ones(shape)
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
    sampling = Sampling(max_tokens=12)
    answers = Generator([stage])([Request(tokens=p, adapter=packing.BASE, sampling=sampling) for p in prompts])
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


def _engine(stage: Stage, rows: int, longest: int, variant: str = "") -> tuple[Engine, list[Any]]:
    """An engine with a snapshot of every adapter."""
    adapters = len(stage.parts.specs)
    options = {"xla_gpu_enable_triton_gemm": True} if variant == "Triton GEMMs" else None
    programs = _PROGRAMS.setdefault(variant, [GenerationPrograms(stage, options)])
    engine = Engine(
        [stage], rows=rows, slots=adapters, blocks=rows * -(-longest // BLOCK), programs=programs, steps=STEPS
    )
    return engine, [engine.snapshot(adapter) for adapter in range(adapters)]


_PROGRAMS: dict[str, list[GenerationPrograms]] = {}  # which all engines of a variant share
VARIANTS = ("one program per sequence", "A by XLA", "Triton GEMMs", "attention by XLA", "12 layers per program")


def _pass_rows(stage: Stage, variant: str, rows: int, filled: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Times passes over rows of equal lengths, and the kernels of one call."""
    changes = {
        "attention by XLA": (cache, "target_platform", lambda: "cpu"),
        "12 layers per program": (passes, "BLOCK", 12),
        "one program per sequence": (paged, "PagedConfig", partial(paged.PagedConfig, parts=1)),
        "A by XLA": (row_adapters, "target_platform", lambda: "cpu"),
    }
    module, name, value = changes.get(variant, (passes, "BLOCK", passes.BLOCK))
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        began = time.perf_counter()
        answer = STEPS * (12 + rows * filled // PROMPT_TOKENS)  # the first rows run while the last prompts are read
        engine, samplers = _engine(stage, rows, filled + answer, variant)
        draw = np.random.default_rng(2)
        for number in range(rows):
            tokens = draw.integers(1, engine.model.vocab_size, max(filled - 3 * STEPS, 8)).tolist()
            sampler = samplers[number % len(samplers)]
            engine.submit(Request(tokens=tokens, sampler=sampler, sampling=Sampling(max_tokens=answer)))
        while engine.busy and engine.num_running < rows:
            engine.step()
        engine.step()
        assert engine.num_running == rows
        ready_s = time.perf_counter() - began
        times = []
        for _ in range(4):  # each waits for the passes of the one before
            began = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - began) / STEPS)
        pass_s, total = float(np.mean(times[1:])), pass_bytes(stage, len(samplers), float(engine.num_cached))
        yield {
            "section": "pass", "variant": variant, "rows": rows, "ready_s": ready_s, "pass_ms": 1e3 * pass_s,
            "pass_gb": total / 1e9, "bound_ms": 1e3 * total / bandwidth, "of_bound": total / bandwidth / pass_s,
        }  # fmt: skip
        yield from kernel_rows(variant, rows, lambda: (engine.step(), engine.wait()))
    finally:
        setattr(module, name, before)


def _snapshot_rows(stage: Stage) -> Iterator[dict[str, Any]]:
    """Times the copy of an adapter's weights to a sampler, which says whether they are finite."""
    engine, samplers = _engine(stage, 8, BLOCK)
    times = []
    for _ in range(5):
        engine.drop(samplers.pop())
        began = time.perf_counter()
        samplers.append(engine.snapshot(0))
        times.append(time.perf_counter() - began)
    yield {"section": "snapshot", "rank": RANK, "snapshot_ms": 1e3 * float(np.median(times))}


def kernel_rows(variant: str, rows: int, run: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Times of the kernels of one pass, the longest first, and what of the time no kernel runs."""
    run()  # nothing of earlier passes is left
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        traces = list(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(traces[0]))
        events = [
            (event.start_ns, event.duration_ns, event.name)
            for plane in data.planes if plane.name.startswith("/device:GPU")
            for line in plane.lines if line.name.startswith("Stream")
            for event in line.events
        ]  # fmt: skip
    if not events:
        return
    spent, times = Counter(), Counter()
    for _, duration, name in events:
        kind = re.sub(r"[._]\d+", "", name)[:70]
        spent[kind] += duration
        times[kind] += 1
    wall = max(start + duration for start, duration, _ in events) - min(start for start, _, _ in events)
    yield {
        "section": "kernels", "variant": variant, "rows": rows, "wall_ms": wall / 1e6 / STEPS,
        "busy_ms": sum(spent.values()) / 1e6 / STEPS, "launches": len(events) / STEPS,
    }  # fmt: skip
    for kind, duration in spent.most_common(16):
        yield {
            "section": "kernel", "variant": variant, "rows": rows, "kernel": kind,
            "ms": duration / 1e6 / STEPS, "times": times[kind] / STEPS,
        }  # fmt: skip


def _our_rows(stage: Stage, requests: list[Request], rows: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Answers requests, of which the first ones have compiled what all need."""
    longest = max(len(request.tokens) + request.sampling.max_tokens for request in requests)
    engine, samplers = _engine(stage, rows, longest)
    began = time.perf_counter()
    _start(engine, requests[:rows], samplers)  # all sizes of passes over rows, and the largest of prompts
    for count in (1, 4):  # prompts of the other sizes
        _start(engine, requests[-count:], samplers)
    engine.pool.forget(range(engine.pool.number))
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    answers, filled, running = _run(engine, requests, samplers)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer.tokens) for answer in answers)
    calls = len(filled)
    least_s = sum(pass_bytes(stage, len(samplers), cached) * STEPS / bandwidth for cached in filled)
    yield {
        "section": "ours", "rows": rows, "requests": len(requests), "adapters": len(samplers), "new_tokens": tokens,
        "first_s": first_s, "seconds": seconds, "tokens_per_s": tokens / seconds, "passes": calls * STEPS,
        "mean_rows": float(np.mean(running)), "bound_s": least_s, "of_bound": least_s / seconds,
    }  # fmt: skip


def _submit(engine: Engine, requests: list[Request], samplers: list[Any]) -> list[Any]:
    return [engine.submit(Request(tokens=r.tokens, sampler=samplers[r.adapter], sampling=r.sampling)) for r in requests]


def _start(engine: Engine, requests: list[Request], samplers: list[Any]) -> None:
    """Runs requests until all of them have tokens, which compiles what they need."""
    answers = _submit(engine, requests, samplers)
    while not all(answer.tokens for answer in answers):
        engine.step()
    for answer in answers:
        engine.cancel(answer)
    while engine.busy:
        engine.step()


def _run(engine: Engine, requests: list[Request], samplers: list[Any]) -> tuple[list[Any], list[float], list[int]]:
    """Returns answers, and of each call: tokens in the cache, and rows."""
    answers, filled, running = _submit(engine, requests, samplers), [], []
    while engine.busy:
        engine.step()
        filled.append(float(engine.num_cached))
        running.append(engine.num_running)
    return answers, filled, running


def pass_bytes(stage: Stage, adapters: int, cached: float) -> float:
    """Bytes that one pass must read: weights, the adapters in the model's dtype, and the filled cache."""
    config, size = stage.parts.model, jnp.dtype(stage.parts.dtype).itemsize
    assert stage.weights.head is not None
    base = sum(leaf.nbytes for leaf in jax.tree.leaves(stage.weights.pieces)) + stage.weights.head.nbytes
    pair = sum(leaf.size for leaf in stage.lora.values()) / len(stage.parts.specs) * size
    row = sum(layer.attention.keys * 2 for layer in config.layers) * size
    return base + adapters * pair + cached * row


def read_bandwidth(count: int) -> float:
    """Bytes per second of a sum over an array."""
    x = jnp.ones(count, jnp.bfloat16)
    run = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    return x.nbytes / _seconds(lambda: jax.block_until_ready(run(x)))


def _peft_rows(
    config: ModelConfig, prompts: list, new: int, longest: int, rows: int, ours: float
) -> Iterator[dict[str, Any]]:
    try:
        import peft
        import torch
        import transformers
    except ImportError as missing:
        yield {"section": "peft", "failed": str(missing)}
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    shape = {key: value for key, value in config_json(config).items() if key not in ("architectures", "model_type")}
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
    yield _in_continuous_batches(model, config, prompts, longest, rows, ours) | versions
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
        run(ids.reshape(-1, ids.shape[-1]), adapter_names=names)
        seconds = time.perf_counter() - began
        yield {
            "section": "peft", "variant": "adapters of all rows in one batch", "seconds": seconds,
            "tokens_per_s": total / seconds, "ours_over_it": ours / (total / seconds), **versions,
        }  # fmt: skip
    except Exception as problem:  # a variant that fails is a row, too
        yield {"section": "peft", "variant": "adapters of all rows in one batch", "failed": str(problem)[:300]}


def _in_continuous_batches(
    model: Any, config: ModelConfig, prompts: list, new: int, rows: int, ours: float
) -> dict[str, Any]:
    """The continuous batching of transformers, at its best: one adapter for all requests, and equal lengths."""
    import transformers

    row = {"section": "peft", "variant": "continuous batches of transformers, one adapter", "requests": 2 * rows}
    length = len(prompts[0][0])
    asked = np.random.default_rng(4).integers(1, config.vocab_size, (2 * rows, length)).tolist()

    def run(inputs: list, count: int) -> int:
        settings = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers = model.generate_batch(inputs, generation_config=settings)
        return sum(len(answer.generated_tokens) for answer in answers.values())

    try:
        run(asked[:rows], 4)
        began = time.perf_counter()
        tokens = run(asked, new)
        seconds = time.perf_counter() - began
    except Exception as problem:  # a variant that fails is a row, too
        return row | {"failed": f"{type(problem).__name__}: {problem}"[:300]}
    rate = tokens / seconds
    return row | {"new_tokens": tokens, "seconds": seconds, "tokens_per_s": rate, "ours_over_it": ours / rate}


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
