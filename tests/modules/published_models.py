"""Small configurations of models that other people wrote and published as packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import models_as_published as models
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from lorafusion_jax.modules import register_linear

IDS = np.arange(24, dtype=np.int32).reshape(4, 6) % 32
POSITIONS = np.broadcast_to(np.arange(6, dtype=np.int32), (4, 6))
CAUSAL = np.broadcast_to(np.tril(np.ones((6, 6), bool)), (4, 6, 6))
PART = lambda y: y[..., :5]  # noqa: E731  # of normalised rows, whose mean square is always 1
IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class NNXCase:
    model: nnx.Module
    inputs: tuple[Any, ...]  # four examples
    output: Callable[[Any], jax.Array]

    def call(self, model: nnx.Module) -> jax.Array:
        return self.output(model(*self.inputs))


@dataclass(frozen=True, kw_only=True)
class LinenCase:
    model: nn.Module
    options: dict[str, Any]
    output: Callable[[Any], jax.Array]
    args: tuple[Any, ...] = ()
    modules: tuple = ()
    params: Any = field(default=None)


def without_face(package: str) -> None:
    """Lets a package's modules be imported without what its `__init__` imports: tunix's needs a whole trainer."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    bare = ModuleType(package)
    bare.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = bare


def tunix(name: str, build: str, **more: Any) -> NNXCase:
    without_face("tunix")
    module = pytest.importorskip(f"tunix.models.{name}.model", exc_type=ImportError)
    register_linear(module.Einsum, weight="w", equation=lambda it: it.einsum_str)
    sizes = {"num_layers": 1, "vocab_size": 32, "embed_dim": 16, "hidden_dim": 24, "num_heads": 2, "head_dim": 8}
    config = module.ModelConfig(**sizes, num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, **more)
    model = getattr(module, build)(config, rngs=nnx.Rngs(0))
    for layer in model.layers:  # Llama's MLP begins at zero, which would hide what its adapters do
        for number, linear in enumerate((layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)):
            linear.kernel[...] = 0.3 * jax.random.normal(jax.random.key(number), linear.kernel.shape)
    return NNXCase(model=model, inputs=(IDS, POSITIONS, None, CAUSAL), output=lambda it: it[0])


def qwen3() -> NNXCase:
    return tunix("qwen3", "Qwen3")


def llama3() -> NNXCase:
    return tunix("llama3", "Llama3", weight_tying=False)


def jimm_vit() -> NNXCase:
    jimm = pytest.importorskip("jimm", exc_type=ImportError)
    sizes = {"img_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "mlp_dim": 24, "hidden_size": 16}
    sharding = pytest.importorskip("jimm.common.sharding").NoSharding
    model = jimm.VisionTransformer(num_classes=5, dropout_rate=0.0, rngs=nnx.Rngs(0), sharding=sharding, **sizes)
    return NNXCase(model=model, inputs=(IMAGES,), output=lambda it: it)


def hf(path: str) -> ModuleType:
    return pytest.importorskip(f"transformers.models.{path}", exc_type=ImportError)


def bert() -> LinenCase:
    module = hf("bert.modeling_flax_bert")
    config = module.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
    )
    args = (IDS, jnp.ones_like(IDS), jnp.zeros_like(IDS), POSITIONS, jnp.ones((1, 2)))
    return LinenCase(model=module.FlaxBertForMaskedLMModule(config), args=args, options={}, output=lambda it: it.logits)


def vit() -> LinenCase:
    module = hf("vit.modeling_flax_vit")
    config = module.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    model = module.FlaxViTForImageClassificationModule(config)
    return LinenCase(model=model, args=(IMAGES,), options={}, output=lambda it: it.logits)


def gpt2() -> LinenCase:
    module = hf("gpt2.modeling_flax_gpt2")
    config = module.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    return LinenCase(
        model=module.FlaxGPT2LMHeadModule(config),
        args=(IDS, jnp.ones_like(IDS), POSITIONS),
        options={},
        output=lambda it: it.logits,
        modules=((module.FlaxConv1D, "kernel"),),
    )


def bart() -> LinenCase:
    module = hf("bart.modeling_flax_bart")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = module.BartConfig(vocab_size=32, max_position_embeddings=8, **sizes, **heads)
    ones = jnp.ones_like(IDS)
    args = (IDS, ones, IDS[:, ::-1], ones, POSITIONS, POSITIONS)
    model = module.FlaxBartForConditionalGenerationModule(config)
    return LinenCase(model=model, args=args, options={}, output=lambda it: it.logits)


def gemma3() -> LinenCase:
    transformer = pytest.importorskip("gemma.gm.nn._transformer", exc_type=ImportError)
    from gemma.gm.nn import _config, _layers, _modules

    kind = _modules.AttentionType
    small = _config.TransformerConfig(
        num_embed=32,
        embed_dim=16,
        hidden_dim=24,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(kind.LOCAL_SLIDING,),
        sliding_window_size=4,
        transpose_gating_einsum=True,
    )

    class Small(transformer.Transformer):
        dtype: Any = jnp.float32
        config: _config.TransformerConfig = small
        INFO = transformer.ModelInfo()

    weight = ((_layers.Einsum, lambda it: it.weight_name),)
    return LinenCase(model=Small(), options={"tokens": IDS}, output=lambda it: it.logits, modules=weight)


def as_published(cls: type, inputs: Any) -> Callable[[], NNXCase]:
    def make() -> NNXCase:
        return NNXCase(model=cls(nnx.Rngs(0)), inputs=(inputs,), output=lambda it: it)

    return make


def linen_as_published(
    cls: type, inputs: Any, output: Callable[[Any], jax.Array] = lambda it: it
) -> Callable[[], LinenCase]:
    def make() -> LinenCase:
        return LinenCase(model=cls(), args=(inputs,), options={}, output=output)

    return make


def flax_llama() -> LinenCase:
    module = hf("llama.modeling_flax_llama")
    config = module.LlamaConfig(**DECODER, intermediate_size=24, num_key_value_heads=1)
    args = (IDS, jnp.ones_like(IDS), POSITIONS)
    return LinenCase(
        model=module.FlaxLlamaForCausalLMModule(config), args=args, options={}, output=lambda it: it.logits
    )


def flax_gptj() -> LinenCase:
    module = hf("gptj.modeling_flax_gptj")
    config = module.GPTJConfig(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    args = (IDS, jnp.ones_like(IDS), POSITIONS)
    return LinenCase(model=module.FlaxGPTJForCausalLMModule(config), args=args, options={}, output=lambda it: it.logits)


def flax_clip() -> LinenCase:
    module = hf("clip.modeling_flax_clip")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = module.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    output = lambda it: it.last_hidden_state  # noqa: E731  # not the norm of a token, whose mean square is always 1
    return LinenCase(model=module.FlaxCLIPVisionModule(config), args=(IMAGES,), options={}, output=output)


DECODER = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def qwen2() -> NNXCase:
    return tunix("qwen2", "Qwen2")


def gemma4() -> NNXCase:
    """With inputs of each layer, whose scaled projection the layers of LoRA take out."""
    without_face("tunix")
    module = pytest.importorskip("tunix.models.gemma4.model", exc_type=ImportError)
    kinds = (module.AttentionType.LOCAL_SLIDING, module.AttentionType.GLOBAL)
    sizes = {"num_embed": 32, "embed_dim": 16, "hidden_dim": 24, "num_heads": 2, "head_dim": 8, "num_kv_heads": 1}
    config = module.ModelConfig(
        num_layers=2, sliding_window_size=4, global_key_size=8, per_layer_input_dim=4, attention_pattern=kinds, **sizes
    )
    model = module.Gemma4(config, rngs=nnx.Rngs(0))
    return NNXCase(model=model, inputs=(IDS, POSITIONS, None, CAUSAL), output=lambda it: it[0])


def mamba(number: int) -> NNXCase:
    module = pytest.importorskip(f"mamba{number}_jax", exc_type=ImportError)
    sizes = {"vocab_size": 32, "hidden_size": 16, "state_size": 8, "head_dim": 8, "chunk_size": 4}
    config = getattr(module, f"Mamba{number}Config")(num_hidden_layers=3, **sizes)
    model = getattr(module, f"Mamba{number}ForCausalLM")(config, rngs=nnx.Rngs(0))
    return NNXCase(model=model, inputs=(IDS,), output=lambda it: it["logits"])


def mamba2() -> NNXCase:
    return mamba(2)


def mamba3() -> NNXCase:
    return mamba(3)


def nano_moe() -> LinenCase:
    module = pytest.importorskip("nano_moe.model", exc_type=ImportError)
    sizes = {"vocab_size": 32, "n_layers": 1, "n_heads": 2, "d_model": 16, "d_ff": 24, "n_experts": 3, "block_size": 8}
    model = module.NanoMoE(module.NanoMoEConfig(**sizes))
    return LinenCase(model=model, args=(IDS,), options={}, output=lambda it: it[0])


def ablang2() -> LinenCase:
    """Its sizes are constants of the package."""
    module = pytest.importorskip("ablang_jax.model", exc_type=ImportError)
    for name, value in {"VOCAB": 32, "HID": 16, "N_HEAD": 2, "N_BLOCK": 1, "HEAD_DIM": 8}.items():
        setattr(module, name, value)
    args = (IDS, np.ones(IDS.shape, bool))
    return LinenCase(model=module.Ablanx(), args=args, options={}, output=lambda it: PART(it[0]))


NNX_MODELS: dict[str, Callable[[], NNXCase]] = {
    case.__name__: case for case in (qwen3, llama3, qwen2, gemma4, mamba2, mamba3, jimm_vit)
}
LINEN_MODELS: dict[str, Callable[[], LinenCase]] = {
    case.__name__: case  # gemma comes last: importing it changes `nn.Module.param` for everybody
    for case in (nano_moe, ablang2, bert, vit, gpt2, bart, flax_llama, flax_gptj, flax_clip, gemma3)
}
# Structures of published models without a package in the registry; they need no extra.
NNX_STRUCTURES = {
    name: as_published(cls, inputs)
    for name, cls, inputs in (
        ("bonsai_qwen3", models.Qwen3, IDS),
        ("bonsai_llada", models.LLaDA, IDS),
        ("bonsai_umt5", models.UMT5, IDS),
        ("bonsai_dinov3", models.DINOv3, IMAGES),
        ("bonsai_vjepa2", models.VJEPA2, IMAGES),
        ("flax_gemma", models.Gemma, IDS),
        ("maxtext", models.MaxText, IDS),
        ("heal_swin", models.HealSwin, IMAGES),
    )
}
LINEN_STRUCTURES = {
    name: linen_as_published(*case)
    for name, *case in (
        ("lm1b", models.LM1B, IDS),
        ("wmt", models.WMT, IDS),
        ("big_vision_scan", models.BigVisionViT, IMAGES),
        ("openpi_pi0", models.Pi0, IDS),
        ("videoprism", models.VideoPrism, IMAGES, PART),
        ("recurrentgemma", models.Griffin, IDS),
        ("octo", models.Octo, IDS),
        ("esm2", models.ESM2, IDS),
        ("aimv2", models.AIMv2, IMAGES),
        ("dit", models.DiT, IMAGES),
        ("nanodo", models.NanoDO, IDS),
    )
} | {
    "openpi_pi0_mlp": lambda: LinenCase(
        model=models.Pi0(),
        args=(IDS,),
        options={},
        output=lambda it: it,
        modules=((models.PiFeedForward, ("gating_einsum", "linear")),),
    )
}
PEFT_KEYS = {  # one key of each model that Hugging Face has, too
    "bonsai_qwen3": "model.layers.1.self_attn.q_proj",
    "bonsai_dinov3": "layer.0.attention.q_proj",
    "bonsai_vjepa2": "pooler.self_attention_layers.0.self_attn.k_proj",
    "bonsai_umt5": "wo",
    "qwen3": "model.layers.0.self_attn.q_proj",
    "llama3": "model.layers.0.self_attn.q_proj",
}
