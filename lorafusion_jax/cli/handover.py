"""lorafusion handover: an adapter of a run into a server that runs already."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.cli.common import RunPath, next_command
from lorafusion_jax.cli.export import exported_folder
from lorafusion_jax.errors import ConfigError, quoted
from lorafusion_jax.report.console import out
from lorafusion_jax.report.servers import (
    Server,
    checked_url,
    commands,
    folder_loader,
    into_ollama,
    read_key,
    type_for_vllm,
)


def command(
    run: RunPath,
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="name of the adapter")],
    vllm: Annotated[str | None, typer.Option(metavar="URL", help="of a vLLM server, such as http://gpu:8000")] = None,
    sglang: Annotated[str | None, typer.Option(metavar="URL", help="of an SGLang server")] = None,
    ollama: Annotated[str | None, typer.Option(metavar="URL", help="of an Ollama server, with --gguf")] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="for Ollama: the adapter, or the merged model, as llama.cpp converts it")
    ] = None,
    base_name: Annotated[
        str | None, typer.Option("--base", help="for Ollama: its name of the base, if --gguf is an adapter")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="its name in the server", show_default="the adapter's")
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="the adapter's folder as the server sees it", show_default="that of the run")
    ] = None,
    prompt: Annotated[str, typer.Option(help="what it is asked once it is loaded")] = "Hello",
    max_tokens: Annotated[int, typer.Option(min=1, help="of the answer")] = 64,
    step: Annotated[int | None, typer.Option(help="exported step", show_default="the newest")] = None,
    key_file: Annotated[Path | None, typer.Option(help="file with the server's API key")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="for each answer of the server")] = 120.0,
) -> None:
    """Loads an adapter into a server that runs, and asks it one prompt.

    Example: lorafusion handover runs/exp1 law --vllm http://127.0.0.1:8000

    Example: lorafusion handover runs/exp1 law --ollama http://127.0.0.1:11434 --gguf law.gguf --base llama3.1
    """
    from lorafusion_jax.checkpoint.base_model import base_in_commands
    from lorafusion_jax.checkpoint.folder import RunFolder, step_of
    from lorafusion_jax.config.specs import adapter_spec
    from lorafusion_jax.peft.leaves import exported_spec

    servers = {"vllm": vllm, "sglang": sglang, "ollama": ollama}
    if len(named := {kind: url for kind, url in servers.items() if url is not None}) != 1:
        raise ConfigError("handover.options", "name one server.", fix="--vllm URL, --sglang URL, or --ollama URL")
    ((kind, url),) = named.items()
    if kind != "ollama" and (gguf is not None or base_name is not None):
        raise ConfigError("handover.options", "--gguf and --base are for Ollama.", fix=f"leave them out of --{kind}")
    if kind == "ollama" and path is not None:
        raise ConfigError("handover.options", "Ollama is sent the file itself.", fix="--gguf FILE instead of --path")
    folder = RunFolder(run)
    config = folder.read_config()
    source = exported_folder(folder, [entry.name for entry in config.adapters], adapter, step)
    spec = exported_spec(adapter_spec(config.adapter(adapter)))
    model_type = type_for_vllm(config, spec) if kind == "vllm" else ""
    base, key = base_in_commands(config), read_key(key_file)
    export = f"lorafusion export {quoted(run)} {adapter} --merge --to FOLDER"
    if kind == "ollama":
        merged = f"{export}, python convert_hf_to_gguf.py FOLDER, --gguf F"
        lines = commands(base, {adapter: (spec, source)})
        convert = next((line for line in lines if line.startswith("python")), None)
        beside_base = merged if convert is None else f"{convert}, --gguf F --base NAME-IN-OLLAMA"
        if gguf is None or (base_name is not None and convert is None):
            message = "Ollama takes a GGUF file." if gguf is None else f"{adapter} has a form that llama.cpp lacks."
            raise ConfigError(
                "handover.form", message, fix=merged if convert is None else f"{beside_base}; or {merged}"
            )
        server = Server(url=checked_url(url), key=key, timeout_s=timeout_s, start="ollama serve")
        makes_file = merged if base_name is None else beside_base
        load = partial(into_ollama, file=gguf, base=base_name, makes_file=makes_file, merged=merged)
    else:
        try:
            server, load = folder_loader(kind, url, spec, base, model_type, key=key, timeout_s=timeout_s)
        except ConfigError as problem:
            fix = problem.fix or f"{export}, and serve the merged model"
            raise ConfigError(problem.code, problem.what, why=problem.why, fix=fix) from None
    console, served_name = out(), name or adapter
    ask = load(server, served_name, path or str(source.resolve()))
    console.print(
        f"loaded {adapter} (step {step_of(source)}) as {served_name}: {server.url}", highlight=False, markup=False
    )
    answer = ask(prompt, max_tokens)
    console.print(f"{prompt!r} → {answer!r}", highlight=False, markup=False, soft_wrap=True)
    next_command(console, f"lorafusion generate {quoted(run)} {quoted(prompt)} --adapter {adapter}")
