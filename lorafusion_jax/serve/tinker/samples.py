"""Requests for samples to settings, and answers to a message. Numpy only: the worker reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lorafusion_jax.generation.sampling import MOST_LISTED, MOST_SEED, Sampling
from lorafusion_jax.serve.tinker.datums import FLOAT32, MOST_TARGETS, DatumError
from lorafusion_jax.serve.tinker.messages import message_class

NO_LOGPROB = -99999.0  # of a place of the most probable tokens that is empty
STOP, LENGTH = 0, 1  # of StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Ids whose log p at positions of the prompt was asked for: cell [i, j] at token i + 1.

    Args:
        ids: [cells], -1 for none.
        row: of each cell.
        crow, col: of a sparse table (None: it is dense).
    """

    ids: list[int]
    row: list[int]
    shape: tuple[int, ...]
    crow: list[int] | None
    col: list[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Samples of one prompt.

    Args:
        samplings: settings of each sample. The first one asks for what is said of the prompt, too.
        scored: whether log p of the prompt's own tokens is returned.
        last: tokens at its end that have it (None: all but the first).
    """

    prompt: list[int]
    samplings: list[Sampling]
    scored: bool
    last: int | None
    targets: Targets | None

    @property
    def pairs(self) -> list[tuple[list[int], Sampling]]:
        """The prompt and the settings of each sample."""
        return [(self.prompt, sampling) for sampling in self.samplings]


def read_sample(values: Mapping[str, Any], most_tokens: int) -> SampleRequest:
    """Reads the JSON of a SampleRequest.

    Args:
        most_tokens: of a prompt and its sample, where the request has no `max_tokens`.

    Raises:
        DatumError, ConfigError, ErrorList: says what is wrong.
    """
    prompt = _read_prompt(values.get("prompt"))
    params = values.get("sampling_params")
    params = params if isinstance(params, Mapping) else {}
    if values.get("prompt_alt_tokens_k"):
        raise DatumError("prompt_alt_tokens_k: other tokens of a prompt are not drawn")
    top_k_of_prompt, last = values.get("topk_prompt_logprobs") or 0, values.get("prompt_logprobs_last_n")
    scores_prompt, targets = bool(values.get("prompt_logprobs")), None
    if last is not None and (not scores_prompt or not isinstance(last, int) or not 1 <= last < len(prompt)):
        raise DatumError(
            f"prompt_logprobs_last_n={last!r} needs prompt_logprobs, and is 1 to {len(prompt) - 1}, the prompt's"
            " tokens without the first"
        )
    if (table := values.get("target_prompt_logprobs")) is not None:
        targets = _read_targets(table, len(prompt) - 1)
    tokens, top_k = params.get("max_tokens"), params.get("top_k", -1)
    sampling = Sampling(
        max_tokens=max(1, most_tokens - len(prompt)) if tokens is None else tokens,
        temperature=params.get("temperature", 1.0),
        top_k=0 if top_k == -1 else top_k,
        top_p=params.get("top_p", 1.0),
        seed=params.get("seed") or 0,
        logprobs=values.get("topk_sample_logprobs") or 0,
        prompt_logprobs=top_k_of_prompt if scores_prompt or top_k_of_prompt or targets else None,
        prompt_last=None if targets else last,
        prompt_targets=() if targets is None else _by_token(targets),
        **_read_stop(params.get("stop")),
    )
    count = values.get("num_samples", 1)
    repeats = replace(sampling, prompt_logprobs=None, prompt_last=None, prompt_targets=()) if count > 1 else sampling
    seeds = [(sampling.seed + number) % (MOST_SEED + 1) for number in range(count)]
    samplings = [sampling, *(replace(repeats, seed=seed) for seed in seeds[1:])]
    return SampleRequest(prompt=prompt, samplings=samplings, scored=scores_prompt, last=last, targets=targets)


def _read_prompt(prompt: Any) -> list[int]:
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list):
        raise DatumError("the prompt has no chunks")
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, Mapping) else "no kind"
        if kind != "encoded_text":
            raise DatumError(f"the prompt has a chunk of {str(kind)[:100]}; there are chunks of text only")
        tokens += _ints(chunk.get("tokens"), "the prompt")
    if not tokens:
        raise DatumError("the prompt has no token")
    return tokens


def _ints(values: Any, where: str) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise DatumError(f"{where} must be whole numbers")
    return values


def _read_stop(stop: Any) -> dict[str, Any]:
    if stop is None:
        return {}
    entries = [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list):
        raise DatumError("stop must be a text, texts, or token ids")
    if all(isinstance(entry, str) for entry in entries):
        return {"stop": tuple(entries), "stop_tokens": ()}
    return {"stop_tokens": tuple(_ints(entries, "stop: its entries are texts, or they"))}


def _read_targets(table: Any, rows: int) -> Targets:
    where = "target_prompt_logprobs"
    if not isinstance(table, Mapping):
        raise DatumError(f"{where} must be a tensor")
    ids, shape = _ints(table.get("data"), where), _ints(table.get("shape"), f"the shape of {where}")
    if len(shape) != 2 or shape[0] != rows or not 1 <= shape[1] <= MOST_TARGETS:
        raise DatumError(f"{where} has the shape {shape[:8]}, not [{rows}, 1 to {MOST_TARGETS}]")
    if (crow := table.get("sparse_crow_indices")) is None:
        if len(ids) != rows * shape[1]:
            raise DatumError(f"{where} has {len(ids)} values, and its shape is {shape}")
        row = [cell // shape[1] for cell in range(len(ids))]
        return Targets(ids=ids, row=row, shape=tuple(shape), crow=None, col=None)
    crow, col = _ints(crow, where), _ints(table.get("sparse_col_indices"), where)
    sizes = np.diff(crow) if len(crow) == rows + 1 else np.array([-1])
    if (sizes < 0).any() or crow[0] or not crow[-1] == len(col) == len(ids) or (sizes > shape[1]).any():
        raise DatumError(f"{where} is no table in CSR form of the shape {shape}")
    row = np.repeat(np.arange(rows), sizes).tolist()
    return Targets(ids=ids, row=row, shape=tuple(shape), crow=crow, col=col)


def _by_token(targets: Targets) -> tuple[tuple[int, ...], ...]:
    """The ids at each token of the prompt, as many for each."""
    lists: list[list[int]] = [[] for _ in range(targets.shape[0] + 1)]
    for row, token in zip(targets.row, targets.ids, strict=True):
        lists[row + 1].append(token)
    widest = max(map(len, lists))
    return tuple((*tokens, *[-1] * (widest - len(tokens))) for tokens in lists)


def write_samples(request: SampleRequest, answers: Sequence[Any]) -> bytes:
    """Writes a SampleResponse.

    Args:
        answers: of the engine, one for each of the samplings.
    """
    message, first = message_class("SampleResponse")(), answers[0]
    for sampling, answer in zip(request.samplings, answers, strict=True):
        tokens, logprobs = answer.drawn_tokens, answer.drawn_logprobs
        sequence = message.sequences.add(stop_reason=STOP if answer.end == "stop" else LENGTH)
        sequence.tokens, sequence.logprobs = np.array(tokens, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes()
        if sampling.logprobs:
            _write_listed(sequence.topk_sampled_logprobs, answer.listed[: len(tokens)], sampling.logprobs)
    length = len(request.prompt)
    since = 0 if request.last is None else length - request.last
    if request.scored:
        scores = [np.nan if score is None or at < since else score for at, score in enumerate(first.prompt_logprobs)]
        message.prompt_logprobs = np.array(scores, "<f4").tobytes()
    if width := request.samplings[0].prompt_logprobs:
        lists = [entries if at >= since else None for at, entries in enumerate(first.prompt_listed)]
        _write_listed(message.topk_prompt_logprobs, lists, width)
    if request.targets is not None:
        _write_targets(message.target_prompt_logprobs, request.targets, first.prompt_targets)
    return message.SerializeToString(deterministic=True)


def _write_listed(written: Any, lists: Sequence[Sequence[tuple[int, float]] | None], k: int) -> None:
    assert k <= MOST_LISTED
    ids, logprobs = np.zeros((len(lists), k), "<i4"), np.full((len(lists), k), NO_LOGPROB, "<f4")
    for at, entries in enumerate(lists):
        for number, (token, logprob) in enumerate(entries or ()):
            ids[at, number], logprobs[at, number] = token, logprob
    written.token_ids, written.logprobs = ids.tobytes(), logprobs.tobytes()
    written.k, written.length = k, len(lists)


def _write_targets(written: Any, targets: Targets, by_token: Sequence[Sequence[float | None] | None]) -> None:
    scores: list[float] = []
    numbers = [0] * targets.shape[0]  # of cells of a row so far
    for row in targets.row:
        of_row = by_token[row + 1] or ()
        score = of_row[numbers[row]] if numbers[row] < len(of_row) else None
        scores.append(0.0 if score is None else score)
        numbers[row] += 1
    values = np.array(scores, "<f4").tobytes()
    written.dtype = FLOAT32
    written.shape.extend(targets.shape)
    if targets.crow is None:
        written.dense = values
    else:
        written.sparse_csr.values = values
        written.sparse_csr.crow_indices = np.array(targets.crow, "<i8").tobytes()
        written.sparse_csr.col_indices = np.array(targets.col, "<i8").tobytes()
