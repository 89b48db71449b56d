"""Decoder and pipeline are one forward pass."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from more_cases import nightly

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.layout.extent import extents
from lorafusion_jax.models import Decoder, ModelConfig, Segments
from lorafusion_jax.models.forward import embed, final_norm
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage_weights import cut

MODEL = ModelConfig(
    family="qwen3", vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True,
)  # fmt: skip
SPECS = (
    AdapterSpec(name="a", rank=4, alpha=8, dropout=0.2, seed=1),
    AdapterSpec(name="b", rank=2, alpha=8, seed=2, targets=("q_proj", "down_proj")),
)
T, TILE = 32, 16


def batch() -> Microbatch:
    segments = Segments.from_lengths([16, 10, 6], T)
    rows = np.arange(T, dtype=np.int32)
    fields = dict.fromkeys(Microbatch._fields, rows) | {
        "tokens": rows % 40, "positions": rows % 16, "row_key": rows.astype(np.uint32) * 7919,
        "tile_adapter": np.array([0, 1], np.int32), "adapters": np.array([0, 1], np.int32), "segment_ids": segments.ids,
        "segment_offsets": segments.offsets, "segment_lengths": segments.lengths, "lora": None,
        "balance": None,
    }  # fmt: skip
    return Microbatch(**fields)


@pytest.mark.parametrize("counts", [nightly([3]), nightly([2, 1]), [1.5, 1.5]], ids=str)
def test_the_pieces_of_a_pipeline_compute_what_the_decoder_does(counts):
    decoder, rng = Decoder(MODEL, SPECS, dtype=jnp.float32), np.random.default_rng(0)
    for path, leaf in nnx.to_flat_state(nnx.state(decoder)):
        if path[-1] in ("lora_b", "bias"):
            leaf[...] = jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
    rows, parts = batch(), Parts(model=MODEL, specs=SPECS, settings=TrainSettings(), dtype=jnp.float32)
    context = LoRAContext.of(SPECS, rows.tile_adapter, row_key=rows.row_key)
    segments = Segments(ids=rows.segment_ids, offsets=rows.segment_offsets, lengths=rows.segment_lengths)
    wanted = decoder.hidden(rows.tokens, rows.positions, segments, context)

    frozen = nnx.to_flat_state(nnx.state(decoder, nnx.Not(nnx.LoRAParam)))
    stages = cut({".".join(map(str, path)): leaf[...] for path, leaf in frozen}, MODEL, extents(counts))
    inputs = parts.inputs.of_batch(rows, dropout=True)
    x = embed(stages[0].embed, rows.tokens)
    lora = nnx.to_flat_state(nnx.state(decoder, nnx.LoRAParam))
    for stage in stages:
        for piece, weights in zip(stage.extent.pieces, stage.pieces, strict=True):
            layer_leaves = {".".join(map(str, path[2:])): leaf[...] for path, leaf in lora if path[1] == piece.layer}
            x = parts.layer(weights, layer_leaves, x, inputs, jnp.int32(piece.layer))
    np.testing.assert_array_equal(final_norm(x, stages[-1].norm, MODEL), wanted)
    assert np.abs(wanted - decoder.hidden(rows.tokens, rows.positions, segments, None)).max() > 1e-3  # adapters count
