"""The process that compiles one program of a stage, see `ahead`: reads a request, fills the caches and ends."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.config.values import BEGUN
from lorafusion_jax.data.assemble import assemble, stacked
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.sealed_programs import use_topology
from lorafusion_jax.session.ahead import Request, Rows
from lorafusion_jax.session.base import parts_of
from lorafusion_jax.session.mesh import StageMesh, stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.places import PlaceTable
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.session.stage_weights import LayerWeights


def main() -> None:
    line = sys.stdin.readline()
    if not line:  # the run needs nothing
        return
    request = Request.read(line)
    options = {"preallocate": False, "memory_fraction": request.memory_fraction}  # the run has the memory
    jax.config.update("jax_pjrt_client_create_options", options)
    prepare_machine()
    use_topology(bytes.fromhex(request.topology))
    for rows in request.rows:
        compile_program(request, rows)


def compile_program(request: Request, rows: Rows) -> None:
    """Compiles the program of a request for microbatches of these sizes."""
    config = JobConfig.model_validate(request.config, context=BEGUN)
    mesh = config.mesh
    model = ModelConfig.from_hf(base_directory(config))
    (stage,) = stage_meshes()  # of the only card that this process sees
    extents = stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=config.batch.largest)
    parts = parts_of(config, model)
    layers = StagePrograms(parts, stage, extents[request.stage], request.remat).layers  # pyright: ignore[reportArgumentType]
    make_inputs = layers.inputs_without_dropout if request.program == "evaluate" else layers.inputs
    leaves, sums = _arrays(request.leaves, stage), _arrays(request.sums, stage)
    number = _array([[], "int32"], stage)
    position = Position(number, number, number)
    x = _array([[1, rows.capacity_tokens, model.hidden_size], str(parts.dtype)], stage)
    inputs = _placed(jax.eval_shape(make_inputs, _microbatch(config, parts, rows)), stage)
    for block in request.blocks:
        weights = tuple(LayerWeights(_arrays(shapes, stage), kind) for kind, shapes in block)
        operands = (weights, leaves, position, x, inputs)
        if request.program == "backward":
            residuals = _placed(layers.residuals(*operands), stage)
            layers.backward.lower(*operands, residuals, x, sums).compile()
        else:
            layers.evaluate.lower(*operands).compile()


def _microbatch(config: JobConfig, parts: Parts, rows: Rows) -> Any:
    batch, stack = stacked([assemble((), **asdict(rows))]), stack_of(config)
    return PlaceTable(parts.leaves, len(stack.config.adapters)).describe(batch) if stack.stand_ins else batch


def _arrays(shapes: dict[str, Any], stage: StageMesh) -> dict[str, Any]:
    return {
        name: _arrays(shape, stage) if isinstance(shape, dict) else _array(shape, stage)
        for name, shape in shapes.items()
    }


def _array(shape: list, stage: StageMesh) -> jax.ShapeDtypeStruct:
    sizes, dtype = shape
    return jax.ShapeDtypeStruct(tuple(sizes), jnp.dtype(dtype), sharding=stage.everywhere)


def _placed(tree: Any, stage: StageMesh) -> Any:
    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=stage.everywhere, weak_type=weak)

    return jax.tree.map(struct, tree)


if __name__ == "__main__":
    main()
