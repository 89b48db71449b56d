"""How our text and mask of a conversation compare with those of transformers.

    PYTHONPATH=. python tests/data/compare_templates.py templates.json     # writes golden/trl.json

of the file that `make_template_golden.py --trl templates.json` wrote.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from template_cases import CONVERSATIONS
from template_fixtures import SPECIAL, unmarked

from lorafusion_jax.data import ChatTemplate
from lorafusion_jax.data.template.compiled import TemplateProblem

GOLDEN = Path(__file__).parent / "golden" / "trl.json"


def record(made: dict) -> dict:
    """Digests of every template, text and mask, and how ours compare: without the texts themselves."""
    cases = {}
    for name, case in made["cases"].items():
        marked = "endgeneration" in case["source"]
        template = ChatTemplate(source=case["source"], special_tokens=SPECIAL)
        plain = ChatTemplate(source=unmarked(case["source"]), special_tokens=SPECIAL)
        rows = {}
        for conversation, golden in case["rows"].items():
            messages, tools = CONVERSATIONS[conversation]
            row = rows[conversation] = {"ours": verdict(template, messages, tools, golden)}
            if marked:
                row["ours, unmarked"] = verdict(plain, messages, tools, golden)
            if "text" in golden:
                row["text"] = digest(golden["text"])
            if golden.get("learned") is not None:
                row["learned"] = digest(json.dumps(golden["learned"]))
        cases[name] = {"source": digest(case["source"]), "rows": rows}
    return {"versions": made["versions"], "cases": cases}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def verdict(template: ChatTemplate, messages: list[dict], tools: list | None, golden: dict) -> str:
    try:
        rendered = template.render_answers(messages, tools=tools)
    except TemplateProblem as problem:
        if "refused" in golden:
            return "refused by both"
        return "drop a call" if "does not write the call" in str(problem) else "refused by us"
    if "refused" in golden:
        return "refused by transformers"  # some templates fail on their own
    if rendered.text != golden["text"]:
        return "different text"
    if golden["learned"] is None:
        return "equal text"  # no mask of theirs
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
    recorded = record(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    lines = [f'{{"versions": {json.dumps(recorded["versions"])}, "cases": {{']
    lines.append(",\n".join(f" {json.dumps(name)}: {json.dumps(case)}" for name, case in recorded["cases"].items()))
    GOLDEN.write_text("\n".join([*lines, "}}"]) + "\n", encoding="utf-8")
