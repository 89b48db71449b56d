"""lorafusion generate and chat, and the same calls from Python."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import lorafusion_jax as lf
from lorafusion_jax.api.generation import OpenGenerator
from lorafusion_jax.cli.chat import Conversation
from lorafusion_jax.config.chat_templates import NAMED
from lorafusion_jax.data.tokenizer import load_tokenizer, with_template
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.sources import find_source
from lorafusion_jax.generation.text import rows_for

QUICK = ("--max-tokens", "6", "--dtype", "float32")


def test_adapters_of_a_run_answer_the_rows_of_a_file(lorafusion, finished, tmp_path, monkeypatch):
    job, run = finished
    rows = [
        {"prompt": "cat dog", "topic": "animals", "temprature": 2.0},
        {"prompt": "moon", "adapter": "base", "max_tokens": 2},
        {"messages": [{"role": "user", "content": "oak", "mood": "glad"}], "adapter": "law"},
    ]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "stdin", io.StringIO("pen quay\n"))
    outcome = lorafusion("generate", run, "-", "--file", file, "-o", out, "--json", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "columns that change no answer, and are copied to its row: topic, temprature" in outcome.err
    assert "keys of messages that the chat template does not write: mood" in outcome.err
    answers = [json.loads(line) for line in outcome.out.splitlines()]
    assert out.read_text() == outcome.out
    names = list(lf.open_run(run).adapters)
    assert [answer["adapter"] for answer in answers] == [*names, *names, "base", "law"]
    assert [answer["prompt"] for answer in answers[: len(names)]] == ["pen quay"] * len(names)
    assert answers[len(names)]["topic"] == "animals"
    assert answers[-2]["tokens"] <= 2
    assert all(answer["end"] in ("stop", "length") for answer in answers)

    # The same from Python, of folders: an adapter of a run, the same under another name, and the base.
    law = lf.open_run(run).adapter("law")
    copy = shutil.copytree(law, tmp_path / "copied law")
    base = job.values["base"]["model"]
    assert find_source(law).base == find_source(copy, base=base).base  # a folder of a run knows the run's base
    opened = lf.open_generator(copy, adapters=["base", f"again={law}", "copied law"], base=base, dtype="float32")
    assert opened.adapters == ("copied law", "again", "base")
    texts = opened.generate(["cat dog", "oak", "moon"], max_tokens=6)  # as many as above for one adapter: equal shapes
    assert texts.of("again") == texts.of("copied law")
    by_adapter = {answer["adapter"]: answer["text"] for answer in answers if answer["prompt"] == "cat dog"}
    assert texts.of("copied law")[0] == by_adapter["law"]
    with pytest.raises(lf.LoraFusionError, match="no text is of the adapter 'law'"):
        texts.of("law")
    assert [text.adapter for text in texts[:3]] == ["base", "again", "copied law"]
    assert "cat dog" in str(texts)
    stop = texts.of("base")[0].strip()[:2]  # all calls have nine rows, whose programs are one
    cut, *_ = opened.generate(["cat dog", "oak", "moon"], max_tokens=6, stop=stop)
    assert (cut.adapter, stop not in cut.text, cut.end) == ("base", True, "stop")
    assert opened.generate([[5, 6, 7], [5], [6]], max_tokens=2)[0].prompt == [5, 6, 7]
    drawn = opened.generate("oak", max_tokens=6, temperature=2.0, samples=3, seed=4)
    assert [text.adapter for text in drawn] == ["base"] * 3 + ["again"] * 3 + ["copied law"] * 3
    assert len({text.tokens for text in drawn[:3]}) > 1
    elsewhere, *_ = opened.generate(["oak", "cat dog", "moon"], max_tokens=6, temperature=2.0, seed=6)
    assert drawn[2].tokens == elsewhere.tokens
    with pytest.warns(UserWarning, match="keys of messages that the chat template does not write: name"):
        opened.generate([[{"role": "user", "content": "oak", "name": "Ann"}], "cat dog", "moon"], max_tokens=6)


def test_prompts_are_written_with_the_template_of_the_adapter(finished, tmp_path):
    job, run = finished
    law, base = lf.open_run(run).adapter("law"), job.values["base"]["model"]
    framed = shutil.copytree(law, tmp_path / "framed")
    (framed / "chat_template.jinja").write_text(NAMED["alpaca"])
    tokenizer = load_tokenizer(base)
    written = with_template(tokenizer, NAMED["alpaca"], "alpaca").chat_template.render(
        [{"role": "user", "content": "cat dog"}], add_generation_prompt=True
    )
    opened = lf.open_generator(framed, adapters=["framed", f"plain={law}"], base=base, dtype="float32")
    asked = opened.generate("cat dog", max_tokens=4)
    encoded = opened.generate(tokenizer.encode(written), max_tokens=4)
    assert asked.of("framed") == encoded.of("plain") == encoded.of("framed")
    assert asked.of("framed") != asked.of("plain")


@pytest.mark.parametrize(
    ("prompts", "options", "code", "said"),
    [
        ("oak", {"adapter": "law"}, "generate.setting", "has no argument 'adapter'; did you mean 'adapters'?"),
        ("oak", {"max_new_tokens": 4}, "generate.setting", "did you mean 'max_tokens'?"),
        ("oak", {"samples": 0}, "generate.setting", "samples must be a whole number from 1"),
        (None, {}, "generate.prompt", "prompts cannot be None"),
        (b"oak", {}, "generate.prompt", "prompts cannot be b'oak'"),
        ({"role": "user", "content": "oak"}, {}, "generate.prompt", "a list of texts, of messages"),
        (["oak", 5], {}, "generate.prompt", "prompt 2 cannot be 5"),
    ],
)
def test_wrong_arguments_of_python_are_named_before_the_model_is_read(prompts, options, code, said):
    with pytest.raises(lf.LoraFusionError, match=re.escape(said)) as caught:
        lf.generate("nowhere", prompts, **options)
    assert caught.value.code == code


def test_no_prompts_have_no_texts():
    model = SimpleNamespace(asked=("base",))
    assert len(OpenGenerator(model).generate([])) == 0  # type: ignore[arg-type]


def test_samples_of_a_prompt_stand_together():
    rows = rows_for(["oak", "cat dog"], ["base", "law"], Sampling(seed=4), 2)
    asked = [(row.prompt, row.adapter, row.sampling.seed) for row in rows]
    assert asked == list(product(["oak", "cat dog"], ["base", "law"], [4, 5]))


def test_a_conversation_goes_on_until_the_end_of_input(lorafusion, finished, monkeypatch):
    lines = "cat\n\n/help\n/adapter law base\ndog\n/adapter nobody\n/new\n" + "oak " * 4000 + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    outcome = lorafusion("chat", finished[1], "-a", "law", "-a", "med", *QUICK)  # two rows, as later
    assert outcome.code == 0, outcome.err
    assert "/adapter NAME" in outcome.out
    assert "law: " in outcome.out
    assert "base: " in outcome.out
    assert "there is no adapter 'nobody'; adapters: law, med, base" in outcome.out
    assert "generate.too-long" in outcome.out  # of this message only: the conversation goes on
    assert "fix: /new starts again, or a shorter message" in outcome.out
    assert "> " not in outcome.out  # a pipe gets answers, and no prompts to type


class Talker:
    """A model of which an interrupt comes after its first word, in its first answer."""

    asked = adapters = ("base",)

    def __init__(self, words):
        self.words, self.prompts = words, []

    def tokenizer_of(self, name):
        return SimpleNamespace(chat_template=name)

    def __call__(self, rows, *, on_text, conversation):
        self.prompts.append(rows[0].prompt)
        for text in self.words:
            if len(self.prompts) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            on_text(0, text)
        return [SimpleNamespace(text=self.words[-1])]


@pytest.mark.parametrize("said", ["a set", ""])
def test_an_interrupt_cuts_an_answer_and_not_the_conversation(said):
    model = Talker([said, "a set has no order"])
    conversation = Conversation(model, Sampling(), None, Console(file=io.StringIO()))
    conversation._answer("What is a set?")
    conversation._answer("And a list?")
    turns = [(turn["role"], turn["content"]) for turn in model.prompts[1]]
    first = [("user", "What is a set?"), ("assistant", said)] if said else []
    assert turns == [*first, ("user", "And a list?")]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["x", "-a", "laww"], "generate.unknown-adapter"),
        (["x", "-a", "new=missing"], "generate.unknown-adapter"),
        (["x", "--temperature", "-1"], "generate.setting"),
        (["x", "--top-p", "1.5"], "generate.setting"),
        (["x", "--dtype", "float64"], "generate.setting"),
        (["x", "--step", "99"], "generate.no-weights"),
        (["x", "--base", "nowhere"], "model.missing"),
        (["--file", "missing.jsonl"], "generate.file"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused_before_the_model_is_read(lorafusion, finished, arguments, code):
    outcome = lorafusion("generate", finished[1], *arguments)
    assert (outcome.code, outcome.errors) == (2, [code])


def test_a_wrong_name_is_answered_with_those_of_the_run(lorafusion, finished):
    outcome = lorafusion("generate", finished[1], "x", "-a", "laww")
    assert "did you mean 'law'?" in outcome.err
    assert ", base" in outcome.err  # behind the run's own


@pytest.mark.parametrize("arguments", [["-"], ["-", "--raw"], ["--file", "-"]], ids=str)
def test_what_is_not_utf8_is_no_fault_of_template_and_tokenizer(lorafusion, finished, monkeypatch, arguments):
    row = b'{"prompt": "\xff"}'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(row), "utf-8"))
    outcome = lorafusion("generate", finished[1], *arguments, "-a", "base", *QUICK)
    assert (outcome.code, outcome.errors) == (2, ["generate.prompt"])
    assert "fix: the text in UTF-8" in outcome.err


@pytest.mark.parametrize(
    ("content", "code"), [(b'\xef\xbb\xbf{"prompt": 5}', "generate.row"), (b"\xff", "data.not-utf8")]
)
def test_files_of_prompts_are_read_as_files_of_rows(lorafusion, finished, tmp_path, content, code):
    (tmp_path / "rows.jsonl").write_bytes(content)
    outcome = lorafusion("generate", finished[1], "--file", tmp_path / "rows.jsonl")
    assert (outcome.code, outcome.errors) == (2, [code])
    assert "is not JSON" not in outcome.err  # the mark with which some programs begin a file


def test_a_chat_without_a_line_and_a_terminal_says_so(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match=r"generate\.no-prompt.*standard input is empty"):
        Conversation(Talker([""]), Sampling(), None, Console(file=io.StringIO())).run()
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    Conversation(Talker([""]), Sampling(), None, Console(file=io.StringIO())).run()


@pytest.mark.parametrize(
    ("words", "typed", "code", "says"),
    [
        ((), "", "generate.no-prompt", "standard input is empty"),
        (("-", "--raw"), " \n\n", "generate.no-prompt", "echo 'a prompt' | lorafusion generate"),
        (("-", "-"), "cat", "generate.options", "can be read once"),
        (("-", "--file", "-"), "cat", "generate.options", "can be read once"),
        (("--file", "-"), "\n\n", "generate.row", "standard input holds no prompts"),
        (("--file", "-"), "[]", "generate.row", "an object in each line"),
    ],
)
def test_a_prompt_that_is_not_there_is_asked_for(lorafusion, finished, monkeypatch, words, typed, code, says):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    outcome = lorafusion("generate", finished[1], *words)
    assert (outcome.code, outcome.errors) == (2, [code])
    assert says in outcome.err


def test_wrong_rows_are_named(lorafusion, finished, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"text": "a"}\nno json\n{"prompt": "a", "top_k": "many"}\n[1]\n\n{"prompt": "b", "adapter": "law"}\n'
    )
    outcome = lorafusion("generate", finished[1], "--file", file)
    assert outcome.code == 2
    assert outcome.errors == ["generate.row"] * 4
    assert [f"row {number}" in outcome.err for number in (1, 2, 3, 4, 6)] == [True] * 4 + [False]


def test_an_adapter_has_the_name_that_the_run_or_its_folder_gives(finished, tiny_base, tmp_path, monkeypatch):
    """Also directly below the root, as in a container that mounts a folder there."""
    latest = finished[1] / "adapters" / "law" / "latest"
    assert [adapter.name for adapter in find_source(latest).adapters] == ["law"]
    shutil.copytree(latest, tmp_path / "out")
    assert [adapter.name for adapter in find_source(tmp_path / "out", base=tiny_base).adapters] == ["out"]
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: Path("/") / path.name)
    assert [adapter.name for adapter in find_source(tmp_path / "out", base=tiny_base).adapters] == ["out"]


def test_what_is_no_source_is_refused(lorafusion, tmp_path):
    assert lorafusion("generate", tmp_path, "x").errors == ["generate.source"]
    assert lorafusion("generate", tmp_path / "nothing", "x").errors == ["model.missing"]
