"""lorafusion chat: a conversation with adapters, in a terminal."""

from __future__ import annotations

import threading
from typing import Any

from lorafusion_jax.cli.common import ProgramCache, standard_input
from lorafusion_jax.cli.generate import (
    Adapters,
    Base,
    Best,
    Dtype,
    MaxTokens,
    Quantize,
    Seed,
    SourceArgument,
    Step,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
)
from lorafusion_jax.errors import ConfigError, LoraFusionError
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import out, say
from lorafusion_jax.signals import cutting

HELP = "/adapter NAME changes the adapter, /new starts again, Ctrl-C cuts an answer, /exit ends"
FIXES = {  # of errors of a message
    "generate.too-long": "/new starts again, or a shorter message",
    "generate.template": "lorafusion generate --raw: without the template",
}


def command(
    source: SourceArgument,
    adapters: Adapters = None,
    base: Base = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    stop: Stop = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    step: Step = None,
    best: Best = False,
    program_cache: ProgramCache = True,
) -> None:
    """Talks with an adapter; several answer each message side by side. Reads lines until /exit or the end of input.

    Example: lorafusion chat runs/exp1 --adapter law
    """
    from lorafusion_jax.generation.sources import find_source

    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    generation_source = find_source(
        source, adapters or (), base=base, dtype=dtype, quantize=quantize, step=step, best=best
    )
    prepare_machine(cache=program_cache)
    from lorafusion_jax.generation.text import TextGenerator

    console = out()
    model = TextGenerator(generation_source)
    conversation = Conversation(model, sampling, system, console)
    if conversation.is_typed:
        say(console, f"{', '.join(model.asked)}  ·  {HELP}", "dim")
    conversation.run()


class Conversation:
    """One conversation for each adapter that answers.

    Attributes:
        is_typed: somebody types the lines, and sees prompts; lines of a pipe or a file get answers only.
    """

    def __init__(self, model: Any, sampling: Sampling, system: str | None, console: Any):
        self._model, self._sampling, self._system, self._console = model, sampling, system, console
        self._names = list(model.asked)
        self._messages: dict[str, list[dict[str, str]]] = {name: [] for name in self._names}
        self._caches: Any = None
        self.is_typed = standard_input().isatty()

    def run(self) -> None:
        """Answers lines until /exit or the end of input.

        Raises:
            ConfigError: `generate.no-prompt`, there is no line, and no terminal to type one.
        """
        line = self._read()
        if line is None and not self.is_typed:
            why, fix = (
                "chat reads a message in each line",
                "a terminal (docker run -it), or echo 'a message' | lorafusion chat RUN",
            )
            raise ConfigError("generate.no-prompt", "standard input is empty.", why=why, fix=fix)
        while line is not None and line != "/exit":
            try:
                self._act(line)
            except LoraFusionError as problem:  # of this message only
                for error in getattr(problem, "errors", [problem]):
                    error.fix = FIXES.get(error.code, error.fix)
                    say(self._console, str(error), "red")
            line = self._read()

    def _read(self) -> str | None:
        if self.is_typed:
            self._console.print("> ", end="", style="bold")
        line = standard_input().readline()
        return line.strip() if line else None

    def _act(self, line: str) -> None:
        command, _, arguments = line.partition(" ")
        if command == "/new":
            self._messages = {name: [] for name in self._names}
        elif command == "/adapter":
            self._choose(arguments.split())
        elif line.startswith("/"):
            say(self._console, HELP, "dim")
        elif line:
            self._answer(line)

    def _choose(self, names: list[str]) -> None:
        unknown = [name for name in names if name not in self._model.adapters]
        if unknown or not names:
            wrong = f"there is no adapter {', '.join(map(repr, unknown))}; " if unknown else ""
            say(self._console, f"{wrong}adapters: {', '.join(self._model.adapters)}", "dim")
            return
        self._names = names
        for name in names:
            self._messages.setdefault(name, [])

    def _answer(self, line: str) -> None:
        from lorafusion_jax.generation.generator import Conversation as Caches
        from lorafusion_jax.generation.text import PromptRow

        self._caches = self._caches or Caches()
        chats = {name: [*self._messages[name], {"role": "user", "content": line}] for name in self._names}
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        plain = {name for name in self._names if self._model.tokenizer_of(name).chat_template is None}
        rows = [
            PromptRow(
                prompt=line if name in plain else [*system, *messages],
                adapter=name,
                sampling=self._sampling,
                where="the message",
            )
            for name, messages in chats.items()
        ]
        with cutting() as cut:
            stream = _Stream(self._console if len(rows) == 1 else None, cut)
            try:
                texts = [text.text for text in self._model(rows, on_text=stream, conversation=self._caches)]
            except _Cut:
                self._caches.forget()
                texts = [stream.texts.get(index, "") for index in range(len(rows))]
        for row, text in zip(rows, texts, strict=True):
            if len(rows) > 1:
                self._console.print(f"{row.adapter}: ", end="", style="bold")
                self._console.print(text.strip(), markup=False, highlight=False)
            if cut.is_set() and not text.strip():
                continue  # nothing was said
            answer = {"role": "assistant", "content": text.strip()}
            self._messages[row.adapter] = [*chats[row.adapter], answer]
        if len(rows) == 1:
            self._console.print()


class _Cut(Exception):
    """Ctrl-C while an answer is written."""


class _Stream:
    """Prints a text as it grows. A character whose tokens are not all there yet waits.

    Args:
        console: None: prints nothing.
        cut: set where the answers are to end.

    Raises:
        _Cut: it is set.
    """

    def __init__(self, console: Any, cut: threading.Event):
        self._console, self._cut, self._shown = console, cut, 0
        self.texts: dict[int, str] = {}

    def __call__(self, index: int, text: str) -> None:
        self.texts[index] = text = text.rstrip("\ufffd")
        if self._console is not None:
            self._console.print(text[self._shown :], end="", markup=False, highlight=False, soft_wrap=True)
            self._shown = max(self._shown, len(text))
        if self._cut.is_set():
            raise _Cut
