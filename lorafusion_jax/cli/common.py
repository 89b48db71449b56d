"""Shared parts of the commands: options, consoles, output, machine settings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.warm_start import read_warm_starts
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases
from lorafusion_jax.cli.tuning_table import use_tables
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import CheckpointError, ConfigError, ErrorList, LoraFusionError, raise_all
from lorafusion_jax.files import user_cache
from lorafusion_jax.layout.layer import LAYER
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.weights.checkpoint_formats import check_stored_as
from lorafusion_jax.weights.table import NONE, check_kernels

JobFile = Annotated[Path, typer.Argument(metavar="JOBS", help="job file, YAML or TOML")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="run folder")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="settings that override those of the file, e.g. train.max_steps=20; optim.lr=1e-4 applies to adapters "
        "without their own value, adapters.NAME.optim.lr=1e-4 to one adapter",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def out() -> Console:
    """Console of standard output. It is wide outside a terminal, so that tables in logs are not truncated."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def plain_table(left: Sequence[str], right: Sequence[str], **options) -> Table:
    """A table without lines: text columns on the left, number columns on the right; cells are not wrapped."""
    table = Table(box=None, header_style="bold", pad_edge=False, **options)
    for title in left:
        table.add_column(title, no_wrap=True)
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def errors_to() -> Console:
    return Console(stderr=True)


def typed(jobs: Path, overrides: Sequence[str] | None) -> str:
    """Job file and settings as typed on a command line."""
    return shlex.join([str(jobs), *(overrides or ())])


def checked_data(config: JobConfig | None, errors: Sequence[LoraFusionError]) -> tuple[JobConfig, Prepared]:
    """Reads the data and warm starts of a job. Raises their errors together with `errors`.

    Args:
        config, errors: from `examine_config`.
    """
    if config is None:
        raise_all(errors)
    assert config is not None
    found, prepared = list(errors), None
    for read in (read_warm_starts, prepare):
        try:
            prepared = read(config)
        except LoraFusionError as problem:
            found += getattr(problem, "errors", [problem])
    raise_all(found + check_start_bases(config))
    assert isinstance(prepared, Prepared)
    return config, prepared


def layer_problems(config: JobConfig) -> tuple[list[str], list[LoraFusionError]]:
    """What is wrong with the layers of each stage and how they are stored, or why that cannot be said; a base of no
    known kind is no mistake of the job file."""
    mesh, quantize = config.mesh, config.base.quantize
    try:
        directory = base_directory(config)
        model = ModelConfig.from_hf(directory)
        check_stored_as(quantize, model.checkpoint_format, where=str(directory))
        check_kernels(quantize, LAYER.kernel_shapes(model))
        stage_layers(model, mesh.stages, mesh.layers)
    except CheckpointError as problem:
        if mesh.stages == 1 and mesh.layers is None and quantize == NONE:
            return [], []
        return [f"the layers of each stage are not checked: {problem.what}"], []
    except ConfigError as problem:
        return [], [problem]
    except ErrorList as problem:
        return [], list(problem.errors)
    return [], []


def ends_in(path: Path, *endings: str) -> None:
    """Checks that the suffix of an output file fits its content.

    Raises:
        ConfigError: `output.ending`.
    """
    if path.suffix not in endings:
        raise ConfigError(
            "output.ending",
            f"{path} does not end in {' or '.join(endings)}.",
            fix=" or ".join(str(path.with_suffix(ending)) for ending in endings),
        )


def next_command(console: Console, command: str) -> None:
    """Prints the command to type next, as the last line."""
    console.print(f"next: {command}", style="bold", highlight=False, markup=False, soft_wrap=True)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a text, wrapped on a terminal and in one line elsewhere."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def warn(console: Console, texts: list[str]) -> None:
    if texts:
        console.print("warnings", style="bold yellow")
        for text in texts:
            say(console, f"  {text}")


MEMORY_FRACTION = 0.95  # of a GPU; CUDA, cuDNN and NCCL need about 1 GiB of the rest
# If one of several GPUs runs out of memory inside a program, XLA lets the others wait forever (jax 0.11.2). The limit
# is longer than the differences in compile time between processes.
GPUS_WAIT = "--xla_gpu_nccl_termination_timeout_seconds=600"


ProgramCache = Annotated[
    bool,
    typer.Option(
        "--program-cache/--no-program-cache",
        help="keep compiled programs for the next start, in the user's cache folder (see lorafusion doctor)",
    ),
]


def program_cache() -> Path:
    """Where compiled programs are kept, `$XDG_CACHE_HOME/lorafusion/programs` on Linux; it may be removed any time."""
    return user_cache("programs")


def prepare_machine(*, cache: bool = True) -> None:
    """Sets what jax must know before it touches a device.

    Most of a GPU's memory may be used: jax's own default of 75 % leaves 35 GB of an H200 idle, and what fits decides
    what has to be computed twice. Compiled programs are kept between runs, unless jax was told of another place; small
    ones, too, for a start has a hundred of them. GPUs that wait for another one end the program after ten minutes.
    Anything the user has told jax stays. Tables of `lorafusion tune` decide the defaults of the ops.

    Args:
        cache: whether programs are kept.
    Raises:
        ConfigError, ErrorList: a tuning table is broken or of another device.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if GPUS_WAIT.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {GPUS_WAIT}".strip()
    if jax.config.jax_pjrt_client_create_options is None:
        jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": MEMORY_FRACTION})
    if not cache:
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(program_cache()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    use_tables()
