"""A worker in a thread of the test whose models are tables of bigrams: it trains for real, in float64 and without jax.

Requests that come out of order, twice or not at all, means instead of sums, and states that lose something change what
it answers.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.generation.answer_text import AnswerTexts
from lorafusion_jax.generation.requests import Answer, Request, check_requests
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.serve.refusals import describe
from lorafusion_jax.serve.tinker.datums import Batch, DatumError, Sparse, read_batch, write_outputs
from lorafusion_jax.serve.tinker.samples import read_sample, write_samples
from lorafusion_jax.serve.worker.link import Link
from lorafusion_jax.serve.worker.samples import Progress, read_completion, write_part

WORDS = 16
Arrays = dict[str, np.ndarray]


class Bigrams:
    """A model: log p of the next token is a row of a table."""

    def __init__(self) -> None:
        self.arrays: Arrays = {name: np.zeros((WORDS, WORDS)) for name in ("table", "sum", "m", "v")}
        self.steps = 0

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        logits = self.arrays["table"][tokens]
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    def run(self, batch: Batch, *, learn: bool) -> bytes:
        """Adds the gradient of a batch, all of it or nothing."""
        outputs, loss, gradient = [], 0.0, np.zeros((WORDS, WORDS))
        for at, datum in enumerate(batch.datums):
            inputs = {name: value for name, value in datum.inputs.items() if not isinstance(value, Sparse)}
            targets = inputs["target_tokens"]
            for name, ids in (("tokens", datum.tokens), ("target_tokens", targets)):
                if ((ids < 0) | (ids >= WORDS)).any():
                    raise DatumError(f"datum {at}: {name} are 0 to {WORDS - 1}")
            if len(targets) != len(datum.tokens):
                raise DatumError(f"datum {at}: {len(targets)} targets of {len(datum.tokens)} tokens")
            if not np.isfinite(inputs.get("weights", np.zeros(1))).all():
                raise DatumError(f"datum {at}: weights are not finite")
            log_p = self.logprobs(datum.tokens)
            rows = np.arange(len(targets))
            chosen = log_p[rows, targets] if targets.ndim == 1 else log_p[rows[:, None], targets]
            match batch.loss:
                case "cross_entropy":
                    weight = inputs.get("weights", np.ones(targets.shape)).astype(float)
                    loss -= (weight * chosen).sum()
                case "importance_sampling":
                    weight = np.exp(chosen - inputs["logprobs"]) * inputs["advantages"]
                    loss -= weight.sum()
                case _:
                    raise DatumError(f"the loss {batch.loss} is not served")
            by_row = weight if weight.ndim == 1 else weight.sum(1)
            np.add.at(gradient, datum.tokens, by_row[:, None] * np.exp(log_p))
            np.subtract.at(gradient, (np.broadcast_to(datum.tokens, targets.T.shape).T, targets), weight)
            outputs.append({"logprobs": chosen.astype(np.float32)})
        if learn:
            self.arrays["sum"] += gradient
        return write_outputs(outputs, {"loss:sum": loss})

    def step(self, values: dict[str, Any]) -> dict[str, float]:
        """One step of AdamW."""
        a, (b1, b2) = self.arrays, (values["beta1"], values["beta2"])
        self.steps += 1
        a["m"] = b1 * a["m"] + (1 - b1) * a["sum"]
        a["v"] = b2 * a["v"] + (1 - b2) * a["sum"] ** 2
        mean, square = a["m"] / (1 - b1**self.steps), a["v"] / (1 - b2**self.steps)
        decayed = a["table"] * (1 - values["learning_rate"] * values["weight_decay"])
        norm = float(np.linalg.norm(a["sum"]))
        a["table"] = decayed - values["learning_rate"] * mean / (np.sqrt(square) + values["eps"])
        a["sum"] = np.zeros((WORDS, WORDS))
        return {"grad_norm:mean": norm, "step:max": float(self.steps)}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "state.npz", steps=self.steps, **self.arrays)

    @classmethod
    def read(cls, folder: Path, *, optimizer: bool = True) -> Bigrams:
        model = cls()
        if not (folder / "state.npz").is_file():
            raise DatumError(f"{folder} cannot be read")
        with np.load(folder / "state.npz", allow_pickle=False) as stored:
            names = list(model.arrays) if optimizer else ["table"]
            model.arrays |= {name: stored[name] for name in names}
            model.steps = int(stored["steps"]) if optimizer else 0
        return model


class BigramProcess:
    """What the server sees as a worker.

    Attributes:
        runs: models take requests while it is set.
        order: (model, seq) of all requests as they were executed.
        save_every: requests after which a state is written.
    """

    runs: ClassVar[threading.Event] = threading.Event()
    order: ClassVar[list[tuple[str, int]]] = []
    cancelled: ClassVar[list[str]] = []
    save_every: ClassVar[int] = 5
    runs.set()

    def __init__(self, server: str, group: str, epoch: int, secret: str = "", base: str = ""):
        self.base = base
        self.models: dict[str, dict[str, Any]] = {}
        self.completing: dict[str, Iterator[dict[str, Any]]] = {}
        self.ended, self.code = threading.Event(), None
        self.link = Link(server, group, epoch, 0.1, self._holds, secret)
        self.link.emit("ready", device="simulated")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def has_ended(self) -> bool:
        return self.code is not None

    def terminate(self) -> None:
        self.ended.set()

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        if not self.ended.is_set():
            self.crash()
        self._thread.join()

    def crash(self) -> None:
        """Ends without a word."""
        self.code = -9
        self.link._ended.set()
        if (wire := self.link._wire) is not None:
            wire.close()
        self.ended.set()

    def _holds(self) -> list[dict[str, Any]]:
        return [{"job": name, "epoch": model["epoch"]} for name, model in list(self.models.items())]

    def _run(self) -> None:
        while not self.ended.is_set():
            with suppress(queue.Empty):
                self._execute(self.link.commands.get(timeout=0.005))
            for future, parts in list(self.completing.items()):
                if self.runs.is_set() and (part := next(parts, None)) is not None:
                    self.link.emit("completed", future=future, **part)
            for name, model in list(self.models.items()):
                while self.runs.is_set() and model["waiting"] and not self.ended.is_set():
                    self._answer(name, model, model["waiting"].pop(0))
        if self.code is None:
            for name in list(self.models):
                self._stop(name)
            self.link.close()

    def _execute(self, command: dict[str, Any]) -> None:
        name = command.get("job", "")
        if command["command"] == "start" and name not in self.models:
            state = command["state"]
            seq = 0 if state is None else int(Path(state).name.rpartition("s")[2])
            load = command["values"]["stream"]["load"]
            try:
                model = Bigrams() if state is None else Bigrams.read(Path(state))
                if state is None and load is not None:
                    model = Bigrams.read(Path(load["folder"]), optimizer=load["optimizer"])
            except DatumError as problem:
                self.link.emit("failed", job=name, epoch=command["epoch"], step=seq, reason=str(problem))
                return
            self.models[name] = command | {"model": model, "seq": seq, "taken": seq, "waiting": [], "path": state}
            self.link.emit("started", job=name, epoch=command["epoch"])
        elif command["command"] == "sample" and self.runs.is_set():
            self._sample(command)
        elif command["command"] == "complete":
            self.completing[command["future"]] = self._parts_of(command)
        elif command["command"] == "cancel":
            self.cancelled.append(command["future"])
            self.completing.pop(command["future"], None)
        elif command["command"] == "request" and name in self.models:
            if command["seq"] <= self.models[name]["taken"]:
                return  # after another connection
            assert command["seq"] == self.models[name]["taken"] + 1
            self.models[name]["taken"] += 1
            self.models[name]["waiting"].append(command)
        elif command["command"] == "stop" and name in self.models:
            self._stop(name)

    def _answer(self, name: str, entry: dict[str, Any], command: dict[str, Any]) -> None:
        seq, model = command["seq"], entry["model"]
        entry["seq"] = seq
        self.order.append((name, seq))
        answer: dict[str, Any] = {"job": name, "epoch": entry["epoch"], "seq": seq}
        try:
            if refused := command["values"].get("refused"):
                raise DatumError(refused)
            if command["kind"] in ("forward", "forward_backward"):
                body = Path(command["path"]).read_bytes()
                if hashlib.sha256(body).hexdigest() != command["sha256"]:
                    raise DatumError("the request was damaged")
                result = model.run(read_batch(body), learn=command["kind"] == "forward_backward")
                Path(command["result"]).write_bytes(result)
                answer |= {"result": {}, "sha256": hashlib.sha256(result).hexdigest(), "bytes": len(result)}
            elif command["kind"] == "optim_step":
                answer["result"] = {"metrics": model.step(command["values"])}
            elif command["kind"] == "load_weights":
                values = command["values"]
                entry["model"] = Bigrams.read(Path(values["folder"]), optimizer=values["optimizer"])
                answer["result"] = {"type": "load_weights", "path": values["path"]}
            else:
                model.write(Path(command["values"]["folder"]))
                answer["result"] = {"bytes": (Path(command["values"]["folder"]) / "state.npz").stat().st_size}
        except DatumError as problem:
            answer |= {"error": str(problem), "category": "user"}
        self.link.emit("answered", **answer)
        if seq % self.save_every == 0:
            path = self._save(entry)
            self.link.emit("saved", job=name, epoch=entry["epoch"], step=seq, path=path)

    def _sample(self, command: dict[str, Any]) -> None:
        """Draws the most probable tokens."""
        told = {"future": command["future"]}
        try:
            request = read_sample(command["values"], 64)
            _check(request.pairs, WORDS)
            model = Bigrams() if command["folder"] is None else Bigrams.read(Path(command["folder"]))
            answers = [_most_probable(model, request.prompt, sampling) for sampling in request.samplings]
            result = write_samples(request, answers)
            Path(command["result"]).write_bytes(result)
            told |= {"sha256": hashlib.sha256(result).hexdigest(), "bytes": len(result)}
        except (DatumError, LoraFusionError) as problem:
            told |= {"error": str(problem), "category": "user"}
        self.link.emit("sampled", **told)

    def _parts_of(self, command: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Answers that say their prompt again and again, three tokens at a time. An adapter says it backwards."""
        tokenizer = load_tokenizer(self.base)
        try:
            request = read_completion(command["values"], tokenizer, 64)
            _check(request.pairs, tokenizer.backend.get_vocab_size())
        except LoraFusionError as problem:
            yield {"error": describe(problem)}
            return
        texts, progress, answers = AnswerTexts(tokenizer), Progress(), [Answer() for _ in request.pairs]
        while any(answer.end is None for answer in answers):
            for (prompt, sampling), answer in zip(request.pairs, answers, strict=True):
                said = prompt if command["folder"] is None else prompt[::-1]
                for _ in range(3 if answer.end is None else 0):
                    answer.tokens.append(said[len(answer.tokens) % len(said)])
                    answer.logprobs.append(-0.5)
                    if sampling.logprobs:
                        answer.listed.append([(token, -1.0 * token) for token in range(sampling.logprobs)])
                    stops = bool(sampling.stop) and texts.ends_with(answer.tokens, sampling.stop)
                    if stops or len(answer.tokens) == sampling.max_tokens:
                        answer.end = "stop" if stops else "length"
                        break
            parts = progress.parts(answers, streamed=request.is_streamed)
            written, ended = [write_part(request, part) for part in parts], all(answer.end for answer in answers)
            if written:
                yield {"parts": written, "ended": ended, "prompt_tokens": request.prompt_tokens}

    def _save(self, entry: dict[str, Any]) -> str:
        path = Path(entry["folder"]) / "state" / f"e{entry['epoch']}-s{entry['seq']}"
        entry["model"].write(path)
        return str(path)

    def _stop(self, name: str) -> None:
        entry = self.models.pop(name)
        path = self._save(entry) if entry["seq"] else entry["path"]
        self.link.emit("stopped", job=name, epoch=entry["epoch"], step=entry["seq"], path=path)


def _check(pairs: Sequence[tuple[list[int], Sampling]], words: int) -> None:
    """Refuses prompts and settings as the engine does."""
    requests = [Request(tokens=prompt, sampling=sampling) for prompt, sampling in pairs]
    check_requests(requests, SimpleNamespace(vocab_size=words, num_outputs=words, positions=1 << 20, ropes=()))


def _most_probable(model: Bigrams, prompt: list[int], sampling: Sampling) -> SimpleNamespace:
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        tokens.append(int(model.logprobs(np.array(tokens[-1:])).argmax()))
        if tokens[-1] in (sampling.stop_tokens or ()):
            break
    scores = model.logprobs(np.array(tokens[:-1]))[np.arange(len(tokens) - 1), tokens[1:]].tolist()
    drawn = {"drawn_tokens": tokens[len(prompt) :], "drawn_logprobs": scores[len(prompt) - 1 :], "listed": []}
    end = "stop" if tokens[-1] in (sampling.stop_tokens or ()) else "length"
    return SimpleNamespace(**drawn, end=end, prompt_logprobs=[None, *scores[: len(prompt) - 1]])


class BigramLauncher:
    """Starts threads instead of processes; they end with the server."""

    problem: ClassVar[str] = ""

    def __init__(self) -> None:
        self.made: list[BigramProcess] = []

    def start(self, arguments: dict[str, Any], log: Path) -> BigramProcess:
        del log  # unused: threads say nothing
        assert json.dumps(arguments)
        self.made.append(
            BigramProcess(
                arguments["server"],
                arguments["group"],
                arguments["epoch"],
                arguments["secret"],
                arguments["base"]["model"],
            )
        )
        return self.made[-1]

    def find(self, group: str, epoch: int, pid: int | None) -> None:
        return None

    def hosts(self, gpus: int) -> int | None:
        return None

    def close(self) -> None:
        pass
