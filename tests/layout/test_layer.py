"""The layer description agrees with the modules: leaves, halves, and checkpoint names."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from shapes import LLAMA_70B

from lorafusion_jax.adapters.spec import AdapterSpec, resolve_targets
from lorafusion_jax.errors import ConfigError, ErrorList
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.experts import Experts, ParallelExperts, Router
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.layout.layer import EXPERTS, FUSED, HALVES, PATHS, TARGETS, saved_path
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
STRANGE = ModelConfig(
    family="llama", vocab_size=32, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, fused=True, norms="sandwich", norm_offset=1.0, activation="gelu_tanh", qk_norm="full",
    attention_soft_cap=5.0, embedding_scale=4.9, residual_scale=0.5, rope_channels=4,
    pattern=(LayerType(window=3, rope=Rope(theta=100.0)), LayerType()),
)  # fmt: skip
POST = replace(PLAIN, norms="post", num_layers=2, sliding_window=5)
MIXED = replace(
    PLAIN, experts=Experts(width=24, inner=10, count=3, active=2, bias=True, router=Router(bias=True, correction=True))
)
DELTA = replace(
    PLAIN, qk_norm=True, norm_offset=1.0, num_layers=2,
    delta_net=DeltaNet(width=24, key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=3),
    pattern=(LayerType(linear=True), LayerType(rope=Rope())),
)  # fmt: skip
GROUPED = replace(DELTA, delta_net=replace(DELTA.delta_net, grouped=True))
LATENT = replace(
    PLAIN, qkv_bias=True,
    latent=LatentAttention(
        width=24, heads=4, q_rank=6, kv_rank=5, plain_dim=3, rotary_dim=4, value_dim=9, mscale=0.4, bias=True
    ),
    head_dim=4,
)  # fmt: skip
ONE_LATENT = replace(LATENT, latent=replace(LATENT.latent, q_rank=None, bias=False))
GATED = replace(PLAIN, attention_gate=True, qk_norm=True)
WIDE = replace(
    PLAIN, num_layers=2, norms="sandwich", qk_norm=True, v_norm=True, layer_scalar=True,
    pattern=(
        LayerType(rope=Rope(share=0.3, channels=10), head_dim=10, kv_heads=1, k_is_v=True),
        LayerType(window=3, rope=Rope()),
    ),
)  # fmt: skip
BESIDE = replace(WIDE, experts=ParallelExperts(width=24, inner=10, count=3, active=2, router=Router(scaled=True)))
OWN_INPUTS = replace(
    WIDE, input_width=6, input_vocab=32,
    pattern=(
        LayerType(rope=Rope(), head_dim=10, sharing="reads", wide=True),
        LayerType(rope=Rope(), head_dim=10, sharing="gives"),
    ),
)  # fmt: skip
ALONE = replace(PLAIN, attention_module="mixer", pattern=(LayerType(only="attention"),))
SPACE = Mamba(width=24, heads=3, head_dim=4, groups=1, state=5, norm="none", out_bias=True)
SECOND = replace(PLAIN, mixer=SPACE, mixer_beside=True, attention_factors=(0.5, 2.0))
BY_HEAD = replace(PLAIN, num_kv_heads=4, fused=True, fused_name="query_key_value", fused_by_head=True, mlp_gated=False,
                  mlp_names=("up_proj", "down_proj"))  # fmt: skip
UNGATED = replace(PLAIN, experts=Experts(width=24, inner=10, count=3, active=2, gated=False, module="mixer"))
OTHERS = tuple(name for name in PATHS if name not in EXPERTS)
ADAPTERS = (
    AdapterSpec(name="law", rank=2, alpha=4, dropout=0.1, targets=OTHERS),
    AdapterSpec(name="all", rank=3, alpha=4, targets=tuple(EXPERTS)),
)


def leaves(config, half, kind):
    layer = nnx.eval_shape(lambda: DecoderLayer(config, ADAPTERS, half=half, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(layer, kind))
    return {".".join(map(str, path)): leaf.shape for path, leaf in state}


@pytest.mark.parametrize("half", [None, *HALVES])
@pytest.mark.parametrize(
    "config",
    [PLAIN, EVERYTHING, STRANGE, POST, MIXED, DELTA, GROUPED, GATED, LATENT, ONE_LATENT, WIDE, BESIDE, OWN_INPUTS,
     ALONE, SECOND, BY_HEAD, UNGATED],
    ids=[
        "plain",
        "everything",
        "strange",
        "post",
        "mixed",
        "delta",
        "grouped",
        "gated",
        "latent",
        "one latent",
        "wide",
        "beside",
        "own inputs",
        "alone", "second", "by head", "ungated",
    ],
)  # fmt: skip
def test_a_layer_has_the_leaves_of_its_description(config, half):
    assert leaves(config, half, nnx.Not(nnx.LoRAParam)) == config.layer(0).frozen_shapes(half)
    adapted = {name.rpartition(".")[0] for name in leaves(config, half, nnx.LoRAParam)}
    assert adapted == {linear.path for linear in config.layer(0).linears_of(half)}


def test_halves_partition_the_leaves():
    attention, mlp = (LLAMA_70B.layer(0).frozen_shapes(half) for half in HALVES)
    assert not attention.keys() & mlp.keys()
    assert attention | mlp == LLAMA_70B.layer(0).frozen_shapes()
    half_of = EVERYTHING.layer(0).half_of
    assert half_of("post_attention_layernorm.weight") == half_of("layers.mlp.down_proj.lora_b") == "mlp"
    assert half_of("self_attn.k_norm.weight") == half_of("input_layernorm.weight") == "attention"
    assert STRANGE.layer(0).half_of("post_attention_layernorm.weight") == "attention"  # in another place


@pytest.mark.parametrize("leaf", ["post_feedforward_layernorm.weight", "mlp.routes.kernel", "q_proj.kernel", "mlp"])
def test_unknown_leaf_is_an_error(leaf):
    with pytest.raises(ValueError, match="no part of this decoder layer has the leaf"):
        PLAIN.layer(0).half_of(leaf)


def test_projections_of_a_site_read_one_input():
    for linears in EVERYTHING.layer(0).sites.values():
        assert len({linear.in_features for linear in linears}) == 1
        assert len({linear.half for linear in linears}) == 1
    assert [PLAIN.layer(0).site_index(name) for name in PLAIN.targets] == [0, 0, 0, 1, 2, 2, 3]


def test_projections_that_not_all_layers_have_know_their_layers():
    assert DELTA.some_layers["linear_attn.out_proj"] == (0,)
    assert DELTA.layers_with("self_attn.q_proj") == (1,)
    assert DELTA.layers_with("mlp.up_proj") == (0, 1)
    assert DELTA.paths_of("out_proj") == ("linear_attn.out_proj",)
    assert not PLAIN.some_layers
    assert not STRANGE.some_layers


def test_targets_are_the_projections():
    assert resolve_targets("all-linear") == PLAIN.targets == TARGETS
    assert STRANGE.targets == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert MIXED.targets == (*TARGETS[:4], *EXPERTS)
    assert resolve_targets("all-linear", MIXED.targets) == TARGETS[:4]
    assert resolve_targets(["experts", "o_proj"], MIXED.targets) == ("o_proj", *EXPERTS)
    assert resolve_targets(["all-linear", "mlp.experts.down_proj"], MIXED.targets)[4:] == ("experts_down_proj",)
    with pytest.raises(ErrorList, match="no projection 'experts_gate_up_proj'"):
        resolve_targets("experts", PLAIN.targets)
    for model in (PLAIN, STRANGE, MIXED, DELTA, GROUPED, LATENT, ONE_LATENT, WIDE, OWN_INPUTS):
        assert {linear.name: saved_path(linear.path) for linear in model.layer(0).linears}.items() <= PATHS.items()
    assert {*TARGETS, *FUSED, *EXPERTS} < {*PATHS}


@pytest.mark.parametrize("refused", [{"dropout": 0.1}, {"kind": "dora"}, {"kind": "vera"}])
def test_adapters_of_experts_are_plain_and_without_dropout(refused):
    with pytest.raises(ConfigError, match="adapters of experts"):
        replace(ADAPTERS[1], **refused)


@pytest.mark.parametrize(
    "config",
    [EVERYTHING, STRANGE, POST, MIXED, DELTA, GATED, LATENT, WIDE],
    ids=["everything", "strange", "post", "mixed", "delta", "gated", "latent", "wide"],
)
def test_forward_defines_all_checkpoint_names(config):
    # LoRA has dropout, DoRA multiplies columns.
    adapters = (*ADAPTERS, replace(ADAPTERS[0], name="med", dropout=0.0, kind="dora"))
    model = nnx.eval_shape(lambda: Decoder(config, adapters, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)
    rows = jnp.arange(16)

    def loss(lora, frozen):
        row_key = jnp.zeros(16, jnp.uint32)
        ctx = LoRAContext.of(adapters, jnp.zeros(1, jnp.int32), row_key=row_key, implementation="pallas_triton")
        segments = Segments.from_lengths([16], 16)
        return nnx.merge(graph, lora, frozen).hidden(rows, rows, segments, ctx, attention="xla").sum()

    def forward(lora, frozen):
        return jax.vjp(lambda lora: loss(lora, frozen), lora)[0]  # some names are given where a gradient is asked for

    text = str(jax.make_jaxpr(forward)(lora, frozen))
    assert [name for name in config.layer(0).checkpoints if f"name[name={name}]" not in text] == []
