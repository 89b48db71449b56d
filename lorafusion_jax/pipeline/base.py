"""The base model of a job, loaded onto the stages of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.model_fit import longest_texts
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import REMAT_POLICIES, RematPolicy
from lorafusion_jax.models import ModelConfig, load_frozen
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.objective.batch import check_loss
from lorafusion_jax.pipeline.mesh import stage_meshes
from lorafusion_jax.pipeline.move import transfer
from lorafusion_jax.pipeline.parts import Parts, cut
from lorafusion_jax.pipeline.processes import any_process
from lorafusion_jax.pipeline.stage import Stage
from lorafusion_jax.planning.blocks import block_layers
from lorafusion_jax.planning.memory import (
    ALLOCATOR_USABLE,
    MemoryProblem,
    advice,
    choose_remat,
    fits,
    memory_problem,
    stage_memory,
)
from lorafusion_jax.planning.stages import stage_layers
from pallas_kernels.device import is_hopper


def check_mesh(config: JobConfig) -> None:
    """Whether a job's mesh fits the machine and the model; reads no data.

    Raises:
        CheckpointError: a model that is not there.
        ConfigError, ErrorList: `mesh.devices`, `mesh.processes`, `mesh.stages`, `mesh.layers`.
    """
    mesh = config.mesh
    stage_meshes(mesh.stages, mesh.data, mesh.fsdp)
    if mesh.stages > 1 or mesh.layers is not None:
        stage_layers(ModelConfig.from_hf(base_directory(config)), mesh.stages, mesh.layers)


def load_stages(config: JobConfig, prepared: Prepared, specs: Sequence[AdapterSpec]) -> list[Stage]:
    """Loads the base model, each stage's layers straight onto its devices; adapters are not started yet.

    Raises:
        CheckpointError: a model that is incomplete, not implemented, or computes differently at this sample length.
        ConfigError: the mesh does not fit the machine or the model.
    """
    objectives = tuple(adapter.objective.chosen for adapter in config.adapters)
    for each in objectives:
        check_loss(each)
    directory, train = base_directory(config), config.train
    model = ModelConfig.from_hf(directory)
    longest = max(int(longest_texts(data.train).max()) for data in prepared.adapters.values())
    model.check_length(longest, where=str(directory))
    mesh = config.mesh
    meshes = stage_meshes(mesh.stages, mesh.data, mesh.fsdp)
    layers = stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=config.batch.capacity_tokens)
    dtype = jnp.dtype(config.base.dtype)

    def place(name: str, shape: tuple[int, ...]):
        return meshes[_stage_of(name, layers)].weight(shape)

    frozen = load_frozen(directory, dtype=dtype, quantize=config.base.quantize, sharding=place)
    weights = cut(frozen, layers)
    if mesh.stages > 1 and model.tie_embeddings:
        weights[-1].head = transfer(weights[-1].head, meshes[-1])
    parts = Parts(
        model=model,
        specs=tuple(specs),
        settings=train,
        dtype=dtype,
        objectives=objectives,
        quantize=config.base.quantize,
    )
    remat = fitting_remat(config, model) if train.remat == "auto" else train.remat
    return [
        Stage(
            parts,
            own,
            here,
            config.adapters,
            remat=remat,
            block=block_layers(train.block_layers, len(own.pieces), fsdp=here.fsdp),
        )
        for own, here in zip(weights, meshes, strict=True)
    ]


def fitting_remat(config: JobConfig, model: ModelConfig) -> RematPolicy:
    """The fastest choice that fits into this machine's devices; everything where they do not tell their size (CPU)."""
    size, problem = device_bytes(), _problem(config, model)
    mine = "everything" if size is None else choose_remat(problem, size, usable=ALLOCATOR_USABLE)
    # Replicas must compile the same programs, so processes take what fits on all of them.
    wanted = REMAT_POLICIES.index(mine)
    return next(remat for number, remat in enumerate(REMAT_POLICIES) if not any_process(wanted > number))


def memory_warning(config: JobConfig, model: ModelConfig, remat: RematPolicy) -> str | None:
    """Says so before the first microbatch where memory will hardly do on this machine, and what to change."""
    size, problem = device_bytes(), replace(_problem(config, model), remat=remat)
    if size is None or fits(problem, size, usable=ALLOCATOR_USABLE):
        return None
    totals = [stage.total for stage in stage_memory(problem)]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    change = advice(problem, size, tile_tokens=config.batch.tile_tokens, usable=ALLOCATOR_USABLE)
    return (
        f"stage {fullest} needs {totals[fullest] / 1e9:.1f} GB by count and the device gives {size / 1e9:.1f}: "
        f"it may run out of memory. To make it fit: {change}"
    )


def _problem(config: JobConfig, model: ModelConfig) -> MemoryProblem:
    return replace(memory_problem(config, model), hopper=is_hopper())


def device_bytes() -> int | None:
    """What the allocator of a device may take; None where it does not tell (CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def _stage_of(name: str, layers: Sequence[Extent]) -> int:
    head, _, rest = name.partition(".")
    if head == "layers":
        number, _, leaf = rest.partition(".")
        return next(stage for stage, own in enumerate(layers) if own.holds(int(number), leaf))
    return 0 if head == "embed_tokens" else len(layers) - 1
