"""Requests that join, leave and give way: on a model that is a hash of what it reads, and on a small real one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import more_cases
import numpy as np
import pytest
from test_generator import MODEL, SPECS, requests, stages

from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.generation import engine as engine_module
from lorafusion_jax.generation.blocks import BlockPool
from lorafusion_jax.generation.choose import Chosen
from lorafusion_jax.generation.engine import Engine
from lorafusion_jax.generation.packing import BASE
from lorafusion_jax.generation.programs import GenerationPrograms
from lorafusion_jax.generation.requests import Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.models.cache import BLOCK
from lorafusion_jax.session.stage_jit import jit_on_stage
from pallas_kernels.norm.xla import norm_forward

VOCABULARY = 48
SHAPE = replace(ModelConfig.from_hf(MODEL), max_positions=160)


def after(chain: int, token: int) -> int:
    return hash((chain, token))


def next_token(chain: int, weights: int) -> int:
    return hash((chain, weights)) % VOCABULARY


class HashedPasses:
    """In place of the device: a cell holds a hash of all tokens up to its own, found through the tables."""

    def __init__(self, stages, programs, *, slots, rows, blocks):
        self.cells, self.slots = {}, [BASE] * slots
        self.weights = {BASE: BASE}  # by slot
        self.newest = np.zeros(rows, np.int32)

    def put(self, adapter, slot):
        self.weights[slot] = adapter
        return True

    def read(self, slot):
        return self.weights[slot]

    def write(self, slot, value):
        self.weights[slot] = value

    def hold(self, adapters):
        self.slots = adapters

    def copy(self, blocks, rows):
        for source, target in blocks.T.tolist():
            for offset in range(BLOCK if target < 10**6 else 0):
                if source * BLOCK + offset in self.cells:
                    self.cells[target * BLOCK + offset] = self.cells[source * BLOCK + offset]

    def read_prompts(self, passes, rows):
        tokens = self.newest[: len(rows.number_B)]
        for prompts in passes:
            chains = {}
            for row in np.flatnonzero(prompts.position_T >= 0).tolist():
                position = int(prompts.position_T[row])
                chain = 0
                if position:
                    before = chains.get(row - 1) if prompts.position_T[row - 1] == position - 1 and row else None
                    if before is None:
                        before = self.cells[self.cell(prompts.tables_GM[row * len(prompts.tables_GM) // len(
                            prompts.tokens_T)], position - 1)]  # fmt: skip
                    chain = before
                chains[row] = self.cells[int(prompts.cell_T[row])] = after(chain, int(prompts.tokens_T[row]))
            for row in np.flatnonzero(prompts.last_B >= 0).tolist():
                last = int(prompts.last_B[row])
                tokens[row] = next_token(chains[last], self.weights[int(prompts.slot_T[last])])
        return Chosen(tokens.copy(), np.zeros(len(tokens), np.float32)), [[] for _ in passes]

    def next_tokens(self, steps, at, rows):
        tokens, position, chosen = self.newest[: len(rows.number_B)], at.position_B.copy(), []
        for _ in range(steps):
            for row in np.flatnonzero(position >= 0).tolist():
                if position[row] < at.limit_B[row]:
                    table, here = at.tables_BM[row], int(position[row])
                    chain = after(self.cells[self.cell(table, here - 1)], int(tokens[row]))
                    self.cells[self.cell(table, here)] = chain
                    tokens[row] = next_token(chain, self.weights[int(at.slot_B[row])])
                    position[row] += 1
            chosen.append(Chosen(tokens.copy(), np.zeros(len(tokens), np.float32)))
        return chosen

    @staticmethod
    def cell(table, position: int) -> int:
        return int(table[position // BLOCK]) * BLOCK + position % BLOCK


def hashed_engine(monkeypatch, **options) -> Engine:
    monkeypatch.setattr(engine_module, "Passes", HashedPasses)
    stage = SimpleNamespace(parts=SimpleNamespace(model=SHAPE, specs=SPECS), occupied=list(enumerate(SPECS)))
    return Engine([stage], programs=[None], **options)  # type: ignore[list-item]


def wanted_tokens(request: Request, adapter: int) -> list[int]:
    chain, tokens = 0, []
    for token in request.tokens:
        chain = after(chain, token)
    while len(tokens) < request.sampling.max_tokens and len(request.tokens) + len(tokens) < SHAPE.positions:
        token = next_token(chain, adapter)
        if token in (request.sampling.stop_tokens or ()):
            break
        tokens.append(token)
        chain = after(chain, token)
    return tokens


@pytest.mark.parametrize("number", [1500, more_cases.nightly(10_000)])
def test_requests_come_and_go_in_a_full_cache(monkeypatch, number):
    """None has a token of another, and all blocks, rows and slots are free at the end."""
    engine = hashed_engine(monkeypatch, rows=16, blocks=16, slots=3, steps=4)
    draw, waiting, preempted = np.random.default_rng(number), [], []
    reserve = engine._scheduler.reserve
    monkeypatch.setattr(engine._scheduler, "reserve", lambda steps: preempted.extend(now := reserve(steps)) or now)
    beginnings = [draw.integers(0, VOCABULARY, 110).tolist() for _ in range(6)]
    samplers = [engine.base]
    made = ended = cancelled = 0
    while made < number or engine.busy:
        if draw.random() < 0.05 and made < number:
            if len(samplers) > 4:
                engine.drop(samplers.pop(int(draw.integers(1, len(samplers)))))
            samplers.append(engine.snapshot(int(draw.integers(3))))
        for _ in range(int(draw.integers(0, 12)) if made < number else 0):
            cut = int(draw.integers(1, 100))
            request = Request(
                tokens=[
                    *beginnings[draw.integers(6)][:cut],
                    *draw.integers(0, VOCABULARY, draw.integers(1, 4)).tolist(),
                ],
                sampler=samplers[draw.integers(len(samplers))],
                sampling=Sampling(max_tokens=int(draw.integers(1, 40)), stop_tokens=(*range(draw.integers(0, 3)),)),
            )
            group = [request] * int(draw.integers(1, 4))
            waiting += [(engine.submit(request), request) for request in group]
            made += len(group)
        if waiting and draw.random() < 0.2:
            engine.cancel(waiting[draw.integers(len(waiting))][0])
        engine.step()
        for answer, request in [pair for pair in waiting if pair[0].end is not None]:
            wanted = wanted_tokens(request, request.sampler.adapter)
            if answer.end == "cancelled":
                assert answer.tokens == wanted[: len(answer.tokens)]
                cancelled += 1
            else:
                assert answer.tokens == wanted
                assert (answer.end == "stop") == (answer.end_token is not None)
            ended += 1
        waiting = [pair for pair in waiting if pair[0].end is None]
    assert not waiting
    assert (made, cancelled > 50, len(preempted) > 20) == (ended, True, True)
    assert engine.pool.num_free == engine.pool.number
    assert not any(engine.pool._users)
    assert sorted(engine._scheduler._free_rows) == list(range(16))
    assert not any(sampler.running for sampler in samplers)


def test_equal_prompts_are_read_once_and_write_into_blocks_of_their_own(monkeypatch):
    engine = hashed_engine(monkeypatch, rows=8, blocks=24, slots=1, steps=4)
    read = []
    passes = engine._passes
    monkeypatch.setattr(
        passes,
        "read_prompts",
        lambda packed, rows: read.append(packed) or HashedPasses.read_prompts(passes, packed, rows),
    )
    law, group = engine.snapshot(0), [7] * 40
    answers = [
        engine.submit(Request(tokens=group, sampler=law, sampling=Sampling(max_tokens=6, seed=seed)))
        for seed in range(4)
    ]
    engine.step()
    assert [(prompts.position_T >= 0).sum() for prompts in read[0]] == [40]
    running = list(engine._scheduler.running.values())
    assert len({sequence.blocks[0] for sequence in running}) == 1
    assert len({sequence.blocks[1] for sequence in running}) == 4
    while engine.busy:
        engine.step()
    assert [answer.tokens for answer in answers] == [
        wanted_tokens(Request(tokens=group, sampling=Sampling(max_tokens=6)), 0)
    ] * 4
    engine.submit(Request(tokens=[*group, 5], sampler=law, sampling=Sampling(max_tokens=1)))
    engine.submit(Request(tokens=group, sampler=engine.base, sampling=Sampling(max_tokens=1)))
    engine.step()
    assert sorted((prompts.position_T >= 0).sum() for prompts in read[1]) == [41 - 32, 40]


def test_a_request_that_never_fits_is_refused(monkeypatch):
    engine = hashed_engine(monkeypatch, rows=2, blocks=2, slots=1, steps=4)
    with pytest.raises(LoraFusionError, match=r"generate\.memory\][^\n]*have 65 tokens, and the cache 64"):
        engine.submit(Request(tokens=[1] * 60, sampling=Sampling(max_tokens=5)))


def test_a_stop_text_where_tokens_have_no_texts_is_refused(monkeypatch):
    engine = hashed_engine(monkeypatch, rows=2, blocks=2, slots=1, special_texts={"<|end|>": 7})
    asked = Sampling(max_tokens=5, stop=("<|end|>", "ab"))
    with pytest.raises(LoraFusionError, match=r"generate\.stop\] the prompt shall end at the text 'ab'"):
        engine.submit(Request(tokens=[1], sampling=asked))
    engine.submit(Request(tokens=[1], sampling=replace(asked, stop=("<|end|>",))))


def test_samplers_beyond_the_slots_wait_on_the_host(monkeypatch):
    engine = hashed_engine(monkeypatch, rows=4, blocks=8, slots=2, steps=4)
    law, med, code = (engine.snapshot(adapter) for adapter in range(3))
    assert (law.slot, law.on_host, med.slot, code.slot) == (None, 0, 1, 0)
    asked = [Request(tokens=[3, 4], sampler=which, sampling=Sampling(max_tokens=5)) for which in (law, med, code)]
    answers = [engine.submit(request) for request in asked]
    while engine.busy:
        engine.step()
    assert [answer.tokens for answer in answers] == [wanted_tokens(r, n) for n, r in enumerate(asked)]


def test_blocks_that_nobody_has_are_found_until_they_are_needed():
    pool = BlockPool(3, 2)
    first = pool.take(2)
    node = pool.remember(pool.remember(-1, [1, 2], first[0]), [3, 4], first[1])
    pool.release(first)
    assert pool.find(-1, [1, 2, 3, 4, 5], 4) == (first, node)
    assert pool.find(-2, [1, 2], 2) == ([], -2)
    pool.release(first)
    taken = pool.take(2)  # the free one, and the tail of what is known
    assert pool.find(-1, [1, 2, 3, 4], 4)[0] == first[:1]
    assert first[1] in taken
    pool.forget(first[:1])
    assert pool.find(-1, [1, 2], 2)[0] == []
    pool.release(first[:1])
    idle = pool.remember(-1, [8, 9], taken[0])
    pool.release(taken[:1])
    pool.forget(taken[:1])
    assert (idle, pool.num_free, len(pool.take(2))) == (3, 2, 2)


@pytest.fixture(scope="module")
def stage():
    (stage,) = stages()
    return stage


@pytest.fixture(scope="module")
def programs(stage) -> list:
    return [GenerationPrograms(stage)]


def opened(stage, programs, **options) -> tuple[Engine, list]:
    engine = Engine([stage], programs=programs, rows=8, slots=4, **{"blocks": 24, "steps": 4} | options)
    return engine, [engine.base, *(engine.snapshot(adapter) for adapter in range(3))]


def run(engine: Engine, asked: list[Request]) -> list:
    answers = [engine.submit(request) for request in asked]
    while engine.busy:
        engine.step()
    return answers


def test_an_answer_is_the_same_whatever_joins_leaves_and_gives_way(stage, programs, monkeypatch):
    """Eight requests in a cache of four blocks: the youngest give way, one is cancelled, and others join in between."""
    asked = [replace(r, sampling=Sampling(max_tokens=30, temperature=0.7, seed=2**40 + n)) for n, r in
             enumerate(requests(8))]  # fmt: skip
    engine, samplers = opened(stage, programs)
    asked = [replace(request, sampler=samplers[request.adapter + 1]) for request in asked]
    wanted = [run(engine, [request])[0] for request in asked]
    assert engine.pool.num_free == 24
    tight, samplers = opened(stage, programs, blocks=4)
    asked = [replace(request, sampler=samplers[request.adapter + 1]) for request in asked]
    preempted, reserve = [], tight._scheduler.reserve
    monkeypatch.setattr(tight._scheduler, "reserve", lambda steps: preempted.extend(now := reserve(steps)) or now)
    answers = []
    for number, request in enumerate(asked):
        answers.append(tight.submit(request))
        tight.step()
        if number == 5:
            tight.cancel(answers[2])
    while tight.busy:
        tight.step()
    assert preempted
    assert answers[2].end == "cancelled"
    for answer, alone in zip(answers, wanted, strict=True):
        assert answer.tokens == alone.tokens[: len(answer.tokens)]
        np.testing.assert_allclose(answer.logprobs, alone.logprobs[: len(answer.tokens)], rtol=1e-3, atol=1e-4)
    assert [len(answer.tokens) for answer in answers[3:]] == [30] * 5
    assert tight.pool.num_free == 4


def test_training_and_generation_round_the_sum_before_a_norm(stage):
    x, delta = (jax.random.normal(jax.random.key(n), (8, 256), jnp.bfloat16) for n in range(2))

    def normed(x, delta):
        return norm_forward(x, delta, jnp.ones(256), eps=1e-6)[1]

    for run in (GenerationPrograms(stage)._jit(normed, ()), jit_on_stage(stage.mesh, normed, (), ())):
        np.testing.assert_array_equal(run(x, delta), normed(x, delta))
    assert (jax.jit(normed)(x, delta) != normed(x, delta)).any()  # XLA leaves the rounding out


def test_a_group_draws_as_its_members_alone(stage, programs):
    engine, samplers = opened(stage, programs)
    prompt = [(7 * n) % 48 for n in range(37)]
    group = [Request(tokens=prompt, sampler=samplers[1], sampling=Sampling(max_tokens=7, temperature=1.3, seed=seed))
             for seed in (3, 4, 2**33 + 3)]  # fmt: skip
    together = [answer.tokens for answer in run(engine, group)]
    assert len({tuple(tokens) for tokens in together}) == 3
    fresh, samplers = opened(stage, programs)
    assert together == [run(fresh, [replace(request, sampler=samplers[1])])[0].tokens for request in group]


def test_log_likelihoods_of_prompts_are_those_of_answers(stage, programs):
    engine, samplers = opened(stage, programs)
    prompt, sampler = requests(8)[5].tokens[:12], samplers[2]
    (drawn,) = run(engine, [Request(tokens=prompt, sampler=sampler, sampling=Sampling(max_tokens=6, logprobs=3))])
    assert [listing[0] for listing in drawn.listed] == list(zip(drawn.tokens, drawn.logprobs, strict=True))
    assert all(listing == sorted(listing, key=lambda pair: -pair[1]) and len(listing) == 3 for listing in drawn.listed)
    tokens = [*prompt, *drawn.tokens]
    targets = [()] * (len(tokens) - 1) + [(drawn.listed[-1][1][0], -1, drawn.listed[-1][2][0])]
    settings = {"prompt_logprobs": 3, "prompt_targets": tuple(targets)}
    scored, last = run(engine, [
        Request(tokens=tokens, sampler=sampler, sampling=Sampling(max_tokens=0, **settings)),
        Request(tokens=tokens, sampler=sampler, sampling=Sampling(max_tokens=1, prompt_last=2, **settings)),
    ])  # fmt: skip
    assert (scored.tokens, scored.end, scored.prompt_logprobs[0]) == ([], "length", None)
    np.testing.assert_allclose(scored.prompt_logprobs[-6:], drawn.logprobs, rtol=1e-3, atol=1e-4)
    listed = [[token for token, _ in listing] for listing in scored.prompt_listed[-6:]]
    assert listed == [[token for token, _ in listing] for listing in drawn.listed]
    first, none, third = scored.prompt_targets[-1]
    assert none is None
    np.testing.assert_allclose([first, third], [pair[1] for pair in drawn.listed[-1][1:]], rtol=1e-3, atol=1e-4)
    assert last.prompt_logprobs[:-2] == [None] * (len(tokens) - 2)
    np.testing.assert_allclose(last.prompt_logprobs[-2:], scored.prompt_logprobs[-2:], rtol=1e-3, atol=1e-4)
    assert len(last.tokens) == 1


def test_settings_of_a_request_change_its_own_tokens_only(stage, programs):
    engine, samplers = opened(stage, programs)
    prompt, greedy = requests(8)[3].tokens, Sampling(max_tokens=9)
    (plain,) = run(engine, [Request(tokens=prompt, sampler=samplers[1], sampling=greedy)])
    first = plain.tokens[0]
    settings = [
        {"allowed_tokens": (5, 9, 11)}, {"logit_bias": {first: -1e9}}, {"repetition_penalty": 1e6}, {},
        {"stop_tokens": (plain.tokens[4],)},
    ]  # fmt: skip
    asked = [Request(tokens=prompt, sampler=samplers[1], sampling=replace(greedy, **more)) for more in settings]
    allowed, biased, penalised, same, stopped = run(engine, asked)
    assert set(allowed.tokens) <= {5, 9, 11}
    assert first not in biased.tokens
    assert len({*penalised.tokens, *prompt}) == len(penalised.tokens) + len({*prompt})
    assert same.tokens == plain.tokens
    assert stopped.drawn_tokens == plain.tokens[: plain.tokens.index(plain.tokens[4]) + 1]
    assert (stopped.end, stopped.drawn_logprobs[-1]) == ("stop", stopped.end_logprob)


def test_an_adapter_in_a_place_has_scales_and_projections_of_its_own(stage, programs, monkeypatch):
    """Not those of the place: its rank, its scale in each projection and layer, and where it is at all."""
    engine, samplers = opened(stage, programs)
    wide, dora, narrow = stage._specs
    asked = replace(requests(8)[1], sampling=Sampling(max_tokens=4))
    patterns = Patterns(rank=6, alpha=9, alphas=(("1.self_attn.q_proj", 2.25),), exclude=("down_proj",))
    later = {
        "scale": (0, replace(wide, alpha=1e-20)),
        "nowhere": (1, replace(dora, patterns=Patterns(rank=2, alpha=4, exclude=("down_proj",)))),
        "patterns": (0, replace(wide, targets=("q_proj",), patterns=patterns)),
    }
    answers = {"base": engine.base, "place": samplers[1]}
    for name, (place, spec) in later.items():
        monkeypatch.setattr(stage, "_specs", [spec if place == index else other for index, other in
                                              enumerate((wide, dora, narrow))])  # fmt: skip
        answers[name] = engine.snapshot(place)
    q, down = "layers.self_attn.q_proj.lora_b", "layers.mlp.down_proj.lora_b"
    monkeypatch.setattr(stage, "_specs", [wide, dora, narrow])
    monkeypatch.setattr(stage, "lora", stage.lora | {q: stage.lora[q].at[1].divide(4), down: stage.lora[down] * 0})
    answers["divided"] = engine.snapshot(0)
    logprobs = {}
    for name, sampler in answers.items():  # the bank has four slots
        logprobs[name] = run(engine, [replace(asked, sampler=sampler)])[0].logprobs
    for name, same in {"scale": "base", "nowhere": "base", "patterns": "divided"}.items():
        np.testing.assert_allclose(logprobs[name], logprobs[same], rtol=1e-4, err_msg=name)
    assert not np.allclose(logprobs["place"], logprobs["base"], rtol=1e-4)
    assert not np.allclose(logprobs["patterns"], logprobs["place"], rtol=1e-4)


def test_snapshots_do_not_move_and_one_that_is_not_finite_ends_its_own_requests(stage, programs):
    engine, samplers = opened(stage, programs)
    asked = [replace(r, sampler=samplers[r.adapter + 1], sampling=Sampling(max_tokens=5)) for r in requests(4)]
    before = [answer.tokens for answer in run(engine, asked)]
    name, whole = "layers.mlp.down_proj.lora_b", dict(stage.lora)
    stage.lora = whole | {name: whole[name] * np.nan}
    try:
        broken = engine.snapshot(0)
    finally:
        stage.lora = whole
    *same, failed = run(engine, [*asked, replace(asked[1], sampler=broken)])
    assert [answer.tokens for answer in same] == before
    assert (failed.end, failed.error.code) == ("error", "generate.not-finite")
    engine.drop(broken)
    with pytest.raises(LoraFusionError, match=r"generate\.dropped"):
        engine.submit(replace(asked[1], sampler=broken))
