"""Texts, ids and masks of chat templates are those of transformers: 11 templates × 21 conversations.

With `{% generation %}` blocks the masks are identical. Without them two differences are meant: a line end after the
end token separates turns and is not learned, and what `add_generation_prompt` writes is context.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from template_cases import CONVERSATIONS
from template_fixtures import SPECIAL, TEMPLATES, unmarked
from template_tokenizer import write_tokenizer

from lorafusion_jax.data import ChatTemplate, Tokenizer, load_tokenizer
from lorafusion_jax.data.template import TemplateProblem

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "templates.json").read_text(encoding="utf-8"))["cases"]
CASES = [(name, conversation) for name in TEMPLATES for conversation in CONVERSATIONS]
# With it the templates that TRL ships are compared, too.
REFERENCE_PYTHON = os.environ.get("LORAFUSION_REFERENCE_PYTHON")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return folder


def tokenizer_with(model: Path, template: str) -> Tokenizer:
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load_tokenizer(model)


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
            tokenizer.render(messages, tools=tools)
        return
    if dropped := calls_that_are_dropped(tokenizer, messages, tools):
        with pytest.raises(TemplateProblem, match=f"does not write the call of {dropped}"):
            tokenizer.render(messages, tools=tools)
        return
    tokens, mask = tokenizer.render(messages, tools=tools)
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
    outcome = compare(json.loads(path.read_text())["cases"])
    assert outcome["templates"] >= 25
    assert outcome["different text"] == []
    # Diffusion Gemma repeats the header of a turn after calls, where its prompt goes on without one.
    assert [case for case in outcome["different mask"] if not case.startswith("diffusion_gemma_training")] == []
    assert outcome["refused by us"] == []


def compare(cases: dict) -> dict:
    """Counts what is equal, and names what is not, over templates with and without their generation blocks."""
    outcome = {"templates": len(cases), "equal": 0, "equal but for line ends": 0, "equal but for the prompt": 0}
    outcome |= {"refused by both": 0, "drop a call": 0}
    outcome |= {key: [] for key in ("different text", "different mask", "refused by us")}
    for name, case in cases.items():
        kinds = [case["source"], unmarked(case["source"])] if "endgeneration" in case["source"] else [case["source"]]
        for conversation, golden in case["rows"].items():
            for source in kinds:
                verdict = _compare_one(ChatTemplate(source=source, special_tokens=SPECIAL), conversation, golden)
                if isinstance(outcome[verdict], list):
                    outcome[verdict].append(f"{name}: {conversation}" + (" (unmarked)" if source != kinds[0] else ""))
                else:
                    outcome[verdict] += 1
    return outcome


def _compare_one(template: ChatTemplate, conversation: str, golden: dict) -> str:
    messages, tools = CONVERSATIONS[conversation]
    try:
        rendered = template.render_answers(messages, tools=tools)
    except TemplateProblem as problem:
        if "refused" in golden:
            return "refused by both"
        return "drop a call" if "does not write the call" in str(problem) else "refused by us"
    if "refused" in golden:
        return "equal"  # some models' templates fail on their own
    if rendered.text != golden["text"]:
        return "different text"
    if golden["learned"] is None:
        return "equal"
    ours = {at for start, stop in rendered.answers for at in range(start, stop)}
    theirs = {at for start, stop in golden["learned"] for at in range(start, stop)}
    if ours == theirs:
        return "equal"
    if not any(rendered.text[at].strip() for at in ours ^ theirs):
        return "equal but for line ends"
    prompts = [
        template.render(messages[:turn], tools=tools, add_generation_prompt=True)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    context = "".join(prompts)
    parts = [part for part in _runs(theirs - ours, rendered.text) if part.strip()]
    if ours <= theirs | _blank(rendered.text) and all(part.strip() in context for part in parts):
        return "equal but for the prompt"
    return "different mask"


def _blank(text: str) -> set[int]:
    return {at for at, character in enumerate(text) if character.isspace()}


def _runs(places: set[int], text: str) -> list[str]:
    runs: list[str] = []
    before = None
    for at in sorted(places):
        runs = [*runs[:-1], runs[-1] + text[at]] if before == at - 1 else [*runs, text[at]]
        before = at
    return runs


if __name__ == "__main__":
    sys.exit(json.dumps(compare(json.loads(Path(sys.argv[1]).read_text())["cases"]), indent=1))
