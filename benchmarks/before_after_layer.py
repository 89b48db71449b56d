"""Times decoder layers of one checkout in turns: `before_after.py` runs it in two checkouts at once.

Imports what the checkout on PYTHONPATH has; run with `python -P`. Reads commands from standard input, and writes
`ANSWER` and JSON for each:

    compile        compiles the layers, which are traced at the start
    NAME SECONDS   runs this layer for so long untimed, then as long timed; answers microseconds of a call
"""

from __future__ import annotations

import json
import sys

from benchmarks import kernel_layer as kl
from benchmarks.quantised_programs import layers, lowered
from pallas_kernels.tuning.timing import time_calls

NAMES = ("bf16", "fp8")  # four adapters of rank 16 with dropout, forward and backward, on bases stored in these forms
SMALL = kl.Shape(name="small", width=128, heads=2, key_heads=1, head=64, inner=256, tokens=256)


def main() -> None:
    shape = SMALL if "--small" in sys.argv else kl.SHAPES[0]
    programs = [program for program in layers(shape) if program.name in NAMES]
    traced = {}
    for program in programs:
        operands = program.operands()
        traced[program.name] = lowered(program, operands, None), operands
    calls = {}
    answer(list(traced))
    for line in sys.stdin:
        name, *seconds = line.rsplit(maxsplit=1)
        if name == "compile":
            calls = {case: (program.compile(), [operands]) for case, (program, operands) in traced.items()}
            answer(len(calls))
        else:
            answer(time_calls({name: calls[name]}, rounds=1, round_s=float(seconds[0]))[name].p50_us)


def answer(value: object) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
