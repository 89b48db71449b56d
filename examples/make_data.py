"""Writes the example data sets: six tasks in six formats, made from the standard library's own words.

    python examples/make_data.py            # writes examples/data/, the same bytes on the same Python

| set       | format, file               | task                                              | rows   |
|-----------|----------------------------|---------------------------------------------------|--------|
| ask       | messages, JSONL            | what does `json.dumps` do? and how is it called?  | short  |
| explain   | prompt/completion, JSONL   | function source → what it does                    | long   |
| module    | instruction/…, CSV         | signature and summary → the module it lives in    | tiny   |
| reference | conversations, JSON        | go on with a paragraph of the language reference  | medium |
| cards     | text, JSONL                | reference cards in Markdown                       | mixed  |
| brief     | chosen/rejected, JSONL     | the answer alone is better than with small talk   | short  |

A tenth of the objects (a fixed draw from their names) is held out of every set, so no evaluation row is trained on.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from stdlib_text import LIBRARY, Item, library_items, reference_paragraphs, share

HELD_OUT = 0.1
SENTENCE_END = re.compile(r"(?<=[a-z0-9\"*)][.])\s+(?=[A-Z])")
ASK = (
    "What does `{}` do?",
    "Tell me what `{}` is for.",
    "Explain `{}` in a sentence.",
    "I found `{}` in a program. What is it?",
    "When would I use `{}`?",
)
ASK_CALL = ("How do I call it?", "Which arguments does it take?", "Show me its signature.")
EXPLAIN = "Here is a Python function:\n\n{}\n\nWhat does it do?"
SMALL_TALK = (
    "Great question! {} I hope this helps!",
    "Certainly! {} Let me know if you have any other questions.",
    "Sure, I would be happy to help. {} Feel free to ask for more.",
    "Thank you for asking. {} Is there anything else you need?",
)
MODULE = "Name the module of the Python standard library that defines this {}."
GO_ON = "The Python language reference says under “{}”:\n\n{}\n\nHow does it go on?"

# The first rows of some sets, for the demo: held-out rows fill one or two microbatches.
FEW_PAIRS = {"brief": 16}
FEW_HELD_OUT = {"ask": 18, "module": 16, "reference": 14, "cards": 16, "brief": 8}

type Row = tuple[str, dict]  # name that decides on which side it falls, row


def ask(items: list[Item]) -> list[Row]:
    """Questions and answers; every third conversation has a second turn."""
    rows = []
    for item in items:
        draw = int(share("ask " + item.path) * 1000)
        messages = [
            {"role": "user", "content": ASK[draw % len(ASK)].format(item.path)},
            {"role": "assistant", "content": item.summary},
        ]
        if draw % 3 == 0:
            messages += [
                {"role": "user", "content": ASK_CALL[draw % 7 % len(ASK_CALL)]},
                {"role": "assistant", "content": f"`{item.call}`"},
            ]
        rows.append((item.path, {"messages": messages}))
    return rows


def explain(items: list[Item]) -> list[Row]:
    """Functions of four lines to a page."""
    return [
        (item.path, {"prompt": EXPLAIN.format(item.source), "completion": item.summary})
        for item in items
        if item.kind != "class" and item.source.count("\n") >= 3 and len(item.source) <= 1600
    ]


def module(items: list[Item]) -> list[Row]:
    """Modules with ten documented objects or more, so that each is met in training."""
    sizes = collections.Counter(item.module.split(".")[0] for item in items)
    return [
        (
            item.path,
            {
                "instruction": MODULE.format(item.kind),
                "input": f"{item.call}\n{item.summary}",
                "output": item.module.split(".")[0],
            },
        )
        for item in items
        if sizes[item.module.split(".")[0]] >= 10
    ]


def reference(paragraphs: list[tuple[str, str]]) -> list[Row]:
    """Paragraphs of two sentences or more, cut after the first."""
    rows = []
    for heading, paragraph in paragraphs:
        first, *rest = SENTENCE_END.split(paragraph, maxsplit=1)
        if rest and 40 <= len(first) <= 400:
            turns = [{"from": "human", "value": GO_ON.format(heading, first)}, {"from": "gpt", "value": rest[0]}]
            rows.append((paragraph, {"conversations": turns}))
    return rows


def cards(items: list[Item]) -> list[Row]:
    """A heading, the kind of thing, how it is called, and the docstring."""
    return [
        (item.path, {"text": f"### {item.path}\n\n- kind: {item.kind}\n- call: `{item.call}`\n\n{item.doc}\n"})
        for item in items
        if len(item.doc) <= 1200
    ]


def brief(items: list[Item]) -> list[Row]:
    """The same answer twice: alone, and wrapped in small talk."""
    rows = []
    for item in items:
        draw = int(share("brief " + item.path) * 1000)
        talk = SMALL_TALK[draw % len(SMALL_TALK)].format(item.summary)
        pair = {"prompt": ASK[draw % len(ASK)].format(item.path), "chosen": item.summary, "rejected": talk}
        rows.append((item.path, pair))
    return rows


def few(items: list[Item], name: str, number: int) -> list[Item]:
    """Picks about `number` items, others for every set."""
    return sorted(sorted(items, key=lambda item: share(f"{name} {item.path}"))[:number], key=lambda item: item.path)


def split(rows: list[Row]) -> tuple[list[dict], list[dict]]:
    """Puts a tenth aside and shuffles both parts by a fixed draw."""
    ordered = sorted(rows, key=lambda row: share("order " + row[0]))
    train = [row for name, row in ordered if share(name) >= HELD_OUT]
    return train, [row for name, row in ordered if share(name) < HELD_OUT]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, rows: list[dict]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text('{"data": [\n' + lines + "\n]}\n", encoding="utf-8")


def write_csv(path: Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    out = parser.parse_args().out
    items = library_items()
    sets: dict[str, tuple[str, Callable[[Path, list[dict]], None], list[Row]]] = {
        "ask": ("jsonl", write_jsonl, ask(few(items, "ask", 1200))),
        "explain": ("jsonl", write_jsonl, explain(few(items, "explain", 2300))),
        "module": ("csv", write_csv, module(few(items, "module", 1500))),
        "reference": ("json", write_json, reference(reference_paragraphs())),
        "cards": ("jsonl", write_jsonl, cards(few(items, "cards", 900))),
        "brief": ("jsonl", write_jsonl, brief(few(items, "brief", 240))),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, (suffix, write, rows) in sets.items():
        train, held_out = split(rows)
        write(out / f"{name}.{suffix}", train)
        write(out / f"{name}_eval.{suffix}", held_out)
        for part, rows_of_part, count in (("_few", train, FEW_PAIRS), ("_eval_few", held_out, FEW_HELD_OUT)):
            if name in count:
                write(out / f"{name}{part}.{suffix}", rows_of_part[: count[name]])
        print(f"{name:10} {len(train):5} rows, {len(held_out):4} held out")
    shutil.copyfile(LIBRARY / "LICENSE.txt", out / "LICENSE.txt")  # its words, its licence


if __name__ == "__main__":
    main()
