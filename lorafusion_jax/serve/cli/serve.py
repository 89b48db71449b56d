"""lorafusion serve: a training service on this machine."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafusion_jax.errors import ConfigError, did_you_mean, install_line
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.report.console import out
from lorafusion_jax.report.servers import read_key
from lorafusion_jax.serve.settings import ONE_SESSION, Settings

NEEDED = ("fastapi", "uvicorn", "sqlalchemy", "prometheus_client")
NEEDED_BY_API = ("google.protobuf", "zstandard")
MOST_SAMPLER_PLACES = 256
SECTIONS = ("base", "mesh", "batch", "train")
PLACES, DEMO_PLACES = "16:8,64:2", "16:2,64:1"
DEMO = {"batch.capacity_tokens": 512, "base.dtype": "float32"}  # settings of its session


SessionSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="settings of the session as in a job file, e.g. batch.capacity_tokens=4096"
    ),
]
Bases = Annotated[list[str] | None, typer.Option(help="base model, FOLDER or NAME=FOLDER")]
Home = Annotated[
    Path | None,
    typer.Option(help="folder of the database, data, jobs and adapters", show_default="service; of --demo: a new one"),
]
PlaceCounts = Annotated[
    str | None,
    typer.Option(
        help="places of a session, RANK:NUMBER,… or KIND:RANK:NUMBER",
        show_default=f"{PLACES}; of --demo: {DEMO_PLACES}",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="who decides which jobs train together", show_default="one-session; ours with several bases or GPUs"
    ),
]
Gpus = Annotated[int, typer.Option(min=0, max=1024, help="GPUs of this machine or cluster, for the policy; 0: the CPU")]
GpuMemory = Annotated[
    float | None, typer.Option(min=1, help="memory of each GPU, for the policy", show_default="by device")
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="device whose rates the policy plans with, as in plan",
        show_default="that of this machine, which the start names",
    ),
]
Host = Annotated[str, typer.Option(help="address to listen on; other than this machine needs a key")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")]
HostNames = Annotated[list[str] | None, typer.Option(help="further name under which it is reached")]
Reproducible = Annotated[
    bool, typer.Option("--reproducible", help="an adapter does not depend on other jobs by a single bit; less dense")
]
MloraRoutes = Annotated[
    bool, typer.Option("--mlora-compat", help="also serve mLoRA's 17 routes, to this machine and without keys")
]
TrainingApi = Annotated[
    bool, typer.Option("--training-api", help="also serve the training API: the tinker SDK trains by calls")
]
JobsShare = Annotated[
    float | None,
    typer.Option(
        min=0.001, max=1000, help="weight of all jobs beside each owner of the training API", show_default="0.5"
    ),
]
YieldSeconds = Annotated[
    float | None, typer.Option(min=0, help="seconds in its place before a job leaves it to another", show_default="60")
]
SamplingShare = Annotated[
    float | None,
    typer.Option(min=0.01, max=0.99, help="of the time for samples while training waits, too", show_default="0.5"),
]
SamplerPlaces = Annotated[
    str | None,
    typer.Option(
        help="adapters sampled from at a time, NUMBER or RANK:NUMBER with the largest rank", show_default="16"
    ),
]
SaveSeconds = Annotated[float, typer.Option(min=0.1, help="seconds between two saves of a job")]
LeaseSeconds = Annotated[float, typer.Option(min=0.5, help="seconds without a sign after which a worker is lost")]
Ray = Annotated[str | None, typer.Option(metavar="ADDRESS", help="run workers on a Ray cluster: auto, or HOST:PORT")]
WorkersAt = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="with --ray: where workers reach this server; all nodes share --home"),
]
Hosts = Annotated[int, typer.Option(min=1, max=1024, help="with --ray: nodes with --gpus each, for the policy")]
Artifacts = Annotated[
    str | None,
    typer.Option(metavar="URL", help="publish finished adapters there, too: s3://…, gs://…, file:///…; needs fsspec"),
]
HandOver = Annotated[
    str | None,
    typer.Option(
        metavar="KIND=URL", help="load finished adapters into a server, too: vllm=http://…, or sglang=http://…"
    ),
]
HandOverKey = Annotated[Path | None, typer.Option(help="file with the API key of --handover")]
ChildMemory = Annotated[float, typer.Option(min=0.25, help="memory of the processes that read data, together")]
Demo = Annotated[bool, typer.Option("--demo", help="a tiny base and three jobs of two users, on the CPU")]


def command(
    settings: SessionSettings = None,
    base: Bases = None,
    home: Home = None,
    places: PlaceCounts = None,
    policy: Policy = None,
    gpus: Gpus = 1,
    memory_gib: GpuMemory = None,
    device: Device = None,
    host: Host = "127.0.0.1",
    port: Port = 7070,
    host_name: HostNames = None,
    reproducible: Reproducible = False,
    mlora_compat: MloraRoutes = False,
    training_api: TrainingApi = False,
    jobs_share: JobsShare = None,
    yield_s: YieldSeconds = None,
    sampling_share: SamplingShare = None,
    sampler_places: SamplerPlaces = None,
    save_s: SaveSeconds = 60.0,
    lease_s: LeaseSeconds = 30.0,
    ray: Ray = None,
    workers_at: WorkersAt = None,
    hosts: Hosts = 1,
    artifacts: Artifacts = None,
    handover: HandOver = None,
    handover_key_file: HandOverKey = None,
    child_memory_gib: ChildMemory = 2.0,
    demo: Demo = False,
) -> None:
    """Runs a training service: jobs in, adapters out, over REST and a web page.

    Example: lorafusion serve --base models/llama-3.1-8b --places 16:8,64:2

    Example: lorafusion serve --demo
    """
    _check_installed(NEEDED + (NEEDED_BY_API if training_api else ()))
    os.umask(0o077)  # keys, data and adapters of all users are in the home
    options = dict(_setting(text) for text in settings or ())
    if demo:
        home = home or Path(tempfile.mkdtemp(prefix="lorafusion-serve-"))
        base, places = base or [f"tiny={examples_directory() / 'base'}"], places or DEMO_PLACES
        _check_demo(places)
        options = DEMO | options
    home, places = home or Path("service"), places or PLACES
    sections = _sections(options)
    policy = read_policy(policy, several=gpus * hosts > 1 or len(base or []) > 1)
    machine, note = read_machine(device, memory_gib, gpus=gpus, policy=policy)
    _check_mesh(sections["mesh"], policy)
    service_settings = Settings(
        home=home.absolute(), bases=_bases(base or []), places=read_places(places), hosts=read_hosts(hosts, ray),
        gpus=gpus, policy=policy, **machine,
        reproducible=reproducible, ray=ray, workers_at=read_workers_at(workers_at, ray),
        mlora_compat=mlora_compat, training_api=training_api, artifacts=artifacts, handover=handover,
        handover_key=read_key(handover_key_file),
        child_memory=int(child_memory_gib * 2**30), save_s=save_s, lease_s=lease_s,
        base=sections["base"], mesh=sections["mesh"], batch=sections["batch"], train=sections["train"],
    )  # fmt: skip
    samplers = None if sampler_places is None else read_sampler_places(sampler_places, places)
    shares = {"jobs_share": jobs_share, "sampling_share": sampling_share, "sampler_places": samplers}
    service_settings = replace(service_settings, **read_shares(service_settings, shares | {"yield_s": yield_s}))
    from lorafusion_jax.serve.server import run_server

    run_server(
        service_settings,
        host=host,
        port=port,
        host_names=host_name or (),
        on_start=partial(_announce, service_settings, demo, note),
    )


def _check_demo(places: str) -> None:
    from lorafusion_jax.serve.demo import JOBS

    needed = max(lora["rank"] for *_, lora, _ in JOBS)
    if largest_rank(places) < needed:
        message = f"--places {places} has no place for a job of --demo, an adapter of rank {needed}."
        raise ConfigError("serve.places", message, fix=f"leave --places out, or --places {needed}:2")


def _announce(settings: Settings, demo: bool, note: str, url: str) -> None:
    """Says where the service listens and what its policy plans with, and submits the jobs of the demo."""
    from rich.markup import escape

    names, home = escape(", ".join(settings.bases)), escape(str(settings.home))
    out().print(f"serving {names} on [bold]{url}[/bold]  ·  home {home}  ·  stop: Ctrl+C")
    if note:
        out().print(note, markup=False)
    if demo:
        from lorafusion_jax.serve.demo import submit_demo

        threading.Thread(target=submit_demo, args=(url, settings), name="demo", daemon=True).start()


def read_places(text: str) -> dict[str, int]:
    """Reads RANK:NUMBER,… or KIND:RANK:NUMBER,…

    Raises:
        ConfigError: `serve.places`.

    >>> read_places("16:8,dora:64:2")
    {'16': 8, 'dora:64': 2}
    """
    from lorafusion_jax.config.places import Places

    parts = [part.strip().rpartition(":") for part in text.split(",")]
    try:
        counts = {name: int(count) for name, _, count in parts}
        Places.of(counts)
    except (ValueError, ConfigError):
        fix = "--places 16:8,64:2,dora:16:1"
        raise ConfigError("serve.places", f"--places {text} is not RANK:NUMBER,…", fix=fix) from None
    return counts


def read_workers_at(text: str | None, ray: str | None) -> tuple[str, int] | None:
    """Reads HOST:PORT, an address of this machine that the nodes of a cluster reach.

    Raises:
        ConfigError: `serve.workers-at`.

    >>> read_workers_at("10.0.0.5:7071", "auto")
    ('10.0.0.5', 7071)
    """
    if text is None and ray is None:
        return None
    host, _, port = (text or "").rpartition(":")
    if ray is None or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        message = (
            f"--workers-at {text} is not HOST:PORT." if ray else "--workers-at is for --ray: other workers are here."
        )
        fix = "--ray auto --workers-at 10.0.0.5:7071, with an address of this machine that the nodes reach"
        raise ConfigError("serve.workers-at", message, why="workers on other nodes connect to it", fix=fix)
    return host, int(port)


def read_shares(settings: Settings, shares: dict[str, Any]) -> dict[str, Any]:
    """Returns the shares that were given.

    Raises:
        ConfigError: `serve.share`, it would have no effect.
    """
    shares = {name: value for name, value in shares.items() if value is not None}
    if "jobs_share" in shares and not settings.training_api:
        why = "clients of the training API share the slots with jobs"
        raise ConfigError("serve.share", "--jobs-share has no effect here.", why=why, fix="add --training-api")
    if "yield_s" in shares and settings.policy != ONE_SESSION:
        why = f"the policy {settings.policy} decides when jobs leave their places"
        raise ConfigError("serve.share", "--yield-s has no effect here.", why=why, fix="leave it or --policy out")
    return shares


def read_sampler_places(text: str, places: str) -> int:
    """Reads NUMBER, or RANK:NUMBER with the rank of the largest place: every model can be sampled.

    Raises:
        ConfigError: `serve.sampler-places`.

    >>> read_sampler_places("32:8", "16:4,32:2")
    8
    """
    largest = largest_rank(places)
    rank, _, count = text.rpartition(":")
    if not (count.isdecimal() and 1 <= int(count) <= MOST_SAMPLER_PLACES and rank in ("", str(largest))):
        raise ConfigError(
            "serve.sampler-places",
            f"--sampler-places {text} is neither a number from 1 to {MOST_SAMPLER_PLACES} nor {largest}:NUMBER.",
            why=f"samplers hold adapters of every place, and the largest has rank {largest}",
            fix=f"--sampler-places {largest}:16",
        )
    return int(count)


def largest_rank(places: str) -> int:
    from lorafusion_jax.config.places import Places

    layout = Places.of(read_places(places))
    by_kind = zip(layout.kinds, layout.ranks, strict=True)
    return max((rank for kind, rank in by_kind if kind == "lora"), default=0)


def read_hosts(hosts: int, ray: str | None) -> int:
    """Returns the number of hosts; without a cluster there is one.

    Raises:
        ConfigError: `serve.hosts`.
    """
    if hosts > 1 and ray is None:
        message, fix = "--hosts is for --ray: other workers are on this machine.", "--ray auto --workers-at HOST:PORT"
        raise ConfigError("serve.hosts", message, fix=fix)
    return hosts


def read_policy(name: str | None, *, several: bool) -> str:
    """Returns the policy; with several GPUs or bases, one session for all jobs is no choice.

    Raises:
        ConfigError: `serve.policy`.
    """
    if name is None:
        return "ours" if several else ONE_SESSION
    from scheduling.online import POLICIES

    policies = [*POLICIES] if several else [ONE_SESSION, *POLICIES]
    if name not in policies:
        raise ConfigError(
            "serve.policy", f"--policy {name} is none of this service.", fix=f"one of {', '.join(policies)}"
        )
    return name


def read_machine(device: str | None, memory_gib: float | None, *, gpus: int, policy: str) -> tuple[dict[str, Any], str]:
    """Returns the device and the memory that a policy plans with, and a line that says so.

    Raises:
        ConfigError: `serve.device`.
    """
    options = [name for name, value in (("--device", device), ("--memory-gib", memory_gib)) if value is not None]
    if options and (policy == ONE_SESSION or not gpus):
        why = "one session of one base has no plan of GPUs" if gpus else "--gpus 0 plans with the rates of a CPU"
        raise ConfigError(
            "serve.device", f"{options[0]} has no effect here.", why=why, fix=f"leave {options[0]} out, or add --gpus 2"
        )
    if policy == ONE_SESSION or not gpus:
        return {}, ""
    from lorafusion_jax.planning.prediction import DEVICES, machine_note, memory_of, this_device

    devices = [name for name in DEVICES if name != "cpu"]
    if device is not None and device not in devices:
        raise ConfigError("serve.device", f"there are no rates of {device}.", fix=f"one of {', '.join(devices)}")
    why = "--device" if device else machine_note()
    device = device or (this_device() if this_device() in devices else devices[0])
    memory = memory_gib or (memory_of(device) or 0) / 2**30
    note = f"the policy {policy} plans with the rates of {device} and {memory:g} GiB a GPU  ·  {why}"
    return {"device": device, "memory_gib": memory}, note


def _check_mesh(mesh: dict[str, Any], policy: str) -> None:
    """Checks that no setting is given that the policy decides.

    Raises:
        ConfigError: `serve.setting`.
    """
    if mesh and policy != ONE_SESSION:
        why = f"the policy {policy} decides the mesh of each session"
        message = f"mesh.{next(iter(mesh))} has no effect here."
        raise ConfigError("serve.setting", message, why=why, fix="leave it out")


def _check_installed(needed: Sequence[str]) -> None:
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "serve.missing",
            f"a service needs {', '.join(missing)}.",
            fix=install_line("serve"),
        )


def _bases(bases: list[str]) -> dict[str, Path]:
    from lorafusion_jax.checkpoint.base_model import similar_folder
    from lorafusion_jax.readable import has_file

    if not bases:
        message, fix = (
            "a service needs a base model.",
            "--base models/llama-3.1-8b, or --base NAME=FOLDER, once or more",
        )
        raise ConfigError("serve.base", message, fix=fix)
    paths = {}
    for text in bases:
        name, is_named, folder = text.partition("=")
        path = Path(folder if is_named else text).absolute()
        if not has_file(path / "config.json"):
            fix = similar_folder(path, folder if is_named else text, "a folder with config.json and *.safetensors")
            raise ConfigError("serve.base", f"{path} is not the folder of a model.", fix=fix)
        key = name if is_named else path.name
        if key in paths:
            raise ConfigError("serve.base", f"two bases are called {key}.", fix=f"--base OTHER={path}")
        paths[key] = path
    return paths


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    from lorafusion_jax.config.schema import SHARED

    key, is_setting, value = text.partition("=")
    valid = [f"{section}.{name}" for section in SECTIONS for name in SHARED[section].model_fields]
    valid.remove("base.model")
    if not is_setting or key not in valid:
        sections = f"KEY=VALUE with a key of {', '.join(SECTIONS)} of a job file"
        near = f"{key}=VALUE" if key in valid else did_you_mean(key, valid)
        fix = "--base FOLDER" if key == "base.model" else near or sections
        raise ConfigError("serve.setting", f"{text!r} is not a setting of a session.", fix=fix)
    return key, yaml.safe_load(value)


def _sections(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    from lorafusion_jax.config.load import parse_config
    from lorafusion_jax.config.read import source_of
    from lorafusion_jax.config.stack import check_session

    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    adapter = {"name": "any", "data": {"train": "-", "max_length": 2}}
    config = parse_config(source_of(sections | {"base": {"model": "-"} | sections["base"], "adapters": [adapter]}))
    check_session(config)
    return sections
