"""Does a microbatch cost what the adapters in it cost, however many a job has? Checks first, then times.

    python -m benchmarks.adapter_counts --out benchmarks/results/adapter_counts_h200_2026-11-24
    python -m benchmarks.adapter_counts --small        # tiny shapes, on a CPU

A decoder of two layers of Llama-3.1-8B's shape and jobs of 4, 64 and 256 adapters of rank 16. The same samples of four
adapters, with the same weights and dropout, run in each job: losses and gradient sums must be those of the smallest
job. Then a microbatch of four adapters, one of sixteen, and an optimizer step are timed in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import conditions
from benchmarks.stages import draw_adapter, full_microbatch, random_stage
from lorafusion_jax.config.schema import AdapterConfig, DataSettings, LoraSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.session.dry_runs import time_passes
from lorafusion_jax.session.leaves import SUMS, own_columns, place_of, take
from lorafusion_jax.session.move import to_stage
from lorafusion_jax.session.stage import Stage

LAYERS, TOGETHER, DROPOUT, TOLERANCE = 2, 4, 0.1, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Counts(options).run()


class Counts:
    """One stage for each number of adapters, all on one device, over the same frozen weights."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.began = options, time.perf_counter()
        wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        tiny = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        shape = tiny if options.small else wide
        self.model = ModelConfig(family="llama", vocab_size=4096, num_layers=LAYERS, **shape)
        self.tokens, self.tile = (256, 16) if options.small else (8192, 128)
        self.dtype = jnp.float32 if options.small else jnp.bfloat16

    def run(self) -> None:
        self.say({"conditions": conditions(), "layers": LAYERS, "rank": self.options.rank, "tokens": self.tokens})
        stages = {count: self.stage(count) for count in self.options.counts}
        with ThreadPoolExecutor(len(stages)) as threads:  # programs of different jobs compile side by side
            checked = list(threads.map(lambda item: self.one_batch(*item), stages.items()))
        self.say({"what": "compiled and run", "seconds": time.perf_counter() - self.began})
        for count, result in zip(stages, checked, strict=True):
            self.guarded(self.compare, count, checked[0], result)
        for places in (TOGETHER, 4 * TOGETHER):
            able = {count: stage for count, stage in stages.items() if count >= places}
            self.guarded(self.time_microbatches, able, places)
        self.guarded(self.time_steps, stages)

    def say(self, row: Mapping[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        with (self.options.out / "adapter_counts.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def guarded(self, case: Any, *arguments: Any) -> None:
        try:
            case(*arguments)
        except Exception as problem:  # one failing case does not end the rest
            self.say({"what": case.__name__, "error": f"{type(problem).__name__}: {str(problem)[:300]}"})

    def stage(self, count: int) -> Stage:
        """A started stage; its chosen adapters have the weights and seeds of the smallest job's."""
        seeds = {index: number for number, index in enumerate(chosen(count, TOGETHER))}
        adapters = tuple(
            AdapterConfig(
                name=f"a{index}", data=DataSettings(train="-"), seed=seeds.get(index, 1000 + index),
                lora=LoraSettings(rank=self.options.rank, alpha=2 * self.options.rank, dropout=DROPOUT),
            )
            for index in range(count)
        )  # fmt: skip
        stage = random_stage(self.model, adapters, self.dtype)
        first = [draw_adapter(stage.parts, adapters[number].name, number) for number in range(TOGETHER)]
        stage.start({adapter.name: first[seeds.get(index, 0)] for index, adapter in enumerate(adapters)})
        held, trained = stage.count_elements(), sum(leaf.size for leaf in first[0].values()) * count
        self.say({"what": "stored", "adapters": count, "own": trained, **held})
        return stage

    def batch(self, adapters: Sequence[int]) -> Microbatch:
        return full_microbatch(self.model, adapters, tokens=self.tokens, tile=self.tile)

    def one_batch(self, count: int, stage: Stage) -> dict[str, np.ndarray]:
        """Losses and gradient sums of the chosen adapters after one microbatch of them."""
        places = chosen(count, TOGETHER)
        losses = stage.forward(0, to_stage(self.batch(places), stage.mesh), None)
        stage.backward(0, None)
        columns, specs = stage.programs.columns, stage.parts.specs
        shape = own_columns(columns, 0, specs[0])  # all have one
        cut = jax.jit(lambda first, sums: take(sums, columns, shape, first, lead=SUMS))
        sums = [jax.device_get(cut(place_of(columns, index, specs[index]).first, stage.sums)) for index in places]
        gradients = {f"{number} {name}": leaf for number, of in enumerate(sums) for name, leaf in of.items()}
        return {"loss": np.asarray(losses)[0, list(places)]} | gradients

    def compare(self, count: int, first: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
        errors = {
            key: np.abs(results[key] - leaf).max() / max(np.abs(leaf).max(), 1e-30) for key, leaf in first.items()
        }
        worst = max(errors, key=errors.__getitem__)
        good = all(np.isfinite(leaf).all() for leaf in results.values()) and errors[worst] <= TOLERANCE
        row = {"adapters": count, "largest_error": float(errors[worst]), "of": worst, "good": bool(good)}
        self.say({"what": "same as in the smallest job"} | row)

    def time_microbatches(self, stages: Mapping[int, Stage], together: int) -> None:
        """Forward and backward of one microbatch with so many adapters in it, the jobs in turns."""
        batches = {count: to_stage(self.batch(chosen(count, together)), s.mesh) for count, s in stages.items()}
        with ThreadPoolExecutor(len(stages)) as threads:
            list(threads.map(lambda count: time_passes(stages[count], batches[count]), stages))
        times: dict[int, list[float]] = {count: [] for count in stages}
        for _ in range(self.options.repeats):
            for count, stage in stages.items():
                times[count].append(sum(time_passes(stage, batches[count])))
        self.report(f"microbatch of {together} adapters", times)

    def time_steps(self, stages: Mapping[int, Stage]) -> None:
        """One adapter's optimizer step."""
        times: dict[int, list[float]] = {count: [] for count in stages}
        for turn in range(self.options.repeats + 1):
            for count, stage in stages.items():
                began = time.perf_counter()
                summary, _ = stage.close_batch(0)
                stage.step(0, [summary], stage.unchanging_hyper(0))
                jax.block_until_ready((stage.lora, stage.sums))
                times[count] += [time.perf_counter() - began] * bool(turn)
        self.report("optimizer step", times)

    def report(self, what: str, times: Mapping[int, Sequence[float]]) -> None:
        medians = {count: statistics.median(samples) for count, samples in times.items()}
        base = next(iter(medians.values()))
        for count, median in medians.items():
            row = {"what": what, "adapters": count, "ms": round(1e3 * median, 3), "ratio": round(median / base, 4)}
            self.say(row | {"seconds": round(time.perf_counter() - self.began, 1)})


def chosen(count: int, together: int) -> tuple[int, ...]:
    """Adapters of a job, spread over all of it."""
    return tuple((number + 1) * count // together - 1 for number in range(together))


if __name__ == "__main__":
    main()
