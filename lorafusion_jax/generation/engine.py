"""Generates for requests that come and go: continuous batches over blocks of a cache. B rows"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from lorafusion_jax.errors import CheckpointError, ConfigError, LoraFusionError, RunError, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.generation.blocks import BlockPool
from lorafusion_jax.generation.choose import NOT_FINITE, Choices, Chosen, Edits
from lorafusion_jax.generation.packing import BASE, NOWHERE, Prompt, bucket, pack_prompts, power_of_two
from lorafusion_jax.generation.passes import Passes, RowSettings
from lorafusion_jax.generation.programs import GenerationPrograms, Position
from lorafusion_jax.generation.sampling import GREEDY, MODES, Sampling
from lorafusion_jax.generation.schedule import Admission, Running, Scheduler, order_copies
from lorafusion_jax.generation.slots import Sampler, SlotTable
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.session.stage import Stage

ROWS = 256  # sequences that run at a time
STEPS = 8  # passes between two looks at their tokens
SLOTS = 16  # adapters that run at a time
PROMPT_TOKENS = 8192  # that are read before others get their next tokens
FEWEST_ROWS = 8
SHARE_OF_MEMORY = 0.8  # of what a device has left, for blocks
WITHOUT_LIMIT = 2**31  # bytes of blocks where a device does not say what it has left

type End = Literal["stop", "length", "context", "cancelled", "error"]
type Listing = list[tuple[int, float]]  # tokens and their log p, most probable first


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt for one adapter.

    Args:
        tokens: the prompt.
        sampler: of the engine; None: `adapter` says which.
        adapter: index, or `BASE`, for a `Generator`.
        where: name of the prompt in messages.
    """

    tokens: Sequence[int]
    sampler: Sampler | None = None
    adapter: int = BASE
    sampling: Sampling = GREEDY
    where: str = "the prompt"


@dataclass(slots=True, kw_only=True)
class Answer:
    """Tokens that were generated for a request, without the token that ended them.

    log p is that under the adapter: without temperature, edits and filters.

    Attributes:
        logprobs: log p of each token.
        end: "stop": a stop token or text; "length": `max_tokens`; "context": the model's last position; "cancelled";
            "error"; None while tokens are still to come.
        end_token, end_logprob: the stop token that ended them, and its log p; None if none did.
        listed: the most probable tokens at each drawn one, the one that ended them included.
        prompt_logprobs: of each token of the prompt; None for the first, and for those that nobody asked for.
        prompt_listed, prompt_targets: the same for its most probable tokens, and for `Sampling.prompt_targets`.
        error: why there is no more.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: End | None = None
    end_token: int | None = None
    end_logprob: float | None = None
    listed: list[Listing] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_listed: list[Listing | None] = field(default_factory=list)
    prompt_targets: list[list[float | None] | None] = field(default_factory=list)
    error: LoraFusionError | None = None

    @property
    def drawn_tokens(self) -> list[int]:
        """All drawn tokens, the one that ended the answer included."""
        return [*self.tokens, *(() if self.end_token is None else (self.end_token,))]

    @property
    def drawn_logprobs(self) -> list[float]:
        """log p of `drawn_tokens`."""
        return [*self.logprobs, *(() if self.end_logprob is None else (self.end_logprob,))]


class Engine:
    """Generates with snapshots of the adapters of a model. All calls come from one thread.

    Args:
        stages: with the model, whose adapters have weights.
        rows: sequences that run at a time.
        blocks: of the cache, `BLOCK` tokens each (None: what fits into what the devices have left).
        slots: adapters that run at a time.
        steps: passes of a call of `step`.
        stop_tokens: tokens that end answers whose settings name none.
        ends_with: (tokens, stop texts) → whether the tokens end with one of the texts.
        special_texts: text → id of special tokens; one ends the answers that have its text as a stop text.
        programs: of another engine of these stages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        rows: int = ROWS,
        blocks: int | None = None,
        slots: int = SLOTS,
        steps: int = STEPS,
        stop_tokens: Sequence[int] = (),
        ends_with: Callable[[Sequence[int], Sequence[str]], bool] = lambda tokens, texts: False,
        special_texts: Mapping[str, int] = MappingProxyType({}),
        programs: Sequence[GenerationPrograms] | None = None,
    ):
        parts = stages[0].parts
        self.model, self._stages = parts.model, stages
        self.programs = list(programs or [GenerationPrograms(stage) for stage in stages])
        number = blocks_that_fit(stages) if blocks is None else blocks
        sizes = {"rows": max(power_of_two(rows), FEWEST_ROWS), "blocks": number}
        self._passes = Passes(stages, self.programs, slots=slots if parts.specs else 0, **sizes)
        self._stop_tokens, self._ends_with = frozenset(stop_tokens), ends_with
        self._special_texts, self.steps = special_texts, steps
        self.pool = BlockPool(number, BLOCK)
        self._slots = SlotTable(slots, self._passes.read, self._passes.write, self._passes.hold)
        self._scheduler = Scheduler(self.pool, rows, self._acquire, self._release)
        self._numbers, self._arrivals = count(1), count()
        self.base = Sampler(number=0, adapter=BASE, name="the base")
        self._sizes: set[int] = set()  # of decoding passes and of their tables, as far as programs are compiled
        self._widths: set[int] = set()
        self._finished: list[Answer] = []  # without a pass

    def snapshot(self, adapter: int) -> Sampler:
        """Copies the weights that an adapter has now. Later steps do not change the copy."""
        spec = dict(self._stages[0].occupied)[adapter]  # another than at the start, where adapters come and go
        sampler = Sampler(number=next(self._numbers), adapter=adapter, name=spec.name, spec=spec)
        slot = self._slots.take(sampler)
        if slot is not None:
            sampler.finite = self._passes.put(adapter, slot)
            return sampler
        held = self._passes.read(0)  # sequences run in all slots: the copy goes to the host through one of them
        sampler.finite = self._passes.put(adapter, 0)
        sampler.on_host = self._passes.read(0)
        self._passes.write(0, held)
        return sampler

    def drop(self, sampler: Sampler) -> None:
        """Frees a sampler, at once or after the last of its requests."""
        self._slots.drop(sampler)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._scheduler.busy or self._finished)

    def submit(self, request: Request) -> Answer:
        """Lets a request wait for its turn. `step` fills the answer.

        Raises:
            LoraFusionError: see `check_requests`; `generate.dropped`, the sampler is gone; `generate.memory`, the
                blocks do not hold prompt and answer.
        """
        check_requests([request], self.model)
        sampling, sampler = request.sampling, request.sampler or self.base
        if sampler.dropped:
            raise RunError("generate.dropped", f"{sampler.name}: its weights were dropped.", where=request.where)
        total = min(len(request.tokens) + sampling.max_tokens, self.model.positions)
        if self.pool.blocks_of(total) > self.pool.number:
            message = f"{request.where} and its answer have {total} tokens, and the cache {self.pool.number * BLOCK}."
            raise ConfigError("generate.memory", message, fix="a smaller max_tokens, or more memory for the cache")
        answer = Answer()
        first = first_scored(request)
        if first is not None:
            size = len(request.tokens)
            answer.prompt_logprobs, answer.prompt_listed = [None] * size, [None] * size
            answer.prompt_targets = [None] * size
        reusable = len(request.tokens) - 1 if first is None else min(len(request.tokens), first) - 1
        stops = self._stop_tokens if sampling.stop_tokens is None else frozenset(sampling.stop_tokens)
        special = [self._special_texts[text] for text in sampling.stop if text in self._special_texts]
        # States are of the end of a sequence only, and longrope turns the keys of long sequences otherwise.
        findable = not self._has_states and all(len(request.tokens) <= most for most in _turned(self.model))
        sequence = Running(
            tokens=[*map(int, request.tokens)],
            most=total,
            arrival=next(self._arrivals),
            root=-1 - sampler.number,
            request=(request, answer),
            stops=stops.union(special) if special else stops,
            reusable=max(reusable, 0) if findable else 0,
            findable=findable,
            shares=first is None,
        )
        if sampler.finite:
            sampler.requests += 1
            self._scheduler.add(sequence)
        else:
            answer.end, answer.error = "error", self._not_finite(sequence)
            self._finished.append(answer)
        return answer

    def cancel(self, answer: Answer) -> None:
        """Ends an answer as it is."""
        for sequence in self._scheduler.sequences:
            if sequence.request[1] is answer:
                answer.end = "cancelled"
                self._scheduler.remove(sequence)
                self._slots.end(self._sampler(sequence))

    def step(self) -> list[Answer]:
        """Starts requests that wait, and runs some passes. Returns the answers that have grown or ended."""
        grown, self._finished = self._finished, []
        if not self._scheduler.reserve(self.steps):
            admissions = self._scheduler.admit(self.steps, PROMPT_TOKENS)
            if admissions:
                grown += self._read(admissions)
        running = self._scheduler.running
        if running:
            left = max(sequence.most - len(sequence.tokens) for sequence in running.values())
            grown += self._continue(min(self.steps, left))
        return list({id(answer): answer for answer in grown}.values())

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._scheduler.running)

    @property
    def num_cached(self) -> int:
        """Tokens of running sequences."""
        return sum(len(sequence.tokens) for sequence in self._scheduler.running.values())

    @property
    def _has_states(self) -> bool:
        return any(layer.state_shapes for layer in self.model.kinds)

    def _acquire(self, sequence: Running) -> int | None:
        return self._slots.acquire(self._sampler(sequence))

    def _release(self, sequence: Running) -> None:
        self._slots.release(self._sampler(sequence))

    def _sampler(self, sequence: Running) -> Sampler:
        return sequence.request[0].sampler or self.base

    def _read(self, admissions: Sequence[Admission]) -> list[Answer]:
        """Reads prompts and takes the token after each."""
        others: dict[int, list[int]] = {}
        for admission in admissions:
            if admission.leader is not None:
                others.setdefault(admission.leader.row, []).append(admission.sequence.row)
        prompts = [
            _prompt_of(admission, tuple(others.get(admission.sequence.row, ())))
            for admission in admissions
            if admission.leader is None
        ]
        sequences = [admission.sequence for admission in admissions]
        passes = pack_prompts(prompts, self._num_rows(sequences), BLOCK)
        chosen, scores = self._passes.read_prompts(passes, self._settings(sequences))
        blocks, rows = order_copies(admissions, BLOCK)
        if rows and (blocks or self._has_states):
            self._passes.copy(_pairs(blocks), _pairs(rows))
        for prompts_of_pass, results in zip(passes, scores, strict=True):
            self._take_scores(prompts_of_pass, results)
        return self._take(sequences, [chosen])

    def _continue(self, steps: int) -> list[Answer]:
        """Runs the next tokens of all running sequences."""
        sequences = list(self._scheduler.running.values())
        B, widest = self._num_rows(sequences), self.pool.blocks_of(max(sequence.most for sequence in sequences))
        at = Position(
            np.full(B, -1, np.int32), np.zeros(B, np.int32), np.full(B, BASE, np.int32),
            np.zeros((B, _compiled(self._widths, widest, bucket(widest, 2), 4 * widest)), np.int32),
        )  # fmt: skip
        for sequence in sequences:
            row, blocks = sequence.row, sequence.blocks
            at.position_B[row], at.limit_B[row] = len(sequence.tokens) - 1, len(blocks) * BLOCK
            at.slot_B[row], at.tables_BM[row, : len(blocks)] = sequence.slot, blocks
        chosen = self._passes.next_tokens(steps, at, self._settings(sequences))
        for sequence in sequences:
            sequence.stored = min(len(sequence.tokens) - 1 + steps, len(sequence.blocks) * BLOCK)
        return self._take(sequences, chosen)

    def _num_rows(self, sequences: Sequence[Running]) -> int:
        """Rows of a pass: a size that is compiled already, if one fits."""
        needed = 1 + max(sequence.row for sequence in sequences)
        return _compiled(self._sizes, needed, max(power_of_two(needed), FEWEST_ROWS), NOWHERE)

    def _settings(self, sequences: Sequence[Running]) -> RowSettings:
        """How the next tokens of some sequences are chosen."""
        B = self._num_rows(sequences)
        zeros, ones = np.zeros(B, np.float32), np.ones(B, np.float32)
        choices = Choices(zeros.copy(), np.zeros(B, np.int32), ones.copy(), zeros.copy(), np.zeros((B, 2), np.uint32))
        tokens, number, slot = np.zeros(B, np.int32), np.zeros(B, np.int32), np.full(B, BASE, np.int32)
        for sequence in sequences:
            request, _ = sequence.request
            row, sampling = sequence.row, request.sampling
            tokens[row], slot[row] = sequence.tokens[-1], sequence.slot
            number[row] = len(sequence.tokens) - len(request.tokens)
            seed = (sampling.seed >> 32, sampling.seed & 0xFFFFFFFF)
            settings = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed)
            for values, value in zip(choices, settings, strict=True):
                values[row] = value
        samplings = [sequence.request[0].sampling for sequence in sequences]
        most = max(sampling.logprobs for sampling in samplings)
        edited = any(sampling.edits for sampling in samplings)
        return RowSettings(
            tokens_B=tokens,
            number_B=number,
            slot_B=slot,
            choices=choices,
            mode=max((sampling.mode for sampling in samplings), key=MODES.index),
            listed=power_of_two(most) if most else 0,
            **(_edits(sequences, B) if edited else {}),
        )

    def _take(self, sequences: Sequence[Running], chosen: Sequence[Chosen]) -> list[Answer]:
        """Adds tokens to answers, and takes out the sequences that end."""
        tokens, logprobs = (
            np.stack([getattr(step, name) for step in chosen], 1).tolist() for name in ("tokens_B", "logprobs_B")
        )
        grown = []
        for sequence in sequences:
            request, answer = sequence.request
            row, wanted = sequence.row, request.sampling.logprobs
            for number, pair in enumerate(zip(tokens[row], logprobs[row], strict=True)):
                if wanted and request.sampling.max_tokens:
                    answer.listed.append(_listing(chosen[number].listed, row, wanted))
                if self._ended(sequence, *pair):
                    break
            grown.append(answer)
            if answer.error is not None:
                self.pool.forget(sequence.blocks)
                sequence.findable = False
            if answer.end is not None:
                self._scheduler.remove(sequence)
                self._slots.end(self._sampler(sequence))
            else:
                self._scheduler.remember(sequence)
        return grown

    def _ended(self, sequence: Running, token: int, logprob: float) -> bool:
        """Adds a token to an answer. Returns whether this ends the answer."""
        request, answer = sequence.request
        sampling = request.sampling
        if token == NOT_FINITE:
            answer.end, answer.error = "error", self._not_finite(sequence)
        elif not sampling.max_tokens:
            answer.end = "length"
        elif token in sequence.stops:
            answer.end, answer.end_token, answer.end_logprob = "stop", token, logprob
        else:
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            sequence.tokens.append(token)
            if sampling.stop and self._ends_with(answer.tokens, sampling.stop):
                answer.end = "stop"
            elif len(sequence.tokens) == sequence.most:
                answer.end = "length" if len(answer.tokens) == sampling.max_tokens else "context"
        return answer.end is not None

    def _not_finite(self, sequence: Running) -> RunError:
        message = f"{self._sampler(sequence).name}: the logits of a token are not numbers."
        return RunError("generate.not-finite", message, where=sequence.request[0].where)

    def _take_scores(self, prompts: Any, results: Sequence[Any]) -> None:
        """Puts log p of tokens of prompts into answers."""
        if prompts.scored is None:
            return
        logprobs_Wk = np.concatenate([logprobs for logprobs, _ in results])
        answers = {row: sequence.request for row, sequence in self._scheduler.running.items()}
        for number, (row, index) in enumerate(prompts.scored.owners):
            request, answer = answers[row]
            answer.prompt_logprobs[index] = float(logprobs_Wk[number, 0])
            targets = request.sampling.prompt_targets
            ids = targets[index] if index < len(targets) else ()
            answer.prompt_targets[index] = [
                float(value) if token >= 0 else None for token, value in zip(ids, logprobs_Wk[number, 1:], strict=False)
            ]
            if wanted := request.sampling.prompt_logprobs:
                part, within = divmod(number, len(results[0][0]))
                answer.prompt_listed[index] = _listing(results[part][1], within, wanted)


def first_scored(request: Request) -> int | None:
    """Index of the first token of a prompt that gets log p; None: none does."""
    sampling, length = request.sampling, len(request.tokens)
    if sampling.prompt_logprobs is None:
        return None
    return max(1, length - (sampling.prompt_last or length))


def _prompt_of(admission: Admission, others: tuple[int, ...]) -> Prompt:
    sequence = admission.sequence
    request, answer = sequence.request
    first = None if answer.tokens or request.sampling.prompt_logprobs is None else first_scored(request)
    return Prompt(
        tokens=sequence.tokens,
        blocks=sequence.blocks,
        row=sequence.row,
        slot=sequence.slot,
        start=admission.start,
        others=others,
        first_scored=first,
        targets=request.sampling.prompt_targets,
        listed=request.sampling.prompt_logprobs or 0,
    )


def _compiled(sizes: set[int], needed: int, new: int, most: int) -> int:
    """A size for which programs are compiled, if one is large enough and not beyond `most`, else a new one."""
    size = min((size for size in sizes if needed <= size <= most), default=new)
    sizes.add(size)
    return size


def _pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """[from, to] of copies, padded with copies of nothing."""
    numbers = np.full((2, power_of_two(len(pairs))), NOWHERE, np.int32)
    numbers[:, : len(pairs)] = np.array(pairs, np.int32).reshape(-1, 2).T
    return numbers


def _edits(sequences: Sequence[Running], rows: int) -> dict[str, Any]:
    """The edits of some sequences, and the tokens that their penalties count."""
    samplings = {sequence.row: sequence.request[0].sampling for sequence in sequences}
    allowed = {row: sampling.allowed_tokens or () for row, sampling in samplings.items()}
    biases = {row: tuple(sampling.logit_bias.items()) for row, sampling in samplings.items()}
    seen = {s.row: s.tokens if samplings[s.row].repetition_penalty != 1 else () for s in sequences}

    def table(lists: Mapping[int, Sequence[Any]], fill: Any, dtype: Any) -> np.ndarray:
        array = np.full((rows, power_of_two(max(map(len, lists.values())))), fill, dtype)
        for row, values in lists.items():
            array[row, : len(values)] = values
        return array

    penalty, only = np.ones(rows, np.float32), np.zeros(rows, bool)
    for row, sampling in samplings.items():
        penalty[row], only[row] = sampling.repetition_penalty, sampling.allowed_tokens is not None
    none: Any = None
    edits = Edits(
        penalty, none, only, table(allowed, -1, np.int32),
        table({row: [token for token, _ in bias] for row, bias in biases.items()}, -1, np.int32),
        table({row: [value for _, value in bias] for row, bias in biases.items()}, 0.0, np.float32),
    )  # fmt: skip
    return {"edits": edits, "seen_BL": table(seen, -1, np.int32)}


def _listing(listed: Any, row: int, wanted: int) -> Listing:
    return list(zip(listed.tokens_Bk[row, :wanted].tolist(), listed.logprobs_Bk[row, :wanted].tolist(), strict=True))


def block_bytes(stages: Sequence[Stage]) -> int:
    """Bytes of a block in all layers of the fullest stage."""
    return max(_block_bytes(stage) for stage in stages)


def _block_bytes(stage: Stage) -> int:
    size = np.dtype(stage.parts.dtype).itemsize
    layers = [stage.parts.model.layer(piece.layer) for piece in stage.extent.pieces if piece.half != "mlp"]
    return BLOCK * size * sum(int(np.prod(shape)) for layer in layers for shape in layer.row_shapes.values())


def blocks_that_fit(stages: Sequence[Stage], *, beside_training: bool = False) -> int:
    """Number of blocks that fit into what the devices have left.

    Args:
        beside_training: leave the memory that slots have taken so far, and take again.
    """
    left, used = WITHOUT_LIMIT, "peak_bytes_in_use" if beside_training else "bytes_in_use"
    for stage in stages:
        for device in stage.mesh.mesh.devices.flat:
            stats = device.memory_stats() if device.platform != "cpu" else None
            if stats and "bytes_limit" in stats:
                unused = (stats["bytes_limit"] - stats[used]) * SHARE_OF_MEMORY
                left = int(unused) if left == WITHOUT_LIMIT else min(left, int(unused))
    return max(1, left // max(block_bytes(stages), 1))


def _turned(model: ModelConfig) -> list[int]:
    """Lengths from which on longer sequences turn all keys otherwise."""
    scalings = [rope.scaling for rope in model.ropes if rope.scaling and rope.scaling.kind == "longrope"]
    return [scaling.original_max_positions for scaling in scalings]


def check_requests(requests: Sequence[Request], model: ModelConfig) -> None:
    """Checks the lengths and the tokens of prompts.

    Raises:
        LoraFusionError, ErrorList: `generate.empty-prompt`, `generate.token`, `generate.too-long`, `generate.longrope`.
    """
    errors: list[LoraFusionError] = []
    for request in requests:
        length, where, sampling = len(request.tokens), request.where, request.sampling
        listed = {
            "its stop_tokens": sampling.stop_tokens or (),
            "its allowed_tokens": sampling.allowed_tokens or (),
            "its logit_bias": tuple(sampling.logit_bias),
            "its prompt_targets": tuple(t for tokens in sampling.prompt_targets for t in tokens if t != -1),
        }
        if not length:
            message = f"{where} has no token."
            errors.append(ConfigError("generate.empty-prompt", message, fix="a text, or at least one message"))
        elif outside := [token for token in request.tokens if not 0 <= token < model.vocab_size]:
            message = f"{where} has the token {outside[0]}, and the model has tokens 0 to {model.vocab_size - 1}."
            errors.append(ConfigError("generate.token", message, fix="the tokens of this base's tokenizer"))
        elif length >= model.positions:
            message = f"{where} has {length} tokens, and the model knows {model.positions} positions."
            errors.append(CheckpointError("generate.too-long", message, fix="a shorter prompt"))
        for name, tokens in listed.items():
            if outside := [token for token in tokens if not 0 <= token < model.vocab_size]:
                message = f"{where}: {name} has {outside[0]}, and the model has tokens 0 to {model.vocab_size - 1}."
                errors.append(ConfigError("generate.token", message, fix="the tokens of this base's tokenizer"))
        total = length + sampling.max_tokens
        for original in _turned(model):
            if length <= original < min(total, model.positions):
                message = f"{where} and its answer may cross {original} positions."
                why = "longrope turns all earlier keys by other angles from there on"
                most = original - length
                fix = f"max_tokens={most}" if most else "a longer or shorter prompt"
                errors.append(ConfigError("generate.longrope", message, why=why, fix=fix))
    raise_all(errors)
