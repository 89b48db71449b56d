"""lorafusion jobs …: submit, list, show, watch, log, metrics, cancel, pause, continue, weight, download, delete."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafusion_jax.errors import ConfigError, RunError, raise_all
from lorafusion_jax.readable import SETTINGS, read_text, to_utf8
from lorafusion_jax.report.console import out, plain_table
from lorafusion_jax.report.format import loss_text
from lorafusion_jax.serve.client import Client, ServiceError
from lorafusion_jax.serve.refusals import KEYS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from lorafusion_jax.config.schema import AdapterConfig, JobConfig

KEY_FILE = "~/.config/lorafusion/key"

app = typer.Typer(no_args_is_help=True, help="Jobs of a service that `lorafusion serve` runs.")
Url = Annotated[str, typer.Option(metavar="URL", help="address of the service")]
Key = Annotated[Path | None, typer.Option("--key-file", help="file with the key", show_default=KEY_FILE)]
Name = Annotated[str, typer.Argument(metavar="JOB", help="id of the job")]
KEY = re.compile(r"tml-lf_[a-z2-7]{8}_[A-Za-z0-9_-]{43}")
LOCAL = "http://127.0.0.1:7070"
FIXES = {  # of refusals, as a command line has them
    "api.key": f"write the key that `lorafusion keys add` or `serve --demo` printed to {KEY_FILE}, or --key-file FILE",
    "api.not-found": "lorafusion jobs ls",
}


@app.command()
def submit(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS", help="job file; each of its adapters becomes a job")],
    base: Annotated[
        str | None, typer.Option(help="name of the base", show_default="the folder's name in the file")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(min=-100, max=100, help="higher ones are placed first", show_default="the file's")
    ] = None,
    url: Url = LOCAL,
    key_file: Key = None,
) -> None:
    """Submits the adapters of a job file and uploads their data.

    Example: lorafusion jobs submit jobs.yaml
    """
    from lorafusion_jax.config.load import load_config

    config = load_config(jobs)
    more = {} if priority is None else {"priority": priority}
    with _service(url, key_file) as client:
        for adapter in config.adapters:
            job = client.submit(job_of(config, adapter, base) | more)
            print(f"{job.id}  {adapter.name}")


@app.command("ls")
def list_jobs(
    state: Annotated[list[str] | None, typer.Option(help="only jobs in this state")] = None,
    url: Url = LOCAL,
    key_file: Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Lists jobs, newest first.

    Example: lorafusion jobs ls --state running
    """
    with _service(url, key_file) as client:
        rows = list(client.jobs(**({"state": state} if state else {})))
    if as_json:
        print(json.dumps(rows))
        return
    table = plain_table(("job", "name", "owner", "state"), ("step", "loss", "weight"))
    for row in rows:
        loss = loss_text(row["loss"], 3)
        step = f"{row['step']}/{row['steps'] or '?'}"
        table.add_row(row["id"], row["name"], row["owner"], row["state"], step, loss, f"{row['weight']:g}")
    out().print(table)


@app.command()
def show(job: Name, url: Url = LOCAL, key_file: Key = None) -> None:
    """Shows a job as JSON, with its transitions and problems.

    Example: lorafusion jobs show job-0123456789ab
    """
    with _service(url, key_file) as client:
        print(json.dumps(client.job(job).show(), indent=1))


@app.command()
def watch(job: Name, url: Url = LOCAL, key_file: Key = None) -> None:
    """Follows a job until it has ended.

    Example: lorafusion jobs watch job-0123456789ab
    """
    console = out()
    with _service(url, key_file) as client:
        handle = client.job(job)
        handle.show()  # refused at once, where there is no such job or service
        for event in handle.events():
            if event["kind"] == "step":
                console.print(f"step {event['step']}  loss {loss_text(event['loss'])}", highlight=False)
            elif event["kind"] == "eval":
                console.print(f"step {event['step']}  held-out loss {loss_text(event['eval_loss'])}", highlight=False)
            elif event["kind"] == "state":
                is_refused = event["after"] == "rejected"  # what follows says why
                why = f": {event['why']}" if event["why"] and not is_refused else ""
                console.print(f"{event['after']}{why}", highlight=False, markup=False)
                if is_refused:
                    for problem in handle.show()["problems"]:
                        console.print(str(_as_error(problem)), highlight=False, markup=False, soft_wrap=True)


@app.command()
def log(
    job: Name,
    tail: Annotated[int, typer.Option(min=1, max=10_000, help="only so many last lines")] = 200,
    url: Url = LOCAL,
    key_file: Key = None,
) -> None:
    """Shows what happened to a job: every change of its state, who asked for it, and why.

    Example: lorafusion jobs log job-0123456789ab
    """
    with _service(url, key_file) as client:
        print(client.job(job).log(tail), end="")


@app.command()
def metrics(
    job: Name,
    from_step: Annotated[int, typer.Option(min=0, help="rows from this step on")] = 0,
    url: Url = LOCAL,
    key_file: Key = None,
) -> None:
    """Prints the rows of a job's steps and evaluations, a JSON object a line.

    Example: lorafusion jobs metrics job-0123456789ab > law.jsonl
    """
    with _service(url, key_file) as client:
        for row in client.job(job).metrics(from_step):
            print(json.dumps(row))


@app.command()
def cancel(job: Name, url: Url = LOCAL, key_file: Key = None) -> None:
    """Cancels a job.

    Example: lorafusion jobs cancel job-0123456789ab
    """
    _ask(url, key_file, lambda client: client.job(job).cancel())


@app.command()
def pause(job: Name, url: Url = LOCAL, key_file: Key = None) -> None:
    """Pauses a job; others get its place.

    Example: lorafusion jobs pause job-0123456789ab
    """
    _ask(url, key_file, lambda client: client.job(job).pause())


@app.command("continue")
def resume(job: Name, url: Url = LOCAL, key_file: Key = None) -> None:
    """Continues a paused job where it stopped.

    Example: lorafusion jobs continue job-0123456789ab
    """
    _ask(url, key_file, lambda client: client.job(job).resume())


@app.command(context_settings={"ignore_unknown_options": True})  # -1 is a number
def weight(
    job: Name,
    value: Annotated[float, typer.Argument(metavar="WEIGHT", help="above 0")],
    url: Url = LOCAL,
    key_file: Key = None,
) -> None:
    """Changes a job's share of the session relative to other jobs.

    Example: lorafusion jobs weight job-0123456789ab 2
    """
    _ask(url, key_file, lambda client: client.job(job).set_weight(value))


@app.command(context_settings={"ignore_unknown_options": True})
def priority(
    job: Name,
    value: Annotated[int, typer.Argument(metavar="PRIORITY", help="-100 to 100; higher ones are placed first")],
    url: Url = LOCAL,
    key_file: Key = None,
) -> None:
    """Changes a job's priority. It takes the place of a job of a lower one if none is free.

    Example: lorafusion jobs priority job-0123456789ab 10
    """
    _ask(url, key_file, lambda client: client.job(job).set_priority(value))


@app.command()
def download(
    job: Name,
    to: Annotated[Path, typer.Option("--to", help="new folder")],
    url: Url = LOCAL,
    key_file: Key = None,
) -> None:
    """Downloads a trained adapter as a PEFT folder and checks its digests.

    Example: lorafusion jobs download job-0123456789ab --to adapters/law
    """
    if to.exists():
        raise ConfigError("export.exists", f"{to} exists already.", fix="choose another folder, or remove this one")
    with _service(url, key_file) as client:
        print(client.job(job).adapter(to))


@app.command()
def delete(job: Name, url: Url = LOCAL, key_file: Key = None) -> None:
    """Deletes a job that has ended; its adapter stays.

    Example: lorafusion jobs delete job-0123456789ab
    """
    _ask(url, key_file, lambda client: client.job(job).delete())


def job_of(config: JobConfig, adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """Converts an adapter of a job file to a job of the service.

    Raises:
        ConfigError: `jobs.not-served`, the file asks for something that a service does not do.
    """
    from lorafusion_jax.config.references import BASE, START
    from lorafusion_jax.serve.control.spec import LoraSpec

    directory = Path(config.directory)
    held_out = adapter.data.eval if isinstance(adapter.data.eval, tuple) else ()
    is_set_by_name = {
        "objective.reference: a folder or an adapter": adapter.objective.reference not in (None, BASE, START),
        "lora.init_from (use init_from of the service)": adapter.lora.init_from is not None,
        "early_stop.patience": adapter.early_stop.patience is not None,
        "rollout": adapter.rollout.is_on,
        "eval.score": adapter.eval.score is not None,
        "halving": config.halving.is_on,
        "handover (its operator says where: serve --handover)": config.handover.is_on,
        "data.train: a list": len(adapter.data.train) > 1 or any(source.weight != 1 for source in adapter.data.train),
        "data.eval: a list": len(held_out) > 1,
        "data.where": bool(adapter.data.where),
        "data.eval: a share of the rows (name a file)": isinstance(adapter.data.eval, float),
    } | {f"lora.{key}": True for key in _changed(adapter.lora) - {"init_from"} - set(LoraSpec.model_fields)}
    if wrong := [name for name, is_set in is_set_by_name.items() if is_set]:
        raise ConfigError(
            "jobs.not-served",
            f"{adapter.name}: a service does not take {', '.join(wrong)}.",
            fix="leave that out, or train the file here: lorafusion train",
        )
    data = adapter.data.model_dump(mode="json", exclude_none=True, exclude={"where"})
    sources_by_key = {"train": adapter.data.train, "eval": held_out}
    data |= {key: _file_of(sources[0].path, directory) for key, sources in sources_by_key.items() if sources}
    lora = adapter.lora.model_dump(mode="json", exclude_none=True, include=set(LoraSpec.model_fields))
    return {
        "name": adapter.name.lower().replace("=", "-").replace("@", "-").replace("+", "-"),
        "base": base or Path(config.base.model).name,
        "data": data,
        "lora": lora,
        "objective": adapter.objective.model_dump(mode="json", exclude_none=True),
        "optim": adapter.optim.model_dump(mode="json", exclude_none=True),
        "batch": {"global_samples": adapter.global_samples},
        "epochs": adapter.epochs,
        "seed": adapter.seed,
        "weight": adapter.weight,
        "priority": adapter.priority,
    } | ({"steps": config.train.max_steps} if config.train.max_steps else {})


def _file_of(source: str, directory: Path) -> str:
    """The file of a source. Rows of the hub and of installed sources are read here, into a file of the cache."""
    from lorafusion_jax.config.data_sources import is_file
    from lorafusion_jax.data.sources import open_source, row_blocks, store_rows

    if is_file(source):
        return str(directory / source)
    raw = open_source(source, directory)
    return str(store_rows(row for rows in row_blocks(raw) for row in rows.values))


def _changed(settings: BaseModel) -> set[str]:
    """Keys whose values are not the defaults."""
    return set(settings.model_dump(exclude_defaults=True))


def _ask(url: str, key_file: Path | None, act: Callable[[Client], dict[str, Any]]) -> None:
    with _service(url, key_file) as client:
        answer = act(client)
    print(f"{answer['id']}  {answer['state']}")


def _client(url: str, key_file: Path | None) -> Client:
    file = key_file or Path(KEY_FILE).expanduser()
    fix = "--key-file with what `lorafusion keys add` has printed, and nothing else"
    try:
        key = read_text(file, SETTINGS).strip() if key_file or file.is_file() else None
    except UnicodeDecodeError:
        key = ""
    except OSError as problem:
        encoding = getattr(problem, "encoding", None)
        fix = to_utf8(str(file), encoding) if encoding else fix
        raise ConfigError("jobs.key", f"{file} cannot be read.", why=problem.strerror or "", fix=fix) from None
    if key is not None and KEY.fullmatch(key) is None:
        raise ConfigError("jobs.key", f"{file} does not hold a key.", why="a key is one line, tml-lf_…", fix=fix)
    try:
        return Client(url, key)
    except ValueError as problem:
        raise ConfigError("jobs.url", f"--url: {problem}.", fix="--url http://127.0.0.1:7070") from None


def _as_error(refusal: dict[str, str]) -> ConfigError:
    """A refusal of the service as an error of ours, with a fix that is a command."""
    values = {"code": "jobs.refused"} | {key: refusal[key] for key in KEYS if key in refusal}
    fix = FIXES.get(values["code"], values.get("fix", ""))
    values["fix"] = f"--base NAME, {fix}" if values["code"] == "job.base" else fix
    return ConfigError(**{"what": ""} | values)


@contextmanager
def _service(url: str, key_file: Path | None) -> Iterator[Client]:
    """A client; what the service refuses is shown as an error of ours, with a fix that is a command."""
    client = _client(url, key_file)
    try:
        yield client
    except ServiceError as problem:
        raise_all([_as_error(entry) for entry in problem.problems])
    except (OSError, HTTPException, OverflowError) as problem:
        if isinstance(problem, OSError) and problem.filename is not None:  # of this machine
            raise
        why = str(problem) or type(problem).__name__
        fix = "lorafusion serve, or --url with the address of a service that runs"
        raise RunError("jobs.no-service", f"no service answers at {url}.", why=why, fix=fix) from None
