"""Running vLLM, SGLang and Ollama: which adapters they take, the commands that start them, and loading into them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorafusion_jax.errors import CheckpointError, ConfigError, LoraFusionError, RunError, quoted, shortened_text
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.readable import SETTINGS, open_regular, read_text
from lorafusion_jax.report.console import errors_to, out, say
from lorafusion_jax.report.events import RunEvent

if TYPE_CHECKING:
    from lorafusion_jax.adapters.spec import AdapterSpec
    from lorafusion_jax.config.schema import JobConfig
    from lorafusion_jax.families.model import ModelConfig

LARGEST_ANSWER = 1 << 20  # bytes
GGUF = b"GGUF"  # how such a file begins
SHOWN = 300  # characters of a server's reason
ANSWER_S, MOST_TOKENS = 120.0, 64  # of an answer at the end of a run
START = {  # server → what lets a running one take adapters, before and behind the base
    "vllm": ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve", "--enable-lora --max-lora-rank {rank}"),
    "sglang": (
        "python -m sglang.launch_server --model-path",
        "--enable-lora --max-lora-rank {rank} --lora-target-modules all",
    ),
}

# Model types, by what their classes in vLLM 0.33 did with folders of ours. Experts in one tensor, as PEFT writes them:
# taken as they are, or where the server and the adapter say so; no other type takes them.
FUSED_EXPERTS = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe")
FLAGGED_EXPERTS = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe",
    "granitemoeshared", "lfm2_moe", "mistral4", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "sarvam_mla",
)  # fmt: skip
EXPERTS_FLAG, EXPERTS_KEY = "--enable-mixed-moe-lora-format", "is_3d_lora_weight"
WITHOUT_CLASS = ("apertus1p5", "apertus1p5_text", "lara_mini")
OTHER_NAMES = ("exaone", "sarvam_moe")  # of projections, those of published files; q_proj alone is left out in silence
WITHOUT_LORA = ("bamba", "gpt2", "stablelm")
SPLIT = {"glm4": "gate_up_proj"}  # a projection that vLLM reads in two parts only
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 512)  # that `--max-lora-rank` takes


def commands(base: str, folders: Mapping[str, tuple[AdapterSpec, Path]], model_type: str = "llama") -> list[str]:
    """Returns the commands that load PEFT folders with the meaning that they were trained with.

    Both programs know one alpha of an adapter, and llama.cpp divides it by the rank even with rsLoRA. vLLM tells the
    projections of experts apart in a folder that has both; llama.cpp does not in all families.

    Args:
        base: folder or hub name of the base model, as a shell reads it.
        folders: the exported adapters by name.
        model_type: of the base as it is published; see `type_of`. Without it there is no command of vLLM.

    >>> from lorafusion_jax.adapters.spec import AdapterSpec
    >>> commands("org/base", {"law": (AdapterSpec(name="law", rank=12, alpha=24), Path("out/law"))})[0]
    'vllm serve org/base --enable-lora --max-lora-rank 16 --lora-modules law=out/law'
    """
    plain = {name: pair for name, pair in folders.items() if _is_plain(pair[0])}
    lines = []
    vllm_folders = {name: pair for name, pair in plain.items() if not why_not_in_vllm(pair[0], model_type)}
    if vllm_folders:
        longest = max(spec.rank for spec, _ in vllm_folders.values())
        rank = next(limit for limit in VLLM_RANKS if limit >= longest)
        flagged = [name for name, (spec, _) in vllm_folders.items() if needs_flag(spec, model_type)]
        modules = " ".join(
            shlex.quote(json.dumps({"name": name, "path": str(folder), EXPERTS_KEY: True}))
            if name in flagged
            else quoted(f"{name}={folder}")
            for name, (_, folder) in vllm_folders.items()
        )
        flag = f"{EXPERTS_FLAG} " if flagged else ""
        lines.append(f"vllm serve {base} --enable-lora {flag}--max-lora-rank {rank} --lora-modules {modules}")
    lines += [
        f"python convert_lora_to_gguf.py --base {base} {quoted(folder)}"
        for spec, folder in plain.values()
        if not spec.rslora and not spec.on_experts
    ]
    return lines


def type_of(base: ModelConfig | None) -> str:
    """The model type of a base as it is published; "" of one that is not known."""
    return "" if base is None else base.wrapper or base.family


def base_if_here(config: JobConfig) -> ModelConfig | None:
    """The base model of a run, if this machine has it: an adapter is delivered without it, too."""
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.families.model import ModelConfig

    try:
        return ModelConfig.from_hf(base_directory(config))
    except CheckpointError as problem:
        if problem.code not in ("model.missing", "model.hub"):
            raise
        return None


def needs_flag(spec: AdapterSpec, model_type: str) -> bool:
    """Whether vLLM takes an adapter where server and request say that its experts are in one tensor."""
    return spec.on_experts and model_type in FLAGGED_EXPERTS


def why_not_in_vllm(spec: AdapterSpec, model_type: str) -> str:
    """Why vLLM does not load an adapter as it was trained; "" if it does. See `commands`."""
    if not _is_plain(spec):
        return "it takes LoRA of one rank and alpha, without heads and tokens, on both projections of experts or none"
    if not model_type:
        return "how it names projections depends on the base"
    if model_type in WITHOUT_CLASS:
        return f"it has no class for {model_type}"
    if model_type in OTHER_NAMES:
        return f"its class for {model_type} has other names of projections than PEFT"
    if model_type in WITHOUT_LORA:
        return f"it has no LoRA for {model_type}"
    if SPLIT.get(model_type) in spec.targets:
        return f"it reads {SPLIT[model_type]} in two parts"
    if spec.on_experts and model_type not in (*FUSED_EXPERTS, *FLAGGED_EXPERTS):
        return f"it does not read adapters of {model_type}'s experts as PEFT stores them"
    return "" if spec.rank <= VLLM_RANKS[-1] else f"it takes no rank above {VLLM_RANKS[-1]}"


def _is_plain(spec: AdapterSpec) -> bool:
    from lorafusion_jax.adapters.table import PLAIN

    experts = [name for name in EXPERTS if name in spec.targets]
    has_layers_only = spec.patterns is None and spec.head is None and spec.tokens is None
    return spec.kind == PLAIN and has_layers_only and len(experts) in (0, len(EXPERTS))


def type_for_vllm(config: JobConfig, spec: AdapterSpec) -> str:
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


def _models(server: Server, path: str = "/v1/models", models: str = "data", name: str = "id") -> set[str]:
    """Names of the models of a server: those of OpenAI's API, or under other keys."""
    answer = server.request(path)
    try:
        return {str(model[name]) for model in answer[models]}
    except (TypeError, LookupError):
        raise server.refused(path, "its answer is no list of models") from None


def _into_sglang(server: Server, name: str, path: str) -> Ask:
    answer = server.request("/load_lora_adapter", {"lora_name": name, "lora_path": path})
    if not (isinstance(answer, dict) and answer.get("success") is True):
        raise server.refused("/load_lora_adapter", _reason(json.dumps(answer)))

    def ask(prompt: str, max_tokens: int) -> str:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0}
        answer = server.request("/generate", {"text": prompt, "sampling_params": sampling, "lora_path": name})
        return _text(server, "/generate", answer, lambda: answer["text"])

    return ask


def into_ollama(
    server: Server, name: str, _path: str, *, file: Path, base: str | None, makes_file: str, merged: str
) -> Ask:
    """Sends the file as a blob, and makes a model of it. Releases of 2026-11 and later refuse adapters.

    Args:
        makes_file, merged: commands that make the file, and one of a merged model.
    """
    try:
        with open_regular(file) as stream:
            begins, _ = stream.read(len(GGUF)), stream.seek(0)
            digest = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
    except OSError as problem:
        raise ConfigError("handover.form", f"{file} cannot be read.", why=str(problem), fix=makes_file) from None
    if begins != GGUF:
        raise ConfigError("handover.form", f"{file} is no GGUF file.", fix=makes_file)
    tagged = name if ":" in name else f"{name}:latest"
    names = partial(_models, server, "/api/tags", "models", "name")
    if tagged in names():
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
    if not (isinstance(answer, dict) and answer.get("status") == "success") or tagged not in names():
        raise server.refused("/api/create", _reason(json.dumps(answer)))

    def ask(prompt: str, max_tokens: int) -> str:
        options = {"num_predict": max_tokens, "temperature": 0}
        answer = server.request("/api/generate", {"model": name, "prompt": prompt, "stream": False, "options": options})
        return _text(server, "/api/generate", answer, lambda: answer["response"])

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


def read_key(path: Path | None) -> str | None:
    """The key in a file; none if there is no file."""
    return None if path is None else read_text(path, SETTINGS).strip()


def checked_url(url: str) -> str:
    """The URL of a server, without a path of its routes."""
    from lorafusion_jax.config.run_sections import is_server_url  # slow to import, and not for --help

    if not is_server_url(url):
        raise ConfigError("handover.options", f"{url} is no address of a server.", fix="such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


class HandOver:
    """A listener that loads the adapters of a run into a server once the run is through, and asks each one prompt.

    A server that fails never ends a run: what it refused is said, with the command that tries again.

    Raises:
        ConfigError: `handover.form`, the server would not load an adapter as it is trained; `handover.options`.
    """

    def __init__(self, config: JobConfig, folder: Path):
        from lorafusion_jax.checkpoint.base_model import base_in_commands
        from lorafusion_jax.config.specs import adapter_spec
        from lorafusion_jax.peft.leaves import exported_spec

        self._settings, self._folder = config.handover, folder
        self._kind = "vllm" if config.handover.vllm else "sglang"
        url, base = config.handover.vllm or config.handover.sglang or "", base_in_commands(config)
        key_file = config.handover.key_file
        try:
            key = read_key(None if key_file is None else Path(config.directory, key_file))
        except OSError as problem:
            raise ConfigError("handover.options", "handover.key_file cannot be read.", why=str(problem)) from None
        self._loaders = {}
        for adapter in config.adapters:
            spec = exported_spec(adapter_spec(adapter))
            model_type = type_for_vllm(config, spec) if self._kind == "vllm" else ""
            self._loaders[adapter.name] = folder_loader(
                self._kind, url, spec, base, model_type, key=key, timeout_s=ANSWER_S
            )

    def __call__(self, event: RunEvent) -> None:
        if event.kind != "finished":
            return
        rows = read_rows(self._folder / "events.jsonl")
        done = dict.fromkeys(row["adapter"] for row in rows if row["kind"] == "adapter-done")
        for name, (server, load) in self._loaders.items():
            if name in done:
                self._hand_over(name, server, load)

    def _hand_over(self, name: str, server: Server, load: Callable[[Server, str, str], Ask]) -> None:
        path = (self._folder / "adapters" / name / "latest").resolve()
        try:
            answer = load(server, name, str(path))(self._settings.prompt, MOST_TOKENS)
        except LoraFusionError as problem:
            retry = f"lorafusion handover {quoted(self._folder)} {name} --{self._kind} {server.url}"
            say(
                errors_to(),
                f"{name} is not handed over: {problem.what} {problem.why} fix: {problem.fix}; then {retry}",
                "yellow",
            )
            return
        say(out(), f"{name}: loaded into {server.url} as {name}: {self._settings.prompt!r} → {answer!r}")
