"""Samples in a worker: an engine beside the session, on its base, with snapshots of adapters that were saved.

The engine runs between slots. Threads read weights of snapshots and write answers. A completion makes tokens of its
prompt with its adapter's own chat template, and texts of its answers while they grow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.stack import place_name, without_places
from lorafusion_jax.data.prompts import prompt_tokens
from lorafusion_jax.data.tokenizer import Tokenizer, load_tokenizer
from lorafusion_jax.errors import LoraFusionError, RunError, ServerCallError
from lorafusion_jax.files import replace_bytes
from lorafusion_jax.generation.answer_text import AnswerTexts, TextStream, text_options
from lorafusion_jax.generation.capacity import SHARE_OF_MEMORY, block_bytes, blocks_that_fit
from lorafusion_jax.generation.engine import ROWS, SLOTS, Engine
from lorafusion_jax.generation.load import read_leaves
from lorafusion_jax.generation.requests import Answer, Listing, Request
from lorafusion_jax.generation.sampling import MOST_SEED, Sampling
from lorafusion_jax.generation.slots import Sampler
from lorafusion_jax.generation.text import tokenizer_of_folder
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.planning.memory import stage_memory
from lorafusion_jax.serve.refusals import describe
from lorafusion_jax.serve.tinker.datums import DatumError
from lorafusion_jax.serve.tinker.samples import SampleRequest, read_sample, write_samples
from lorafusion_jax.serve.wire import Message
from lorafusion_jax.serve.worker.link import Link
from lorafusion_jax.session import AdapterState, Session
from lorafusion_jax.session.base import device_bytes, memory_problem_here, stages_for
from lorafusion_jax.session.distant_stage import local_stages

MOST_SAMPLERS = 64  # snapshots in memory; others are read again
LONG, LEAST_ROOM = 4096, 1 << 30  # tokens of a long sequence; bytes that samples should have
Leaves = dict[str, np.ndarray]


@dataclass(slots=True)
class Progress:
    """How much of each answer was told."""

    told: list[int] = field(default_factory=list[int])
    ended: set[int] = field(default_factory=set[int])

    def parts(self, answers: Sequence[Answer], *, streamed: bool) -> list[Part]:
        """What is new since the last call. Answers that are not streamed are told when they end."""
        self.told = self.told or [0] * len(answers)
        parts = []
        for index, answer in enumerate(answers):
            position, size = self.told[index], len(answer.tokens)
            has_news = answer.end is not None or (streamed and size > position)
            if index in self.ended or not has_news:
                continue
            parts.append(
                Part(
                    index=index, tokens=answer.tokens[position:], logprobs=answer.logprobs[position:],
                    listed=answer.listed[position:size], end=answer.end, drawn=len(answer.drawn_tokens),
                )
            )  # fmt: skip
            self.told[index] = size
            if answer.end is not None:
                self.ended.add(index)
        return parts


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """A request for samples or completions.

    Attributes:
        reading: its settings, and the weights of its snapshot if they have to be read.
        answers: once the engine has it.
        progress: of a completion, what was told of it.
    """

    command: Message
    reading: Future[tuple[SampleRequest | CompletionRequest, Leaves | None]]
    request: SampleRequest | CompletionRequest | None = None
    answers: Sequence[Answer] | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def folder(self) -> str | None:
        return self.command["folder"]


class Samples:
    """Samples of a worker. Methods are called by its loop.

    Args:
        wake: ends the wait of the loop.
        places: adapters that are sampled from at a time.
    """

    def __init__(self, session: Session, link: Link, *, wake: Callable[[], None], places: int = SLOTS):
        self._session, self._link, self._wake, self._places = session, link, wake, places
        self._asked: dict[str, Asked] = {}
        self._samplers: dict[str, Sampler] = {}  # folder → its snapshot, the least recently used first
        self._held: set[str] = set()  # folders that are read, or in `_samplers`
        self._reader = ThreadPoolExecutor(1, "samplers")
        self._writer = ThreadPoolExecutor(1, "samples")
        self._bank: Bank | None = None

    @property
    def busy(self) -> bool:
        """Whether the engine has something to do."""
        return any(asked.answers is not None or asked.reading.done() for asked in self._asked.values())

    def take(self, command: Message) -> None:
        """Takes a request. One that comes again after a lost connection is there already."""
        if command["future"] not in self._asked:
            self._asked[command["future"]] = Asked(command=command, reading=self._read_later(command))

    def cancel(self, future: str) -> None:
        """Ends a request that nobody waits for."""
        asked = self._asked.pop(future, None)
        if asked is not None and asked.answers is not None and self._bank is not None:
            for answer in asked.answers:
                self._bank.engine.cancel(answer)

    def advance(self) -> None:
        """Gives the engine what was read, runs some passes, and has answers written."""
        for asked in list(self._asked.values()):
            if asked.answers is None and asked.reading.done():
                self._submit(asked)
        if self._bank is not None and self._bank.engine.busy:
            try:
                self._bank.engine.step()
            except Exception as problem:  # of the devices: sessions train on
                self._fail_all(problem)
        for asked in list(self._asked.values()):
            if asked.answers is not None:
                self._tell_of(asked, asked.answers)

    def wait(self) -> None:
        """Waits for the passes that the devices run."""
        if self._bank is not None:
            with suppress(Exception):  # the next call of `advance` meets it, too, and fails those who wait
                self._bank.engine.wait()

    def close(self) -> None:
        for pool in (self._reader, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, asked: Asked) -> None:
        try:
            asked.request, leaves = asked.reading.result()
            assert self._bank is not None
            sampler = self._sampler(self._bank, asked.folder, leaves)
            if sampler is None:
                asked.reading = self._read_later(asked.command)
                return
            requests = [
                Request(tokens=tokens, sampler=sampler, sampling=sampling) for tokens, sampling in asked.request.pairs
            ]
            asked.answers = [self._bank.engine.submit(request) for request in requests]
        except Exception as problem:  # whatever it is, others do not fail with it
            self._fail(asked, problem)

    def _sampler(self, bank: Bank, folder: str | None, leaves: Leaves | None) -> Sampler | None:
        """Returns the snapshot of a folder; None: it has to be read again."""
        if folder is None:
            return bank.engine.base
        sampler = self._samplers.pop(folder, None)
        if sampler is None:
            if leaves is None:
                self._held.discard(folder)
                return None
            sampler = bank.snapshot(leaves)
        self._samplers[folder] = sampler
        while len(self._samplers) > MOST_SAMPLERS:
            oldest = next(iter(self._samplers))
            self._held.discard(oldest)
            bank.engine.drop(self._samplers.pop(oldest))
        return sampler

    def _tell_of(self, asked: Asked, answers: Sequence[Answer]) -> None:
        """Has samples written that have ended, and tells how completions have grown."""
        has_ended = all(answer.end is not None for answer in answers)
        error = next((answer.error for answer in answers if answer.error is not None), None)
        if error is not None:
            for answer in answers:
                if answer.end is None and self._bank is not None:
                    self._bank.engine.cancel(answer)
            self._fail(asked, error)
            return
        if has_ended:
            del self._asked[asked.command["future"]]
        if isinstance(asked.request, CompletionRequest):
            parts = asked.progress.parts(answers, streamed=asked.request.is_streamed)
            if parts:
                self._writer.submit(self._tell_parts, asked.command, asked.request, parts, has_ended)
        elif has_ended:
            assert asked.request is not None
            self._writer.submit(self._tell, asked.command, asked.request, answers)

    def _fail_all(self, problem: Exception) -> None:
        """Ends everything that runs: an engine whose pass has failed has no cache any more."""
        for asked in [asked for asked in self._asked.values() if asked.answers is not None]:
            self._fail(asked, problem, "server")
        self._samplers.clear()
        self._held.clear()
        self._bank = None
        for asked in self._asked.values():
            asked.reading = self._read_later(asked.command)

    def _fail(self, asked: Asked, problem: Exception, category: str = "") -> None:
        is_refused = isinstance(problem, DatumError | LoraFusionError)
        category = category or getattr(problem, "category", "user" if is_refused else "server")
        text = str(problem) or type(problem).__name__
        del self._asked[asked.command["future"]]
        if asked.command["command"] == "complete":
            error = describe(problem) if category == "user" else {"code": "api.internal", "what": text}
            self._link.emit("completed", future=asked.command["future"], error=error)
        else:
            self._link.emit("sampled", future=asked.command["future"], error=text, category=category)

    # In threads.

    def _read_later(self, command: Message) -> Future[tuple[SampleRequest | CompletionRequest, Leaves | None]]:
        reading = self._reader.submit(self._read, command)
        reading.add_done_callback(lambda _: self._wake())
        return reading

    def _read(self, command: Message) -> tuple[SampleRequest | CompletionRequest, Leaves | None]:
        if self._bank is None:
            self._bank = Bank(self._session, self._places)
            print(self._bank.room, flush=True)
        bank, folder = self._bank, command["folder"]
        if command["command"] == "complete":
            request = read_completion(command["values"], bank.tokenizer_of(folder), bank.most_tokens)
        else:
            request = read_sample(command["values"], bank.most_tokens)
        if folder is None or folder in self._held:
            return request, None
        if not Path(folder).is_dir():
            raise DatumError("the weights of this sampler were removed; make another one from weights that are there")
        try:
            leaves = bank.read(Path(folder))
        except Exception as problem:  # whatever is wrong with a file, its client did not write it
            message = "the weights of this sampler cannot be read."
            raise ServerCallError("call.damaged", message, why=str(problem), fix="save them again") from problem
        self._held.add(folder)
        return request, leaves

    def _tell_parts(self, command: Message, request: CompletionRequest, parts: Sequence[Part], ended: bool) -> None:
        messages = [write_part(request, part) for part in parts]
        usage = {"prompt_tokens": request.prompt_tokens}
        self._link.emit("completed", future=command["future"], parts=messages, ended=ended, **usage)

    def _tell(self, command: Message, request: SampleRequest, answers: Sequence[Answer]) -> None:
        content = write_samples(request, answers)
        try:
            replace_bytes(Path(command["result"]), content)
        except (LoraFusionError, OSError) as problem:  # the disk
            self._link.emit("sampled", future=command["future"], error=str(problem), category="server")
            return
        digest = hashlib.sha256(content).hexdigest()
        self._link.emit("sampled", future=command["future"], sha256=digest, bytes=len(content))


def expected_room(session: Session, places: int) -> str:
    """Says how much can be sampled beside slots, by count: what these, and the adapters to sample from, leave.

    Empty where devices have no limit, and where the session is on several hosts.
    """
    size, stages = device_bytes(), list(local_stages(session.stages).values())
    if size is None or len(stages) < len(session.stages):
        return ""
    problem = memory_problem_here(session.config, stages[0].parts.model)
    slots = max(stage.total for stage in stage_memory(replace(problem, remat=session.facts.remat)))
    parts, kinds = stages[0].parts, session.places.kinds
    shapes = parts.leaves.own_shapes()
    plain = [shapes[place_name(place)].values() for place, kind in enumerate(kinds) if kind == PLAIN]
    adapter = max((sum(map(math.prod, leaves)) for leaves in plain), default=0) // len(stages)
    unused = size - slots - places * adapter * np.dtype(parts.dtype).itemsize
    blocks = max(int(unused * SHARE_OF_MEMORY), 0) // block_bytes(stages)
    sequences, size_gb = blocks * BLOCK // LONG, blocks * block_bytes(stages) / 1e9
    text = f"beside slots, by count: a cache of {size_gb:.3g} GB for samples, {sequences} sequences of {LONG} tokens"
    if unused < LEAST_ROOM:
        text += f"; that is little for {places} adapters: take fewer --sampler-places or --places"
    return text


class Bank:
    """An engine on the base of a session, and the place through which snapshots come into it.

    Args:
        places: adapters that are sampled from at a time.

    Attributes:
        most_tokens: of a prompt and its sample.
        room: how much is sampled at once, for the log.
    """

    def __init__(self, session: Session, places: int):
        by_kind = zip(session.places.kinds, session.places.ranks, strict=True)
        rank = max((rank for kind, rank in by_kind if kind == "lora"), default=1)
        self._task = session.new_stream("sampler", rank=rank, alpha=rank)  # its scale is 1
        config = without_places(self._task.config)
        stages = stages_for(session.stages, config, [self._task.spec])
        self._stages = list(local_stages(stages).values())
        if len(self._stages) < len(stages):
            raise RunError("generate.hosts", "sessions over several hosts do not sample.", fix="one host")
        self._parts = self._stages[0].parts
        self._shapes = self._parts.leaves.own_shapes()[self._task.name]
        self._put({})
        self._tokenizer = tokenizer = load_tokenizer(base_directory(config))
        self.tokenizer_of = lru_cache(MOST_SAMPLERS)(self._tokenizer_of)
        positions = self._parts.model.positions
        blocks = min(blocks_that_fit(self._stages, beside_training=True), ROWS * -(-positions // BLOCK))
        self.most_tokens = min(positions, blocks * BLOCK)
        size_gb = blocks * block_bytes(self._stages) / 1e9
        self.room = f"cache for samples: {blocks} blocks of {BLOCK} tokens, {size_gb:.3g} GB, for {places} adapters"
        self.engine = Engine(
            self._stages,
            blocks=blocks,
            slots=places,
            stop_tokens=tokenizer.stop_ids,
            **text_options(tokenizer),
        )

    def snapshot(self, leaves: Mapping[str, np.ndarray]) -> Sampler:
        """Copies weights that were read to the devices."""
        self._put(leaves)
        return self.engine.snapshot(0)

    def _tokenizer_of(self, folder: str | None) -> Tokenizer:
        """The tokenizer with the chat template that the adapter of a folder was trained with."""
        return self._tokenizer if folder is None else tokenizer_of_folder(Path(folder), self._tokenizer)

    def _put(self, leaves: Mapping[str, np.ndarray]) -> None:
        for stage in self._stages:
            stage.take_weights({self._task.name: leaves})

    def read(self, folder: Path) -> Leaves:
        """Reads what was saved to sample from, or to train on, as leaves of the largest rank whose scale is 1."""
        if (folder / "adapter_config.json").is_file():
            spec, weights = read_leaves(folder, self._parts)
            scale, ratios = spec.scale, self._parts.inputs.ratios_of(spec)
            self._check(spec, weights)
        else:
            weights = AdapterState.read(folder, self._task.adapter).weights
            ranks = {leaf.shape[-1] for name, leaf in weights.items() if name.endswith(".lora_a")}
            scale, ratios = 32.0 / max(ranks), {}
        leaves = {}
        for name, leaf in weights.items():
            leaves[name] = np.zeros(self._shapes[name], np.float32)
            within = tuple(slice(size) for size in leaf.shape)
            factor_L = scale * np.asarray(ratios.get(name, 1.0)) if name.endswith(".lora_b") else np.ones(())
            leaves[name][within] = leaf * factor_L.astype(np.float32).reshape(-1, *[1] * (leaf.ndim - 1))
        return leaves

    def _check(self, spec: AdapterSpec, stored: Leaves) -> None:
        """Refuses adapters that no place of the session could hold."""
        if spec.kind != PLAIN:
            raise DatumError(f"the adapter is of kind {spec.kind}, and a session samples adapters of kind {PLAIN}")
        for name, leaf in stored.items():
            if name not in self._shapes:
                raise DatumError(f"the adapter has {name}, and no adapter of this session has that")
            if any(size > room for size, room in zip(leaf.shape, self._shapes[name], strict=True)):
                raise DatumError(f"the adapter has rank {spec.rank}, and the places of this session less")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Answers to texts, messages or tokens.

    Args:
        pairs: the tokens of the prompt and the settings of each answer.
        prompt_tokens: of all prompts, each counted once.
        is_streamed: whether parts of answers are told before they end.
        is_scored: whether log p of their tokens is told.
        streams: of the answers.
    """

    pairs: list[tuple[list[int], Sampling]]
    prompt_tokens: int
    is_streamed: bool
    is_scored: bool
    tokenizer: Tokenizer
    streams: list[TextStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an answer has grown by.

    Attributes:
        listed: log p of the most probable tokens at each of its tokens.
        end: why there is no more; None: there may be.
        drawn: tokens of the whole answer, once it has ended.
    """

    index: int
    tokens: list[int]
    logprobs: list[float]
    listed: list[Listing]
    end: str | None
    drawn: int


def read_completion(values: Mapping[str, Any], tokenizer: Tokenizer, most_tokens: int) -> CompletionRequest:
    """Reads what a server asks for, see `serve.api.openai`.

    Args:
        tokenizer: with the chat template of the adapter.
        most_tokens: of a prompt and its answer, where the request has no `max_tokens`.

    Raises:
        LoraFusionError: says what is wrong.
    """
    tokenizer.require()
    if values["messages"] is not None:
        prompts = [prompt_tokens(values["messages"], tokenizer, where="messages", by_request=True)]
    else:
        prompts = [prompt_tokens(prompt, tokenizer, raw=True, where="prompt") for prompt in values["prompts"]]
    texts, pairs = AnswerTexts(tokenizer), []
    for prompt in prompts:
        room = max(1, most_tokens - len(prompt))
        sampling = Sampling(**{"max_tokens": room, "stop_tokens": tokenizer.stop_ids} | values["sampling"])
        seeds = [(sampling.seed + number) % (MOST_SEED + 1) for number in range(values["n"])]
        pairs += [(prompt, replace(sampling, seed=seed)) for seed in seeds]
    return CompletionRequest(
        pairs=pairs,
        prompt_tokens=sum(map(len, prompts)),
        is_streamed=values["stream"],
        is_scored=values["scored"],
        tokenizer=tokenizer,
        streams=[TextStream(texts, sampling.stop) for _, sampling in pairs],
    )


def write_part(request: CompletionRequest, part: Part) -> Message:
    """What a server is told of a part."""
    stream = request.streams[part.index]
    text = stream.add(part.tokens) if part.end is None else stream.end(part.tokens)
    message: Message = {"index": part.index, "text": text, "tokens": part.drawn}
    message["end"] = part.end and ("stop" if part.end == "stop" else "length")
    if request.is_scored:
        piece, listings = request.tokenizer.piece, part.listed or [[] for _ in part.tokens]
        message["logprobs"] = [
            [piece(token), logprob, [[piece(alternative), value] for alternative, value in listing]]
            for token, logprob, listing in zip(part.tokens, part.logprobs, listings, strict=True)
        ]
    return message
