"""python -m lorafusion_jax.serve.control.child_process: answers requests, one JSON a line, within their limits.

It checks jobs, counts and shows the rows of uploaded files, and renders rows with the prompt templates of mLoRA's
clients.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.places import ON_EXPERTS, Places, class_name, place_kind
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.data.preview import render_preview
from lorafusion_jax.data.row_blocks import LARGE, unpacked_parquet_bytes
from lorafusion_jax.data.sources import kind_of, open_source, row_blocks
from lorafusion_jax.data.template.compiled import render
from lorafusion_jax.errors import DataError, LoraFusionError, raise_all
from lorafusion_jax.planning.checks import checked_data, layer_problems
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.serve.control.spec import examine
from lorafusion_jax.serve.refusals import describe
from scheduling import PlanError
from scheduling.checks import check_jobs

UNPACKED_BYTES, UNPACKED_RATIO = 64 << 20, 200  # of the rows of a Parquet file, beside its own bytes
MOST_COLUMNS, COLUMN_ROWS = 100, 1000  # columns that are listed, and rows that are looked at for them
Problem = dict[str, str]
MOST_LENGTHS = 256  # of a job's samples, for predictions
MOST_ROWS = 1_000_000
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
ADDRESSES = 4 << 30
LOWER = 5  # priority for the processor than the server's


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request."""
    match request["what"]:
        case "check":
            return check(request["values"], request["places"])
        case "preview":
            return preview(request["values"], request["row"])
        case "render":
            return render_rows(request)
        case _:
            return count(Path(request["file"]), request["most_bytes"])


def limit(seconds: float, memory_bytes: int) -> None:
    """Limits the processor time and the memory that this process may take from now on; then the system ends it.

    Libraries reserve addresses that they never use, so these have a wider limit than memory that can be written.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes + ADDRESSES, resource.RLIM_INFINITY))


def data_bytes() -> int:
    """Memory of this process that it can write."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def stay_small() -> None:
    """Ends with the server, before any other process when the machine has no memory, and leaves the processor to it."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    os.nice(LOWER)
    with suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> int:
    parent = os.getppid()
    for stop in (signal.SIGINT, signal.SIGTERM):  # a service manager sends them to all processes of a service at once:
        signal.signal(stop, signal.SIG_IGN)  # a job whose check had ended so would be rejected
    stay_small()
    if os.getppid() != parent:  # it ended before it could be noticed
        return 1
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    at_start = data_bytes()
    for line in sys.stdin:
        request = json.loads(line)
        limit(request["limits"]["seconds"], at_start + request["limits"]["bytes"])
        output.write(json.dumps(answer(request)) + "\n")
        output.flush()
    return 0


def render_rows(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the first rows, or writes all of them as JSONL.

    Args:
        request: `file` of rows, `prompt` with the key `template`, `type` of the prompt, `most` rows, and the file
            `to` write.
    """
    try:
        template = yaml.safe_load(Path(request["prompt"]).read_text(encoding="utf-8"))["template"]
        text = Path(request["file"]).read_text(encoding="utf-8")
        rows = yaml.safe_load(text) if request["file"].endswith(".yaml") else json.loads(text)
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as problem:
        return _refuse(f"the file cannot be read: {type(problem).__name__}")
    if not isinstance(rows, list) or not isinstance(template, str) or len(rows) > MOST_ROWS:
        return _refuse("the data must be a list of rows, and the prompt a mapping with the text `template`")
    texts = []
    try:
        for row in rows[: request["most"]]:
            texts += [_render_row(template, row, request["type"])]
    except ValueError as problem:
        return _refuse(f"row {len(texts)}: {str(problem).splitlines()[0]}")
    if request["to"] is None:
        return {"problems": [], "rows": texts}
    with Path(request["to"]).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in texts)
    return {"problems": [], "rows": []}


def _render_row(template: str, row: Any, kind: str) -> dict[str, str]:
    """A text, or a prompt with two answers: what both texts begin with, and their rests."""
    if kind == "instruction":
        return {"text": render(template, {"data_point": row})}
    chosen, rejected = (render(template, {"data_point": row, "is_chosen": is_chosen}) for is_chosen in (True, False))
    prompt = os.path.commonprefix([chosen, rejected])
    return {"prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}


def _refuse(message: str) -> dict[str, Any]:
    return {"problems": [{"code": "mlora.rows", "where": "rows", "what": message}]}


def check(values: dict[str, Any], places: dict[str, int]) -> dict[str, Any]:
    """Returns `{"problems": [...]}`, with `steps`, `tokens`, `eval_tokens`, `rank` and `lengths` if there are none."""
    try:
        config, errors = examine(values)
        more = [] if config is None else layer_problems(config)[1]
        config, prepared = checked_data(config, [*errors, *more])
        (job,) = train_jobs(config, prepared)
        check_jobs(
            [job],
            capacity_tokens=config.batch.sizes,
            num_stages=config.mesh.stages,
            data_parallel=config.mesh.replicas,
            tile_tokens=config.batch.tile_tokens,
        )
    except (LoraFusionError, PlanError) as problem:
        return {"problems": [describe(error) for error in getattr(problem, "errors", [problem])]}
    (spec,) = adapter_specs(config)
    layout = Places.of(places)
    if why := layout.refuses(spec):
        return {"problems": [_place_problem(layout, spec, why)]}
    lengths = job.stream[:: max(1, len(job.stream) // MOST_LENGTHS)][:MOST_LENGTHS].tolist()
    held_out = prepared.adapters[spec.name].eval
    sizes = {"steps": job.num_batches, "tokens": int(job.stream.sum()), "rank": spec.rank}
    sizes["eval_tokens"] = 0 if held_out is None else int(held_out.lengths.sum())
    return {"problems": []} | sizes | {"lengths": lengths}


def _place_problem(layout: Places, spec: AdapterSpec, why: str) -> Problem:
    """Says why no place can hold an adapter. Other places may be large enough; some adapters need a run."""
    kind = place_kind(spec)
    larger = f"start the service with --places {class_name(kind, spec.rank)}:1"
    if kind == ON_EXPERTS and kind not in layout.kinds:
        code, where, fix = "job.kind", "lora.targets", f"other lora.targets, or {larger}"
    elif kind not in layout.kinds:
        code, where, fix = "job.kind", "lora.kind", f"another lora.kind, or {larger}"
    elif not layout.holds(kind, spec.rank):
        code, where, fix = "job.rank", "lora.rank", f"a smaller lora.rank, or {larger}"
    elif layout.lacks_head(spec):
        code, where, fix = "job.objective", "objective", "its default options, or train it in a run: lorafusion train"
    else:
        code, where, fix = "job.not-served", "lora", "train it in a run: lorafusion train"
    return {"code": code, "where": where, "what": f"{why}.", "why": "", "fix": fix}


def count(file: Path, most_bytes: int) -> dict[str, Any]:
    """Returns rows and columns of a file, or its problems. It reads block by block.

    Args:
        most_bytes: that the rows may have once they are unpacked.
    """
    rows, columns = 0, set[str]()
    try:
        _check_unpacked(file, most_bytes)
        for block in row_blocks(open_source(str(file), Path(".")), one_block=False):
            raise_all(block.problems)
            columns.update(key for row in block.values[: max(0, COLUMN_ROWS - rows)] for key in row)
            rows += len(block.values)
    except LoraFusionError as problem:
        return {"problems": [_without_path(describe(error), file) for error in getattr(problem, "errors", [problem])]}
    return {"problems": [], "rows": rows, "columns": sorted(columns)[:MOST_COLUMNS]}


def preview(values: dict[str, Any], row: int) -> dict[str, Any]:
    """Returns a row as text, with ⟦ ⟧ around what is learned. Of the file it reads nothing after that row."""
    (adapter,) = values["adapters"]
    file = Path(adapter["data"]["train"])
    with tempfile.TemporaryDirectory(prefix="preview-") as folder:
        part = Path(folder) / f"{file.stem}.jsonl"
        try:
            line = json.dumps(_row(file, row), default=str)
            part.write_text("\n" * row + line + "\n", encoding="utf-8")  # messages name its line
            adapter = adapter | {"data": adapter["data"] | {"train": str(part)}}
            prepared = prepare(parse_config(source_of(values | {"adapters": [adapter]})))
        except LoraFusionError as problem:
            errors = [describe(error) for error in getattr(problem, "errors", [problem])]
            return {"problems": [{k: v.replace(str(part), str(file)) for k, v in error.items()} for error in errors]}
        samples = prepared.adapters[adapter["name"]].train
        samples = dataclasses.replace(samples, rows=samples.rows + row)
        output = io.StringIO()
        Console(file=output, width=120).print(render_preview(samples, prepared.tokenizer, title="preview"))
        text = output.getvalue().replace(str(part), str(file))
        tokens, mask = samples.sample(0)
        return {"problems": [], "text": text, "tokens": len(tokens), "learned": int(mask.sum())}


def _check_unpacked(file: Path, most_bytes: int) -> None:
    """Refuses a small file that would take much of the memory and time of all who read it.

    Raises:
        DataError: `data.unpacked`.
    """
    if kind_of(file) != "parquet":
        return
    most = min(most_bytes, UNPACKED_BYTES + UNPACKED_RATIO * file.stat().st_size)
    if unpacked_parquet_bytes(str(file), file, most) > most:
        raise DataError(
            "data.unpacked",
            f"the rows of the file take more than {most >> 20} MiB once they are unpacked.",
            where="the file",
            why=f"a file of its size has at most {UNPACKED_BYTES >> 20} MiB and {UNPACKED_RATIO} times its bytes here",
            fix="split it, remove what is repeated, or upload the rows as JSONL",
        )


def _row(file: Path, row: int) -> dict[str, Any]:
    """Reads blocks of a file up to a row.

    Raises:
        DataError: `data.row`; problems of the block.
    """
    kind, rows = kind_of(file), 0
    assert kind is not None
    for block in LARGE[kind](str(file), file):
        if row < rows + len(block.values):
            return block.values[row - rows]
        raise_all(block.problems)
        rows += len(block.values)
    raise DataError("data.row", f"the data set has {rows} rows.", where="row", fix="a smaller row")


def _without_path(problem: dict[str, str], file: Path) -> dict[str, str]:
    """Nothing of the server's folders reaches a client."""
    fix = problem.get("fix", "").replace(str(file.with_suffix("")), "FILE")  # commands name files beside it, too
    problem = problem | ({"fix": fix} if fix else {})
    return {key: text.replace(str(file), "the file").replace(str(file.parent), "") for key, text in problem.items()}


if __name__ == "__main__":
    sys.exit(main())
