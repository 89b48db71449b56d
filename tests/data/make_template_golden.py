"""Writes what transformers makes of templates and conversations, in an environment with transformers.

python tests/data/make_template_golden.py                          # golden/templates.json: the templates of these tests
python tests/data/make_template_golden.py --trl templates.json     # those that TRL ships, with their texts

TRL's own texts are not kept here. `test_template_reference.py templates.json` compares them with ours and writes
golden/trl.json: a digest of each template, of each text and of what is learned of it, and how ours compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--trl", type=Path, help="write the templates of TRL, with their texts, to this file")
    arguments = arguments.parse_args()
    if arguments.trl:
        arguments.trl.write_text(json.dumps(of_trl()))
        return
    (HERE / "golden").mkdir(exist_ok=True)
    made = of_fixtures()
    lines = [f'{{"versions": {json.dumps(made["versions"])}, "cases": {{']
    for name, rows in made["cases"].items():
        case_lines = [f"  {json.dumps(key)}: {json.dumps(row, ensure_ascii=False)}" for key, row in rows.items()]
        lines += [
            f" {json.dumps(name)}: {{",
            ",\n".join(case_lines),
            " }" + ("," if name != list(made["cases"])[-1] else ""),
        ]
    (HERE / "golden" / "templates.json").write_text("\n".join([*lines, "}}"]) + "\n", encoding="utf-8")


def of_fixtures() -> dict:
    """Ids (as a hash) and learned ranges of tokens, by transformers' own mask of generation blocks."""
    import tokenizers
    import transformers
    from template_cases import CONVERSATIONS
    from template_fixtures import SPECIAL, TEMPLATES
    from template_tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = write_tokenizer(Path(folder))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **SPECIAL)
    cases = {}
    for name, source in TEMPLATES.items():
        rows = cases[name] = {}
        for conversation, (messages, tools) in CONVERSATIONS.items():
            try:
                made = tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=source,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
            except Exception as problem:  # templates raise what they like
                rows[conversation] = {"refused": f"{type(problem).__name__}: {problem}"}
                continue
            ids, mask = made["input_ids"], made["assistant_masks"]
            digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
            rows[conversation] = {"tokens": len(ids), "ids": digest, "learned": shown(ranges(mask))}
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    return {"versions": versions, "cases": cases}


def of_trl() -> dict:
    """Source, texts and learned ranges of characters of every template that TRL ships."""
    import jinja2
    import transformers
    import trl
    from template_cases import CONVERSATIONS
    from template_fixtures import SPECIAL
    from transformers.utils import chat_template_utils as utils

    cases = {}
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        marks = "endgeneration" in source
        rows = {}
        for conversation, (messages, tools) in CONVERSATIONS.items():
            messages = [{k: v for k, v in m.items() if v is not None} for m in messages]  # as apply_chat_template does
            try:
                texts, spans = utils.render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=source,
                    return_assistant_tokens_mask=marks,
                    strftime_now=lambda form: __import__("datetime").datetime(2024, 7, 26).strftime(form),
                    **SPECIAL,
                )
                rows[conversation] = {"text": texts[0], "learned": spans[0] if marks else None}
            except Exception as problem:  # templates raise what they like
                rows[conversation] = {"refused": f"{type(problem).__name__}: {problem}"}
        cases[path.stem] = {"source": source, "rows": rows}
    versions = {module.__name__: module.__version__ for module in (transformers, trl, jinja2)}
    return {"versions": versions, "cases": cases}


def shown(spans: list[list[int]]) -> str:
    return " ".join(f"{start}-{stop}" for start, stop in spans)


def ranges(mask: list[int]) -> list[list[int]]:
    """[0, 1, 1, 0, 1] → [[1, 3], [4, 5]]."""
    spans: list[list[int]] = []
    for position, learned in enumerate(mask):
        if learned and spans and spans[-1][1] == position:
            spans[-1][1] += 1
        elif learned:
            spans.append([position, position + 1])
    return spans


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
