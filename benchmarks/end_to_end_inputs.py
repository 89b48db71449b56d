"""What runs at real size need: random weights and random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import AdapterData
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.session.mesh import StageMesh, stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage_weights import LayerWeights, StageWeights
from lorafusion_jax.weights.table import NONE, stored_kind
from scheduling import AdapterJob

GPT_OSS_20B: dict[str, Any] = {
    "family": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_layers": 24,
    "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "qkv_bias": True, "o_bias": True, "attention_sinks": True,
    "norm_eps": 1e-5, "max_positions": 131072,
    "pattern": tuple(
        LayerType(window=None if number % 2 else 128, rope=Rope(theta=150000.0)) for number in range(24)
    ),
    "experts": Experts(
        width=2880, inner=2880, count=32, active=4, router=Router(score="softmax_of_chosen", bias=True), bias=True,
        interleaved=True, limit=7.0,
    ),
}  # fmt: skip

QWEN3_235B: dict[str, Any] = {
    "family": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 94,
    "num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "rope_theta": 1e6, "qk_norm": True, "max_positions": 40960,
    "experts": Experts(width=4096, inner=1536, count=128, active=8),
}  # fmt: skip

GEMMA_4_E2B: dict[str, Any] = {
    "family": "gemma4_text", "vocab_size": 262144, "hidden_size": 1536, "intermediate_size": 6144, "num_layers": 35,
    "num_heads": 8, "num_kv_heads": 1, "head_dim": 256, "norms": "sandwich", "embedding_scale": 1536**0.5,
    "qk_norm": True, "v_norm": True, "layer_scalar": True, "attention_scale": 1.0, "activation": "gelu_tanh",
    "tie_embeddings": True, "final_soft_cap": 30.0, "max_positions": 131072, "input_width": 256, "input_vocab": 262144,
    "pattern": tuple(
        LayerType(
            rope=Rope() if (number + 1) % 5 else Rope(theta=1e6, channels=512, share=0.25),
            window=512 if (number + 1) % 5 else None,
            head_dim=None if (number + 1) % 5 else 512,
            sharing="reads" if number >= 15 else "gives" if number >= 13 else "none",
            wide=number >= 15,
        )
        for number in range(35)
    ),
}  # fmt: skip

OTHER_SHAPES = {"gpt-oss-20b": GPT_OSS_20B, "gemma-4-e2b": GEMMA_4_E2B, "qwen3-235b-a22b": QWEN3_235B}


class Draw:
    """Random tensors of a stage: norms 1, biases 0, kernels scaled by their input size."""

    def __init__(self, stage: StageMesh, dtype: Any, quantize: str = NONE):
        self._stage, self._dtype, self._key, self._made = stage, dtype, 0, {}
        self._kind, self._stored = stored_kind(quantize), {}

    def stored(self, name: str, shape: tuple[int, ...], experts: int) -> Any:
        """The same, a projection's kernel as the stage stores it; kernels of experts lie one below the other."""
        array = self(name, shape)
        if self._kind is None or not name.endswith(".kernel"):
            return array
        kind = self._kind.of(experts)
        if (shape, experts) not in self._stored:
            targets = {name: self._stage.weight(array.shape) for name, array in kind.arrays(*shape).items()}
            self._stored[shape, experts] = jax.jit(
                lambda w: dict(kind.quantise(w.astype(jnp.float32))), out_shardings=targets
            )
        return jax.block_until_ready(self._stored[shape, experts](array))  # one kernel of the wide type at a time

    def __call__(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        self._key += 1
        num_in = shape[0]
        kind = (name.rsplit(".", 1)[-1] if len(shape) < 2 else "kernel", shape)
        if kind not in self._made:
            target = self._stage.weight(shape)

            def make(seed: jax.Array) -> jax.Array:
                if kind[0] != "kernel":
                    return jnp.full(shape, 0.0 if kind[0] == "bias" else 1.0, self._dtype)
                key = jax.random.wrap_key_data(jnp.full(4, seed, jnp.uint32), impl="unsafe_rbg")
                return jax.random.normal(key, shape, self._dtype) * jnp.asarray(num_in**-0.5, self._dtype)

            self._made[kind] = jax.jit(make, out_shardings=target)
        return self._made[kind](self._key)


def random_base(config: JobConfig, model: ModelConfig, dtype: Any) -> list[tuple[StageWeights, StageMesh]]:
    """Random weights of the real shapes, stage by stage, drawn on their devices."""
    mesh = config.mesh
    meshes = stage_meshes(mesh.stages, mesh.data, mesh.fsdp)
    parts = Parts(model=model, specs=(), settings=config.train, dtype=dtype)
    layers = stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=config.batch.largest)
    table = (model.vocab_size, model.hidden_size)
    experts = [{f"{linear.path}.kernel": linear.experts for linear in kind.linears} for kind in model.kinds]
    result = []
    for stage, (extent, stage_mesh) in enumerate(zip(layers, meshes, strict=True)):
        draw = Draw(stage_mesh, dtype, config.base.quantize)
        weights = StageWeights(
            extent=extent,
            pieces=[
                LayerWeights(
                    {n: draw.stored(n, s, experts[kind].get(n, 0)) for n, s in parts.frozen_shapes(half, kind).items()},
                    kind,
                )
                for kind, half in ((model.kind_of(piece.layer), piece.half) for piece in extent.pieces)
            ],
            embed=draw("embed.kernel", table) if stage == 0 else None,
            own_inputs={n: draw(n, s) for n, s in model.input_shapes.items()} if stage == 0 else {},
            norm=draw("norm.weight", table[1:]) if stage == len(layers) - 1 else None,
            head=draw("head.kernel", table) if stage == len(layers) - 1 else None,
        )
        result.append((weights, stage_mesh))
    return result


def random_pairs(pairs: Sequence[tuple[int, int, int]], vocab: int, seed: int) -> AdapterData:
    """Random tokens of pairs of (prompt, chosen, rejected) tokens, and random references of their answers."""
    draw = np.random.default_rng(seed)
    lengths = np.array([[prompt + chosen, prompt + rejected] for prompt, chosen, rejected in pairs], np.int64)
    prompts = np.repeat([prompt for prompt, *_ in pairs], 2)
    offsets = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    starts = np.concatenate([[0], np.cumsum(lengths.reshape(-1))[:-1]])
    position = np.arange(offsets[-1]) - np.repeat(starts, lengths.reshape(-1))
    mask = position >= np.repeat(prompts, lengths.reshape(-1))
    held = TokenizedSet(
        tokens=draw.integers(0, vocab, offsets[-1]).astype(np.int32), loss_mask=mask, offsets=offsets,
        rows=np.arange(len(pairs)), report=None, segment_lengths=lengths,  # type: ignore[arg-type]
        reference=np.where(mask, -np.log(vocab), 0.0).astype(np.float32),
    )  # fmt: skip
    return AdapterData(train=held, eval=None, order=np.arange(len(pairs)))


def random_data(job: AdapterJob, vocab: int, seed: int) -> AdapterData:
    lengths = np.asarray(job.sample_tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], bool)
    mask[offsets[:-1]] = False
    tokens = np.random.default_rng(seed).integers(0, vocab, offsets[-1]).astype(np.int32)
    held = TokenizedSet(tokens=tokens, loss_mask=mask, offsets=offsets, rows=np.arange(len(lengths)), report=None)  # type: ignore[arg-type]
    return AdapterData(train=held, eval=None, order=np.arange(len(lengths)))
