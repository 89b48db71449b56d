"""Greedy tokens of base and adapter in one batch, against `transformers` and `peft`, for every family."""

from __future__ import annotations

import json
from pathlib import Path

import more_cases
import pytest

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.generation.generator import Generator, Request
from lorafusion_jax.generation.load import load_stage
from lorafusion_jax.generation.places import BASE
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.sources import AdapterSource, Source

MODELS = Path(__file__).parents[1] / "models/golden"
RECORD = json.loads((Path(__file__).parent / "greedy.json").read_text())
CASES = sorted(set(RECORD["cases"]) - {"phi3_long"})  # whose prompts cross the context of longrope, see below
ALWAYS = ("gemma2", "gpt_oss", "llama3")  # caps and windows; experts and sinks; scaled rotary angles
ROUNDING = 2e-5  # what logits of float32 differ by, a tenth of the smallest margin but three


def generator(case: str) -> Generator:
    folder = MODELS / case
    adapter = AdapterSource(name="a", folder=folder / "adapter")
    return Generator([load_stage(Source(base=folder, adapters=(adapter,), asked=(), dtype="float32"))])


@pytest.mark.parametrize("case", more_cases.mostly_nightly(CASES, ALWAYS))
def test_tokens_are_those_of_transformers_and_peft(case):
    wanted, new = RECORD["cases"][case], len(RECORD["cases"][case]["base"]["tokens"][0])
    requests = [
        Request(tokens=prompt, adapter=adapter, sampling=Sampling(max_tokens=new))
        for adapter in (0, BASE)
        for prompt in RECORD["prompts"]
    ]
    answers = generator(case)(requests)
    assert min(wanted[name]["margin"] for name in wanted) > ROUNDING
    assert [answer.tokens for answer in answers] == wanted["adapter"]["tokens"] + wanted["base"]["tokens"]
    assert wanted["adapter"]["tokens"] != wanted["base"]["tokens"]


def test_an_answer_that_crosses_the_context_of_longrope_is_refused():
    folder = MODELS / "phi3_long"
    model = Generator([load_stage(Source(base=folder, adapters=(), asked=(), dtype="float32"))])
    with pytest.raises(ConfigError, match=r"generate\.longrope\][^\n]*cross 16 positions[^⁂]*max_tokens=13"):
        model([Request(tokens=[5, 17, 2], sampling=Sampling(max_tokens=14))])
