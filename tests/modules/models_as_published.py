"""Small models with the structure of published ones whose packages are not in the registry, written here anew.

Each says what of the published model it has: classes of linear layers, options of their calls, names of paths.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.lax import Precision

from lorafusion_jax.modules import register_linear

D, F, HEADS, C, VOCABULARY = 16, 24, 2, 8, 40


def attend(q, k, v, causal=True):
    """[b, t, heads, c] each."""
    scores = jnp.einsum("bthc,bshc->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v)


def heads(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


class Qwen3(nnx.Module):
    """Bonsai's Qwen3: `nnx.Einsum` projections with heads, norms of q and k, one head for two queries, a gated MLP."""

    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.q_proj = nnx.Einsum("BTD,DNH->BTNH", (D, HEADS, C), rngs=rngs)
            self.k_proj = nnx.Einsum("BSD,DKH->BSKH", (D, 1, C), rngs=rngs)
            self.v_proj = nnx.Einsum("BSD,DKH->BSKH", (D, 1, C), rngs=rngs)
            self.o_proj = nnx.Einsum("BTNH,NHD->BTD", (HEADS, C, D), rngs=rngs)
            self.q_norm, self.k_norm = nnx.RMSNorm(C, rngs=rngs), nnx.RMSNorm(C, rngs=rngs)

        def __call__(self, x):
            k, v = (jnp.repeat(array, HEADS, 2) for array in (self.k_norm(self.k_proj(x)), self.v_proj(x)))
            return self.o_proj(attend(self.q_norm(self.q_proj(x)), k, v))

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.gate_proj, self.up_proj = (nnx.Linear(D, F, use_bias=False, rngs=rngs) for _ in range(2))
            self.down_proj = nnx.Linear(F, D, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))

    def __init__(self, rngs):
        self.embedder = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.layers = nnx.List([nnx.Dict(attn=self.Attention(rngs), mlp=self.MLP(rngs)) for _ in range(2)])
        self.lm_head = nnx.Einsum("BTD,DV->BTV", (D, VOCABULARY), rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens)
        for layer in self.layers:
            x = x + layer.attn(x)
            x = x + layer.mlp(x)
        return self.lm_head(x)


class ShardedLinear(nnx.Module):
    """LLaDA's own linear class of Bonsai: `jnp.matmul` with `out_sharding`."""

    def __init__(self, num_in, num_out, rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (num_in, num_out)))
        self.bias = nnx.data(jnp.zeros(num_out))

    def __call__(self, x, *, out_sharding=None):
        return jnp.matmul(x, self.kernel[...], out_sharding=out_sharding) + self.bias


register_linear(ShardedLinear, weight="kernel", equation="...k,kn->...n")


class LLaDA(nnx.Module):
    """Bonsai's LLaDA: a head called ff_out beside layers with a ff_out of their own, and no causal mask."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.q_proj, self.k_proj, self.v_proj, self.attn_out = (ShardedLinear(D, D, rngs) for _ in range(4))
            self.ff_proj, self.up_proj = ShardedLinear(D, F, rngs), ShardedLinear(D, F, rngs)
            self.ff_out = ShardedLinear(F, D, rngs)

        def __call__(self, x):
            q, k, v = (heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
            x = x + self.attn_out(attend(q, k, v, causal=False).reshape(x.shape))
            return x + self.ff_out(nnx.silu(self.ff_proj(x)) * self.up_proj(x))

    def __init__(self, rngs):
        self.wte = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.blocks = nnx.List([self.Block(rngs) for _ in range(2)])
        self.ff_out = ShardedLinear(D, VOCABULARY, rngs)

    def __call__(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.ff_out(x)


class UMT5(nnx.Module):
    """Bonsai's UMT5: every layer at the highest precision, biases of relative positions, encoder and decoder."""

    class Attention(nnx.Module):
        def __init__(self, rngs):
            exact = functools.partial(nnx.Linear, D, D, use_bias=False, precision=Precision.HIGHEST, rngs=rngs)
            self.q, self.k, self.v, self.o = exact(), exact(), exact(), exact()
            self.relative_attention_bias = nnx.Embed(4, HEADS, rngs=rngs)

        def __call__(self, x, memory=None):
            memory = x if memory is None else memory
            q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
            distance = jnp.abs(jnp.arange(x.shape[1])[:, None] - jnp.arange(memory.shape[1])).clip(max=3)
            scores = jnp.einsum("bthc,bshc->bhts", q, k, precision=Precision.HIGHEST)
            weights = jax.nn.softmax(scores + self.relative_attention_bias(distance).transpose(2, 0, 1))
            return self.o(jnp.einsum("bhts,bshc->bthc", weights, v).reshape(x.shape))

    def __init__(self, rngs):
        self.shared = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.encoder, self.decoder, self.cross = (nnx.List([self.Attention(rngs)]) for _ in range(3))
        self.wi = nnx.Linear(D, F, precision=Precision.HIGHEST, rngs=rngs)
        self.wo = nnx.Linear(F, D, precision="highest", rngs=rngs)
        self.lm_head = nnx.Linear(D, VOCABULARY, use_bias=False, precision=Precision.HIGHEST, rngs=rngs)

    def __call__(self, tokens):
        x = self.shared(tokens)
        memory = x + self.encoder[0](x)
        x = x + self.decoder[0](x)
        x = x + self.cross[0](x, memory)
        return self.lm_head(x + self.wo(nnx.gelu(self.wi(x))))


class DINOv3(nnx.Module):
    """Bonsai's DINOv3: class and register tokens, scales of layers, and the names of Hugging Face's own model."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            self.attention = nnx.Dict({name: nnx.Linear(D, D, use_bias=name != "k_proj", rngs=rngs) for name in names})
            self.mlp = nnx.Dict(up_proj=nnx.Linear(D, F, rngs=rngs), down_proj=nnx.Linear(F, D, rngs=rngs))
            self.lambda1 = nnx.Param(jnp.full(D, 0.5))

        def __call__(self, x):
            q, k, v = (heads(self.attention[name](x)) for name in ("q_proj", "k_proj", "v_proj"))
            x = x + self.lambda1[...] * self.attention["o_proj"](attend(q, k, v, causal=False).reshape(x.shape))
            return x + self.mlp["down_proj"](nnx.gelu(self.mlp["up_proj"](x)))

    def __init__(self, rngs):
        self.cls_token = nnx.Param(jnp.ones((1, 1, D)))
        self.register_tokens = nnx.Param(jnp.zeros((1, 4, D)))
        self.patch_embeddings = nnx.Conv(3, D, (4, 4), (4, 4), rngs=rngs)
        self.layer = nnx.List([self.Layer(rngs) for _ in range(2)])

    def __call__(self, images):
        patches = self.patch_embeddings(images).reshape(len(images), -1, D)
        tokens = (
            jnp.broadcast_to(it[...], (len(images), *it.shape[1:])) for it in (self.cls_token, self.register_tokens)
        )
        x = jnp.concatenate([*tokens, patches], axis=1)
        for layer in self.layer:
            x = layer(x)
        return x


class VJEPA2(nnx.Module):
    """Bonsai's V-JEPA 2: an encoder of video patches and a pooler whose one query attends to them."""

    def __init__(self, rngs):
        self.patches = nnx.Conv(3, D, (1, 4, 4), (1, 4, 4), rngs=rngs)
        names = ("query", "key", "value", "proj")
        self.layer = nnx.List([nnx.Dict({name: nnx.Linear(D, D, rngs=rngs) for name in names}) for _ in range(2)])
        self.pooler = nnx.Dict(
            query_tokens=nnx.Param(jnp.ones((1, 1, D))),
            self_attention_layers=nnx.List([nnx.Dict(self_attn=nnx.Dict(k_proj=nnx.Linear(D, D, rngs=rngs)))]),
        )
        self.classifier = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, video):
        x = self.patches(video[:, None]).reshape(len(video), -1, D)
        for layer in self.layer:
            q, k, v = (heads(layer[name](x)) for name in ("query", "key", "value"))
            x = x + layer["proj"](attend(q, k, v, causal=False).reshape(x.shape))
        k = self.pooler["self_attention_layers"][0]["self_attn"]["k_proj"](x)
        weights = jax.nn.softmax(
            jnp.einsum("bqd,bsd->bqs", jnp.tile(self.pooler["query_tokens"][...], (len(x), 1, 1)), k)
        )
        return self.classifier(jnp.einsum("bqs,bsd->bqd", weights, x)[:, 0])


class GemmaEinsum(nnx.Module):
    """The class of the Gemma in Flax's examples: an equation in an attribute, so nothing is to be registered."""

    def __init__(self, einsum_str, shape, rngs):
        self.einsum_str, self.shape = einsum_str, shape
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) * 0.2)

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class Gemma(nnx.Module):
    """The Gemma of Flax's examples: k and v stacked in one weight whose axis comes first in the result, tied logits."""

    def __init__(self, rngs):
        self.input_embedding = nnx.Param(jax.random.normal(rngs.params(), (VOCABULARY, D)))
        self.layers = nnx.List(
            [
                nnx.Dict(
                    q_einsum=GemmaEinsum("BTD,NDH->BTNH", (HEADS, D, C), rngs),
                    kv_einsum=GemmaEinsum("BSD,CKDH->CBSKH", (2, HEADS, D, C), rngs),
                    attn_vec_einsum=GemmaEinsum("BTNH,NHD->BTD", (HEADS, C, D), rngs),
                )
                for _ in range(2)
            ]
        )

    def __call__(self, tokens):
        x = self.input_embedding[...][tokens]
        for layer in self.layers:
            k, v = layer["kv_einsum"](x)
            x = x + layer["attn_vec_einsum"](attend(layer["q_einsum"](x), k, v))
        return x @ self.input_embedding[...].T


class DenseGeneral(nnx.Module):
    """MaxText's layer: axes in attributes, a cast, and a `dot_general` of its own code."""

    def __init__(self, num_in, out, rngs):
        out = out if isinstance(out, tuple) else (out,)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (num_in, *out)))

    def __call__(self, x):
        kernel = self.kernel[...].astype(x.dtype)
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=Precision.DEFAULT)


register_linear(
    DenseGeneral, weight="kernel", equation=lambda it: "...k,kn->...n" if it.kernel.ndim == 2 else "...k,kmn->...mn"
)


class MaxText(nnx.Module):
    def __init__(self, rngs):
        self.token_embedder = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.query, self.key, self.value = (DenseGeneral(D, (HEADS, C), rngs) for _ in range(3))
        self.wi, self.wo = DenseGeneral(D, F, rngs), DenseGeneral(F, D, rngs)
        self.logits_dense = DenseGeneral(D, VOCABULARY, rngs)

    def __call__(self, tokens):
        x = self.token_embedder(tokens)
        x = x + attend(self.query(x), self.key(x), self.value(x)).reshape(x.shape)
        return self.logits_dense(x + self.wo(nnx.gelu(self.wi(x))))


class LM1B(nn.Module):
    """Flax's lm1b: a decoder whose head is called logitdense."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name="embed")(tokens)
        for number in range(2):
            y = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name=f"encoderdecoderblock_{number}")(x)
            x = x + nn.Dense(D)(nn.relu(nn.Dense(F)(x + y)))
        return nn.Dense(VOCABULARY, name="logitdense")(x)


class WMT(nn.Module):
    """Flax's wmt: encoder, decoder with cross-attention, one shared embedding, logitdense."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, D, name="shared_embedding")
        memory = embed(tokens)
        memory = memory + nn.SelfAttention(HEADS, name="encoder")(memory)
        x = embed(tokens[:, ::-1])
        x = x + nn.SelfAttention(HEADS, name="decoder")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="cross")(x, memory)
        x = x + nn.Dense(D, name="wo")(nn.relu(nn.Dense(F, name="wi")(x)))
        return nn.Dense(VOCABULARY, name="logitdense")(x)


class ViTBlock(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        y = nn.LayerNorm()(x)
        y = x + nn.MultiHeadDotProductAttention(HEADS, deterministic=deterministic)(y, y)
        return y + nn.Dense(D)(nn.gelu(nn.Dense(F)(nn.LayerNorm()(y)))), {"sa": y}


class BigVisionViT(nn.Module):
    """big_vision's ViT with `scan=True`: a scan of rematerialised blocks that names only "params"."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(D, (4, 4), (4, 4), padding="VALID", name="embedding")(images).reshape(len(images), -1, D)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, x.shape[1], D))
        block = nn.remat(ViTBlock, prevent_cse=False, static_argnums=(2,))
        scan = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=3,
        )
        x, _ = scan(name="encoderblock")(x, True)
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, D))
        x = nn.MultiHeadDotProductAttention(HEADS, name="pool")(jnp.tile(probe, (len(x), 1, 1)), x)
        return nn.Dense(7, name="head")(x[:, 0])


class PiEinsum(nn.Module):
    """openpi's class: its equation comes with the call."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param("w", nn.initializers.lecun_normal(), self.shape))


class PiFeedForward(nn.Module):
    """Its two matrices are parameters that its own code reads."""

    @nn.compact
    def __call__(self, x):
        gating = self.param("gating_einsum", nn.initializers.lecun_normal(in_axis=-2), (2, D, F))
        linear = self.param("linear", nn.initializers.lecun_normal(), (F, D))
        return jnp.dot(nn.gelu(jnp.dot(x, gating[0])) * jnp.dot(x, gating[1]), linear)


class PiBlock(nn.Module):
    """Two experts with weights of their own attend to each other."""

    @nn.compact
    def __call__(self, xs, _):
        shape = (HEADS, D, C)
        parts = []
        for x, suffix in zip(xs, ("", "_1"), strict=True):
            q = PiEinsum(shape, name=f"q_einsum{suffix}")("BTD,NDH->BTNH", x)
            k, v = PiEinsum((2, *shape), name=f"kv_einsum{suffix}")("BSD,2KDH->2BSKH", x)
            parts.append((q, k, v))
        q, k, v = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        y, results, start = attend(q, k, v), [], 0
        for x, suffix in zip(xs, ("", "_1"), strict=True):
            part = y[:, start : start + x.shape[1]]
            x = x + PiEinsum((HEADS, C, D), name=f"attn_vec_einsum{suffix}")("BTNH,NHD->BTD", part)
            results.append(x + PiFeedForward(name=f"mlp{suffix}")(x))
            start += x.shape[1]
        return tuple(results), None


class Pi0(nn.Module):
    """openpi's π0: its Gemma experts are always scanned."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name="embedder")(tokens)
        scan = nn.scan(
            nn.remat(PiBlock), variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=2
        )
        xs, _ = scan(name="layers")((x, x[:, :2] * 0.5), None)
        return jnp.concatenate(xs, axis=1)


class VideoPrismProjection(nn.Module):
    """VideoPrism's `AttentionProjection`: a weight and a bias of two axes."""

    output: bool = False

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (D, HEADS, C))
        b = self.param("b", nn.initializers.normal(0.1), (D,) if self.output else (HEADS, C))
        return jnp.einsum("bthc,dhc->btd" if self.output else "btd,dhc->bthc", x, w) + b


class VideoPrismBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k, v = (VideoPrismProjection(name=name)(x) for name in ("query", "key", "value"))
        x = x + VideoPrismProjection(output=True, name="post")(attend(q, k, v, causal=False))
        return x + nn.Dense(D, name="ffn_layer2")(nn.gelu(nn.Dense(F, name="ffn_layer1")(x))), None


class VideoPrism(nn.Module):
    """VideoPrism's ViT: a scan of rematerialised blocks."""

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(D, name="patch_projection")(images.reshape(len(images), 16, -1))
        scan = nn.scan(nn.remat(VideoPrismBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.LayerNorm()(scan(name="transformers_stack")(x, None)[0])


class GriffinEinsum(nn.Module):
    """recurrentgemma's `Einsum`: an equation, and a bias with an axis of the two halves."""

    shape: tuple[int, ...]
    bias: tuple[int, ...]
    equation: str

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(in_axis=-2), self.shape)
        return jnp.einsum(self.equation, x, w) + self.param("b", nn.initializers.normal(0.1), self.bias)


class Griffin(nn.Module):
    """recurrentgemma: a recurrent block, then attention, each with an MLP whose two halves are one weight."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name="embedder")(tokens)
        for number, kind in enumerate(("recurrent", "attention")):
            y = nn.RMSNorm()(x)
            if kind == "recurrent":
                gate = nn.gelu(nn.Dense(D, name=f"linear_y_{number}")(y))
                decay = jax.nn.sigmoid(nn.Dense(D, name=f"a_gate_{number}")(y))
                inside = nn.Dense(D, name=f"linear_x_{number}")(y) * (1 - decay)
                _, h = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, inside), axis=1)
                x = x + nn.Dense(D, name=f"linear_out_{number}")(h * gate)
            else:
                q, k, v = (heads(nn.Dense(D, use_bias=False, name=f"proj_{name}_{number}")(y)) for name in "qkv")
                x = x + nn.Dense(D, name=f"proj_final_{number}")(attend(q, k, v).reshape(x.shape))
            up = GriffinEinsum((2, D, F), (2, 1, 1, F), "btd,cdf->cbtf", name=f"ffw_up_{number}")
            gate, up = up(nn.RMSNorm()(x))
            x = x + nn.Dense(D, name=f"ffw_down_{number}")(nn.gelu(gate) * up)
        return x


class OctoBlock(nn.Module):
    """octo's `Encoder1DBlock`: attention with a mask and dropout that is off."""

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=True)(y, y, mask=mask)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(F)(nn.LayerNorm()(x))))


class Octo(nn.Module):
    """octo's transformer over tokens of a task and of observations, with a read-out and a head of actions."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name="task_tokenizer")(tokens)
        readout = self.param("readout_action", nn.initializers.normal(0.5), (1, 1, D))
        x = jnp.concatenate([x, jnp.broadcast_to(readout, (len(x), 1, D))], axis=1)
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
        for number in range(2):
            x = OctoBlock(name=f"encoderblock_{number}")(x, mask)
        return nn.Dense(7, name="head")(nn.LayerNorm(name="encoder_norm")(x)[:, -1])


class ESMDense(nn.DenseGeneral):
    """esmjax's subclass, with a bias of two axes."""


class ESM2(nn.Module):
    """esmjax's ESM-2: projections to heads, an MLP, a head of its own."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D, name="embedding")(tokens)
        for number in range(2):
            q, k, v = (ESMDense((HEADS, C), name=f"{name}_proj_{number}")(x) for name in "qkv")
            x = x + ESMDense(D, axis=(-2, -1), name=f"out_proj_{number}")(attend(q, k, v, causal=False))
            x = x + nn.Dense(D, name=f"fc2_{number}")(nn.gelu(nn.Dense(F, name=f"fc1_{number}")(x)))
        return nn.Dense(VOCABULARY, name="lm_head_fc2")(nn.gelu(nn.Dense(D, name="lm_head_fc")(x)))


class AIMv2(nn.Module):
    """AIMv2's encoder: q, k and v as one projection, a gated MLP, norms without biases."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(D, (4, 4), (4, 4), padding="VALID", name="patchifier")(images).reshape(len(images), -1, D)
        for number in range(2):
            qkv = nn.Dense(3 * D, use_bias=False, name=f"qkv_{number}")(nn.RMSNorm()(x))
            y = attend(*(heads(part) for part in jnp.split(qkv, 3, -1)), causal=False).reshape(x.shape)
            x = x + nn.Dense(D, use_bias=False, name=f"proj_{number}")(y)
            y = nn.RMSNorm()(x)
            gate, up = (nn.Dense(F, use_bias=False, name=f"{name}_{number}")(y) for name in ("fc1", "fc3"))
            x = x + nn.Dense(D, use_bias=False, name=f"fc2_{number}")(nn.silu(gate) * up)
        return nn.RMSNorm(name="post_trunk_norm")(x)


class DiT(nn.Module):
    """shortcut-models' DiT: blocks whose norms a condition shifts and scales (adaLN)."""

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(D, name="patch_embed")(images.reshape(len(images), 16, -1))
        condition = nn.silu(nn.Dense(D, name="time_embed")(jnp.mean(x, 1)))
        for number in range(2):
            shift, scale, gate = jnp.split(nn.Dense(3 * D, name=f"modulation_{number}")(condition)[:, None], 3, -1)
            y = nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift
            y = nn.MultiHeadDotProductAttention(HEADS, name=f"attention_{number}")(y, y)
            x = x + (1 + gate) * (y + nn.Dense(D, name=f"mlp_{number}")(nn.gelu(y)))
        return nn.Dense(12, name="final")(x)


class NanoDOBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(use_bias=False)(x)
        q, k, v = (nn.DenseGeneral((HEADS, C), use_bias=False, name=name)(y) for name in ("query", "key", "value"))
        x = x + nn.DenseGeneral(D, axis=(-2, -1), use_bias=False, name="attn_out_proj")(attend(q, k, v))
        return x + nn.Dense(D, use_bias=False)(nn.gelu(nn.Dense(F, use_bias=False)(nn.LayerNorm(use_bias=False)(x))))


class NanoDO(nn.Module):
    """nanodo: a decoder of rematerialised blocks, whose logits are products with the embedding."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, D, name="embed")
        x = embed(tokens) + self.param("pos", nn.initializers.normal(0.1), (tokens.shape[1], D))
        for number in range(2):
            x = nn.remat(NanoDOBlock)(name=f"blocks_{number}")(x)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


class HealSwin(nnx.Module):
    """heal-swin: stages whose layers differ, the last one without a merge of patches."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(12, D, rngs=rngs)
        self.stages = nnx.List(
            [
                nnx.Dict(
                    qkv=nnx.Linear(D, 3 * D, rngs=rngs), proj=nnx.Linear(D, D, rngs=rngs),
                    fc1=nnx.Linear(D, F, rngs=rngs), fc2=nnx.Linear(F, D, rngs=rngs),
                    **({"downsample": nnx.Linear(2 * D, D, use_bias=False, rngs=rngs)} if stage == 0 else {}),
                )
                for stage in range(2)
            ]
        )  # fmt: skip

    def __call__(self, images):
        x = self.embed(images.reshape(len(images), 16, -1))
        for stage in self.stages:
            q, k, v = (heads(part) for part in jnp.split(stage["qkv"](x), 3, -1))
            x = x + stage["proj"](attend(q, k, v, causal=False).reshape(x.shape))
            x = x + stage["fc2"](nnx.gelu(stage["fc1"](x)))
            if "downsample" in stage:
                x = stage["downsample"](x.reshape(len(x), x.shape[1] // 2, -1))
        return x


class AbsorbedLatents(nnx.Module):
    """dantinox' latent attention as it is served: the parent multiplies by the kernels of `up_k` and `up_v`."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, D, rngs=rngs)
        names = {"down_kv": (D, C), "up_k": (C, D), "up_v": (C, D), "query": (D, D), "out": (D, D)}
        for name, shape in names.items():
            setattr(self, name, nnx.Linear(*shape, use_bias=False, rngs=rngs))

    def __call__(self, tokens):
        x = self.embed(tokens)
        latents = self.down_kv(x)
        absorbed = self.query(x) @ self.up_k.kernel[...].T
        weights = jax.nn.softmax(jnp.einsum("btc,bsc->bts", absorbed, latents))
        return self.out(jnp.einsum("bts,bsc->btc", weights, latents) @ self.up_v.kernel[...])
