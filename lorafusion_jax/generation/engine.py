"""Generates for requests that come and go: continuous batches over blocks of a cache. B rows"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.generation.blocks import BlockPool
from lorafusion_jax.generation.capacity import blocks_that_fit
from lorafusion_jax.generation.choose import NOT_FINITE, Chosen
from lorafusion_jax.generation.packing import (
    BASE,
    NOWHERE,
    Prompt,
    PromptPass,
    bucket,
    pack_prompts,
    power_of_two,
)
from lorafusion_jax.generation.passes import Passes
from lorafusion_jax.generation.programs import GenerationPrograms, Position
from lorafusion_jax.generation.requests import Answer, Listing, Request, check_requests, first_scored, turned_lengths
from lorafusion_jax.generation.row_settings import row_settings
from lorafusion_jax.generation.schedule import Admission, Running, Scheduler, order_copies
from lorafusion_jax.generation.slots import Sampler, SlotTable
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.session.stage import Stage

ROWS = 256  # sequences that run at a time
STEPS = 8  # passes between two looks at their tokens
SLOTS = 16  # adapters that run at a time
PROMPT_TOKENS = 8192  # that are read before others get their next tokens
FEWEST_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """Passes that the devices run, or have run: nobody has looked at their tokens.

    Attributes:
        owners: of the rows: sequence and answer.
        chosen: of each pass.
        prompts, scores: of passes that read prompts.
    """

    owners: dict[int, tuple[Running, Answer]]
    chosen: list[Chosen]
    prompts: Sequence[PromptPass] = ()
    scores: Sequence[Any] = ()


class Engine:
    """Generates with snapshots of the adapters of a model. All calls come from one thread.

    Args:
        stages: with the model, whose adapters have weights.
        rows: sequences that run at a time.
        blocks: of the cache, `BLOCK` tokens each (None: what fits into what the devices have left).
        slots: adapters that run at a time.
        steps: passes of a call of `step`.
        stop_tokens: tokens that end answers whose settings name none.
        ends_with: (tokens, stop texts) → whether the tokens end with one of the texts (None: they have no text).
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
        ends_with: Callable[[Sequence[int], Sequence[str]], bool] | None = None,
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
        self._issued: list[Issued] = []

    def snapshot(self, adapter: int) -> Sampler:
        """Copies the weights that an adapter has now. Later steps do not change the copy."""
        spec = dict(self._stages[0].occupied)[adapter]  # another than at the start, where adapters come and go
        sampler = Sampler(number=next(self._numbers), adapter=adapter, name=spec.name, spec=spec)
        slot = self._slots.take(sampler)
        if slot is not None:
            sampler.finite = self._passes.put(adapter, slot)
            return sampler
        slot_weights = self._passes.read(0)  # sequences run in all slots: the copy goes to the host through one of them
        sampler.finite = self._passes.put(adapter, 0)
        sampler.on_host = self._passes.read(0)
        self._passes.write(0, slot_weights)
        return sampler

    def drop(self, sampler: Sampler) -> None:
        """Frees a sampler, at once or after the last of its requests."""
        self._slots.drop(sampler)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._scheduler.busy or self._finished or self._issued)

    def submit(self, request: Request) -> Answer:
        """Lets a request wait for its turn. `step` fills the answer.

        Raises:
            LoraFusionError: see `check_requests`; `generate.stop`, a text shall end it and tokens have none;
                `generate.dropped`, the sampler is gone; `generate.memory`, the blocks do not hold prompt and answer.
        """
        check_requests([request], self.model)
        sampling, sampler = request.sampling, request.sampler or self.base
        if self._ends_with is None and (texts := [text for text in sampling.stop if text not in self._special_texts]):
            message = f"{request.where} shall end at the text {texts[0]!r}, and the base has no tokenizer.json."
            raise ConfigError("generate.stop", message, fix="stop tokens, or a base with its tokenizer.json")
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
        findable = not self._has_states and all(len(request.tokens) <= most for most in turned_lengths(self.model))
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
        """Starts requests that wait, and issues some passes. Returns the answers that have grown or ended.

        The devices run them while the host looks at the tokens of the passes before: rows that have ended there run in
        vain for one more call.
        """
        grown, self._finished = self._finished, []
        before, self._issued = self._issued, []
        if self._counts_tokens or not self._scheduler.can_reserve(self.steps):
            grown += self._look(before)
            before = []
        if not self._scheduler.reserve(self.steps):
            admissions = self._scheduler.admit(self.steps, PROMPT_TOKENS)
            if admissions:
                self._read(admissions)
        if self._issued and self._counts_tokens:
            grown += self._look([*before, *self._issued])
            before, self._issued = [], []
        going = [sequence for sequence in self._scheduler.running.values() if sequence.length < sequence.most]
        if going:
            self._continue(going, min(self.steps, max(sequence.most - sequence.length for sequence in going)))
        grown += self._look(before)
        return list({id(answer): answer for answer in grown}.values())

    @property
    def _counts_tokens(self) -> bool:
        """Whether the next passes depend on all tokens before them: penalties count them."""
        sequences = self._scheduler.running.values()
        return any(sequence.request[0].sampling.repetition_penalty != 1 for sequence in sequences)

    def wait(self) -> None:
        """Waits for all passes that were issued, without a look at their tokens."""
        jax.block_until_ready(self._passes.newest)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._scheduler.running)

    @property
    def num_cached(self) -> int:
        """Tokens of running sequences."""
        return sum(sequence.length for sequence in self._scheduler.running.values())

    @property
    def _has_states(self) -> bool:
        return any(layer.state_shapes for layer in self.model.kinds)

    def _acquire(self, sequence: Running) -> int | None:
        return self._slots.acquire(self._sampler(sequence))

    def _release(self, sequence: Running) -> None:
        self._slots.release(self._sampler(sequence))

    def _sampler(self, sequence: Running) -> Sampler:
        return sequence.request[0].sampler or self.base

    def _read(self, admissions: Sequence[Admission]) -> None:
        """Reads prompts and chooses the token after each."""
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
        B = self._num_rows(sequences)
        passes = pack_prompts(prompts, B, BLOCK)
        chosen, scores = self._passes.read_prompts(passes, row_settings(sequences, B))
        blocks, rows = order_copies(admissions, BLOCK)
        if rows and (blocks or self._has_states):
            self._passes.copy(_pairs(blocks), _pairs(rows))
        self._issue(sequences, [chosen], prompts=passes, scores=scores)

    def _continue(self, sequences: Sequence[Running], steps: int) -> None:
        """Runs the next tokens of sequences."""
        B, widest = self._num_rows(sequences), self.pool.blocks_of(max(sequence.most for sequence in sequences))
        at = Position(
            np.full(B, -1, np.int32), np.zeros(B, np.int32), np.full(B, BASE, np.int32),
            np.zeros((B, _compiled(self._widths, widest, bucket(widest, 2), 4 * widest)), np.int32),
        )  # fmt: skip
        for sequence in sequences:
            row, blocks = sequence.row, sequence.blocks
            at.position_B[row], at.limit_B[row] = sequence.length - 1, len(blocks) * BLOCK
            at.slot_B[row], at.tables_BM[row, : len(blocks)] = sequence.slot, blocks
        chosen = self._passes.next_tokens(steps, at, row_settings(sequences, B))
        for sequence in sequences:
            sequence.stored = min(sequence.length - 1 + steps, len(sequence.blocks) * BLOCK)
        self._issue(sequences, chosen)

    def _issue(self, sequences: Sequence[Running], chosen: list[Chosen], **prompts: Any) -> None:
        """Notes passes that the devices run."""
        for sequence in sequences:
            sequence.ahead += len(chosen)
        owners = {sequence.row: (sequence, sequence.request[1]) for sequence in sequences}
        self._issued.append(Issued(owners=owners, chosen=chosen, **prompts))

    def _num_rows(self, sequences: Sequence[Running]) -> int:
        """Rows of a pass: a size that is compiled already, if one fits."""
        num_rows = 1 + max(sequence.row for sequence in sequences)
        return _compiled(self._sizes, num_rows, max(power_of_two(num_rows), FEWEST_ROWS), NOWHERE)

    def _look(self, issued: Sequence[Issued]) -> list[Answer]:
        """Adds tokens to answers, and takes out the sequences that end."""
        grown = []
        for passes, (chosen, scores) in zip(
            issued, jax.device_get([(p.chosen, p.scores) for p in issued]), strict=True
        ):
            for prompts, of_pass in zip(passes.prompts, scores, strict=True):
                _take_scores(passes, prompts, of_pass)
            tokens, logprobs = (
                np.stack([getattr(step, name) for step in chosen], 1).tolist() for name in ("tokens_B", "logprobs_B")
            )
            for row, (sequence, answer) in passes.owners.items():
                if answer.end is None:  # others have ended before these passes
                    sequence.ahead -= len(chosen)
                    self._take(sequence, row, list(zip(tokens[row], logprobs[row], strict=True)), chosen)
                    grown.append(answer)
        return grown

    def _take(self, sequence: Running, row: int, pairs: Sequence[Any], chosen: Sequence[Chosen]) -> None:
        """Adds the tokens of passes to the answer of a sequence."""
        request, answer = sequence.request
        num_listed = request.sampling.logprobs
        for number, pair in enumerate(pairs):
            if num_listed and request.sampling.max_tokens:
                answer.listed.append(_listing(chosen[number].listed, row, num_listed))
            if self._ended(sequence, *pair):
                break
        if answer.error is not None:
            self.pool.forget(sequence.blocks)
            sequence.findable = False
        if answer.end is not None:
            self._scheduler.remove(sequence)
            self._slots.end(self._sampler(sequence))
        else:
            self._scheduler.remember(sequence)

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
            if sampling.stop and self._ends_with is not None and self._ends_with(answer.tokens, sampling.stop):
                answer.end = "stop"
            elif len(sequence.tokens) == sequence.most:
                answer.end = "length" if len(answer.tokens) == sampling.max_tokens else "context"
        return answer.end is not None

    def _not_finite(self, sequence: Running) -> RunError:
        message = f"{self._sampler(sequence).name}: the logits of a token are not numbers."
        return RunError("generate.not-finite", message, where=sequence.request[0].where)


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


def _take_scores(passes: Issued, prompts: PromptPass, results: Sequence[Any]) -> None:
    """Puts log p of tokens of prompts into answers."""
    if prompts.scored is None:
        return
    logprobs_Wk = np.concatenate([logprobs for logprobs, _ in results])
    for number, (row, index) in enumerate(prompts.scored.owners):
        request, answer = passes.owners[row][0].request
        answer.prompt_logprobs[index] = float(logprobs_Wk[number, 0])
        targets = request.sampling.prompt_targets
        ids = targets[index] if index < len(targets) else ()
        answer.prompt_targets[index] = [
            float(value) if token >= 0 else None for token, value in zip(ids, logprobs_Wk[number, 1:], strict=False)
        ]
        if num_listed := request.sampling.prompt_logprobs:
            part, within = divmod(number, len(results[0][0]))
            answer.prompt_listed[index] = _listing(results[part][1], within, num_listed)


def _listing(listed: Any, row: int, wanted: int) -> Listing:
    return list(zip(listed.tokens_Bk[row, :wanted].tolist(), listed.logprobs_Bk[row, :wanted].tolist(), strict=True))
