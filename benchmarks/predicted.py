"""What the product predicts for the documents: memory and times of shapes that no run is needed for.

Computed by the code whenever tables are made, so these numbers are never older than it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import delta_net, experts
from benchmarks.end_to_end_inputs import GEMMA_4_E2B, GPT_OSS_20B
from benchmarks.workloads import SHAPES
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.per_layer_input import TABLE as INPUT_TABLE
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.layout.layer import EXPERTS, REMAT_POLICIES
from lorafusion_jax.planning.memory import (
    DEVICE_BYTES,
    GIB,
    MemoryProblem,
    choose_remat,
    largest_capacity,
    memory_problem,
    stage_memory,
    trainable_parameters,
    working_memory,
)
from lorafusion_jax.planning.prediction import predicted_parts
from lorafusion_jax.planning.stages import split_layers
from lorafusion_jax.weights.table import stored_kind
from pallas_kernels.quantised import fp8

FOUR = tuple(AdapterSpec(name=f"a{i}", rank=16, alpha=32, dropout=0.1) for i in range(4))
LENGTHS = (32768, 65536, 131072)
LONGER = (131072, 262144, 393216)
MESHES: dict[str, dict[str, int]] = {
    "one GPU": {}, "`tensor: 2`": {"tensor": 2}, "`tensor: 4`": {"tensor": 4}, "`tensor: 8`": {"tensor": 8},
    "`stages: 4`": {"stages": 4},
}  # fmt: skip
LLAMA = ModelConfig(**SHAPES["8b"])
MOE = ModelConfig(
    family="qwen3_moe", vocab_size=256, intermediate_size=6144, num_layers=1, qk_norm=True, experts=experts.EXPERTS,
    **experts.SHAPE,
)  # fmt: skip


def problem(model: ModelConfig, adapters: tuple[AdapterSpec, ...], tokens: int, **settings: Any) -> MemoryProblem:
    """Memory of a job with AdamW and bfloat16 weights on a mesh."""
    layers = split_layers(model.num_layers, settings.pop("stages", 1))
    names = ("adamw",) * len(adapters)
    return MemoryProblem(
        model=model, adapters=adapters, optimizers=names, layers=layers, capacity_tokens=tokens, **settings
    )


def peak(job: MemoryProblem) -> int:
    return max(stage.total for stage in stage_memory(job))


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def long_samples() -> str:
    """GiB of one sample in a microbatch by `train.remat`, and what `auto` takes on an H200."""
    lines = ["| tokens | `everything` | `gemm_inputs` | `nothing` | `train.remat: auto` |", "|---|---|---|---|---|"]
    for tokens in LENGTHS:
        job = problem(LLAMA, FOUR, tokens)
        peaks = (f"{peak(replace(job, remat=remat)) / GIB:.0f} GiB" for remat in REMAT_POLICIES)
        lines.append(f"| {spaced(tokens)} | {' | '.join(peaks)} | `{choose_remat(job, DEVICE_BYTES['h200'])}` |")
    return "\n".join(lines)


def longer_samples() -> str:
    """GiB of the fullest GPU by mesh, saving only the layers' inputs."""
    lines = [f"| tokens of a sample | {' | '.join(MESHES)} |", "|---" * (1 + len(MESHES)) + "|"]
    for tokens in LONGER:
        peaks = (peak(problem(LLAMA, FOUR, tokens, remat="nothing", **mesh)) / GIB for mesh in MESHES.values())
        lines.append(f"| {spaced(tokens)} | {' | '.join(f'{each:.0f}' for each in peaks)} |")
    return "\n".join(lines)


def inputs_of_layers() -> list[str]:
    """GiB of the inputs of all layers and of the last norm, of the longest sample, in bfloat16."""
    return [f"{2 * LONGER[-1] * LLAMA.hidden_size * (LLAMA.num_layers + 1) / GIB:.0f}"]


def loss_of_long_sample() -> list[str]:
    """GiB of the loss of a whole sample: logits in chunks, their gradient, rows."""
    return [f"{working_memory(problem(LLAMA, FOUR, LENGTHS[-1]), 0)['loss'] / GIB:.0f}"]


def stages_of_70b(remat: str, *, suggestion: bool = False) -> list[str]:
    """GiB of each of four stages, as `plan` splits the layers; and the largest microbatch that fits."""
    adapters = [{"name": spec.name, "data": {"train": "-"}, "lora": {"rank": 16, "dropout": 0.1}} for spec in FOUR]
    sections = {"base": {"model": "70b"}, "batch": {"capacity_tokens": 6144}, "mesh": {"stages": 4}}
    config = JobConfig.model_validate(sections | {"adapters": adapters})
    job = replace(memory_problem(config, ModelConfig(**SHAPES["70b"])), remat=remat)
    peaks = [f"{stage.total / GIB:.1f}" for stage in stage_memory(job)]
    return [*peaks, str(largest_capacity(job, DEVICE_BYTES["h200"]))] if suggestion else peaks


def gpt_oss_20b() -> list[str]:
    """GB of the weights, and of a job with four adapters of attention: no product computed twice, all saved."""
    attention = tuple(replace(spec, targets=("q_proj", "k_proj", "v_proj", "o_proj")) for spec in FOUR)
    job = problem(ModelConfig(**GPT_OSS_20B), attention, 8192, implementation="xla", attention="xla")
    (stage,) = stage_memory(job)
    peaks = (peak(replace(job, remat=remat)) for remat in ("gemm_inputs", "everything"))
    return [f"{size / 1e9:.0f}" for size in (stage.frozen, *peaks)]


def inputs_of_gemma_4_e2b() -> list[str]:
    """GB of the table of its layers' inputs and of all weights."""
    model = ModelConfig(**GEMMA_4_E2B)
    return [f"{2 * size / 1e9:.1f}" for size in (prod(model.input_shapes[INPUT_TABLE]), model.num_parameters)]


def row_of_gemma_4_e2b() -> list[str]:
    """Bytes of a token's inputs of all layers, in thousands."""
    model = ModelConfig(**GEMMA_4_E2B)
    return [f"{2 * model.num_layers * model.input_width / 1e3:.0f}"]


def layer_of_experts() -> list[str]:
    return [_ms(MOE, [1024] * 8)]


def layer_of_hybrid(mixer: str) -> list[str]:
    """With a gated delta net, or with gated attention."""
    kind = LayerType(linear=True) if mixer == "gated delta net" else LayerType(rope=Rope(channels=64))
    model = ModelConfig(
        family="qwen3_5_text", vocab_size=256, num_layers=1, qk_norm=True, norm_offset=1.0, attention_gate=True,
        delta_net=delta_net.NET, pattern=(kind,), **delta_net.SHAPE,
    )  # fmt: skip
    return [_ms(model, [1024] * 8)]


def _ms(model: ModelConfig, lengths: list[int]) -> str:
    """Forward and backward of 8 192 tokens on an H200."""
    layer, squares = predicted_parts(model, "h200").layer, sum(length**2 for length in lengths)
    return f"{1e3 * (layer.forward.seconds(8192, squares) + layer.backward.seconds(8192, squares)):.1f}"


def parameters_of_experts() -> list[str]:
    """Numbers, in billions, of an adapter of rank 8 on all experts of Qwen3-30B-A3B."""
    spec = AdapterSpec(name="a", rank=8, alpha=8, targets=tuple(EXPERTS))
    return [f"{trainable_parameters(problem(replace(MOE, num_layers=48), (spec,), 8192)) / 1e9:.2f}"]


def rounding_to_fp8() -> list[str]:
    """Distance of normal numbers from what e4m3 with a scale keeps of them, in % of the norm."""
    kernel = np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32)
    kept = fp8.dequantise(fp8.quantise(jnp.asarray(kernel)), jnp.dtype(jnp.float32))
    errors = np.linalg.norm(np.asarray(kept) - kernel, axis=0) / np.linalg.norm(kernel, axis=0)
    return [f"{100 * errors.mean():.1f}"]


def bytes_a_weight(*kinds: str) -> list[str]:
    """With scales, of a kernel of 4096 x 4096."""
    sizes = []
    for name in kinds:
        kind = stored_kind(name)
        assert kind is not None, name
        sizes.append(
            sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in kind.arrays(4096, 4096).values())
        )
    return [f"{size / 4096**2:.2f}" for size in sizes]
