"""What `lorafusion plan` predicts for large bases, stored plain and quantised: nothing here is measured.

python -m benchmarks.quantised_plan    # prints the table of docs/pages/quantised.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.workloads import SHAPES
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.layer import REMAT_POLICIES
from lorafusion_jax.planning.memory import GIB, MemoryProblem, fits, largest_capacity, memory_problem, stage_memory
from lorafusion_jax.planning.prediction import predicted_costs

ADAPTERS, RANK, DROPOUT = 4, 16, 0.1
LARGEST = 8192  # tokens of a microbatch
SAMPLE = 512  # tokens, for the share of attention
H200 = 140 * GIB
RATES = "h200"
MEASURED = ("none", "fp8")  # what layers of other kinds take to be dequantised is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A base on devices of a size.

    Args:
        at_home: whether the device is the one whose rates are known; on others no time is predicted.
    """

    model: str
    quantize: str
    device: str
    device_bytes: int
    stages: int = 1
    at_home: bool = True


CASES = (
    *(Case(model="8b", quantize=kind, device="H200", device_bytes=H200) for kind in ("none", "fp8", "int8", "nf4")),
    *(
        Case(model="8b", quantize=kind, device="24 GB", device_bytes=24 * 10**9, at_home=False)
        for kind in ("none", "int8", "nf4")
    ),
    *(Case(model="32b", quantize=kind, device="H200", device_bytes=H200) for kind in ("none", "fp8", "nf4")),
    *(Case(model="70b", quantize=kind, device="H200", device_bytes=H200) for kind in ("none", "fp8", "nf4")),
    Case(model="70b", quantize="fp8", device="2 H200, stages", device_bytes=H200, stages=2),
    Case(model="70b", quantize="nf4", device="80 GB", device_bytes=80 * 10**9, at_home=False),
)


def quantised_bases() -> str:
    """The table in Markdown."""
    head = ["| base | stored as | device | microbatch | saved for backward | GB a stage | tok/s |", "|---" * 7 + "|"]
    return "\n".join([*head, *(_row(case) for case in CASES)]) + "\n"


def _row(case: Case) -> str:
    config, model = _job(case), ModelConfig(**SHAPES[case.model])
    problem = memory_problem(config, model)
    start = f"| {case.model.upper()} | {case.quantize} | {case.device} |"
    largest = _largest(problem, case.device_bytes)
    if largest is None:
        weights = max(stage.frozen for stage in stage_memory(problem)) / 1e9
        return f"{start} does not fit | | {weights:.0f} of weights | |"
    peak = max(stage.total for stage in stage_memory(largest)) / 1e9
    at_most = "" if case.quantize in MEASURED else "≤ "
    speed = f"{at_most}{_tokens_per_s(config, model, largest) / 1e3:.1f} k" if case.at_home else "–"
    return f"{start} {largest.capacity_tokens} | {largest.remat} | {peak:.0f} | {speed} |"


def _largest(problem: MemoryProblem, device_bytes: int) -> MemoryProblem | None:
    """With the largest microbatch that fits, and the fastest `train.remat` for it."""
    tokens = largest_capacity(dataclasses.replace(problem, remat="nothing"), device_bytes)
    return next((variant for variant in _policies(problem, tokens) if tokens and fits(variant, device_bytes)), None)


def _policies(problem: MemoryProblem, tokens: int) -> Iterator[MemoryProblem]:
    return (dataclasses.replace(problem, remat=remat, capacity_tokens=tokens) for remat in REMAT_POLICIES)


def _tokens_per_s(config: JobConfig, model: ModelConfig, problem: MemoryProblem) -> float:
    """Of full microbatches without pauses; a pipeline runs at its slowest stage. Where nothing is saved, backward
    repeats the forward pass, which `lorafusion plan` does not count."""
    costs, tokens = predicted_costs(config, model, RATES), problem.capacity_tokens
    squares = tokens * SAMPLE
    passes = 2 if problem.remat == "nothing" else 1
    slots = [
        passes * stage.forward.seconds(tokens, squares) + stage.backward.seconds(tokens, squares)
        for stage in costs.stages
    ]
    return tokens / max(slots)


def _job(case: Case) -> JobConfig:
    lora = {"rank": RANK, "dropout": DROPOUT}
    return JobConfig.model_validate(
        {
            "base": {"model": case.model, "quantize": case.quantize},
            "batch": {"capacity_tokens": LARGEST},
            "mesh": {"stages": case.stages},
            "adapters": [{"name": f"a{i}", "data": {"train": "-"}, "lora": lora} for i in range(ADAPTERS)],
        }
    )


if __name__ == "__main__":
    print(quantised_bases())
