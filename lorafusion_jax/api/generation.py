"""`generate` and `open_generator`: texts from adapters, as objects."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lorafusion_jax.api.arguments import names_unknown
from lorafusion_jax.api.runs import Run
from lorafusion_jax.api.shown import Shown
from lorafusion_jax.errors import ConfigError, DataError, did_you_mean
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.sources import find_source
from lorafusion_jax.machine import prepare_machine

if TYPE_CHECKING:
    from rich.console import Console

    from lorafusion_jax.generation.text import Generated, TextGenerator

type Prompts = str | Sequence[Any]


@dataclass(frozen=True, slots=True, repr=False)
class Texts(Shown, Sequence["Generated"]):
    """Generated texts, in order of the prompts, for each prompt in order of the adapters, and for each its samples."""

    texts: tuple[Generated, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        return self.texts[index]

    def of(self, adapter: str) -> list[str]:
        """The texts of one adapter, in order of the prompts.

        Raises:
            ConfigError: `generate.unknown-adapter`, none of the texts is its.
        """
        if self.texts and adapter not in (names := dict.fromkeys(text.adapter for text in self.texts)):
            near, fix = did_you_mean(adapter, names), f"one of: {', '.join(names)}"
            message = f"no text is of the adapter {adapter!r}{f'; {near}' if near else '.'}"
            raise ConfigError("generate.unknown-adapter", message, fix=fix)
        return [text.text for text in self.texts if text.adapter == adapter]

    def _show(self, console: Console) -> None:
        from lorafusion_jax.report.console import show_texts

        show_texts(console, [(text.prompt, text.adapter, text.text) for text in self.texts])


def generate(
    source: Run | str | Path,
    prompts: Prompts,
    *,
    adapters: str | Sequence[str] = (),
    base: str | Path | None = None,
    raw: bool = False,
    system: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    step: int | None = None,
    best: bool = False,
    samples: int = 1,
    **sampling: Any,
) -> Texts:
    """Generates a text for every prompt with every adapter, all in one batch.

    Loads the model at every call; `open_generator` keeps it.

    Args:
        source: run, run folder, PEFT folder, or folder or hub name of a base model.
        prompts: a text, or a list of texts, of lists of messages, or of lists of tokens.
        adapters: names of adapters of the run, NAME=FOLDER for PEFT folders, or "base" (none: all of the run).
        base: another folder of the base model.
        raw: give texts to the model without its chat template.
        system: a system message before each prompt.
        dtype, quantize: of the base, as in a job file (None: as the run was trained).
        step: exported step of a run's adapters (None: the newest).
        best: take the step of each adapter with the best held-out result.
        samples: texts of each adapter for each prompt, drawn with the seeds `seed`, `seed` + 1, ….
        sampling: `max_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `stop` and others; see `Sampling`.

    Raises:
        LoraFusionError: the errors of `lorafusion generate`.
    """
    _read_sampling(sampling, samples)  # before the model is loaded
    prompts = _listed(prompts)
    generator = open_generator(
        source, adapters=adapters, base=base, dtype=dtype, quantize=quantize, step=step, best=best
    )
    return generator.generate(prompts, raw=raw, system=system, samples=samples, **sampling)


@dataclass(frozen=True, slots=True, repr=False)
class OpenGenerator:
    """A base model and adapters in memory. Prompts of similar lengths compile once.

    Attributes:
        model: what generates.
    """

    model: TextGenerator

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that can generate, "base" included."""
        return self.model.adapters

    def generate(
        self,
        prompts: Prompts,
        *,
        adapters: str | Sequence[str] = (),
        raw: bool = False,
        system: str | None = None,
        samples: int = 1,
        on_text: Callable[[int, str], None] | None = None,
        **sampling: Any,
    ) -> Texts:
        """Generates a text for every prompt with every adapter; arguments as in `lorafusion_jax.generate`.

        Args:
            on_text: called with the index of a text and the text so far, whenever it has grown.
        """
        from lorafusion_jax.generation.text import rows_for

        names = (adapters,) if isinstance(adapters, str) else tuple(adapters)
        rows = rows_for(_listed(prompts), names or self.model.asked, _read_sampling(sampling, samples), samples)
        if not rows:
            return Texts(())
        if unread := self.model.unread_keys(rows):
            keys = ", ".join(unread)
            warnings.warn(f"keys of messages that the chat template does not write: {keys}", stacklevel=2)
        return Texts(tuple(self.model(rows, raw=raw, system=system, on_text=on_text)))


@names_unknown
def open_generator(
    source: Run | str | Path,
    *,
    adapters: str | Sequence[str] = (),
    base: str | Path | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    step: int | None = None,
    best: bool = False,
) -> OpenGenerator:
    """Loads a base model and adapters to generate with; arguments as in `generate`."""
    from lorafusion_jax.generation.text import TextGenerator

    names = (adapters,) if isinstance(adapters, str) else tuple(adapters)
    path = source.folder if isinstance(source, Run) else source
    generation_source = find_source(path, names, base=base, dtype=dtype, quantize=quantize, step=step, best=best)
    prepare_machine()
    return OpenGenerator(TextGenerator(generation_source))


def _listed(prompts: Prompts) -> Sequence[Any]:
    """Several prompts; a text, one conversation or the tokens of one prompt is a single one.

    Raises:
        DataError: `generate.prompt`.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = _items(prompts, "prompts")
    if listed and isinstance(listed[0], Mapping | int | np.integer):
        return [listed]
    return [
        prompt if isinstance(prompt, str) else _items(prompt, f"prompt {number}")
        for number, prompt in enumerate(listed, 1)
    ]


def _items(value: Any, where: str) -> list[Any]:
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        message = f"{where} cannot be {shortened(value)}."
        raise DataError("generate.prompt", message, fix="a text, or a list of texts, of messages or of token ids")
    return list(value)


def _read_sampling(settings: Mapping[str, Any], samples: int) -> Sampling:
    """The settings of a call by name.

    Raises:
        ConfigError: `generate.setting`.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        message = f"samples must be a whole number from 1, not {samples!r}."
        raise ConfigError("generate.setting", message, where="samples")
    names = [field.name for field in fields(Sampling)]
    if unknown := [name for name in settings if name not in names]:
        near = did_you_mean(unknown[0], [*inspect.signature(OpenGenerator.generate).parameters, *names])
        message = f"generate has no argument {unknown[0]!r}{f'; {near}' if near else '.'}"
        raise ConfigError("generate.setting", message, where=unknown[0], fix=f"one of: {', '.join(names)}")
    return Sampling(**settings)
