"""Calls of the unmodified `tinker` SDK, in its own environment: python tinker_calls.py URL KEY [NAME…].

Each function is a client with a session of its own. What it computes is compared with a table of bigrams here.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import tinker
from tinker import types

WORDS = 16
ROWS = [[1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9, 2, 6], [0, 1]]
ADAM = types.AdamParams(learning_rate=0.1)


class Table:
    """The model that the server should have."""

    def __init__(self):
        self.w, self.m, self.v = (np.zeros((WORDS, WORDS)) for _ in range(3))
        self.steps = 0

    def log_p(self, row):
        logits = self.w[row[:-1]]
        return (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(len(row) - 1), row[1:]]

    def step(self, rows, weights=None, adam=ADAM):
        gradient = np.zeros((WORDS, WORDS))
        for at, row in enumerate(rows):
            for position, (word, target) in enumerate(pairwise(row)):
                weight = 1.0 if weights is None else weights[at][position]
                p = np.exp(self.w[word]) / np.exp(self.w[word]).sum()
                gradient[word] += weight * p
                gradient[word, target] -= weight
        self.steps += 1
        self.m = adam.beta1 * self.m + (1 - adam.beta1) * gradient
        self.v = adam.beta2 * self.v + (1 - adam.beta2) * gradient**2
        mean, square = self.m / (1 - adam.beta1**self.steps), self.v / (1 - adam.beta2**self.steps)
        self.w = self.w - adam.learning_rate * mean / (np.sqrt(square) + adam.eps)


def datum(row, weights=None, **inputs):
    values = {"target_tokens": row[1:], "weights": weights or [1.0] * (len(row) - 1)} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=values)


def outputs(result):
    return [np.asarray(out["logprobs"].data) for out in result.loss_fn_outputs]


def check(model, table):
    result = model.forward([datum(row) for row in ROWS], "cross_entropy").result()
    for row, values in zip(ROWS, outputs(result), strict=True):
        np.testing.assert_allclose(values, table.log_p(row), rtol=1e-5)
    np.testing.assert_allclose(result.metrics["loss:sum"], -sum(table.log_p(row).sum() for row in ROWS), rtol=1e-5)


def fine_tuning(service):
    model = ready(service.create_lora_training_client("tiny", rank=4, seed=1))
    table = Table()
    info = model.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("tiny", 4, True)
    for _ in range(5):  # the step is sent before the rows are done
        rows = model.forward_backward([datum(row) for row in ROWS], "cross_entropy")
        step = model.optim_step(ADAM)
        np.testing.assert_allclose(outputs(rows.result())[1], table.log_p(ROWS[1]), rtol=1e-5)
        assert step.result().metrics["grad_norm:mean"] > 0
        table.step(ROWS)
    check(model, table)


def accumulation_in_chunks(service):
    """More rows than a chunk has, of which the first is sent last, then two calls for one step."""
    model = ready(service.create_lora_training_client("tiny", rank=4))
    config = model.holder._client_config
    model.holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": 3})
    rows, table = ROWS * 5, Table()
    first = model.forward_backward([datum(row) for row in rows], "cross_entropy")
    second = model.forward_backward([datum(row) for row in ROWS], "cross_entropy")
    model.optim_step(ADAM).result()
    assert len(first.result().loss_fn_outputs) == 15
    np.testing.assert_allclose(first.result().metrics["loss:sum"] / 5, second.result().metrics["loss:sum"])
    table.step(rows + ROWS)
    check(model, table)


def custom_loss(service):
    import torch

    model = ready(service.create_lora_training_client("tiny", rank=4))
    table = Table()

    def loss(data, logprobs):
        return sum((values * (at + 1)).sum() for at, values in enumerate(logprobs)) * -0.5, {"custom": 3.0}

    result = model.forward_backward_custom([datum(row) for row in ROWS], loss)
    model.optim_step(ADAM).result()
    assert result.result().metrics["custom"] == 3.0
    assert torch.tensor(0.0) == 0
    table.step(ROWS, [[0.5 * (at + 1)] * (len(row) - 1) for at, row in enumerate(ROWS)])
    check(model, table)


def policy_gradient(service):
    model = ready(service.create_lora_training_client("tiny", rank=4))
    table, data, weights = Table(), [], []
    for at, row in enumerate(ROWS):
        advantages = [(-1.0) ** at * 0.5] * (len(row) - 1)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": row[1:],
                    "logprobs": table.log_p(row).astype(np.float32),
                    "advantages": advantages,
                },
            )
        )
        weights.append(advantages)
    model.forward_backward(data, "importance_sampling").result()
    model.optim_step(ADAM).result()
    table.step(ROWS, weights)
    check(model, table)


def mistakes(service):
    model = ready(service.create_lora_training_client("tiny", rank=4))
    table = Table()
    futures = [
        model.forward_backward([datum(ROWS[0], weights=[float("nan")] * 4)], "cross_entropy"),
        model.forward_backward([datum(row) for row in ROWS], "cross_entropy"),
        model.optim_step(ADAM),
    ]
    failed(futures[0], "not finite")
    futures[1].result()
    futures[2].result()
    table.step(ROWS)
    check(model, table)
    failed(lambda: service.create_lora_training_client("tiny", rank=999), "rank 999 is above")
    failed(lambda: service.create_lora_training_client("other", rank=4), "other is not served")


def ready(made):
    """A client; older SDKs return it, newer ones a future of it."""
    return made.result() if hasattr(made, "result") else made


def raised(future):
    """What a future raises, or what returns one; None if it has a result."""
    try:
        ready(future() if callable(future) else future)
    except tinker.TinkerError as problem:
        return problem
    return None


def failed(future, text):
    problem = raised(future)
    assert isinstance(problem, tinker.RequestFailedError), problem
    assert text in str(problem), problem
    assert problem.category is types.RequestErrorCategory.User


def many_at_once(service):
    """Sixteen steps in flight, of three models."""
    models = [service.create_lora_training_client("tiny", rank=4) for _ in range(2)]
    models, tables = [ready(model) for model in models], [Table() for _ in models]
    futures = []
    for turn in range(16):
        for at, (model, table) in enumerate(zip(models, tables, strict=True)):
            row = ROWS[(turn + at) % 3]
            futures += [model.forward_backward([datum(row)], "cross_entropy"), model.optim_step(ADAM)]
            table.step([row])
    for future in futures:
        future.result()
    for model, table in zip(models, tables, strict=True):
        check(model, table)


def asynchronous(service):
    async def run():
        made = service.create_lora_training_client_async("tiny", rank=4)
        model, table = await made, Table()
        rows = await model.forward_backward_async([datum(row) for row in ROWS], "cross_entropy")
        await (await model.optim_step_async(ADAM))
        await rows
        table.step(ROWS)
        return model, table

    check(*asyncio.run(run()))


def rest(service):
    client = service.create_rest_client()
    model = ready(service.create_lora_training_client("tiny", rank=4))
    session = model.holder.get_session_id()
    assert session in client.list_sessions().result().sessions
    assert client.get_session(session).result().training_run_ids == [model.model_id]
    if hasattr(client, "get_server_capabilities"):
        assert client.get_server_capabilities().result().supported_models[0].model_name == "tiny"
    else:
        assert service.get_server_capabilities().supported_models[0].model_name == "tiny"
    refused = raised(client.publish_checkpoint_from_tinker_path(f"tinker://{model.model_id}/weights/a"))
    assert isinstance(refused, tinker.PermissionDeniedError), refused  # at once


def checkpoints(service):
    client = service.create_rest_client()
    model = ready(service.create_lora_training_client("tiny", rank=4))
    table = Table()
    model.forward_backward([datum(row) for row in ROWS], "cross_entropy")
    model.optim_step(ADAM)
    table.step(ROWS)
    path = model.save_state("first", ttl_seconds=3600, user_metadata={"step": "1"}).result().path
    failed(model.save_state("first"), "there is a checkpoint")
    failed(model.save_state("no/name"), "no name of a checkpoint")
    for create in (
        service.create_training_client_from_state_with_optimizer,
        service.create_training_client_from_state,
    ):
        other = ready(create(path))
        check(other, table)
        assert other.get_info().lora_rank == 4
    missing = raised(lambda: service.create_training_client_from_state(path + "-no"))
    assert "checkpoint" in str(missing)
    model.optim_step(ADAM)
    model.load_state_with_optimizer(path).result()
    check(model, table)
    sampler = model.save_weights_for_sampler("out").result().path
    shown = {each.tinker_path: each for each in client.list_checkpoints(model.model_id).result().checkpoints}
    assert {path, sampler} == set(shown)
    assert shown[path].expires_at is not None
    assert shown[path].user_metadata == {"step": "1"}
    assert path in {each.tinker_path for each in client.list_user_checkpoints().result().checkpoints}
    assert client.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    run = client.get_training_run_by_tinker_path(path).result()
    assert run.last_checkpoint.tinker_path == path
    assert run.training_run_id in {each.training_run_id for each in client.list_training_runs().result().training_runs}
    client.set_checkpoint_ttl_from_tinker_path(path, None).result()
    client.delete_checkpoint_from_tinker_path(sampler).result()
    assert [each.tinker_path for each in client.list_checkpoints(model.model_id).result().checkpoints] == [path]
    external = model.save_weights_external("all").result().path
    urls = client.get_external_weights_urls(external).result().urls
    assert urls
    if hasattr(client, "get_checkpoint_archive_url"):  # of older SDKs
        path = model.save_weights_for_sampler("out").result().path
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", path, "--output", folder]
        environment = os.environ | {"TINKER_BASE_URL": sys.argv[1], "TINKER_API_KEY": sys.argv[2]}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {file.name for file in Path(folder).rglob("*") if file.is_file()} >= set(urls)


def samples(service):
    model = ready(service.create_lora_training_client("tiny", rank=4))
    model.forward_backward([datum(row) for row in ROWS], "cross_entropy")
    model.optim_step(ADAM).result()
    sampler = model.save_weights_and_get_sampling_client()
    prompt, params = types.ModelInput.from_ints(ROWS[1][:3]), types.SamplingParams(max_tokens=6, temperature=0.0)
    answer = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
    assert len({each.sequence_id for each in answer.sequences}) == 3
    tokens = ROWS[1][:3] + answer.sequences[0].tokens
    scores = outputs(model.forward([datum(tokens)], "cross_entropy").result())[0]
    np.testing.assert_allclose(answer.prompt_logprobs[1:], scores[:2], atol=1e-5)
    np.testing.assert_allclose(answer.sequences[0].logprobs, scores[2:], atol=1e-5)
    np.testing.assert_allclose(
        sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], scores, atol=1e-5
    )
    stop = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[tokens[4]])
    ended = sampler.sample(prompt, 1, stop).result().sequences[0]
    assert (ended.stop_reason, ended.tokens[-1]) == ("stop", tokens[4])
    model.forward_backward([datum(row) for row in ROWS], "cross_entropy")
    model.optim_step(ADAM).result()
    again = sampler.sample(prompt, 1, params).result().sequences[0]  # it does not move
    assert again.logprobs == answer.sequences[0].logprobs
    base = service.create_sampling_client(base_model="tiny")
    assert len(base.sample(prompt, 2, types.SamplingParams(max_tokens=4, stop=[])).result().sequences) == 2
    named = service.create_sampling_client(model_path=model.save_weights_for_sampler("out").result().path)
    assert named.sample(prompt, 1, params).result().sequences[0].logprobs != again.logprobs
    failed(sampler.sample(types.ModelInput.from_ints([]), 1, params), "no token")


CALLS = (
    fine_tuning,
    accumulation_in_chunks,
    custom_loss,
    policy_gradient,
    mistakes,
    many_at_once,
    asynchronous,
    rest,
    checkpoints,
    samples,
)


def main(url: str, key: str, *names: str) -> int:
    warnings.simplefilter("ignore")
    print("tinker", version("tinker"))
    problems = 0
    for call in CALLS:
        if names and call.__name__ not in names:
            continue
        try:
            with tinker.ServiceClient(base_url=url, api_key=key) as service:
                call(service)
            print(f"{call.__name__}: passed", flush=True)
        except Exception:
            problems += 1
            print(f"{call.__name__}: failed\n{traceback.format_exc()}", flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
