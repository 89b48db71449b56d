"""Kernels of experts as `base.quantize` stores them: each with scales of its own, as the memory plan counts them."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import golden
from jax.sharding import NamedSharding
from memory_problems import problem

from benchmarks.saved_model import load_frozen
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.memory.stored import kernel_bytes
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.weights.table import StoredKind, stored_kind

FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe_groups")  # plain experts; with biases; beside shared ones


def stored_as(quantize: str) -> StoredKind:
    kind = stored_kind(quantize)
    assert kind is not None
    return kind


def load(folder, **options) -> dict[str, Any]:
    return {**load_frozen(folder, dtype=jnp.float32, **options)}


def of_experts(frozen, model):
    """Kernels of experts by name, and how many experts each has."""
    for name, weight in frozen.items():
        *_, projection, leaf = name.split(".")
        if projection in EXPERTS and leaf == "kernel":
            yield name, weight, model.layer(int(name.split(".")[1])).linear(projection).experts


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_is_stored_as_its_kernel_alone_would_be(family, quantize):
    folder = golden(family)
    model, kind = ModelConfig.from_hf(folder), stored_as(quantize)
    plain = load(folder)
    stored = load(folder, quantize=quantize)
    assert list(of_experts(plain, model)) != []
    alone = jax.jit(lambda kernel: kind.dequantise(kind.quantise(kernel), jnp.float32))
    for name, kernels, experts in of_experts(plain, model):
        dense = kind.of(experts).dequantise(stored[name], jnp.float32)
        each = [alone(kernel) for kernel in jnp.split(kernels, experts)]
        np.testing.assert_array_equal(dense, jnp.concatenate(each), err_msg=name)


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
def test_the_plan_counts_the_bytes_that_are_read(quantize):
    folder = golden("qwen3_moe")
    model = ModelConfig.from_hf(folder)
    stored = load(folder, quantize=quantize)
    parts = Parts(model=model, specs=(), settings=TrainSettings(), quantize=quantize)
    for number in range(model.num_layers):
        names = model.layer(number).kernel_shapes()
        arrays = {name: stored[f"layers.{number}.{name}"] for name in names}
        counted = kernel_bytes(problem(model=model, quantize=quantize), number=number)
        assert counted == sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
        shapes = parts.stored_shapes(layer_kind=model.kind_of(number))
        for name, leaves in arrays.items():
            assert {leaf: array.shape for leaf, array in leaves.items()} == shapes[name], name


@pytest.mark.parametrize("quantize", ["fp8", "int8"])
def test_devices_of_a_mesh_have_parts_of_the_same_bytes(quantize):
    folder = golden("qwen3_moe")
    model, mesh = ModelConfig.from_hf(folder), stage_meshes(fsdp=2)[0]
    whole = load(folder, quantize=quantize)
    split = load(folder, quantize=quantize, sharding=lambda name, shape: mesh.weight(shape))
    for name, arrays, _ in of_experts(split, model):
        for leaf, array in arrays.items():
            np.testing.assert_array_equal(array, whole[name][leaf], err_msg=name)
        values = arrays["values"]
        assert isinstance(values.sharding, NamedSharding)
        assert prod(values.addressable_shards[0].data.shape) * 2 == values.size, "each device has a half"
