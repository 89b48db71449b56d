"""Texts for prompts with a loaded model, and files of prompts: what `lorafusion generate` and `chat` use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lorafusion_jax.data.prompts import Prompt, prompt_tokens
from lorafusion_jax.data.row_files import parse_csv
from lorafusion_jax.data.rows import messages_or_text, typed_row
from lorafusion_jax.data.template.left_out import unread_keys
from lorafusion_jax.data.tokenizer import Tokenizer, load_tokenizer, with_template
from lorafusion_jax.errors import DataError, LoraFusionError, raise_all
from lorafusion_jax.families.hf_config import one_of_each
from lorafusion_jax.generation.answer_text import AnswerTexts
from lorafusion_jax.generation.generator import MOST_SEQUENCES, Conversation, Generator
from lorafusion_jax.generation.load import load_stage
from lorafusion_jax.generation.packing import BASE
from lorafusion_jax.generation.requests import Answer, End, Request
from lorafusion_jax.generation.sampling import GREEDY, MOST_SEED, Sampling
from lorafusion_jax.generation.sources import BASE_NAME, Source, unknown_adapter
from lorafusion_jax.objective.protocol import CellType
from lorafusion_jax.readable import TEMPLATE, read_text
from lorafusion_jax.session.stage import Stage

NUMBERS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
TYPES: Mapping[str, CellType] = dict.fromkeys(NUMBERS, "number")
OF_RESULTS = ("logprobs", "prompt_logprobs", "prompt_last", "prompt_targets")  # not of what is drawn
SETTINGS = tuple(field.name for field in fields(Sampling) if field.name not in OF_RESULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A prompt, for one adapter.

    Args:
        prompt: a text, messages or tokens.
        adapter: name, or "base".
        where: name of the prompt in messages.
    """

    prompt: Prompt
    adapter: str
    sampling: Sampling = GREEDY
    where: str = "the prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A generated text.

    Attributes:
        tokens: of the text, special ones included, without the token that ended it.
        logprobs: log p of each token under the adapter, without temperature, top k and top p.
        end: "stop": a stop token or text ended it; "length": it has `max_tokens` tokens; "context": the model knows no
            further positions.
        end_token, end_logprob: the stop token that ended it, and its log p; None if none did.
    """

    adapter: str
    prompt: Prompt
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: End
    end_token: int | None = None
    end_logprob: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the adapter ended the text itself, rather than a limit of length."""
        return self.end == "stop"

    @property
    def completion_ids(self) -> list[int]:
        """All drawn tokens, the one that ended the text included: a column of losses on advantages."""
        return [*self.tokens, *(() if self.end_token is None else (self.end_token,))]

    @property
    def old_logprobs(self) -> list[float]:
        """log p of `completion_ids`."""
        return [*self.logprobs, *(() if self.end_logprob is None else (self.end_logprob,))]


class TextGenerator:
    """A base model and adapters on one device.

    Attributes:
        adapters: names that can generate, "base" included.
        asked: names that generate where a prompt names none.
        tokenizer: of the base model, with its own chat template.
    """

    def __init__(self, source: Source):
        self.tokenizer: Tokenizer = load_tokenizer(source.base)
        self.tokenizer.require()
        self._tokenizers = {
            adapter.name: tokenizer_of_folder(adapter.folder, self.tokenizer) for adapter in source.adapters
        }
        self.asked = source.asked
        self._names = [adapter.name for adapter in source.adapters]
        self._generator = TokenGenerator([load_stage(source)], self.tokenizer, self._stops())

    @property
    def adapters(self) -> tuple[str, ...]:
        return (*self._names, BASE_NAME)

    def tokenizer_of(self, adapter: str) -> Tokenizer:
        """The base's tokenizer with the chat template that the adapter was trained with."""
        return self._tokenizers.get(adapter, self.tokenizer)

    def __call__(
        self,
        rows: Sequence[PromptRow],
        *,
        raw: bool = False,
        system: str | None = None,
        most: int = MOST_SEQUENCES,
        on_text: Callable[[int, str], None] | None = None,
        conversation: Conversation | None = None,
    ) -> list[Generated]:
        """Generates a text for each row.

        Args:
            raw, system: see `prompt_tokens`.
            most: sequences at a time.
            on_text: called with the index of a row and its text so far, whenever it has grown.
            conversation: caches of the last call: rows read only what follows the tokens of their last turn.

        Raises:
            LoraFusionError: see `prompt_tokens` and `Generator`; `generate.unknown-adapter`.
        """
        requests = [
            Request(
                tokens=self._encode(row, raw, system),
                adapter=self._index(row),
                sampling=row.sampling,
                where=row.where,
            )
            for row in rows
        ]
        answers = self._generator(requests, on_text, most=most, conversation=conversation)
        return [
            Generated(
                adapter=row.adapter,
                prompt=row.prompt,
                text=self._generator.text(request, answer),
                tokens=tuple(answer.tokens),
                logprobs=tuple(answer.logprobs),
                end=answer.end or "length",
                end_token=answer.end_token,
                end_logprob=answer.end_logprob,
            )
            for row, request, answer in zip(rows, requests, answers, strict=True)
        ]

    def unread_keys(self, rows: Sequence[PromptRow]) -> list[str]:
        """Keys of messages that the chat template of the row's adapter does not use: no answer depends on them."""
        messages: dict[str, list[dict[str, Any]]] = {}  # by adapter
        for row in rows:
            of_adapter = messages.setdefault(row.adapter, [])
            of_adapter += [message for message in row.prompt if isinstance(message, dict)]
        templates = {adapter: self.tokenizer_of(adapter).chat_template for adapter in messages}
        return sorted(
            {
                key
                for adapter, template in templates.items()
                if template is not None
                for key in unread_keys(template, messages[adapter])
            }
        )

    def _encode(self, row: PromptRow, raw: bool, system: str | None) -> list[int]:
        return prompt_tokens(row.prompt, self.tokenizer_of(row.adapter), raw=raw, system=system, where=row.where)

    def _stops(self) -> list[int]:
        """The tokens that end a text of any adapter."""
        tokenizers = (self.tokenizer, *self._tokenizers.values())
        stops = (number for tokenizer in tokenizers for number in tokenizer.stop_ids)
        return list(dict.fromkeys(stops))

    def _index(self, row: PromptRow) -> int:
        if row.adapter == BASE_NAME:
            return BASE
        if row.adapter not in self._names:
            raise unknown_adapter(row.adapter, self._names, row.where)
        return self._names.index(row.adapter)


class TokenGenerator:
    """A generator whose answers end with stop texts, too.

    Args:
        stages: of a model, with adapters.
        stops: tokens that end an answer.
    """

    def __init__(self, stages: Sequence[Stage], tokenizer: Tokenizer, stops: Sequence[int]):
        self._texts = AnswerTexts(tokenizer)
        self._generator = Generator(stages, stops, self._texts.ends_with, self._texts.special_texts)

    def __call__(
        self,
        requests: Sequence[Request],
        on_text: Callable[[int, str], None] | None = None,
        *,
        most: int = MOST_SEQUENCES,
        conversation: Conversation | None = None,
    ) -> list[Answer]:
        def on_tokens(index: int, answer: Answer) -> None:
            if on_text is not None:
                on_text(index, self.text(requests[index], answer))

        return self._generator(requests, on_tokens, most=most, conversation=conversation)

    def text(self, request: Request, answer: Answer) -> str:
        """The text of an answer, without what ended it."""
        return self._texts.text(answer.tokens, request.sampling.stop)


def rows_for(
    prompts: Sequence[Prompt], adapters: Sequence[str], sampling: Sampling, samples: int = 1
) -> list[PromptRow]:
    """Returns rows for each prompt and adapter: `samples` of them, with the seeds from that of the sampling on."""
    settings = [replace(sampling, seed=(sampling.seed + number) % (MOST_SEED + 1)) for number in range(samples)]
    return [
        PromptRow(prompt=prompt, adapter=adapter, sampling=setting, where=f"prompt {number}")
        for number, prompt in enumerate(prompts, 1)
        for adapter in adapters
        for setting in settings
    ]


def tokenizer_of_folder(folder: Path, tokenizer: Tokenizer) -> Tokenizer:
    """The base's tokenizer with the chat template of an adapter's folder, if it has one of its own."""
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return tokenizer
    source = read_text(path, TEMPLATE)
    is_of_base = tokenizer.chat_template is not None and tokenizer.chat_template.source == source
    return tokenizer if is_of_base else with_template(tokenizer, source, str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A row of a prompt file.

    Attributes:
        rows: one for each adapter.
        others: columns without a meaning here, which go with the answer.
    """

    rows: tuple[PromptRow, ...]
    others: dict[str, Any]


def read_rows(lines: Iterable[str], adapters: Sequence[str], sampling: Sampling, *, name: str) -> list[FileRow]:
    """Reads rows such as {"prompt": "…", "adapter": "law", "temperature": 0.7}.

    Args:
        adapters: of rows without the column "adapter".
        sampling: settings that a row may replace.
        name: of the file, for messages.

    Raises:
        DataError, ErrorList: `generate.row`: rows that are no objects, or hold neither a prompt nor messages.
    """
    file_rows, errors = [], []
    rows = parse_csv(name, "".join(lines)).values if name.lower().endswith(".csv") else lines
    for number, row in enumerate(rows, 1):
        if not isinstance(row, str) or row.strip():
            try:
                file_rows.append(_read_row(row, adapters, sampling, f"{name}, row {number}"))
            except LoraFusionError as problem:
                errors.append(problem)
    raise_all(errors[:20])
    if not file_rows:
        raise DataError("generate.row", f"{name} holds no prompts.", fix='rows such as {"prompt": "…"}')
    return file_rows


def _read_row(line: str | dict, adapters: Sequence[str], sampling: Sampling, where: str) -> FileRow:
    if not isinstance(line, str):
        try:
            line = json.dumps(typed_row({key: text for key, text in line.items() if text}, TYPES))
        except ValueError as problem:
            raise DataError("generate.row", f"{where}: {problem}.") from None
    try:
        row = json.loads(line, object_pairs_hook=one_of_each)
    except (ValueError, RecursionError) as problem:
        raise DataError("generate.row", f"{where} is not JSON.", why=str(problem)) from None
    if not isinstance(row, Mapping):
        raise DataError("generate.row", f"{where} is not an object.", fix='an object in each line: {"prompt": "…"}')
    prompt = row.get("prompt", row.get("messages"))
    prompt = messages_or_text(prompt) if isinstance(prompt, str) else prompt
    if ("prompt" in row) == ("messages" in row) or not _is_prompt(prompt):
        message = f"{where} needs either 'prompt', a text or messages, or 'messages'."
        raise DataError("generate.row", message, why=f"it has {', '.join(map(repr, row)) or 'no column'}")
    adapter = row.get("adapter")
    if not (adapter is None or isinstance(adapter, str)):
        raise DataError("generate.row", f"{where}: 'adapter' is not a text.", fix='"adapter": "NAME"')
    options = {key: row[key] for key in SETTINGS if key in row}
    try:
        settings = replace(sampling, **options)
    except (LoraFusionError, TypeError) as problem:
        raise DataError("generate.row", f"{where}: {getattr(problem, 'what', problem)}") from None
    names = adapters if adapter is None else [adapter]
    return FileRow(
        rows=tuple(PromptRow(prompt=prompt, adapter=name, sampling=settings, where=where) for name in names),
        others={key: value for key, value in row.items() if key not in (*SETTINGS, "prompt", "messages", "adapter")},
    )


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in prompt)
