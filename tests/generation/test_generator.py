"""Batches: every request as alone, rows that are used again, few compilations, stages, and wrong requests."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import more_cases
import numpy as np
import pytest
import tokenizers
from drawn import golden

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.tokens import TokenRows
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.data.prompts import prompt_tokens
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.errors import DataError, ErrorList, LoraFusionError, RunError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.generation import generator, packing
from lorafusion_jax.generation.answer_text import AnswerTexts
from lorafusion_jax.generation.generator import Conversation, Generator
from lorafusion_jax.generation.load import read_leaves
from lorafusion_jax.generation.packing import BASE, NOWHERE, TILE, Prompt, pack_prompts
from lorafusion_jax.generation.passes import Passes
from lorafusion_jax.generation.requests import Request, check_requests
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.generation.text import read_rows as read_prompts
from lorafusion_jax.models import open_frozen
from lorafusion_jax.peft.folder import write_adapter
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.move import transfer
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import cut

# Batches of these tests have at most eight rows: a program of layers compiles for each shape.
MODEL = golden("qwen2_window")
SPECS = (  # other kinds, ranks and targets, in no order
    AdapterSpec(name="wide", rank=6, alpha=9, targets=("down_proj", "q_proj")),
    AdapterSpec(name="dora", rank=2, alpha=4, targets=("down_proj",), kind="dora"),
    AdapterSpec(name="narrow", rank=1, alpha=3, targets=("q_proj",)),
)
LENGTHS = (1, 7, 12, 19, 5, 17, 2, 11)  # of answers: of the first four, each ends in another look at their tokens


def stages(*, layers: int = 3, **mesh: int) -> list[Stage]:
    """The model with adapters of random weights: a full layer, and windows of 6."""
    whole, meshes = ModelConfig.from_hf(MODEL), stage_meshes(**mesh)
    model = replace(whole, num_layers=layers, pattern=whole.pattern[:layers], max_positions=64)
    extents = stage_layers(model, len(meshes), [1.5, 1.5] if len(meshes) == 2 else None)
    frozen = open_frozen(MODEL, dtype=jnp.float32, sharding=lambda name, shape: meshes[0].weight(shape)).read()
    parts = Parts(model=model, specs=SPECS, settings=TrainSettings(), dtype=jnp.float32)
    draw = np.random.default_rng(7)
    leaves = {
        name: {leaf: draw.normal(size=shape).astype(np.float32) * 0.6 for leaf, shape in shapes.items()}
        for name, shapes in parts.leaves.own_shapes().items()
    }
    made = []
    for weights, of_stage in zip(cut(frozen, model, extents), meshes, strict=True):
        moved = jax.tree.map(lambda leaf, to=of_stage: jax.device_put(leaf, to.weight(leaf.shape)), weights.pieces)
        weights.pieces = moved
        for name in ("embed", "norm", "head"):
            if getattr(weights, name) is not None:
                setattr(weights, name, transfer(getattr(weights, name), of_stage))
        stage = Stage(parts, weights, of_stage, [], remat="everything", block=1)
        stage.take_weights(leaves)
        made.append(stage)
    return made


def requests(count: int, **sampling) -> list[Request]:
    draw = np.random.default_rng(3)
    return [
        Request(
            tokens=draw.integers(0, 48, draw.integers(1, 30)).tolist(),
            adapter=(number % 4) - 1,
            sampling=Sampling(max_tokens=LENGTHS[number], seed=number, **sampling),
            where=f"prompt {number}",
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model() -> Generator:
    return Generator(stages())


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    return [model([request])[0].tokens for request in requests(8)]


def test_a_batch_of_adapters_is_as_each_alone(model, alone):
    """And rows are used again by requests that wait."""
    grown: list[int] = []
    answers = model(requests(8), lambda index, answer: grown.append(index), most=4)
    # Products of other heights sum in another order: tokens are compared, whose logits differ by far more.
    assert [answer.tokens for answer in answers] == alone
    assert tuple(map(len, alone)) == LENGTHS
    assert len({tuple(tokens) for tokens in alone}) == 8
    assert set(grown) == set(range(8))
    assert all(answer.end == "length" for answer in answers)


def test_log_likelihoods_of_an_answer_are_those_after_a_longer_prompt(model):
    """Tokens come from caches, and from prompts that hold the tokens before them."""
    request = requests(8)[2]
    (answer,) = model([request])
    assert len(answer.logprobs) == len(answer.tokens) > 2
    sampling = replace(request.sampling, max_tokens=1)
    prompts = [[*request.tokens, *answer.tokens[:count]] for count in range(len(answer.tokens))]
    again = model([Request(tokens=tokens, adapter=request.adapter, sampling=sampling) for tokens in prompts])
    assert [single.tokens for single in again] == [[token] for token in answer.tokens]
    np.testing.assert_allclose([single.logprobs[0] for single in again], answer.logprobs, rtol=1e-4)


def test_draws_depend_on_the_request_only(model):
    drawn = requests(6, temperature=1.5, top_k=30, top_p=0.9)
    together = [answer.tokens for answer in model(drawn)]
    assert [model([request])[0].tokens for request in drawn[2:4]] == together[2:4]
    undrawn = [answer.tokens for answer in model(requests(6))]
    assert together != undrawn
    # A greedy request beside drawn ones stays greedy, and they stay as they were: as many, in the programs of above.
    mixed = [answer.tokens for answer in model([drawn[0], requests(6)[1], *drawn[2:]])]
    assert mixed == [together[0], undrawn[1], *together[2:]]


def test_other_prompts_compile_nothing(model, alone):
    def compiled() -> list[int]:
        (programs,) = model._programs
        jitted = [programs.run_block, programs.embed, programs.next_inputs, programs.prompt_inputs]
        return [program._cache_size() for program in (*jitted, programs.head("greedy", False, 0, True))]

    model(requests(8), most=4)
    before = compiled()
    others = [
        Request(tokens=[*request.tokens[1:], 3, 9], adapter=request.adapter, sampling=request.sampling)
        for request in requests(8)
    ]
    assert [answer.tokens for answer in model(others, most=4)] != alone
    assert compiled() == before


@pytest.mark.parametrize(
    "mesh", [{"stages": 2}, more_cases.nightly({"tensor": 2}), more_cases.nightly({"data": 2, "fsdp": 2})], ids=str
)
def test_stages_and_shards_generate_the_same(mesh, alone):
    """Half a layer on each of two stages, too."""
    answer = Generator(stages(**mesh))([requests(8)[5]])[0]
    assert len(answer.tokens) == LENGTHS[5]
    assert answer.tokens == alone[5]


def test_an_answer_ends_with_a_stop_token_or_at_the_last_position(model, alone):
    request, tokens = requests(8)[2], alone[2]
    stopping = Generator(model._stages, [tokens[2]])
    stopping._programs = model._programs  # traced already
    answer = stopping([request])[0]
    assert (answer.tokens, answer.end) == (tokens[: tokens.index(tokens[2])], "stop")
    (unstopped,) = model([request])  # in which the token is one of the text
    assert (answer.end_token, unstopped.end_token, unstopped.end_logprob) == (tokens[2], None, None)
    assert answer.end_logprob == unstopped.logprobs[len(answer.tokens)]
    special = Generator(model._stages, (), lambda _, texts: False, {"<|user|>": tokens[2], "<|other|>": tokens[0]})
    special._programs = model._programs
    for texts, end in (("none", "<|user|>"), "stop"), (("<|us",), "length"):
        (by_text,) = special([replace(request, sampling=replace(request.sampling, stop=texts))])
        assert by_text.end == end
        assert by_text == answer or end == "length"
    long = Request(tokens=[7] * 58, sampling=Sampling(max_tokens=50))
    answer = model([long])[0]
    assert (len(answer.tokens), answer.end) == (6, "context")


def prompt(row: int, length: int, slot: int = 0, start: int = 0) -> Prompt:
    return Prompt(tokens=[row] * length, blocks=range(10 * row, 10 * row + 10), row=row, slot=slot, start=start)


def test_long_prompts_take_several_passes(monkeypatch):
    monkeypatch.setattr(packing, "MOST_ROWS", 2 * TILE)
    monkeypatch.setattr(packing, "SIZES", (TILE,))
    passes = pack_prompts([prompt(0, 100), prompt(2, 300, BASE), prompt(1, 100)], rows=4, block=32)
    assert [len(prompts.tokens_T) for prompts in passes] == [4 * TILE, 2 * TILE]
    assert passes[1].last_B.tolist() == [99, 199, -1, -1]
    assert passes[1].tile_slot.tolist() == [0, 0]
    assert passes[0].tile_slot.tolist() == [-1, -1, -1, -1]
    assert passes[0].position_T[[0, 299, 300]].tolist() == [0, 299, -1]
    assert passes[1].cell_T[[0, 99, 100, 200]].tolist() == [0, 99, 320, NOWHERE]
    assert passes[1].segments.lengths[:3].tolist() == [100, 100, 56]
    assert passes[1].state_M.tolist()[:3] == [0, 1, NOWHERE]
    equal = pack_prompts([prompt(row, TILE) for row in range(5)], rows=8, block=32)
    assert [len(prompts.tokens_T) for prompts in equal] == [2 * TILE, 2 * TILE, TILE]


def test_prompts_that_go_on_have_tiles_of_their_own(monkeypatch):
    monkeypatch.setattr(packing, "MOST_CONTINUED", 2 * TILE)
    monkeypatch.setattr(packing, "SIZES", (TILE,))
    passes = pack_prompts([prompt(0, 70, start=64), prompt(1, 320, start=32), prompt(2, 40)], rows=4, block=32)
    assert [prompts.tables_GM is None for prompts in passes] == [True, False, False, False]
    assert [prompts.last_B.tolist() for prompts in passes] == [
        [-1, -1, 39, -1], [5, -1, -1, -1], [-1, -1, -1, -1], [-1, 31, -1, -1],
    ]  # fmt: skip
    assert passes[2].position_T[[0, 255]].tolist() == [32, 287]
    assert passes[2].tables_GM[:, :3].tolist() == [[10, 11, 12]] * 2


def test_wrong_requests_are_reported_together(model):
    wrong = [Request(tokens=[], where="row 1"), Request(tokens=[1] * 64, where="row 2")]
    with pytest.raises(ErrorList) as caught:
        model(wrong)
    assert [error.code for error in caught.value.errors] == ["generate.empty-prompt", "generate.too-long"]
    for token in (48, -1, 2**31, 10**30, True, 2.5):
        with pytest.raises(LoraFusionError, match=f"row 7 has the token {token}, and the model has tokens 0 to 47"):
            model([Request(tokens=[3, token], where="row 7")])
    with pytest.raises(LoraFusionError) as settings:
        Sampling(max_tokens=0, temperature=float("nan"), top_p=0, top_k=-1, seed=-5, stop=("",))
    assert str(settings.value).count("generate.setting") == 6


def test_tokens_that_the_head_has_no_row_of_are_prompts_only():
    model = replace(ModelConfig.from_hf(MODEL), vocab_size=48, output_vocab=40)
    check_requests([Request(tokens=[3, 47], sampling=Sampling(repetition_penalty=2.0))], model)
    check_requests([Request(tokens=[47, 39], sampling=Sampling(prompt_logprobs=1, allowed_tokens=(39,)))], model)
    for tokens, sampling in (
        ([3, 47], Sampling(prompt_logprobs=0)),
        ([3], Sampling(allowed_tokens=(40,))),
        ([3], Sampling(logit_bias={41: 1.0})),
        ([3, 5], Sampling(prompt_logprobs=1, prompt_targets=((-1,), (44,)))),
    ):
        with pytest.raises(LoraFusionError, match=r"generate.token\].* and the model predicts 39 at most"):
            check_requests([Request(tokens=tokens, sampling=sampling)], model)


def test_trained_rows_of_tokens_are_read_from_a_folder(tmp_path):
    spec = AdapterSpec(name="law", rank=1, alpha=3, targets=("q_proj",), tokens=TokenRows(embed=(3, 17)))
    model = ModelConfig.from_hf(MODEL)
    rows = np.arange(2 * model.hidden_size, dtype=np.float32).reshape(-1, 2)
    linear = model.layer(0).linear("q_proj")
    pair = np.ones((linear.in_features, 1), np.float32), np.ones((1, linear.out_features), np.float32)
    arrays = {f"layers.{layer}.self_attn.q_proj": pair for layer in range(model.num_layers)}
    folder = write_adapter(arrays | {"tokens": (rows,)}, spec, "base", tmp_path / "law")
    parts = Parts(model=model, specs=(spec,), settings=TrainSettings(), dtype=jnp.float32)
    _, leaves = read_leaves(folder, parts)
    np.testing.assert_array_equal(leaves["tokens.embed"][0], rows)


def test_weights_that_are_not_numbers_name_their_adapter(model):
    (stage,) = model._stages
    name, whole = "layers.mlp.down_proj.lora_a", dict(stage.lora)
    assert stage.all_leaves  # the norms that other tests read are of these weights, not of the next
    stage.lora = whole | {name: whole[name] * jnp.nan}
    try:
        with pytest.raises(RunError, match=r"generate.not-finite\] wide"):
            model([Request(tokens=[1, 2], adapter=0, sampling=Sampling(max_tokens=2))])
    finally:
        stage.lora = whole


def test_trained_rows_of_tokens_are_those_of_a_model_with_these_rows(model, alone):
    stage, tokens = stages()[0], (3, 17, 29, 41)
    rows = np.random.default_rng(2).normal(size=(len(tokens), stage.parts.model.hidden_size)).astype(np.float32)
    trained = replace(SPECS[0], tokens=TokenRows(embed=tokens, head=tokens))
    values = {spec.name: jax.device_get(stage.adapter(number)) for number, spec in enumerate(SPECS)}

    def model_with(spec: AdapterSpec, leaves, weights) -> Generator:
        parts = Parts(model=stage.parts.model, specs=(spec, *SPECS[1:]), settings=TrainSettings(), dtype=jnp.float32)
        made = Stage(parts, weights, stage.mesh, [], remat="everything", block=1)
        made.take_weights(values | {spec.name: values[spec.name] | leaves})
        return Generator([made])

    changed = copy(stage.weights)
    for name in ("embed", "head"):
        table = np.array(getattr(changed, name))
        table[list(tokens)] = rows
        setattr(changed, name, jnp.asarray(table))
    of_base, short, of_dora, longest = requests(4)
    asked = [of_base, replace(longest, adapter=0), of_dora, replace(short, adapter=2)]
    with_rows = model_with(SPECS[0], {}, changed)
    with_rows._programs = model._programs  # traced already
    (wanted,) = with_rows(asked[1:2])
    assert any(token in wanted.tokens for token in tokens)
    token_leaves = {f"tokens.{table}": rows.T[None] for table in ("embed", "head")}
    answers = model_with(trained, token_leaves, stage.weights)(asked)
    assert [answer.tokens for answer in answers[:3]] == [alone[0], wanted.tokens, alone[2]]


def turns(generator, conversation, first, more):
    """Answers of two turns, each prompt of the second being all of the first and `more`."""
    answers = generator(first, conversation=conversation)
    second = [
        replace(request, tokens=[*request.tokens, *answer.tokens, *more])
        for request, answer in zip(first, answers, strict=True)
    ]
    return answers, generator(second, conversation=conversation), second


def read_rows(monkeypatch) -> list[int]:
    """Counts the rows of the prompts of each call."""
    counts, read = [], Passes.read_prompts

    def counted(self, passes, *args):
        counts.append(sum(int((prompts.position_T >= 0).sum()) for prompts in passes))
        return read(self, passes, *args)

    monkeypatch.setattr(Passes, "read_prompts", counted)
    return counts


def test_a_second_turn_reads_only_new_tokens(model, monkeypatch):
    """But for those of the last block, which nobody shares before it is full."""
    monkeypatch.setattr(packing, "MOST_CONTINUED", 16)
    counts = read_rows(monkeypatch)
    first = [replace(r, tokens=(r.tokens * 20)[:40], sampling=Sampling(max_tokens=9)) for r in requests(4)]
    _, kept, second = turns(model, Conversation(), first, [5, 7, 11])
    assert counts == [4 * 40, 4 * (40 + 9 + 3 - 32)]
    assert [answer.tokens for answer in kept] == [answer.tokens for answer in model(second)]
    assert counts[2] == sum(len(request.tokens) for request in second)


def test_other_adapters_share_nothing(model, monkeypatch):
    counts, conversation = read_rows(monkeypatch), Conversation()
    long = [replace(r, tokens=[7] * 40, sampling=Sampling(max_tokens=2)) for r in requests(3)]
    apart = [model([request])[0].tokens for request in long]
    together = [model([request], conversation=conversation)[0].tokens for request in [*long, long[1]]]
    assert together == [*apart, apart[1]]
    assert counts == [40] * 6 + [40 - 32]


def test_a_longer_conversation_gets_a_new_engine(model, monkeypatch):
    made, conversation = [], Conversation()

    def opened(stages, *, blocks, **options):
        made.append(blocks)
        return SimpleNamespace(pool=SimpleNamespace(number=blocks))

    monkeypatch.setattr(generator, "Engine", opened)
    for length, count in ((3, 1), (3, 2), (50, 1), (50, 9), (50, 10)):
        asked = [Request(tokens=[3] * length, sampling=Sampling(max_tokens=3))] * count
        model._engine(asked, 64, conversation, generator.TURNS)
    assert made == [generator.FEWEST_BLOCKS, 128]  # four turns of nine times two blocks


@pytest.fixture
def special_tokenizer(tmp_path):
    """Letters, and two special tokens: 26 is <|user|>, 27 <|end|>."""
    words = {chr(97 + number): number for number in range(26)} | {"<|user|>": 26, "<|end|>": 27}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<|user|>", "<|end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize(("tokens", "stops", "ends", "text"), [
    ([0, 1, 26], ("<|user|>",), True, "ab"),
    ([0, 1, 26, 2], ("b<|user|>",), True, "a"),  # part text, part special
    ([0, 26, 1, 27], ("<|user|>b<|end|>",), True, "a"),
    ([0, 26, 1], ("ab",), True, ""),  # a text is looked for in what a person reads
    ([0, 26, 1], ("user", "|>"), False, "ab"),  # and parts of special tokens are none
    ([0, 27, 1], ("<|user|>", "b<|end|>"), False, "ab"),
])  # fmt: skip
def test_stop_texts_with_special_tokens_end_an_answer(special_tokenizer, tokens, stops, ends, text):
    texts = AnswerTexts(special_tokenizer)
    assert texts.ends_with(tokens, stops) is ends
    assert texts.text(tokens, stops) == text


@pytest.mark.parametrize(
    "prompt", [[1, True], [1, 2.5], [3, "a"], [{"role": "user", "content": "a"}, 4], [None], [[1]]]
)
def test_prompts_that_are_neither_messages_nor_token_ids_are_refused(special_tokenizer, prompt):
    with pytest.raises(LoraFusionError, match=r"generate\.prompt.*prompt 2 has"):
        prompt_tokens(prompt, special_tokenizer, where="prompt 2")
    assert prompt_tokens(np.array([1, 2], np.int32), special_tokenizer) == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [[1, 2], [{"role": "system", "content": "Be long."}, {"role": "user", "content": "a"}]]
)
def test_a_system_message_that_a_prompt_cannot_have_is_refused(special_tokenizer, prompt):
    with pytest.raises(
        LoraFusionError, match=r"generate\.prompt.*prompt 3 cannot have the system message 'Be brief\.'"
    ):
        prompt_tokens(prompt, special_tokenizer, system="Be brief.", where="prompt 3")


def test_rows_of_csv_have_numbers():
    lines = ["prompt,max_tokens,temperature,adapter,note\n", "hello,5,0.5,law,1\n", "and,,,,\n"]
    first, second = read_prompts(lines, ["med"], Sampling(max_tokens=9), name="rows.csv")
    (row,) = first.rows
    assert (row.prompt, row.adapter, row.sampling) == ("hello", "law", Sampling(max_tokens=5, temperature=0.5))
    assert first.others == {"note": "1"}
    assert (second.rows[0].adapter, second.rows[0].sampling) == ("med", Sampling(max_tokens=9))
    with pytest.raises(LoraFusionError, match=r"rows\.csv, row 1: its max_tokens is 'many', not a number"):
        read_prompts(["prompt,max_tokens\n", "hello,many\n"], [], Sampling(), name="rows.csv")


@pytest.mark.parametrize(("stop", "read"), [("hello", ("hello",)), (["a", "bc"], ("a", "bc")), ([], ())])
def test_a_stop_text_of_a_row_is_one(stop, read):
    lines = [json.dumps({"prompt": "hi", "stop": stop})]
    (row,) = read_prompts(lines, ["med"], Sampling(stop=("other",)), name="rows.jsonl")
    assert row.rows[0].sampling.stop == read


@pytest.mark.parametrize("stop", [5, None, {"a": 1}, [""], ["a", 1], ""])
def test_a_stop_that_is_no_text_is_refused(stop):
    with pytest.raises(DataError, match="stop must be a text or texts"):
        read_prompts([json.dumps({"prompt": "hi", "stop": stop})], ["med"], Sampling(), name="rows.jsonl")


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "hi"}], {"role": "user", "content": "hi"}])
@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_in_a_text_are_json(column, messages):
    text = json.dumps(messages)
    for name, lines in {
        "rows.csv": [f"{column},stop\n", f'"{text.replace(chr(34), chr(34) * 2)}",###\n'],
        "rows.jsonl": [json.dumps({column: text, "stop": "###"})],
    }.items():
        (row,) = read_prompts(lines, ["med"], Sampling(), name=name)
        assert row.rows[0].prompt == [{"role": "user", "content": "hi"}]
        assert row.rows[0].sampling.stop == ("###",)


def test_a_base_that_devices_share_makes_no_text():
    stage = SimpleNamespace(parts=SimpleNamespace(tensor=2, model=None))
    with pytest.raises(RunError, match=r"(?s)generate\.tensor.*2 devices share each layer.*fix: mesh\.tensor: 1"):
        Generator([stage])
