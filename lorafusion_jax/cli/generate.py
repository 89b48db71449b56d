"""lorafusion generate: texts from a run, an adapter or a base model."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafusion_jax.cli.common import Json, ProgramCache, next_command, standard_input
from lorafusion_jax.errors import ConfigError, DataError, quoted
from lorafusion_jax.files import write_output
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.report.console import errors_to, out, say, warn

STDIN = "-"
MARK = "\ufeff"  # with which some programs begin a text in UTF-8

SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="run folder, PEFT folder, or folder or hub name of a base model")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", "-a",
        metavar="ADAPTER",
        help="adapter of the run, NAME=FOLDER for a PEFT folder, or base for the base alone; repeatable",
        show_default="all of the run",
    ),
]  # fmt: skip
Base = Annotated[str | None, typer.Option(help="another folder of the base model", rich_help_panel="Model")]
Dtype = Annotated[
    str | None,
    typer.Option(help="bfloat16 or float32", show_default="of the run, else bfloat16", rich_help_panel="Model"),
]
Quantize = Annotated[
    str | None,
    typer.Option(help="none, fp8, int8 or nf4", show_default="of the run or adapter", rich_help_panel="Model"),
]
Step = Annotated[
    int | None,
    typer.Option(help="exported step of a run's adapters", show_default="the newest", rich_help_panel="Model"),
]
Best = Annotated[
    bool, typer.Option("--best", help="the step of each adapter with the best held-out result", rich_help_panel="Model")
]
System = Annotated[str | None, typer.Option(help="system message before each prompt")]
MaxTokens = Annotated[int, typer.Option(help="new tokens at most", rich_help_panel="Sampling")]
Temperature = Annotated[
    float, typer.Option(help="divides the logits; 0: always the most probable token", rich_help_panel="Sampling")
]
TopK = Annotated[
    int, typer.Option(help="draw from the k most probable tokens; 0: from all", rich_help_panel="Sampling")
]
TopP = Annotated[
    float, typer.Option(help="draw from the fewest tokens of this total probability", rich_help_panel="Sampling")
]
Seed = Annotated[int, typer.Option(help="of the draws", rich_help_panel="Sampling")]
Stop = Annotated[
    list[str] | None, typer.Option(help="text that ends an answer; repeatable", rich_help_panel="Sampling")
]


def command(
    source: SourceArgument,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="texts; - reads one from standard input")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f",
            metavar="FILE",
            help="JSONL or CSV: a prompt or messages in each row, and as you like adapter, max_tokens, temperature, "
            "top_k, top_p, seed, stop; - for standard input",
        ),
    ] = None,
    adapters: Adapters = None,
    base: Base = None,
    raw: Annotated[bool, typer.Option("--raw", help="give texts to the model without its chat template")] = False,
    system: System = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    step: Step = None,
    best: Best = False,
    to: Annotated[Path | None, typer.Option("--out", "-o", help="write the rows of --json to a file")] = None,
    program_cache: ProgramCache = True,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Generates texts with all adapters of a run in one batch, or with an adapter, or with a base model.

    Example: lorafusion generate runs/exp1 "Who may appeal?" --adapter law --adapter base
    """
    from lorafusion_jax.generation.sources import find_source

    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    generation_source = find_source(
        source, adapters or (), base=base, dtype=dtype, quantize=quantize, step=step, best=best
    )
    from lorafusion_jax.generation.text import FileRow, read_rows, rows_for

    texts = _texts(prompts or (), file, source)
    file_rows = [FileRow(rows=tuple(rows_for([text], generation_source.asked, sampling)), others={}) for text in texts]
    if file is not None:
        name = "standard input" if file == STDIN else file
        file_rows += read_rows(_lines(file), generation_source.asked, sampling, name=name)
    prepare_machine(cache=program_cache)
    from lorafusion_jax.generation.text import TextGenerator

    generator, prompt_rows = TextGenerator(generation_source), [row for entry in file_rows for row in entry.rows]
    others = dict.fromkeys(column for entry in file_rows for column in entry.others)
    warn(errors_to(), _notes(others, generator.unread_keys(prompt_rows)))
    answers = generator(prompt_rows, raw=raw, system=system)
    columns_of_rows = [entry.others for entry in file_rows for _ in entry.rows]
    rows = [_row(text, columns) for text, columns in zip(answers, columns_of_rows, strict=True)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    console = out()
    if to is not None:
        write_output(to, lines)
    if as_json:
        print(lines, end="")
    else:
        from lorafusion_jax.report.console import show_texts

        show_texts(console, [(text.prompt, text.adapter, text.text) for text in answers])
        say(console, f"written to {to}") if to is not None else None
        same = {"--base": base, "--system": system, "--dtype": dtype, "--quantize": quantize, "--step": step}
        next_command(console, _chat_with(source, adapters or (), same, best=best))


def _chat_with(source: str, adapters: Iterable[str], options: dict[str, Any], *, best: bool) -> str:
    """Returns the command that talks with the models that have answered."""
    words = ["lorafusion", "chat", source, *(word for name in adapters for word in ("-a", name))]
    words += [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    return shlex.join([*words, *(["--best"] if best else [])])


def _notes(columns: Collection[str], keys: Collection[str]) -> list[str]:
    facts = {
        "columns that change no answer, and are copied to its row": columns,
        "keys of messages that the chat template does not write": keys,
    }
    return [f"{fact}: {', '.join(names)}" for fact, names in facts.items() if names]


def _row(generated: Any, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "adapter": generated.adapter,
        "prompt": generated.prompt,
        "text": generated.text,
        "tokens": len(generated.tokens),
        "logprobs": list(generated.logprobs),
        "end": generated.end,
        "end_token": generated.end_token,
        "end_logprob": generated.end_logprob,
        **more,
    }


def _texts(prompts: Sequence[str], file: str | None, source: str) -> list[str]:
    """Returns the prompts of a command; where it has none, standard input is one."""
    if not prompts and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("generate.no-prompt", "there is no prompt.", fix="a text, --file FILE, or - for stdin")
        prompts = (STDIN,)
    if [*prompts, file].count(STDIN) > 1:
        message, fix = "standard input is named more than once, and can be read once.", "- for one prompt or file"
        raise ConfigError("generate.options", message, fix=fix)
    return [_stdin(source) if prompt == STDIN else prompt for prompt in prompts]


def _stdin(source: str) -> str:
    text = standard_input().read().removeprefix(MARK).rstrip("\n")
    if not text.strip():
        command = f"lorafusion generate {quoted(source)}"
        raise ConfigError(
            "generate.no-prompt",
            "standard input is empty.",
            why="a prompt is read from there where the command has none, or -",
            fix=f"{command} 'a prompt', {command} --file FILE, or echo 'a prompt' | {command}",
        )
    return text


def _lines(file: str) -> Iterable[str]:
    if file == STDIN:
        return StringIO(standard_input().read().removeprefix(MARK))
    from lorafusion_jax.data.row_files import decode

    try:
        return StringIO(decode(file, Path(file).read_bytes()), newline=None)
    except OSError as problem:
        why, fix = problem.strerror or str(problem), 'a file of rows such as {"prompt": "…"}, or - for standard input'
        raise DataError("generate.file", f"{file} cannot be read.", why=why, fix=fix) from None
