import io
import re

from data_helpers import chat
from rich.console import Console

from lorafusion_jax.data import render_preview

ROW = {"messages": chat("Say [b]東京[/b]\x1b[31m", "two\nand 🎉", system="Be brief.")}


def shown(samples, tokenizer, *, color: bool = False, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=color, color_system="standard" if color else None)
    console.print(render_preview(samples, tokenizer, **options))
    return out.getvalue()


def test_what_is_learned_reads_without_colours(load, tokenizer):
    text = shown(load([ROW]), tokenizer, title="law")
    assert text.startswith("law  law.jsonl · format messages · loss assistant")
    assert "⟦two↵\nand 🎉<|end|>⟧↵" in text
    assert text.count("⟦") == 2  # the legend and the answer


def test_data_is_shown_and_neither_markup_nor_escape_codes_work(load, tokenizer):
    text = shown(load([ROW]), tokenizer)
    assert "[b]東京[/b]␛[31m" in text
    assert "\x1b" not in text


def test_counts_of_each_row(load, tokenizer):
    samples = load([ROW])
    tokens, mask = samples.sample(0)
    assert f"row 0  {len(tokens)} tokens, {mask.sum()} learned" in shown(samples, tokenizer)


def test_colours_follow_the_mask(load, tokenizer):
    row = {"messages": chat("yes", "no")}
    text = shown(load([row]), tokenizer, color=True)
    style = {word: re.search(rf"\x1b\[([0-9;]*)m{word}", text).group(1).split(";") for word in ("yes", "no")}
    assert {"32", "92"} & set(style["no"])  # green
    assert not {"32", "92"} & set(style["yes"])


def test_choice_of_rows(load, tokenizer):
    samples = load([ROW] * 5)
    assert shown(samples, tokenizer, rows=2).count("\nrow ") == 2
    assert shown(samples, tokenizer, rows=9).count("\nrow ") == 5
    assert "row 3" in shown(samples, tokenizer, rows=[3])
