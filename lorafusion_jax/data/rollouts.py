"""Prompts of adapters that sample their own rows, and what they have sampled.

A plan reserves room for the longest answer: it knows the lengths of prompts, and those of answers only once they are
drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.config.rollout_section import ANSWER
from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.config.user_functions import unknown_arguments
from lorafusion_jax.data.chosen_rows import choose_rows
from lorafusion_jax.data.fit_length import MOST_LOST
from lorafusion_jax.data.prompts import prompt_tokens
from lorafusion_jax.data.rows import Rows, messages_or_text
from lorafusion_jax.data.sources import open_source, parse_rows
from lorafusion_jax.data.template.left_out import unread_keys
from lorafusion_jax.data.tokenized_set import DataReport, TokenizedSet, quantiles
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.errors import DataError, LoraFusionError, raise_all
from lorafusion_jax.objective.policy import ADVANTAGES, OLD

PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A row of the file of prompts.

    Attributes:
        prompt: a text, or messages.
        row: its columns, with the roles of `data.columns` as further ones: what rewards and tools are given.
    """

    prompt: Any
    tokens: list[int]
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """A global batch that was sampled and rewarded.

    Attributes:
        samples: in the order of the adapter's stream.
        metrics: of its step: reward, lag, and what else was measured.
    """

    samples: TokenizedSet
    metrics: Mapping[str, float]


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutData:
    """What an adapter samples from, and its batches that wait for training or are in it.

    Attributes:
        prompts: in the order of `AdapterData.train`.
        held_out: prompts of evaluations.
        batches: by number of the global batch. The run fills it, and forgets those that are trained.
    """

    prompts: list[PromptRow]
    held_out: list[PromptRow] = field(default_factory=list)
    batches: dict[int, RolloutBatch] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of all columns: rewards depend on them."""
        rows = [dict(entry.row) for entry in (*self.prompts, *self.held_out)]
        return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load_prompts(
    source: str, adapter: AdapterConfig, tokenizer: Tokenizer, base_dir: Path
) -> tuple[TokenizedSet, list[PromptRow]]:
    """Reads a source of prompts. Returns them with room for an answer each, and as they are.

    Raises:
        DataError, ErrorList: data.missing-column, data.bad-row, data.too-long, with the rows.
    """
    columns, settings = dict(adapter.data.columns), adapter.data
    chosen = choose_rows(source, base_dir, settings.where) if settings.where else None
    raw = chosen.raw if chosen else open_source(source, base_dir)
    rows = chosen.of(settings.where) if chosen else parse_rows(raw)
    raise_all(rows.problems)
    roles = {PROMPT} | {reward.value for reward in adapter.rollout.reward if reward.kind == "exact"}
    prompts: dict[int, PromptRow] = {}
    bad: list[tuple[int, str]] = []
    for number, row in enumerate(rows.values):
        row = row | {role: row[column] for role, column in columns.items() if column in row}
        try:
            if missing := [name for name in sorted(roles) if row.get(name) in (None, "", [])]:
                raise ValueError(f"it has no '{columns.get(missing[0], missing[0])}'")
            prompts[number] = _prompt(row, tokenizer, rows.locate(number))
        except (ValueError, LoraFusionError) as problem:
            bad.append((number, getattr(problem, "what", str(problem))))
    if bad and (settings.on_bad == "error" or len(bad) > MOST_LOST * len(rows.values)):
        fix = f"repair these rows, or data.columns: {{prompt: COLUMN, {ANSWER}: COLUMN}}"
        raise rows.refuse("data.bad-row", f"{adapter.name}: {len(bad)} rows are no prompts.", bad, fix=fix)
    prompts, too_long = _fitting(prompts, adapter, rows)
    notes = [f"[data.left-out] {len(bad)} rows are no prompts: {bad[0][1]}"] if bad else []
    conversations = [entry.prompt for entry in prompts.values() if not isinstance(entry.prompt, str)]
    if tokenizer.chat_template is not None and (
        unread := unread_keys(tokenizer.chat_template, chain.from_iterable(conversations))
    ):
        names = ", ".join(f"'{key}'" for key in unread)
        notes.append(
            f"[data.unused-key] the chat template does not use {names} of messages: no answer can depend on it"
        )
    if too_long:
        notes.append(
            f"[data.too-long] {len(too_long)} prompts leave less than {adapter.rollout.reserved_tokens} of "
            f"data.max_length={settings.max_length} tokens for an answer, and are left out"
        )
    report = DataReport(
        source=raw.name,
        format=adapter.objective.name,
        columns=columns or {PROMPT: PROMPT},
        loss="answer",
        rows=len(rows.values),
        tokens=0,
        loss_tokens=0,
        longest=0,
        cut=0,
        dropped=tuple(rows.number(number) for number, _ in bad),
        too_long=tuple(rows.number(number) for number in too_long),
        uncut=quantiles([len(entry.tokens) for entry in prompts.values()]),
        notes=tuple(notes),
    )
    reserved = [0] * adapter.rollout.reserved_tokens
    answers = [Sampled(tokens=reserved, learned=[True] * len(reserved), logprobs=[0.0] * len(reserved))] * len(prompts)
    numbers = np.array([rows.number(number) for number in prompts], np.int64)
    prompt_rows = list(prompts.values())
    samples = samples_of(prompt_rows, answers, np.zeros(len(prompt_rows)), report, rows=numbers)
    counts = {"tokens": len(samples.tokens), "loss_tokens": int(samples.loss_mask.sum())}
    return replace(samples, report=replace(report, **counts, longest=int(samples.lengths.max()))), prompt_rows


def argument_problems(adapter: AdapterConfig, base_dir: Path, rollout: RolloutData) -> list[LoraFusionError]:
    """Arguments of the adapter's functions that no row has a column for: each call of them would fail."""
    sets = [(text, rows) for text in adapter.rollout.functions for rows in (rollout.prompts, rollout.held_out) if rows]
    if adapter.eval.score is not None:
        sets.append((adapter.eval.score, rollout.held_out))
    sentences: dict[str, None] = {}
    for text, rows in sets:
        if wrong := unknown_arguments(base_dir, text, {name for entry in rows for name in entry.row}):
            sentences[wrong] = None
    fix = "a column of the rows, or a default: def score(prompts, completions, answer, weight=1.0)"
    return [DataError("data.missing-column", f"{adapter.name}: {wrong}", fix=fix) for wrong in sentences]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What follows a prompt.

    Attributes:
        learned: whether the adapter drew the token; a tool gave the others.
        logprobs: log p of each token that was drawn, 0 for the others.
    """

    tokens: Sequence[int]
    learned: Sequence[bool]
    logprobs: Sequence[float]


def samples_of(
    prompts: Sequence[PromptRow],
    sampled: Sequence[Sampled],
    advantages: np.ndarray,
    report: DataReport,
    *,
    rows: np.ndarray | None = None,
) -> TokenizedSet:
    """Returns answers as samples of an objective on advantages."""
    lengths = [len(prompt.tokens) + len(answer.tokens) for prompt, answer in zip(prompts, sampled, strict=True)]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens, mask = np.zeros(offsets[-1], np.int32), np.zeros(offsets[-1], bool)
    values = {name: np.zeros(offsets[-1], np.float32) for name in (ADVANTAGES, OLD)}
    for number, (prompt, answer) in enumerate(zip(prompts, sampled, strict=True)):
        first, start, end = offsets[number], offsets[number] + len(prompt.tokens), offsets[number + 1]
        tokens[first:start], tokens[start:end] = prompt.tokens, answer.tokens
        mask[start:end], values[OLD][start:end] = answer.learned, answer.logprobs
        values[ADVANTAGES][start:end] = np.where(answer.learned, advantages[number], 0.0)
    return TokenizedSet(
        tokens=tokens,
        loss_mask=mask,
        offsets=offsets,
        rows=np.arange(len(prompts)) if rows is None else rows,
        values=values,
        segment_lengths=np.array(lengths, np.int64)[:, None],
        report=report,
    )


def _prompt(row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> PromptRow:
    prompt = messages_or_text(row[PROMPT]) if isinstance(row[PROMPT], str) else row[PROMPT]
    if not isinstance(prompt, str | list):
        raise ValueError("its prompt is neither a text nor messages")
    tokens = prompt_tokens(prompt, tokenizer, where=where)
    if not tokens:
        raise ValueError("its prompt has no tokens")
    return PromptRow(prompt=prompt, tokens=tokens, row=row)


def _fitting(
    prompts: Mapping[int, PromptRow], adapter: AdapterConfig, rows: Rows
) -> tuple[dict[int, PromptRow], list[int]]:
    """Returns the prompts that leave room for an answer, and the numbers of the others."""
    most_tokens = adapter.data.max_length - adapter.rollout.reserved_tokens
    long = [number for number, entry in prompts.items() if len(entry.tokens) > most_tokens]
    if long and (adapter.data.on_long == "error" or len(long) == len(prompts)):
        why = f"it has {len(prompts[long[0]].tokens)} tokens, and the longest answer {adapter.rollout.reserved_tokens}"
        raise rows.refuse(
            "data.too-long",
            f"{adapter.name}: {len(long)} prompts leave no room for an answer in data.max_length="
            f"{adapter.data.max_length} tokens.",
            [(number, why) for number in long],
            fix=f"{adapter.rollout.fix_of_room}, a larger data.max_length, or data.on_long: drop",
        )
    return {number: entry for number, entry in prompts.items() if number not in set(long)}, long
