"""Losses against their formulas in float64, where TRL has no such trainer or option."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from lorafusion_jax.data.rows import Rows
from lorafusion_jax.data.segments import read_samples
from lorafusion_jax.objective.choose import choose
from lorafusion_jax.objective.kto import KTO, kto_segments
from lorafusion_jax.objective.pairs import chosen_and_rejected, prompt_and_answer
from lorafusion_jax.objective.ppo import PPO, generalised_advantages
from lorafusion_jax.objective.protocol import Sample


def log_sigmoid(x: float) -> float:
    return -np.log1p(np.exp(-x))


def loss_of(name: str, sample: Sample, **options) -> tuple[float, dict[str, float]]:
    chosen = choose(name, options)
    assert chosen.objective.loss is not None
    loss, metrics = chosen.objective.loss(sample, chosen.options)
    return float(loss), {key: value for key, value in metrics.items() if key not in chosen.ratios}


def pair(**more) -> Sample:
    return Sample(
        nll=np.float32([3.0, 5.0]),
        tokens=np.float32([4, 7]),
        token_weight=np.float32([0.25, 0.2]),
        reference_nll=np.float32([3.6, 4.5]),
        **more,
    )


def test_cdpo_smooths_the_label_and_adds_the_likelihood():
    loss, metrics = loss_of("dpo", pair(), beta=0.4, label_smoothing=0.1, sft=0.5)
    margin = 0.4 * ((3.6 - 3.0) - (4.5 - 5.0))
    wanted = -0.9 * log_sigmoid(margin) - 0.1 * log_sigmoid(-margin) + 0.5 * 3.0 * 0.25
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert float(metrics["rewards/margins"]) == pytest.approx(margin, rel=1e-6)


def test_dpo_has_a_hinge():
    margin = 0.4 * ((3.6 - 3.0) - (4.5 - 5.0))
    assert loss_of("dpo", pair(), beta=0.4, loss="hinge")[0] == pytest.approx(1 - margin, rel=1e-6)


def test_cpo_has_a_hinge_and_smoothing():
    margin = 0.1 * (5.0 - 3.0)
    assert loss_of("cpo", pair(), loss="hinge", nll=0)[0] == pytest.approx(1 - margin, rel=1e-6)
    smoothed = -0.8 * log_sigmoid(margin) - 0.2 * log_sigmoid(-margin) + 3.0 * 0.25
    assert loss_of("cpo", pair(), label_smoothing=0.2)[0] == pytest.approx(smoothed, rel=1e-6)


def group() -> Sample:
    return Sample(
        nll=np.float32([[3.0, 4.0], [5.0, 2.0]]),
        tokens=np.float32([[4, 4], [7, 3]]),
        token_weight=np.float32([[0.1, 0.1], [0.1, 0.1]]),
        numbers={"label": np.float32([1, 0])},
        reference_nll=np.float32([[3.6, 4.8], [4.5, 1.9]]),
    )


def test_kto_without_an_estimate_compares_with_the_reference():
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    loss, _ = loss_of("kto", group(), loss="apo_zero_unpaired", beta=0.5, undesirable_weight=2.0)
    wanted = np.mean([1 - sigmoid(0.5 * 0.6), 2 * (1 - sigmoid(0.5 * 0.5))])
    assert loss == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("references", "kl"), [((4.8, 1.9), 0.35), ((3.0, 1.9), 0.0)])
def test_kto_compares_with_the_mean_gain_of_mismatched_texts_or_with_nothing(references, kl):
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    sample = group()._replace(reference_nll=np.float32([[3.6, references[0]], [4.5, references[1]]]))
    loss, metrics = loss_of("kto", sample, beta=0.5)
    assert float(metrics["kl"]) == pytest.approx(kl, abs=1e-6)
    assert loss == pytest.approx(np.mean([1 - sigmoid(0.5 * (0.6 - kl)), 1 - sigmoid(0.5 * (kl + 0.5))]), rel=1e-6)


def test_a_mismatched_text_has_the_completion_of_the_row_before():
    rows = [{"prompt": f"p{n}", "completion": f"c{n}", "label": n > 0} for n in range(3)]
    matched, mismatched = zip(*kto_segments(rows), strict=True)
    assert [(segment.prompt, segment.answer) for segment in matched] == [("p0", "c0"), ("p1", "c1"), ("p2", "c2")]
    assert [(segment.prompt, segment.answer) for segment in mismatched] == [("p0", "c2"), ("p1", "c0"), ("p2", "c1")]


def texts_of(segments) -> list[str]:
    return [f"{segment.prompt}{segment.answer}" for segment in segments]


def test_several_answers_of_a_prompt_are_no_mismatched_texts():
    """Sorted by prompt, as files with several answers are; TRL would take a prompt's own answers."""
    rows = [{"prompt": prompt, "completion": f"{n}", "label": n % 2} for n, prompt in enumerate("aabbbc")]
    _, mismatched = zip(*kto_segments(rows), strict=True)
    assert texts_of(mismatched) == ["a5", "a5", "b1", "b1", "b1", "c4"]


@pytest.mark.parametrize(
    "alike",
    [
        (" where is\tit?", "where is it? "),
        ("where", [{"role": "user", "content": "where\n"}]),
        ([{"from": "human", "value": "where"}], [{"role": "user", "content": [{"type": "text", "text": "where"}]}]),
        ([{"role": "system", "content": "brief"}, "x"], [{"role": "system", "content": "brief "}, "x"]),
    ],
)
def test_one_prompt_in_other_words_is_one_prompt(alike):
    """Its answers are none to another prompt, whatever spaces it has and whether it is a text or a message."""
    rows = [{"prompt": prompt, "completion": f"{n}", "label": n % 2} for n, prompt in enumerate([*alike, "when"])]
    assert [segments[1].answer or segments[1].messages[-1]["content"] for segments in kto_segments(rows)] == [
        "2", "2", "1"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="all 2 rows of its group have the same prompt"):
        kto_segments(rows[:2])


@pytest.mark.parametrize("size", [2, 3])
def test_pairs_are_taken_apart_as_trl_does(size):
    """All chosen answers of the file, then all rejected ones; each prompt with the completion of the row before."""
    rows = Rows(source="x.jsonl", values=[{"prompt": p, "chosen": f"c{p}", "rejected": f"r{p}"} for p in "ABC"])
    samples, _ = read_samples(rows, choose("kto", {"group": size}), {}, adapter="a")
    unpaired = [f"{p}c{p}" for p in "ABC"] + [f"{p}r{p}" for p in "ABC"]
    for number, sample in enumerate(samples):
        group = unpaired[number * size : number * size + size]
        before = [group[-1], *group[:-1]]
        assert texts_of(sample.segments[::2]) == group
        assert texts_of(sample.segments[1::2]) == [
            text[0] + other[1:] for text, other in zip(group, before, strict=True)
        ]
    assert [sample.rows for sample in samples] == {2: [(0, 1), (2, 0), (1, 2)], 3: [(0, 1, 2), (0, 1, 2)]}[size]


SYSTEM = {"role": "system", "content": "brief"}
ASKED, NEXT = {"role": "user", "content": "where "}, {"from": "human", "value": "when"}
REPLIES = [{"role": "assistant", "content": text} for text in ("here", "there", "now")]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("where", [ASKED]),
        ("where", [SYSTEM, ASKED]),
        ("when", [ASKED, REPLIES[2], NEXT]),
        ([ASKED], [ASKED]),
        ([SYSTEM, ASKED], [SYSTEM, ASKED]),
        (None, [ASKED]),
    ],
)
def test_conversations_beside_a_prompt_are_split_where_it_ends(prompt, before):
    answers = [[*before, REPLIES[0]], [*before, REPLIES[1]]]
    segments = chosen_and_rejected({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    for segment, reply in zip(segments, REPLIES[:2], strict=True):
        assert (list(segment.messages), segment.prompt_messages) == ([*before, reply], len(before))
    if prompt is not None:
        segment = prompt_and_answer("completion", prompt, answers[0])
        assert (list(segment.messages), segment.prompt_messages) == (answers[0], len(before))
        (row,) = KTO.expand({"prompt": prompt, "completion": answers[0], "label": True})
        assert (row["prompt"], row["completion"]) == (before, [REPLIES[0]])


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_cit_contrasts_the_states_of_a_group(limit):
    draw = np.random.default_rng(0)
    states = draw.standard_normal((2, 2, 5))
    sample = group()._replace(hidden=states.astype(np.float32))
    loss, metrics = loss_of("cit", sample, temperature=0.5, weight=limit, group=2)
    units = states / np.linalg.norm(states, axis=-1, keepdims=True)
    logits = units[:, 0] @ units[:, 1].T / 0.5
    rows = [np.log(np.exp(logits[i]).sum()) - logits[i, i] for i in range(2)]
    columns = [np.log(np.exp(logits[:, i]).sum()) - logits[i, i] for i in range(2)]
    contrast = (np.mean(rows) + np.mean(columns)) / 2
    by_token = sample.nll.sum() / sample.tokens.sum()
    nll = sample.nll.sum() / 20  # a token weight of 0.1 each: ten tokens of each text in a group
    assert loss == pytest.approx(nll + min(limit, by_token / contrast) * contrast, rel=1e-5)
    assert float(metrics["contrastive"]) == pytest.approx(contrast, rel=1e-5)


def tokens(**more) -> Sample:
    """Three tokens of one text, and two places without a token."""
    return Sample(
        nll=np.float32([3.5]),
        tokens=np.float32([3]),
        token_weight=np.float32([0.2]),
        logprobs=np.float32([-0.5, -1.0, -2.0, 0, 0]),
        mask=np.array([True, True, True, False, False]),
        values={"advantages": np.float32([1, -1, 2, 0, 0]), "old_logprobs": np.float32([-0.7, -0.4, -3.0, 0, 0])},
        **more,
    )


def test_importance_sampling_weights_advantages():
    ratio = np.exp([0.2, -0.6, 1.0])
    wanted = -(ratio * [1, -1, 2]).sum() * 0.2
    assert loss_of("importance_sampling", tokens())[0] == pytest.approx(wanted, rel=1e-6)


def test_grpo_adds_the_divergence_from_the_reference():
    sample = tokens(reference_logprobs=np.float32([-0.6, -1.2, -1.5, 0, 0]))
    ratio, advantages = np.exp([0.2, -0.6, 1.0]), np.array([1, -1, 2])
    losses = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.3) * advantages)
    difference = np.array([-0.1, -0.2, 0.5])
    losses += 0.1 * (np.exp(difference) - difference - 1)
    given = {"beta": 0.1, "epsilon_high": 0.3}
    assert loss_of("grpo", sample, **given)[0] == pytest.approx(losses.sum() * 0.2, rel=1e-6)
    by_length = loss_of("grpo", sample, **given, loss="dr_grpo", completion_tokens=10)[0]
    assert by_length == pytest.approx(losses.sum() / 10, rel=1e-6)


def test_metrics_of_grpo_count_clipped_tokens_and_sequences_leave_padding_out():
    chosen = choose("grpo", {"ratio": "sequence"})
    padded = tokens()._replace(logprobs=np.float32([-0.5, -1.0, -2.0, -0.9, -0.9]))
    metrics = chosen.objective.loss(padded, chosen.options)[1]
    assert float(metrics["ratio"]) == pytest.approx(np.exp((0.2 - 0.6 + 1.0) / 3), rel=1e-6)
    by_token = choose("grpo", {"epsilon_high": 0.3})
    metrics = by_token.objective.loss(tokens(), by_token.options)[1]  # of +20, -45 and +170 % the last two are outside
    assert float(metrics["clip_ratio"]) == pytest.approx(2 / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "weights"),
    [("cispo", [np.exp(0.2), -np.exp(-0.6), 2 * 1.5]), ("dft", np.exp([-0.5, -1.0, -2.0]))],
)
def test_weights_of_log_likelihoods_have_no_gradient(name, weights):
    chosen = choose(name, {"epsilon_high": 1.5} if name == "cispo" else {})
    loss = lambda logprobs: chosen.objective.loss(tokens()._replace(logprobs=logprobs), chosen.options)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(tokens().logprobs)
    assert float(value) == pytest.approx(-0.2 * np.dot(weights, [-0.5, -1.0, -2.0]), rel=1e-6)
    np.testing.assert_allclose(gradient, [*(-0.2 * np.asarray(weights)), 0, 0], rtol=1e-6)


def test_a_margin_raises_what_a_chosen_answer_should_have_more():
    sample = pair(score=np.float32([1.5, 0.25]), numbers={"margin": np.float32(0.5)})
    wanted = -log_sigmoid(1.5 - 0.25 - 0.5) + 0.1 * 1.75**2
    assert loss_of("reward", sample, center=0.1)[0] == pytest.approx(wanted, rel=1e-6)


def ppo_reference(logprobs, values, row, options):
    """PPO of one answer as TRL writes it, but for whitened advantages: loops over tokens, float64."""
    old, reference, old_values = row["old_logprobs"], row["reference"], row["old_values"]
    count = len(old)
    rewards = [-options["beta"] * (p - q) for p, q in zip(old, reference, strict=True)]
    rewards[-1] += row["reward"]
    advantages, after = [0.0] * count, 0.0
    for t in reversed(range(count)):
        following = old_values[t + 1] if t + 1 < count else 0.0
        delta = rewards[t] + options["gamma"] * following - old_values[t]
        after = advantages[t] = delta + options["gamma"] * options["lam"] * after
    total = 0.0
    for t in range(count):
        ratio = np.exp(logprobs[t] - old[t])
        clipped = np.clip(ratio, 1 - options["epsilon"], 1 + options["epsilon"])
        total += max(-advantages[t] * ratio, -advantages[t] * clipped)
        target = advantages[t] + old_values[t]
        near = np.clip(values[t], old_values[t] - options["value_clip"], old_values[t] + options["value_clip"])
        total += options["value_weight"] * 0.5 * max((values[t] - target) ** 2, (near - target) ** 2)
    return total * row["token_weight"]


def test_ppo_is_clipped_in_policy_and_value_with_generalised_advantages():
    options = {"beta": 0.1, "gamma": 0.9, "lam": 0.8, "epsilon": 0.2, "value_clip": 0.15, "value_weight": 0.3}
    rng, count, length = np.random.default_rng(0), 5, 8  # the rest is padding, whatever it holds
    row = {"reward": 1.5, "token_weight": 0.2, **{name: -rng.random(count) for name in ("old_logprobs", "reference")}}
    row["old_values"] = rng.normal(size=count)
    logprobs, values = row["old_logprobs"] - rng.normal(size=count) * 0.3, rng.normal(size=count)
    chosen, mask = choose("ppo", options), np.arange(length) < count

    def padded(array):
        return np.concatenate([array, np.full(length - count, np.nan)])

    def loss(logprobs, values):
        sample = Sample(
            nll=-logprobs[:count].sum()[None],
            tokens=np.array([float(count)]),
            token_weight=np.array([row["token_weight"]]),
            logprobs=logprobs,
            mask=mask,
            reference_logprobs=padded(row["reference"]),
            values={
                "advantages": padded(np.full(count, row["reward"])),
                "old_logprobs": padded(row["old_logprobs"]),
                "old_values": padded(row["old_values"]),
            },
            token_score=values,
        )
        return chosen.objective.loss(sample, chosen.options)[0]

    with jax.enable_x64(True):
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(
            *(jax.numpy.asarray(padded(a)) for a in (logprobs, values))
        )
    assert float(value) == pytest.approx(ppo_reference(logprobs, values, row, options), rel=1e-12)
    for number, gradient in enumerate(gradients):
        assert (np.asarray(gradient)[count:] == 0).all()
        for t in range(count):
            step = np.zeros(count)
            step[t] = 1e-6
            shifted = [
                ppo_reference(
                    *(a + sign * step * (n == number) for n, a in enumerate((logprobs, values))), row, options
                )
                for sign in (1, -1)
            ]
            assert float(gradient[t]) == pytest.approx((shifted[0] - shifted[1]) / 2e-6, abs=1e-7)


def test_ppo_has_the_advantages_loss_and_gradients_of_trl():
    golden = json.loads((Path(__file__).parent / "golden" / "ppo.json").read_text())  # by make_ppo_golden.py
    settings, theirs = golden["settings"], golden["theirs"]
    names = {"cliprange": "epsilon", "cliprange_value": "value_clip", "vf_coef": "value_weight", "kl_coef": "beta"}
    chosen = choose("ppo", {names.get(key, key): value for key, value in settings.items()})
    logprobs, values = jax.numpy.asarray(golden["logprobs"]), jax.numpy.asarray(golden["values"])
    rows, length = logprobs.shape
    recorded = {name: np.array(golden[name]) for name in ("old_logprobs", "old_values", "reference", "rewards")}

    def loss(logprobs, values):
        total = 0.0
        for row in range(rows):
            sample = Sample(
                nll=-logprobs[row].sum()[None], tokens=np.array([float(length)]),
                token_weight=np.array([1 / (rows * length)]), logprobs=logprobs[row], mask=np.ones(length, bool),
                reference_logprobs=recorded["reference"][row],
                values={
                    "advantages": np.full(length, recorded["rewards"][row]),
                    "old_logprobs": recorded["old_logprobs"][row], "old_values": recorded["old_values"][row],
                },
                token_score=values[row],
            )  # fmt: skip
            total += chosen.objective.loss(sample, chosen.options)[0]
        return total

    rewards = -settings["kl_coef"] * (recorded["old_logprobs"] - recorded["reference"])
    rewards[:, -1] += recorded["rewards"]
    advantages = [
        generalised_advantages(*numbers, settings["gamma"], settings["lam"])
        for numbers in zip(rewards, recorded["old_values"], strict=True)
    ]
    np.testing.assert_allclose(advantages, theirs["advantages"], rtol=1e-5, atol=1e-6)
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(logprobs, values)
    assert float(value) == pytest.approx(theirs["loss"], rel=1e-5)
    for gradient, name in zip(gradients, ("logprobs", "values"), strict=True):
        np.testing.assert_allclose(gradient, theirs["gradients"][name], rtol=1e-5, atol=1e-6)


def test_ppo_learns_nothing_from_an_answer_that_no_reward_judged():
    sample = Sample(
        nll=np.float32([2.0]),
        tokens=np.float32([2]),
        token_weight=np.float32([0.5]),
        logprobs=np.float32([-1, -1]),
        mask=np.array([True, True]),
        values={"advantages": np.float32([np.nan, np.nan])},
        token_score=np.float32([1, 2]),
    )
    assert loss_of("ppo", sample, beta=0.0)[0] == 0


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "no reward"),
        ({"reward": 1, "rewards": [1]}, "both"),
        ({"reward": [1.0]}, "one number"),
        ({"rewards": 1.0}, "one number"),
        ({"reward": "good"}, "number"),
        ({"reward": 1, "old_values": ["a"]}, "old_values"),
    ],
)
def test_rows_of_ppo_have_one_reward_or_one_for_each_token(row, says):
    with pytest.raises(ValueError, match=says):
        PPO.segments({"prompt_ids": [1], "completion_ids": [2, 3], **row})
    (segment,) = PPO.segments(
        {"prompt_ids": [1], "completion_ids": [2, 3], "rewards": [0.0, 1.0], "old_values": [1, 2]}
    )
    assert segment.values == {"rewards": [0.0, 1.0], "old_values": [1, 2]}
