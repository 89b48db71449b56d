"""Samples of 32 k, 64 k and 128 k tokens, one in a microbatch: what is predicted, what lowers, what runs.

    python -m benchmarks.long_samples --out benchmarks/results/long_samples_h200_DATE      # one H200
    python -m benchmarks.long_samples --out /tmp/long --parts memory lower                  # any machine
    python -m benchmarks.long_samples --out /tmp/long --small                               # any machine: does it run?

memory: bytes of Llama-3.1-8B's shape with four adapters by `planning.memory`, for each `train.remat`, and what an H200
holds. lower: the programs of a layer for an H200, which need no card, and their largest array; those with tokens²
elements are named. run: forward and backward of the whole model on this machine, one sample, random weights.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks.conditions import conditions
from benchmarks.end_to_end import VARIANTS, Bench
from benchmarks.workloads import SHAPES
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import MeshSettings, TrainSettings
from lorafusion_jax.data.assemble import Microbatch, Piece, assemble, num_segments, stacked
from lorafusion_jax.layout.extent import Extent, extents
from lorafusion_jax.layout.layer import REMAT_POLICIES
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.memory import DEVICE_BYTES, MemoryProblem, fits, stage_memory
from lorafusion_jax.session.dry_runs import time_passes
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.move import to_stage
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_columns import Position

PARTS = ("memory", "lower", "run")
LENGTHS = (32768, 65536, 131072)
ADAPTERS, TILE, REPEATS = 4, 128, 2
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
SHAPE = re.compile(r"tensor<((?:\d+x)+)(?:bf16|f16|f32|i32|ui32|i8|ui8|i1|i64)>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--remat", choices=REMAT_POLICIES, default="nothing")
    parser.add_argument("--small", action="store_true", help="a tiny model and short samples")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lengths = (256, 512) if options.small else options.tokens
    work = {
        "memory": memory,
        "lower": partial(lower, remat=options.remat),
        "run": partial(run, out=options.out, remat=options.remat, small=options.small),
    }
    codes = [0]
    for part in options.parts:
        for tokens in lengths:
            try:
                row = work[part](LENGTHS[0] if options.small and part == "lower" else tokens)
            except Exception as problem:  # a length that does not fit must not end the others
                row = {"error": f"{type(problem).__name__}: {problem}"[:1000]}
                codes.append(1)
            row = {"part": part, "tokens": tokens} | row | conditions()
            with (options.out / "long_samples.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    return max(codes)


def specs(count: int) -> tuple[AdapterSpec, ...]:
    return tuple(AdapterSpec(name=f"a{at}", rank=16, alpha=32, dropout=0.1) for at in range(count))


def memory(tokens: int) -> dict[str, Any]:
    """Predicted GiB of one stage, and the policies that fit on an H200."""
    model = ModelConfig(**SHAPES["8b"])
    problem = MemoryProblem(
        model=model,
        adapters=specs(ADAPTERS),
        optimizers=("adamw",) * ADAPTERS,
        layers=extents([model.num_layers]),
        capacity_tokens=tokens,
    )
    problems = {remat: replace(problem, remat=remat) for remat in REMAT_POLICIES}
    return {
        "gib": {remat: round(stage_memory(variant)[0].total / 2**30, 1) for remat, variant in problems.items()},
        "fits_h200": [remat for remat, variant in problems.items() if fits(variant, DEVICE_BYTES["h200"])],
    }


def lower(tokens: int, remat: str) -> dict[str, Any]:
    """The largest array of a layer's two programs, and whether any has tokens² elements."""
    model = replace(ModelConfig(**SHAPES["8b"]), num_layers=1)
    parts = Parts(model=model, specs=specs(ADAPTERS), settings=TrainSettings(), dtype=jnp.bfloat16)
    programs = StagePrograms(parts, stage_meshes()[0], Extent(0, 2), remat)  # type: ignore[arg-type]
    whole = jax.ShapeDtypeStruct
    lora = {name: whole(shape, jnp.float32) for name, shape in parts.leaves.lora_shapes(1).items()}
    frozen = ({name: whole(shape, jnp.bfloat16) for name, shape in parts.frozen_shapes().items()},)
    x = whole((1, tokens, model.hidden_size), jnp.bfloat16)
    sums = {name: whole((1, *leaf.shape), leaf.dtype) for name, leaf in lora.items()}
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        inputs = jax.eval_shape(programs.layers.inputs, _shapes(tokens))
        block = (frozen, lora, Position(*(whole((), np.int32),) * 3), x, inputs)
        y, kept = jax.eval_shape(programs.layers.forward, *block)
        traced = (programs.layers.forward.trace(*block), programs.layers.backward.trace(*block, kept, y, sums))
        text = "".join(program.lower(lowering_platforms=("cuda",)).as_text() for program in traced)
    sizes = {prod(map(int, shape[:-1].split("x"))): shape[:-1] for shape in SHAPE.findall(text)}
    return {
        "largest": sizes[max(sizes)],
        "largest_elements_per_token": round(max(sizes) / tokens, 1),
        "quadratic": sorted(shape for count, shape in sizes.items() if count >= tokens * tokens),
        "kernels": text.count("mosaic_gpu_v2"),
    }


def _shapes(tokens: int) -> Microbatch:
    row = _rows(TILE, 1, TILE)
    long = {TILE: tokens, 1: tokens // TILE}  # axes of rows and of tiles
    tiled = {"tile_adapter"}
    return Microbatch(
        *(
            jax.ShapeDtypeStruct((1, long[leaf.shape[1]]) if _is_long(name, tiled) else leaf.shape, leaf.dtype)
            for name, leaf in zip(Microbatch._fields, row, strict=True)
            if leaf is not None  # the last fields, which have defaults
        )
    )


def _is_long(name: str, tiled: set[str]) -> bool:
    return name in tiled or name not in ("segment_offsets", "segment_lengths", "adapters")


def _rows(tokens: int, adapters: int, tile: int) -> Microbatch:
    """One sample that fills a microbatch."""
    ids = np.random.default_rng(0).integers(0, 256, tokens).astype(np.int32)
    piece = Piece(0, ids, np.ones(tokens, bool), 1.0, key=1)
    rows = assemble(
        [piece], capacity_tokens=tokens, tile_tokens=tile, max_segments=num_segments(1), max_adapters=adapters
    )
    return stacked([rows])


def run(tokens: int, out: Path, remat: str, small: bool) -> dict[str, Any]:
    """Seconds of forward and backward of the whole model, and the peak of memory."""
    options = argparse.Namespace(
        model="tiny" if small else "8b", layers=None, stages=1, data=1, capacity=tokens, batch=1, adapters=ADAPTERS,
        set=[f"remat={remat}"], xla=[], layers_per_stage=None, out=out,
    )  # fmt: skip
    bench = Bench(options)
    config = bench.config(VARIANTS["ours"], MeshSettings(), tokens, ADAPTERS)
    (stage,) = bench.stages(config)
    stage.start(stage.first_lora())
    batch = to_stage(_rows(tokens, 1, bench.tile), stage.mesh)
    time_passes(stage, batch)  # compiles
    times = [time_passes(stage, batch) for _ in range(REPEATS)]
    forward_s, backward_s = min(times, key=sum)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "model": options.model,
        "remat": remat,
        "forward_s": round(forward_s, 4),
        "backward_s": round(backward_s, 4),
        "tokens_per_s": round(tokens / (forward_s + backward_s), 1),
        "peak_gib": None if peak is None else round(peak / 2**30, 1),  # of the process: the largest length so far
    }


if __name__ == "__main__":
    raise SystemExit(main())
