"""lorafusion handover: an adapter of a run into a server that runs already."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.folder import RunFolder, step_of
from lorafusion_jax.cli.common import RunPath, next_command
from lorafusion_jax.cli.export import (
    EXPERTS_FLAG,
    EXPERTS_KEY,
    base_if_here,
    commands,
    exported_folder,
    needs_flag,
    type_of,
)
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_spec
from lorafusion_jax.errors import ConfigError, RunError, shortened_text
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.peft.leaves import exported_spec
from lorafusion_jax.readable import SETTINGS, read_text
from lorafusion_jax.report.console import out

LARGEST_ANSWER = 1 << 20  # bytes
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
    """
    if (vllm is None) == (sglang is None):
        raise ConfigError("handover.options", "name one server.", fix="--vllm URL, or --sglang URL")
    folder = RunFolder(run)
    config = folder.read_config()
    source = exported_folder(folder, [entry.name for entry in config.adapters], adapter, step)
    spec = exported_spec(adapter_spec(config.adapter(adapter)))
    model_type = _type_for_server(config, spec, is_vllm=vllm is not None)
    base, flagged = config.base.hub_id or str(config.base.model), vllm is not None and needs_flag(spec, model_type)
    lines = commands(base, {adapter: (spec, source)}, model_type)
    if not any(line.startswith("vllm") for line in lines):
        message = f"{adapter} has a form that servers do not load as an adapter."
        fix = f"lorafusion export {run} {adapter} --merge --to FOLDER, and serve the merged model"
        raise ConfigError("handover.form", message, fix=fix)
    kind = "vllm" if vllm is not None else "sglang"
    before, behind = START[kind]
    start = f"{before} {base} {behind.format(rank=lines[0].split('--max-lora-rank ')[1].split()[0])}"
    start += f" {EXPERTS_FLAG}" if flagged else ""
    server = Server(url=_checked_url(vllm or sglang or ""), key=_read_key(key_file), timeout_s=timeout_s, start=start)
    load = {"vllm": partial(_into_vllm, flagged=flagged), "sglang": _into_sglang}[kind]
    console, served_name = out(), name or adapter
    ask = load(server, served_name, path or str(source.resolve()))
    console.print(
        f"loaded {adapter} (step {step_of(source)}) as {served_name}: {server.url}", highlight=False, markup=False
    )
    answer = ask(prompt, max_tokens)
    console.print(f"{prompt!r} → {answer!r}", highlight=False, markup=False, soft_wrap=True)
    next_command(console, f"lorafusion generate {run} {json.dumps(prompt)} --adapter {adapter}")


def _type_for_server(config: JobConfig, spec: AdapterSpec, *, is_vllm: bool) -> str:
    """The base's model type, or one whose adapters are all sent where the server shall answer itself."""
    if not is_vllm:
        return "gpt_oss"  # what SGLang does with experts was not tried
    if spec.on_experts:  # how vLLM takes them depends on it
        return type_of(ModelConfig.from_hf(base_directory(config)))
    return type_of(base_if_here(config)) or "llama"


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

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Sends JSON, and returns the answer: JSON, or the text.

        Raises:
            RunError: `handover.no-server`, `handover.refused`.
        """
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
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


Ask = Callable[[str, int], str]


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


def _read_key(path: Path | None) -> str | None:
    return None if path is None else read_text(path, SETTINGS).strip()


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError("handover.options", f"{url} is no address of a server.", fix="such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")
