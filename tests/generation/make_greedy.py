"""Writes greedy.json: greedy tokens of `transformers` and `peft` in float32, with models that are drawn
from tests/models/golden.jsonl and drawn_families.jsonl.

    python3.11 -m venv reference && reference/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2
    reference/bin/python tests/generation/make_greedy.py [case …]

For every case: the tokens after each prompt, of the base and of the adapter, and the smallest distance between the two
largest logits of any step, which says how much rounding could change a token. Where it is below MARGIN, a case has
prompts of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
import transformers

sys.path.append(str(Path(__file__).parents[1]))
from drawn import DRAWN, GOLDEN, golden

# Unequal lengths, shorter and longer than the windows of the models. Those of longrope stay on one side of its context.
PROMPTS = [[5, 17, 2], [40, 8, 8, 31, 1, 22, 13, 9, 30, 4, 11], [(7 * i * i + 3 * i + 1) % 48 for i in range(37)]]
OTHERS = [[[(token + shift) % 48 for token in prompt] for prompt in PROMPTS] for shift in range(1, 8)]
MARGIN = 1e-4  # five times what logits of float32 differ by
NEW = 24
OPTIONS = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped products want wide models


def generate(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    with torch.no_grad():
        result = model.generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
            # Its cache of a window of one token keeps all tokens.
            use_cache=getattr(model.config, "sliding_window", None) != 1,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    tops = [torch.topk(logits[0].float(), 2).values for logits in result.logits]
    margin = min(float(top[0] - top[1]) for top in tops)
    return result.sequences[0, len(prompt) :].tolist(), margin


def results_of(folder: Path, prompts: list[list[int]]) -> dict[str, dict]:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    base = kind.from_pretrained(folder, dtype=torch.float32, **OPTIONS).eval()
    both = {"base": [generate(base, prompt) for prompt in prompts]}
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    both["adapter"] = [generate(adapted, prompt) for prompt in prompts]
    return {
        name: {"tokens": [tokens for tokens, _ in results], "margin": min(margin for _, margin in results)}
        for name, results in both.items()
    }


def main(names: list[str]) -> None:
    file = Path(__file__).parent / "greedy.json"
    cases = json.loads(file.read_text())["cases"] if names else {}
    for folder in map(golden, names or sorted(GOLDEN | DRAWN)):
        try:
            longest = (GOLDEN | DRAWN)[folder.name]["config"].get("index_topk", 64) - NEW  # longer ones are refused
            for prompts in ([prompt[:longest] for prompt in prompts] for prompts in (PROMPTS, *OTHERS)):
                case = results_of(folder, prompts)
                if min(results["margin"] for results in case.values()) > MARGIN:
                    break
        except Exception as problem:  # a model that another program cannot generate with has no row
            print(f"{folder.name}: {type(problem).__name__}: {problem}")
            continue
        cases[folder.name] = case | ({"prompts": prompts} if prompts != PROMPTS else {})
    versions = {package.__name__: package.__version__ for package in (torch, transformers, peft)}
    lines = ",\n".join(f'    "{name}": {json.dumps(cases[name])}' for name in sorted(cases))
    head = f'  "versions": {json.dumps(versions)},\n  "prompts": {json.dumps(PROMPTS)}'
    file.write_text(f'{{\n{head},\n  "cases": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
