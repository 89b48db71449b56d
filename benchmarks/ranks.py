"""Adapters of different ranks in one call: is it right, what does a layer cost, and where does the time go?

    python -m benchmarks.ranks --out benchmarks/results/ranks_h200_2026-11-25      # one Hopper GPU, 4 minutes
    python -m benchmarks.ranks --out /tmp/ranks --small                            # any machine: does it run?

Microbatches of the trainer, and the linears of a decoder layer, of Qwen3-8B's shape, 8192 tokens, forward and backward,
dropout 0.1, four adapters. "first 16" is the same call when the fused kernels take the first 16 of large ranks. Then
results are compared with those of the XLA form in float32: ranks 1 to 256 in one call, and 300 adapters.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks.conditions import conditions
from benchmarks.stages import draw_adapter, full_microbatch, random_stage
from lorafusion_jax.config.schema import AdapterConfig, DataSettings, LoraSettings
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.session.dry_runs import time_passes
from lorafusion_jax.session.move import to_stage
from lorafusion_jax.session.stage import Stage
from pallas_kernels import policy
from pallas_kernels.dropout import mix32
from pallas_kernels.mlp.xla import silu_gate
from pallas_kernels.tuning.timing import time_calls

PARTS = ("microbatches", "layers", "profile", "check")
RATE, TILE, BF16 = 0.1, 128, 1e-2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    tokens: int = 8192
    width: int = 4096
    kv: int = 1024
    inner: int = 12288

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        d, f = self.width, self.inner
        return {
            "q": (d, d), "k": (d, self.kv), "v": (d, self.kv), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)
        }  # fmt: skip


SMALL = Sizes(tokens=2048, width=256, kv=128, inner=512)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    ranks: tuple[int, ...]  # of the adapters; none: frozen
    first: str = ""  # "16": the fused kernels take the first 16 ranks of each call also where all ranks are large

    def policy(self):
        """A context in which the policy decides so."""

        def first_ranks(shape):
            fits = shape.joint_rank <= policy.MAX_RANK
            return shape.ranks if fits else tuple(min(rank, policy.MIN_RANK) for rank in shape.ranks)

        return mock.patch.object(policy, "first_ranks", first_ranks) if self.first else contextlib.nullcontext()


BASE = Case(name="4 x r16", ranks=(16,) * 4)
MIXED = (16, 16, 16, 128)
CASES = (  # most telling first
    BASE,
    Case(name="4 x r128", ranks=(128,) * 4),
    Case(name="frozen", ranks=()),
    Case(name="4 x r256", ranks=(256,) * 4),
    Case(name="3 x r16, r128", ranks=MIXED),
    Case(name="4 x r128, first 16", ranks=(128,) * 4, first="16"),
    Case(name="4 x r256, first 16", ranks=(256,) * 4, first="16"),
)
LARGEST = 256


class Recorder:
    """Rows on the screen and in a file, as they come; an error is a row, too."""

    def __init__(self, folder: Path, seconds: float = 0.0, name: str = "ranks.jsonl"):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / name
        self._start, self.seconds = time.monotonic(), seconds

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self._start)

    def add(self, **row: Any) -> None:
        row["at_s"] = round(time.monotonic() - self._start, 1)
        text = json.dumps(row)
        print(text, flush=True)
        with self._path.open("a") as stream:
            stream.write(text + "\n")

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # one case must not end the others
            self.add(part="error", name=name, why=f"{type(error).__name__}: {error}"[:600])
            traceback.print_exc(limit=8)
            return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "ranks")), help="folder of the run")
    parser.add_argument("--small", action="store_true", help="tiny shapes, by XLA where there is no Hopper GPU")
    parser.add_argument("--cases", nargs="+", help="of microbatches; default: all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=190, help="no new case is begun after them")
    options = parser.parse_args()
    recorder = Recorder(options.out, options.seconds)
    recorder.add(part="conditions", **conditions())
    sizes = SMALL if options.small else Sizes()
    if "microbatches" in options.parts:
        microbatches(recorder, sizes, options.small, options.cases, with_profile="profile" in options.parts)
    compiled = layers(recorder, sizes, options.small) if "layers" in options.parts else {}
    if "profile" in options.parts:
        for name in ("4 x r16", "4 x r128"):
            if name in compiled:
                fn, arrays = compiled[name]
                work = functools.partial(profile, recorder, name, functools.partial(fn, arrays))
                recorder.attempt(f"profile {name}", work)
    compiled.clear()
    if "check" in options.parts:
        check(recorder, small=options.small)
    return 0


# --- correctness -------------------------------------------------------------------------------------------------


def check(recorder: Recorder, *, small: bool) -> None:
    """Values and gradients against the XLA form in float32."""
    implementation = "xla" if jax.default_backend() != "gpu" else policy.HOPPER
    mixed = (1, 16, 40, 64, 100, 128, 200, 256)
    many = tuple(1 + (7 * i) % 96 for i in range(300))

    def work(name: str, ranks: tuple[int, ...], tile: int, sites: tuple[str, ...]) -> None:
        if recorder.left_s < 20:
            return
        tokens = tile * max(16, len(ranks) + 4)
        sizes = Sizes(tokens=tokens, width=1024, kv=512, inner=2048)
        if small:
            sizes = Sizes(tokens=tokens, width=256, kv=128, inner=256)
        # not given, all count as the largest: the call is then one of large ranks alone
        for given in (True,) if name == "300 adapters" else (False, True):
            errors = check_one(ranks, sizes, tile, sites, given, implementation)
            wrong = {n: e for n, e in errors.items() if not e < BF16}
            recorder.add(part="check", name=name, ranks_given=given, worst=max(errors.values()), wrong=wrong)

    with ThreadPoolExecutor(4) as pool:  # most of the time goes into compiling
        for case in (
            ("mlp", mixed, 128, ("gate", "up", "down")),
            ("siblings", mixed, 128, ("q", "k", "v")),
            ("down", mixed, 128, ("down",)),
            ("300 adapters", many, 64, ("k",)),
        ):
            pool.submit(recorder.attempt, f"check {case[0]}", functools.partial(work, *case))


def check_one(ranks, sizes: Sizes, tile: int, sites, given: bool, implementation: str) -> dict[str, float]:
    arrays = make_arrays(ranks, sizes, tile)
    arrays = {**arrays, "ranks": arrays["ranks"] if given else None}

    def run(implementation, dtype, arrays):
        def f(x, a, b):
            return project(sites, x, {**arrays, "a": a, "b": b}, implementation)

        x = arrays["wide" if sites == ("down",) else "x"].astype(dtype)
        arrays = {**arrays, "w": {n: w.astype(dtype) for n, w in arrays["w"].items()}}
        a, b = ({n: arrays[part][n] for n in sites} for part in "ab")
        ys, pullback = jax.vjp(f, x, a, b)
        return {"y": ys, "gradients": pullback(tuple(jnp.sin(y.astype(jnp.float32)).astype(y.dtype) for y in ys))}

    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(run, "xla", jnp.float32))(arrays)
    got = jax.jit(functools.partial(run, implementation, jnp.bfloat16), compiler_options=pk.compiler_options())(arrays)
    leaves = jax.tree_util.tree_leaves_with_path(jax.tree.map(relative, got, want))
    return {jax.tree_util.keystr(path): float(error) for path, error in leaves}


def relative(got, want) -> float:
    got, want = (np.asarray(array.astype(jnp.float32), np.float64) for array in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


# --- layers ------------------------------------------------------------------------------------------------------


def layers(recorder: Recorder, sizes: Sizes, small: bool) -> dict[str, tuple]:
    """Times the linears of a layer, and prints every case over four adapters of rank 16; half of the time is for it."""
    compiled: dict[str, tuple] = {}
    whole = make_arrays((LARGEST,) * 4, sizes, TILE)
    jax.block_until_ready(whole)
    recorder.add(part="arrays made")

    def finish(case: Case, lowered, arrays, start: float) -> None:
        begun = time.monotonic()
        fn = lowered.compile()
        done = time.monotonic()
        jax.block_until_ready(fn(arrays))
        recorder.add(part="compile", name=case.name, lower_s=round(begun - start, 1), compile_s=round(done - begun, 1))
        compiled[case.name] = fn, arrays

    with ThreadPoolExecutor(6) as pool:
        for case in CASES:
            if recorder.left_s < 0.55 * recorder.seconds and len(compiled) > 2:
                break
            start, arrays = time.monotonic(), of_ranks(whole, case.ranks)
            with case.policy():  # what it changes is read while lowering
                # an object of its own, or jax would find what it traced for another policy
                layer_of_ranks = functools.partial(layer, ranks=case.ranks or None)
                work = jax.jit(layer_of_ranks, compiler_options=pk.compiler_options()).lower
                lowered = recorder.attempt(f"lower {case.name}", functools.partial(work, arrays))
            if lowered is not None:
                work = functools.partial(finish, case, lowered, arrays, start)
                pool.submit(recorder.attempt, f"compile {case.name}", work)
    names = [case.name for case in CASES if case.name in compiled]
    calls = {name: (compiled[name][0], [(compiled[name][1],)]) for name in names}
    timings = time_calls(calls, rounds=2 if small else 9, round_s=0.001 if small else 0.06)
    base = timings.get(BASE.name)
    for name, timing in timings.items():
        ratio = round(timing.p50_us / base.p50_us, 4) if base else None
        recorder.add(part="layer", name=name, over_r16=ratio, **dataclasses.asdict(timing))
    return compiled


def make_arrays(ranks: Sequence[int], sizes: Sizes, tile: int) -> dict[str, Any]:
    """One program makes all arrays: a small one for each would compile for longer than anything runs."""
    count, rank, tiles = len(ranks), max(ranks), sizes.tokens // tile
    owners = np.arange(tiles) * count // tiles
    if count > 4:  # padding rows, and tiles in no order
        owners = np.random.default_rng(0).permutation(owners)
        owners[1] = -1

    @jax.jit
    def make():
        def normal(number, shape, scale, dtype=jnp.bfloat16):
            """Of three terms, from a hash: a random number generator takes longer to compile."""
            n = jnp.arange(np.prod(shape), dtype=jnp.uint32) + jnp.uint32(number) * jnp.uint32(0x9E3779B9)
            terms = [mix32(n ^ jnp.uint32(salt)) for salt in (0x243F6A88, 0x85A308D3, 0x13198A2E)]
            total = sum((term >> 8).astype(jnp.float32) * 2**-24 - 0.5 for term in terms)
            return (2 * scale * total).reshape(shape).astype(dtype)

        d, linears = sizes.width, sizes.linears
        arrays = {"x": normal(98, (sizes.tokens, d), 1.0), "attended": normal(99, (sizes.tokens, d), 1.0)}
        arrays["wide"] = normal(97, (sizes.tokens, sizes.inner), 1.0)
        arrays["w"] = {name: normal(i, shape, 0.02) for i, (name, shape) in enumerate(linears.items())}
        shapes = enumerate(linears.items())
        arrays["a"] = {name: normal(10 + i, (count, k, rank), 0.02, jnp.float32) for i, (name, (k, _)) in shapes}
        shapes = enumerate(linears.items())
        arrays["b"] = {name: normal(20 + i, (count, rank, n), 0.02, jnp.float32) for i, (name, (_, n)) in shapes}
        return arrays | {
            "scale": jnp.full(count, 2.0), "rate": jnp.full(count, RATE),
            "key": mix32(jnp.arange(count, dtype=jnp.uint32)),
            "row_key": mix32(jnp.arange(sizes.tokens, dtype=jnp.uint32)),
        }  # fmt: skip

    return of_ranks(make() | {"tile_adapter": jnp.asarray(owners, jnp.int32)}, ranks)


def of_ranks(arrays: dict[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """The call with adapters of these ranks: what lies beyond an adapter's own is zero."""
    if not ranks:
        return {**arrays, "a": {}, "b": {}, "ranks": jnp.zeros(4, jnp.int32)}
    rank, table = max(ranks), jnp.asarray(ranks, jnp.int32)

    @jax.jit
    def cut(a, b):
        in_rank = jnp.arange(rank)[None, :] < table[:, None]
        a = {name: bank[:, :, :rank] * in_rank[:, None, :] for name, bank in a.items()}
        return a, {name: bank[:, :rank] * in_rank[:, :, None] for name, bank in b.items()}

    a, b = cut(arrays["a"], arrays["b"])
    return {**arrays, "a": a, "b": b, "ranks": table}


def layer(arrays, *, ranks: tuple[int, ...] | None):
    """Forward and backward of all linears; attention and norms, which are the same everywhere, are left out."""

    def forward(x, attended, a, b):
        given = {**arrays, "a": a, "b": b, "ranks": ranks}
        qkv = project(("q", "k", "v"), x, given, None)
        return *qkv, *project(("o",), attended, given, None), *project(("gate", "up", "down"), x, given, None)

    if not arrays["a"]:
        ys, pullback = jax.vjp(lambda x, o: forward(x, o, {}, {}), arrays["x"], arrays["attended"])
    else:
        ys, pullback = jax.vjp(forward, arrays["x"], arrays["attended"], arrays["a"], arrays["b"])
    return pullback(ys)


def project(sites, x, arrays, implementation) -> tuple[jax.Array, ...]:
    w, a, b = ([arrays[part].get(name) for name in sites] for part in "wab")
    dropout = pk.Dropout(rate=arrays["rate"], key=arrays["key"], row_key=arrays["row_key"])
    rest = {name: arrays[name] for name in ("tile_adapter", "scale", "ranks")}
    if a[0] is None:
        return frozen(sites, x, w)
    if "gate" in sites:
        other = dataclasses.replace(dropout, key=pk.fold_key(arrays["key"], 1))
        down = {"dropout": dropout, "down_dropout": other, "implementation": implementation}
        return (pk.multi_lora_mlp(x, w, a, b, **rest, **down),)
    return pk.multi_lora_linears(x, w, a, b, dropout=dropout, implementation=implementation, **rest)


def frozen(sites, x, w) -> tuple[jax.Array, ...]:
    if "gate" in sites:
        gate, up, down = w
        return (silu_gate(x @ gate, x @ up) @ down,)
    return tuple(x @ kernel for kernel in w)


# --- the trainer's own programs ----------------------------------------------------------------------------------


def microbatches(
    recorder: Recorder, sizes: Sizes, small: bool, only: Sequence[str] | None, *, with_profile: bool
) -> None:
    """A microbatch of 8192 tokens in the trainer, over one of four adapters of rank 16.

    A ninth of Qwen3-8B: four of its layers and as much of its vocabulary.
    """
    heads = {"num_heads": 4, "num_kv_heads": 2} if small else {"num_heads": 32, "num_kv_heads": 8}
    model = ModelConfig(
        family="qwen3", vocab_size=512 if small else 16896, num_layers=4, hidden_size=sizes.width,
        intermediate_size=sizes.inner, head_dim=sizes.width // heads["num_heads"], **heads,
    )  # fmt: skip
    cases = [case for case in CASES if case.ranks and (case.name in only if only else not case.first)]
    tokens, dtype = (512, jnp.float32) if small else (sizes.tokens, jnp.bfloat16)

    def start(ranks: Sequence[int]) -> tuple[Stage, Any]:
        adapters = tuple(
            AdapterConfig(
                name=f"a{index}", data=DataSettings(train="-"), seed=index,
                lora=LoraSettings(rank=rank, alpha=2 * rank, dropout=RATE),
            )
            for index, rank in enumerate(ranks)
        )  # fmt: skip
        stage = random_stage(model, adapters, dtype)
        stage.start({adapter.name: draw_adapter(stage.parts, adapter.name, 0) for adapter in adapters})
        batch = to_stage(full_microbatch(model, range(len(ranks)), tokens=tokens, tile=TILE), stage.mesh)
        time_passes(stage, batch)
        return stage, batch

    def attempt(case: Case) -> Any:
        return recorder.attempt(f"microbatch {case.name}", functools.partial(start, case.ranks))

    with ThreadPoolExecutor(len(cases)) as pool:
        usual = [case for case in cases if not case.first]
        started = dict(zip((case.name for case in usual), pool.map(attempt, usual), strict=True))
    for case in cases:
        if case.first:  # one at a time: what it changes is read while lowering
            with case.policy():
                started[case.name] = attempt(case)
    recorder.add(part="microbatches compiled")
    times: dict[str, list[float]] = {name: [] for name, stage in started.items() if stage is not None}
    for _ in range(2 if small else 15):
        for name, seconds in times.items():
            stage, batch = started[name]
            seconds.append(sum(time_passes(stage, batch)))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, median in medians.items():
        ratio = round(median / medians[BASE.name], 4) if BASE.name in medians else None
        spread = [round(1e3 * float(second), 2) for second in np.percentile(times[name], (20, 80))]
        recorder.add(part="microbatch", name=name, over_r16=ratio, ms=round(1e3 * median, 2), p20_p80_ms=spread)
    for name in times if with_profile else ():
        stage, batch = started[name]
        passes = functools.partial(time_passes, stage, batch)
        work = functools.partial(profile, recorder, f"microbatch {name}", passes)
        recorder.attempt(f"profile microbatch {name}", work)


# --- where the time goes -----------------------------------------------------------------------------------------


def profile(recorder: Recorder, name: str, run: Callable[[], Any], runs: int = 5) -> None:
    """Time of every kind of kernel in one call."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                out = run()
            jax.block_until_ready(out)
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        spent, count = defaultdict(float), defaultdict(int)
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    kind = re.sub(r"[._]\d+$", "", event.name)
                    spent[kind] += event.duration_ns / 1e3 / runs
                    count[kind] += 1
    total = sum(spent.values())
    recorder.add(part="profile", name=name, total_us=round(total))
    for kind, us in sorted(spent.items(), key=lambda pair: -pair[1])[:40]:
        recorder.add(part="kernel", name=name, kernel=kind[:90], us=round(us, 1), times=count[kind] / runs)


if __name__ == "__main__":
    sys.exit(main())
