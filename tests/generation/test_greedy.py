"""Greedy tokens of base and adapter in one batch, against `transformers` and `peft`, for every family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import more_cases
import numpy as np
import pytest
from drawn import golden

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.generation.capacity import cached_rows
from lorafusion_jax.generation.generator import Conversation, Generator
from lorafusion_jax.generation.load import load_stage
from lorafusion_jax.generation.packing import BASE
from lorafusion_jax.generation.requests import Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.sources import AdapterSource, Source
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.weights.table import stored_kind

RECORD = json.loads((Path(__file__).parent / "greedy.json").read_text())
CASES = sorted(set(RECORD["cases"]) - {"phi3_long"})  # whose prompts cross the context of longrope, see below
ALWAYS = ("gemma2", "gpt_oss", "qwen3_5")  # caps and windows; experts, sinks; delta nets
ROUNDING = 2e-5  # what logits of float32 differ by, a fifth of the smallest margin


def stage_of(folder: Path) -> Stage:
    adapter = AdapterSource(name="a", folder=folder / "adapter")
    return load_stage(Source(base=folder, adapters=(adapter,), asked=(), dtype="float32"))


def generator(case: str) -> Generator:
    return Generator([stage_of(golden(case))])


@pytest.mark.filterwarnings("ignore:only the text part")
@pytest.mark.parametrize("case", more_cases.mostly_nightly(CASES, ALWAYS))
def test_tokens_are_those_of_transformers_and_peft(case):
    wanted, new = RECORD["cases"][case], len(RECORD["cases"][case]["base"]["tokens"][0])
    requests = [
        Request(tokens=prompt, adapter=adapter, sampling=Sampling(max_tokens=new))
        for adapter in (0, BASE)
        for prompt in wanted.get("prompts", RECORD["prompts"])
    ]
    answers = generator(case)(requests)
    assert min(wanted[name]["margin"] for name in ("adapter", "base")) > 5 * ROUNDING
    assert [answer.tokens for answer in answers] == wanted["adapter"]["tokens"] + wanted["base"]["tokens"]


def test_latents_are_read_again_as_the_keys_and_values_that_they_make():
    """A second turn reads blocks of latents; with an adapter that scales columns the cache has keys and values."""
    folder, prompt = golden("deepseek_v3"), RECORD["prompts"][2]
    run, conversation = generator("deepseek_v3"), Conversation()
    asked = [Request(tokens=prompt, adapter=adapter, sampling=Sampling(max_tokens=24)) for adapter in (0, BASE)]
    first = run(asked, conversation=conversation)
    wanted = RECORD["cases"]["deepseek_v3"]
    assert [answer.tokens for answer in first] == [wanted[name]["tokens"][2] for name in ("adapter", "base")]
    turns = [
        Request(tokens=prompt + answer.tokens[:9], adapter=request.adapter, sampling=Sampling(max_tokens=15))
        for request, answer in zip(asked, first, strict=True)
    ]
    second = run(turns, conversation=conversation)
    for before, after in zip(first, second, strict=True):
        assert after.tokens == before.tokens[9:]
        np.testing.assert_allclose(after.logprobs, before.logprobs[9:], atol=2e-5)
    plain = stage_of(folder)
    layer = plain.parts.model.layer(0)
    of_heads = cached_rows(replace(plain.parts, specs=(replace(plain.parts.specs[0], kind="dora"),)), layer)
    assert (set(cached_rows(plain.parts, layer)), set(of_heads)) == ({"latents"}, {"keys", "values"})


def test_adapters_change_tokens():
    cases = RECORD["cases"].values()
    assert sum(case["adapter"]["tokens"] == case["base"]["tokens"] for case in cases) < len(cases) / 10


def test_an_answer_that_crosses_the_context_of_longrope_is_refused():
    folder = golden("phi3_long")
    model = Generator([load_stage(Source(base=folder, adapters=(), asked=(), dtype="float32"))])
    with pytest.raises(ConfigError, match=r"generate\.longrope\][^\n]*cross 16 positions[^⁂]*max_tokens=13"):
        model([Request(tokens=[5, 17, 2], sampling=Sampling(max_tokens=14))])


@pytest.mark.parametrize("kind", ["int8", more_cases.nightly("nf4"), more_cases.nightly("fp8")])
def test_a_quantised_base_generates_as_its_dequantised_weights(kind):
    folder = golden("llama3")
    stage = load_stage(Source(base=folder, adapters=(), asked=(), dtype="float32", quantize=kind))
    plain = load_stage(Source(base=folder, adapters=(), asked=(), dtype="float32"))
    dense = [
        {
            name: stored_kind(kind).dequantise(weight, jnp.float32) if isinstance(weight, dict) else weight
            for name, weight in piece.items()
        }
        for piece in stage.weights.pieces
    ]
    before = Generator([plain])(prompts := [Request(tokens=prompt) for prompt in RECORD["prompts"]])
    plain.weights.pieces = dense
    plain.replace_base(plain.weights)
    wanted = [answer.tokens for answer in Generator([plain])(prompts)]
    assert [answer.tokens for answer in Generator([stage])(prompts)] == wanted
    assert [answer.tokens for answer in before] != wanted


@pytest.mark.parametrize("kind", ["fp8", more_cases.nightly("int8")])
def test_experts_in_8_bits_generate_the_same_alone_and_together(kind):
    """Rows of a batch share tiles of an expert, and each is rounded by itself."""
    source = Source(base=golden("gpt_oss"), adapters=(), asked=(), dtype="float32", quantize=kind)
    generator = Generator([load_stage(source)])
    prompts = [Request(tokens=prompt, sampling=Sampling(max_tokens=6)) for prompt in RECORD["prompts"]]
    together = [answer.tokens for answer in generator(prompts)]
    assert [generator([prompt])[0].tokens for prompt in prompts] == together
