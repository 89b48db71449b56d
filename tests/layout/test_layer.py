"""The layer description agrees with the modules: leaves, halves, and checkpoint names."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from shapes import LLAMA_70B

from lorafusion_jax.adapters.spec import AdapterSpec, resolve_targets
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import HALVES, LAYER
from lorafusion_jax.models import Decoder, ModelConfig, Segments
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.modules import LoRAContext

PLAIN = ModelConfig(
    family="llama", vocab_size=32, hidden_size=24, intermediate_size=40, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8,
)  # fmt: skip
EVERYTHING = ModelConfig(
    family="qwen3", vocab_size=32, hidden_size=24, intermediate_size=40, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=8, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
)  # fmt: skip
ADAPTERS = (AdapterSpec(name="law", rank=2, alpha=4, dropout=0.1),)


def leaves(config, half, kind):
    layer = nnx.eval_shape(lambda: DecoderLayer(config, ADAPTERS, half=half, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    found = nnx.to_flat_state(nnx.state(layer, kind))
    return {".".join(map(str, path)): leaf.shape for path, leaf in found}


@pytest.mark.parametrize("half", [None, *HALVES])
@pytest.mark.parametrize("config", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_a_layer_has_the_leaves_of_its_description(config, half):
    assert leaves(config, half, nnx.Not(nnx.LoRAParam)) == LAYER.frozen_shapes(config, half)
    adapted = {name.rpartition(".")[0] for name in leaves(config, half, nnx.LoRAParam)}
    assert adapted == {linear.path for linear in LAYER.linears_of(half)}


def test_halves_partition_the_leaves():
    attention, mlp = (LAYER.frozen_shapes(LLAMA_70B, half) for half in HALVES)
    assert not attention.keys() & mlp.keys()
    assert attention | mlp == LAYER.frozen_shapes(LLAMA_70B)
    assert LAYER.half_of("post_attention_layernorm.weight") == LAYER.half_of("layers.mlp.down_proj.lora_b") == "mlp"
    assert LAYER.half_of("self_attn.k_norm.weight") == LAYER.half_of("input_layernorm.weight") == "attention"


@pytest.mark.parametrize("leaf", ["post_feedforward_layernorm.weight", "mlp.router.kernel", "q_proj.kernel", "mlp"])
def test_unknown_leaf_is_an_error(leaf):
    with pytest.raises(ValueError, match="no part of a decoder layer has the leaf"):
        LAYER.half_of(leaf)
    with pytest.raises(ValueError, match="no part of a decoder layer has the leaf"):
        Extent(0, 4).layers_of(leaf)


def test_projections_of_a_site_read_one_input():
    for linears in LAYER.sites.values():
        assert len({linear.shape(EVERYTHING)[0] for linear in linears}) == 1
        assert len({linear.half for linear in linears}) == 1
    assert [LAYER.site_index(name) for name in LAYER.targets] == [0, 0, 0, 1, 2, 2, 3]


def test_targets_are_the_projections():
    assert resolve_targets("all-linear") == LAYER.targets


def test_forward_defines_all_checkpoint_names():
    model = nnx.eval_shape(lambda: Decoder(EVERYTHING, ADAPTERS, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    rows = jnp.arange(16)

    def loss(lora, frozen):
        row_key = jnp.zeros(16, jnp.uint32)
        ctx = LoRAContext.of(ADAPTERS, jnp.zeros(1, jnp.int32), row_key=row_key, implementation="pallas_triton")
        segments = Segments.from_lengths([16], 16)
        return nnx.merge(graph, lora, frozen).hidden(rows, rows, segments, ctx, attention="xla").sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(lora, frozen))
    assert [name for name in LAYER.checkpoints if f"name[name={name}]" not in text] == []
