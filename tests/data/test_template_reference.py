"""Texts, ids and masks of chat templates are those of transformers: 11 templates × 21 conversations, and those of TRL.

With `{% generation %}` blocks the masks are identical. Without them two differences are meant: a line end after the
end token separates turns and is not learned, and what `add_generation_prompt` writes is context.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from compare_templates import digest, record, verdict
from template_cases import CONVERSATIONS
from template_fixtures import SPECIAL, TEMPLATES, unmarked
from template_tokenizer import write_tokenizer

from lorafusion_jax.data import ChatTemplate, Tokenizer, load_tokenizer
from lorafusion_jax.data.template.compiled import TemplateProblem
from lorafusion_jax.data.tokenizer import Encoded

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "templates.json").read_text(encoding="utf-8"))["cases"]
GOLDEN_TRL = json.loads((HERE / "golden" / "trl.json").read_text(encoding="utf-8"))["cases"]
CASES = [(name, conversation) for name in TEMPLATES for conversation in CONVERSATIONS]
# With it the templates that TRL ships are rendered anew by transformers; where TRL is installed, its files are enough.
REFERENCE_PYTHON = os.environ.get("LORAFUSION_REFERENCE_PYTHON")
TRL = find_spec("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return folder


def tokenizer_with(model: Path, template: str) -> Tokenizer:
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load_tokenizer(model)


def render(tokenizer: Tokenizer, messages: list[dict], tools: list | None) -> Encoded:
    assert tokenizer.chat_template is not None
    return tokenizer.encode_rendered([tokenizer.chat_template.render_answers(messages, tools=tools)])[0]


def learned_tokens(golden: dict) -> set[int]:
    ranges = [part.split("-") for part in golden["learned"].split()]
    return {token for start, stop in ranges for token in range(int(start), int(stop))}


@pytest.mark.parametrize("kind", ["marked", "unmarked"])
@pytest.mark.parametrize(("name", "conversation"), CASES)
def test_ids_and_masks_are_those_of_transformers(model, name, conversation, kind):
    golden, (messages, tools) = GOLDEN[name][conversation], CONVERSATIONS[conversation]
    source = TEMPLATES[name] if kind == "marked" else unmarked(TEMPLATES[name])
    tokenizer = tokenizer_with(model, source)
    if (
        "no attribute 'content'" in golden.get("refused", "") and "tool_calls" in source
    ):  # such templates want null where a call has no text
        rendered = tokenizer.chat_template.render_answers(messages, tools=tools)
        assert "get_weather" in "".join(rendered.text[start:stop] for start, stop in rendered.answers)
        return
    if "refused" in golden:
        with pytest.raises(TemplateProblem):
            render(tokenizer, messages, tools)
        return
    if dropped := calls_that_are_dropped(tokenizer, messages, tools):
        with pytest.raises(TemplateProblem, match=f"does not write the call of {dropped}"):
            render(tokenizer, messages, tools)
        return
    tokens, mask = render(tokenizer, messages, tools)
    assert len(tokens) == golden["tokens"]
    assert hashlib.sha256(json.dumps(tokens.tolist()).encode()).hexdigest()[:16] == golden["ids"]
    ours, theirs = set(mask.nonzero()[0].tolist()), learned_tokens(golden)
    if kind == "marked":
        assert ours == theirs
    assert ours <= theirs
    assert "".join(tokenizer.piece(int(tokens[at])) for at in sorted(theirs - ours)).strip() == ""


def calls_that_are_dropped(tokenizer: Tokenizer, messages: list[dict], tools: list | None) -> str:
    """The name of a tool that is called in the messages, but not in their text."""
    text = tokenizer.chat_template.render(messages, tools=None if tools is None else [])
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    return next((name for name in called if name not in text), "")


@pytest.mark.skipif(not REFERENCE_PYTHON, reason="LORAFUSION_REFERENCE_PYTHON names a Python with transformers and trl")
def test_templates_that_trl_ships_live(tmp_path):
    path = tmp_path / "trl.json"
    script = HERE / "make_template_golden.py"
    subprocess.run([REFERENCE_PYTHON, str(script), "--trl", str(path)], check=True, env={"PATH": os.environ["PATH"]})
    live = record(json.loads(path.read_text()))["cases"]
    assert len(live) >= 25
    check_verdicts(live)
    same = [name for name in live if live[name]["source"] == GOLDEN_TRL.get(name, {}).get("source")]
    assert {name: live[name] for name in same} == {name: GOLDEN_TRL[name] for name in same}


@pytest.mark.skipif(TRL is None, reason="trl is not installed")
def test_templates_that_trl_ships_give_the_texts_of_the_golden_file():
    assert TRL is not None
    assert TRL.submodule_search_locations
    (folder,) = TRL.submodule_search_locations
    known = 0
    for name, golden in GOLDEN_TRL.items():
        path = Path(folder) / "chat_templates" / f"{name}.jinja"
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        if digest(source) != golden["source"]:  # of another version
            continue
        known += 1
        for conversation, row in golden["rows"].items():
            if row["ours"].startswith("equal"):
                messages, tools = CONVERSATIONS[conversation]
                rendered = ChatTemplate(source=source, special_tokens=SPECIAL).render_answers(messages, tools=tools)
                assert digest(rendered.text) == row["text"], f"{name}: {conversation}"
    assert known


def test_the_golden_file_of_trl_has_25_templates_and_nothing_that_differs_unsaid():
    assert len(GOLDEN_TRL) >= 25
    assert all(len(case["rows"]) >= 20 for case in GOLDEN_TRL.values())
    check_verdicts(GOLDEN_TRL)


def check_verdicts(cases: dict) -> None:
    """No text differs and nothing is refused by us alone. One family's mask does, where its blocks are taken away."""
    for name, case in cases.items():
        for conversation, row in case["rows"].items():
            kinds = {row["ours"], row.get("ours, unmarked", row["ours"])}
            assert kinds.isdisjoint({"different text", "refused by us"}), f"{name}: {conversation}"
            # Diffusion Gemma repeats the header of a turn after calls, where its prompt goes on without one.
            assert name == "diffusion_gemma_training" or "different mask" not in kinds, f"{name}: {conversation}"
            assert row["ours"] != "different mask", f"{name}: {conversation}"


@pytest.mark.parametrize(
    ("golden", "expected"),
    [
        ({"text": "<u>a<r>b<e>", "learned": [[7, 11]]}, "equal"),
        ({"text": "<u>a<r>b<e>", "learned": [[4, 11]]}, "equal but for the prompt"),
        ({"text": "<u>a<r>b<e>", "learned": [[7, 8]]}, "different mask"),
        ({"text": "<u>c<r>b<e>", "learned": [[7, 11]]}, "different text"),
        ({"refused": "ValueError"}, "refused by transformers"),
    ],
)
def test_differences_have_names(golden, expected):
    """What the figures rest on: a difference is called one."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<r>{{ m.content }}<e>{% endif %}"
    )
    template = ChatTemplate(source=source + "{% endfor %}{% if add_generation_prompt %}<r>{% endif %}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert verdict(template, messages, None, golden) == expected
