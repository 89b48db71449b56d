"""Stored weights in a stage's programs: no layer's kernels outlive the layer."""

from __future__ import annotations

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from more_cases import nightly

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import REMAT_POLICIES
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.weights.table import stored_kind

T, LAYERS = 16, 2
MODEL = ModelConfig(
    family="llama", vocab_size=64, hidden_size=256, intermediate_size=512, num_layers=LAYERS, num_heads=2,
    num_kv_heads=1, head_dim=128,
)  # fmt: skip
SPECS = (AdapterSpec(name="law", rank=2, alpha=4),)
LAYER_BYTES = 4 * sum(map(prod, MODEL.layer(0).kernel_shapes().values()))


def operands(parts, replicas):
    """Shapes of what a block of all layers takes: (frozen, lora, position, x, inputs)."""
    whole, kind = jax.ShapeDtypeStruct, stored_kind(parts.quantize)
    frozen = {name: whole(shape, jnp.float32) for name, shape in parts.frozen_shapes().items()}
    if kind is not None:
        for name, shape in MODEL.layer(0).kernel_shapes().items():
            arrays = kind.arrays(*shape).items()
            frozen[name] = {leaf: whole(array.shape, jnp.dtype(array.dtype)) for leaf, array in arrays}
    lora = {name: whole(shape, jnp.float32) for name, shape in parts.leaves.lora_shapes(LAYERS).items()}
    sizes = {"segment_offsets": 2, "segment_lengths": 1, "tile_adapter": 1, "adapters": 1}
    kinds = {"row_key": np.uint32, "weights": np.float32}
    needed = [name for name in Microbatch._fields if name not in Microbatch._field_defaults]
    batch = Microbatch(**{name: whole((replicas, sizes.get(name, T)), kinds.get(name, np.int32)) for name in needed})
    position = Position(*(whole((), np.int32),) * 3)
    return (frozen,) * LAYERS, lora, position, whole((replicas, T, MODEL.hidden_size), np.float32), batch


def blocks(quantize, remat, fsdp=1):
    """Programs of all layers in one, what they take, and the shapes of what forward leaves for backward."""
    parts = Parts(model=MODEL, specs=SPECS, settings=TrainSettings(), dtype=jnp.float32, quantize=quantize)
    programs = StagePrograms(parts, stage_meshes(fsdp=fsdp)[0], Extent(0, 2 * LAYERS), remat)
    frozen, lora, position, x, batch = operands(parts, fsdp)
    inputs = jax.eval_shape(programs.layers.inputs, batch)
    block = (frozen, lora, position, x, inputs)
    y, kept = jax.eval_shape(programs.layers.forward, *block)
    sums = {name: jax.ShapeDtypeStruct((fsdp, *leaf.shape), leaf.dtype) for name, leaf in lora.items()}
    return programs, block, (*block, kept, y, sums), kept


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_forward_leaves_no_kernel_for_backward(remat):
    """The same arrays as with plain weights."""
    plain, stored = (sorted(leaf.shape for leaf in jax.tree.leaves(blocks(q, remat)[3])) for q in ("none", "int8"))
    assert stored == plain


@pytest.mark.parametrize(("direction", "remat"), [
    ("forward", "everything"), nightly("backward", "everything"), ("backward", "nothing"),
])  # fmt: skip
def test_a_program_of_many_layers_dequantises_one_at_a_time(direction, remat):
    """By the compiler's own count of temporary memory, next to that of plain weights."""

    def temporary(quantize):
        programs, forward, backward, _ = blocks(quantize, remat)
        lowered = (
            programs.layers.forward.lower(*forward)
            if direction == "forward"
            else programs.layers.backward.lower(*backward)
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary("int8") - temporary("none") < 1.5 * LAYER_BYTES  # of LAYERS layers


@pytest.mark.parametrize(("kind", "dtype"), [("nf4", "u8"), ("fp8", "f8e4m3fn")])
def test_devices_gather_the_stored_bytes(kind, dtype):
    """What moves are the kernels as they are stored, and nothing else of their size."""
    programs, forward, _, _ = blocks(kind, "everything", fsdp=2)
    lowered = programs.layers.forward.lower(*forward)
    # XLA widens 8-bit floats for a CPU, wherever they are; so these are looked at before, where all layers call one
    # function.
    text = lowered.as_text(dialect="hlo") if kind == "fp8" else lowered.compile().as_text()
    moved = re.findall(r"= \(?([a-z0-9]+)\[([0-9,]*)\]\S* all-gather(?:-start)?\(", text)
    arrays = [stored_kind(kind).arrays(*shape).values() for shape in MODEL.layer(0).kernel_shapes().values()]
    kernels = [prod(max(arrays_of_device, key=lambda array: array.num_bytes).shape) for arrays_of_device in arrays]
    large = [(of, size) for of, shape in moved if (size := prod(map(int, shape.split(",")))) >= min(kernels)]
    calls = 1 if kind == "fp8" else LAYERS
    assert sorted(large) == sorted((dtype, size) for size in kernels * calls)
