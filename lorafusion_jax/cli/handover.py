"""lorafusion handover: an adapter of a run into a server that runs already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafusion_jax.cli.common import RunPath, next_command
from lorafusion_jax.cli.export import (
    EXPERTS_FLAG,
    EXPERTS_KEY,
    base_if_here,
    commands,
    exported_folder,
    needs_flag,
    type_of,
    why_not_in_vllm,
)
from lorafusion_jax.errors import ConfigError, RunError, shortened_text
from lorafusion_jax.readable import SETTINGS, open_regular, read_text
from lorafusion_jax.report.console import out

if TYPE_CHECKING:
    from lorafusion_jax.adapters.spec import AdapterSpec
    from lorafusion_jax.config.schema import JobConfig

LARGEST_ANSWER = 1 << 20  # bytes
GGUF = b"GGUF"  # how such a file begins
SHOWN = 300  # characters of a server's reason
START = {  # server → what lets a running one take adapters, before and behind the base
    "vllm": ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve", "--enable-lora --max-lora-rank {rank}"),
    "sglang": (
        "python -m sglang.launch_server --model-path",
        "--enable-lora --max-lora-rank {rank} --lora-target-modules all",
    ),
}


def command(
    run: RunPath,
    adapter: Annotated[str, typer.Argument(help="name of the adapter")],
    vllm: Annotated[str | None, typer.Option(metavar="URL", help="of a vLLM server, such as http://gpu:8000")] = None,
    sglang: Annotated[str | None, typer.Option(metavar="URL", help="of an SGLang server")] = None,
    ollama: Annotated[str | None, typer.Option(metavar="URL", help="of an Ollama server, with --gguf")] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="for Ollama: the adapter, or the merged model, as llama.cpp converts it")
    ] = None,
    base_name: Annotated[
        str | None, typer.Option("--base", help="for Ollama: its name of the base, if --gguf is an adapter")
    ] = None,
    name: Annotated[str | None, typer.Option("--as", help="its name in the server [default: the adapter's]")] = None,
    path: Annotated[
        str | None, typer.Option(help="the adapter's folder as the server sees it [default: that of the run]")
    ] = None,
    prompt: Annotated[str, typer.Option(help="what it is asked once it is loaded")] = "Hello",
    max_tokens: Annotated[int, typer.Option(min=1, help="of the answer")] = 64,
    step: Annotated[int | None, typer.Option(help="exported step [default: the newest]")] = None,
    key_file: Annotated[Path | None, typer.Option(help="file with the server's API key")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="for each answer of the server")] = 120.0,
) -> None:
    """Loads an adapter into a server that runs, and asks it one prompt.

    Example: lorafusion handover runs/exp1 law --vllm http://127.0.0.1:8000

    Example: lorafusion handover runs/exp1 law --ollama http://127.0.0.1:11434 --gguf law.gguf --base llama3.1
    """
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
    model_type = _type_for_vllm(config, spec) if kind == "vllm" else ""
    base, key = config.base.hub_id or str(config.base.model), read_key(key_file)
    if kind == "ollama":
        merged = f"lorafusion export {run} {adapter} --merge --to FOLDER, python convert_hf_to_gguf.py FOLDER, --gguf F"
        lines = commands(base, {adapter: (spec, source)})
        convert = next((line for line in lines if line.startswith("python")), None)
        if gguf is None or (base_name is not None and convert is None):
            message = "Ollama takes a GGUF file." if gguf is None else f"{adapter} has a form that llama.cpp lacks."
            fix = merged if convert is None else f"{convert}, --gguf F --base NAME-IN-OLLAMA; or {merged}"
            raise ConfigError("handover.form", message, fix=fix)
        server = Server(url=checked_url(url), key=key, timeout_s=timeout_s, start="ollama serve")
        load = partial(_into_ollama, file=gguf, base=base_name, merged=merged)
    else:
        try:
            server, load = folder_loader(kind, url, spec, base, model_type, key=key, timeout_s=timeout_s)
        except ConfigError as problem:
            fix = problem.fix or f"lorafusion export {run} {adapter} --merge --to FOLDER, and serve the merged model"
            raise ConfigError(problem.code, problem.what, why=problem.why, fix=fix) from None
    console, served_name = out(), name or adapter
    ask = load(server, served_name, path or str(source.resolve()))
    console.print(
        f"loaded {adapter} (step {step_of(source)}) as {served_name}: {server.url}", highlight=False, markup=False
    )
    answer = ask(prompt, max_tokens)
    console.print(f"{prompt!r} → {answer!r}", highlight=False, markup=False, soft_wrap=True)
    next_command(console, f"lorafusion generate {run} {json.dumps(prompt)} --adapter {adapter}")


def _type_for_vllm(config: JobConfig, spec: AdapterSpec) -> str:
    """The base's model type; that of a Llama where it is not here and nothing depends on it."""
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.families.model import ModelConfig

    if spec.on_experts:  # how vLLM takes them depends on it
        return type_of(ModelConfig.from_hf(base_directory(config)))
    return type_of(base_if_here(config)) or "llama"


Ask = Callable[[str, int], str]


def folder_loader(
    kind: str, url: str, spec: AdapterSpec, base: str, model_type: str, *, key: str | None, timeout_s: float
) -> tuple[Server, Callable[[Server, str, str], Ask]]:
    """A server that reads PEFT folders, and the function that loads one there: of server, name and folder.

    Args:
        kind: "vllm" or "sglang".
        base: of the adapter, as the server is started with it.
        model_type: of the base, for vLLM; see `type_of`.

    Raises:
        ConfigError: `handover.options`, `handover.form`, the server would not load this adapter as it was trained.
    """
    # what SGLang does with experts was not tried, so it answers itself
    lines = commands(base, {"adapter": (spec, Path("folder"))}, model_type if kind == "vllm" else "gpt_oss")
    serve = next((line for line in lines if line.startswith("vllm")), None)
    if serve is None:
        message = f"{spec.name} has a form that servers do not load as an adapter."
        raise ConfigError("handover.form", message, why=why_not_in_vllm(spec, model_type) if kind == "vllm" else "")
    flagged = kind == "vllm" and needs_flag(spec, model_type)
    before, behind = START[kind]
    start = f"{before} {base} {behind.format(rank=serve.split('--max-lora-rank ')[1].split()[0])}"
    start += f" {EXPERTS_FLAG}" if flagged else ""
    load = partial(_into_vllm, flagged=flagged) if kind == "vllm" else _into_sglang
    return Server(url=checked_url(url), key=key, timeout_s=timeout_s, start=start), load


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server of another program.

    Attributes:
        start: a command that starts one that takes adapters.
    """

    url: str
    key: str | None
    timeout_s: float
    start: str

    def request(self, path: str, body: dict[str, Any] | Path | None = None) -> Any:
        """Sends JSON or a file, and returns the answer: JSON, or the text.

        Raises:
            RunError: `handover.no-server`, `handover.refused`.
        """
        import http.client  # slow to import, and not for --help
        import urllib.error
        import urllib.request

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with ExitStack() as files:
                if isinstance(body, Path):
                    headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(body.stat().st_size)}
                    data = files.enter_context(body.open("rb"))
                else:
                    headers["Content-Type"] = "application/json"
                    data = None if body is None else json.dumps(body).encode()
                request = urllib.request.Request(self.url + path, data, headers)
                answer = files.enter_context(urllib.request.urlopen(request, timeout=self.timeout_s))
                text = answer.read(LARGEST_ANSWER).decode(errors="replace")
        except urllib.error.HTTPError as problem:
            with problem:
                text = problem.read(LARGEST_ANSWER).decode(errors="replace")
            raise self.refused(path, f"{problem.code}: {_reason(text)}", missing=problem.code in (404, 405)) from None
        except (OSError, http.client.HTTPException) as problem:
            why = str(getattr(problem, "reason", "") or problem or type(problem).__name__)
            message = f"no server answers at {self.url}."
            raise RunError("handover.no-server", message, why=shortened_text(why, SHOWN), fix=self.start) from None
        try:
            return json.loads(text)
        except ValueError:
            return text

    def refused(self, path: str, why: str, *, missing: bool = False) -> RunError:
        """The error of an answer that is none."""
        fix = self.start if missing else "--path FOLDER as the server sees it, or another --as; see the server's log"
        if why.startswith(("401", "403")):
            fix = "--key-file FILE with the key of the server"
        return RunError("handover.refused", f"{self.url}{path} refused.", why=why, fix=fix)


def _into_vllm(server: Server, name: str, path: str, *, flagged: bool) -> Ask:
    if name in _models(server):
        fix = f"--as {name}-2, or POST {server.url}/v1/unload_lora_adapter with {json.dumps({'lora_name': name})}"
        raise RunError("handover.exists", f"{server.url} has a model '{name}' already.", fix=fix)
    server.request(
        "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | ({EXPERTS_KEY: True} if flagged else {})
    )
    if name not in (models := _models(server)):
        raise server.refused("/v1/models", f"'{name}' is not among its models: {', '.join(sorted(models))}")

    def ask(prompt: str, max_tokens: int) -> str:
        body = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = server.request("/v1/completions", body)
        return _text(server, "/v1/completions", answer, lambda: answer["choices"][0]["text"])

    return ask


def _models(server: Server) -> set[str]:
    answer = server.request("/v1/models")
    try:
        return {str(model["id"]) for model in answer["data"]}
    except (TypeError, LookupError):
        raise server.refused("/v1/models", "its answer is no list of models") from None


def _into_sglang(server: Server, name: str, path: str) -> Ask:
    answer = server.request("/load_lora_adapter", {"lora_name": name, "lora_path": path})
    if not (isinstance(answer, dict) and answer.get("success") is True):
        raise server.refused("/load_lora_adapter", _reason(json.dumps(answer)))

    def ask(prompt: str, max_tokens: int) -> str:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0}
        answer = server.request("/generate", {"text": prompt, "sampling_params": sampling, "lora_path": name})
        return _text(server, "/generate", answer, lambda: answer["text"])

    return ask


def _into_ollama(server: Server, name: str, _path: str, *, file: Path, base: str | None, merged: str) -> Ask:
    """Sends the file as a blob, and makes a model of it. Releases of 2026-11 and later refuse adapters."""
    try:
        with open_regular(file) as stream:
            begins, _ = stream.read(len(GGUF)), stream.seek(0)
            digest = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
    except OSError as problem:
        raise ConfigError("handover.form", f"{file} cannot be read.", why=str(problem), fix=merged) from None
    if begins != GGUF:
        raise ConfigError("handover.form", f"{file} is no GGUF file.", fix=merged)
    tagged = name if ":" in name else f"{name}:latest"
    if tagged in _ollama_models(server):
        fix = f"--as {name}-2, or ollama rm {name}"
        raise RunError("handover.exists", f"{server.url} has a model '{name}' already.", fix=fix)
    server.request(f"/api/blobs/{digest}", file)
    files = {"files": {file.name: digest}} if base is None else {"from": base, "adapters": {file.name: digest}}
    try:
        answer = server.request("/api/create", {"model": name, "stream": False} | files)
    except RunError as problem:
        if "adapters are no longer supported" in problem.why:
            raise RunError(problem.code, "this Ollama takes no adapters.", why=problem.why, fix=merged) from None
        raise
    if not (isinstance(answer, dict) and answer.get("status") == "success") or tagged not in _ollama_models(server):
        raise server.refused("/api/create", _reason(json.dumps(answer)))

    def ask(prompt: str, max_tokens: int) -> str:
        options = {"num_predict": max_tokens, "temperature": 0}
        answer = server.request("/api/generate", {"model": name, "prompt": prompt, "stream": False, "options": options})
        return _text(server, "/api/generate", answer, lambda: answer["response"])

    return ask


def _ollama_models(server: Server) -> set[str]:
    answer = server.request("/api/tags")
    try:
        return {str(model["name"]) for model in answer["models"]}
    except (TypeError, LookupError):
        raise server.refused("/api/tags", "its answer is no list of models") from None


def _text(server: Server, path: str, answer: Any, read: Callable[[], Any]) -> str:
    try:
        text = read()
    except (TypeError, LookupError):
        text = None
    if not isinstance(text, str):
        raise server.refused(path, f"its answer has no text: {shortened_text(str(answer), SHOWN)}")
    return text


def _reason(text: str) -> str:
    """What a server says of an error, in any of the forms of JSON that are in use."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in ("error", "message", "error_message", "detail"):
        value = value.get(key, value) if isinstance(value, dict) else value
    return shortened_text(str(value).strip(), SHOWN)


def read_key(path: Path | None) -> str | None:
    """The key in a file; none if there is no file."""
    return None if path is None else read_text(path, SETTINGS).strip()


def checked_url(url: str) -> str:
    """The URL of a server, without a path of its routes."""
    from urllib.parse import urlsplit  # slow to import, and not for --help

    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError("handover.options", f"{url} is no address of a server.", fix="such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")
