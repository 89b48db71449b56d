"""A Llama's layer is this program and nothing else: what other families need costs it no operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.models import ModelConfig, Segments, attention
from lorafusion_jax.models.forward import layer_inputs
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.models.rope import apply_rope
from lorafusion_jax.modules import LoRAContext, lora_mlp, lora_siblings
from pallas_kernels.norm import add_rms_norm, rms_norm, rms_norm_with_residual

SHAPE = {
    "vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8,
}  # fmt: skip
ADAPTERS = (AdapterSpec(name="law", rank=2, alpha=4, dropout=0.1),)
T = 16


def by_hand(layer, x, inputs, *, qk_norm):
    eps, attn, mlp = 1e-6, layer.self_attn, layer.mlp
    x, h = rms_norm_with_residual(x, layer.input_layernorm.weight[...], eps=eps)
    qkv = lora_siblings(h, [attn.q_proj, attn.k_proj, attn.v_proj], inputs.lora, site=0)
    q, k, v = (y.reshape(T, -1, 8) for y in qkv)
    if qk_norm:
        q, k = checkpoint_name(q, "qk_in"), checkpoint_name(k, "qk_in")
        q, k = rms_norm(q, attn.q_norm.weight[...], eps=eps), rms_norm(k, attn.k_norm.weight[...], eps=eps)
    q, k = apply_rope(q, inputs.ropes[0]), apply_rope(k, inputs.ropes[0])
    o = attn.o_proj(attention(q, k, v, inputs.segments, implementation="xla", flat=True), inputs.lora, site=1)
    x, h = add_rms_norm(x, checkpoint_name(o, "o_out"), layer.post_attention_layernorm.weight[...], eps=eps)
    return x + lora_mlp(h, mlp.gate_proj, mlp.up_proj, mlp.down_proj, inputs.lora, sites=(2, 3))


@pytest.mark.parametrize(("family", "qk_norm"), [("llama", False), ("qwen3", True)])
def test_the_layer_is_the_program_by_hand(family, qk_norm):
    config = ModelConfig(family=family, qk_norm=qk_norm, **SHAPE)
    layer = nnx.eval_shape(lambda: DecoderLayer(config, ADAPTERS, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)
    segments = Segments.from_lengths([T], T)

    def gradient(run):
        def passes(x, lora, frozen, row_key):
            context = LoRAContext.of(ADAPTERS, np.zeros(1, np.int32), row_key=row_key, implementation="xla")
            inputs = layer_inputs(config, jnp.arange(T), segments, context)
            layer = lambda x, lora: run(nnx.merge(graph, lora, frozen), x, inputs.at_layer(1))  # noqa: E731
            y, pullback = jax.vjp(layer, x, lora)
            return y, pullback(y)

        x, row_key = jax.ShapeDtypeStruct((T, 24), jnp.bfloat16), jax.ShapeDtypeStruct((T,), jnp.uint32)
        return jax.jit(passes).lower(x, lora, frozen, row_key).as_text()

    ours = gradient(lambda layer, x, inputs: layer(x, inputs, "xla"))
    assert ours == gradient(lambda layer, x, inputs: by_hand(layer, x, inputs, qk_norm=qk_norm))
