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
from functools import partial
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
    if hasattr(service, "create_custom_loss"):  # one that could run on another server

        def weighted(logprobs, weights):
            loss = -(logprobs * weights).sum() * 2.0
            return loss, {"custom/loss:sum": loss}

        handle = service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}).result()
        model.forward_backward_custom([datum(row) for row in ROWS], handle).result()
        model.optim_step(ADAM).result()
        table.step(ROWS, [[2.0] * (len(row) - 1) for row in ROWS])
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
        made = future() if callable(future) else future
        asyncio.run(made) if asyncio.iscoroutine(made) else ready(made)
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


def awaited(service):
    """The calls again, in their forms for coroutines."""

    async def result_of(call):
        """What a coroutine returns, and what the future in it does."""
        made = await call
        return await made if hasattr(made, "__await__") else made

    async def run():
        table, data = Table(), [datum(row) for row in ROWS]
        capabilities = await service.get_server_capabilities_async()
        assert capabilities.supported_models[0].model_name == "tiny"
        model = await service.create_lora_training_client_async("tiny", rank=4)
        assert (await model.get_info_async()).lora_rank == 4

        def loss(data, logprobs):
            return -sum(values.sum() for values in logprobs), {}

        await result_of(model.forward_backward_custom_async(data, loss))
        await result_of(model.optim_step_async(ADAM))
        table.step(ROWS)
        path = (await result_of(model.save_state_async("point"))).path
        await result_of(model.load_state_async(path))
        await result_of(model.load_state_with_optimizer_async(path))
        others = [
            await service.create_training_client_from_state_async(path),
            await service.create_training_client_from_state_with_optimizer_async(path),
        ]
        for other in (model, *others):
            result = await result_of(other.forward_async(data, "cross_entropy"))
            np.testing.assert_allclose(outputs(result)[1], table.log_p(ROWS[1]), rtol=1e-5)
        saved = (await result_of(model.save_weights_for_sampler_async("out"))).path
        samplers = [
            await model.create_sampling_client_async(saved),
            await service.create_sampling_client_async(model_path=saved),
            await model.save_weights_and_get_sampling_client_async("now"),
        ]
        prompt, params = types.ModelInput.from_ints(ROWS[1]), types.SamplingParams(max_tokens=4, temperature=0.0)
        answers = [await sampler.sample_async(prompt, 1, params) for sampler in samplers]
        assert len({(*answer.sequences[0].tokens, *answer.sequences[0].logprobs) for answer in answers}) == 1
        scores = await samplers[0].compute_logprobs_async(prompt)
        np.testing.assert_allclose(scores[1:], table.log_p(ROWS[1]), atol=1e-5)
        assert await samplers[0].get_base_model_async() == "tiny"
        client = service.create_rest_client()
        run, session = model.model_id, model.holder.get_session_id()
        assert (await client.get_training_run_async(run)).training_run_id == run
        assert (await client.get_training_run_by_tinker_path_async(path)).training_run_id == run
        assert run in {each.training_run_id for each in (await client.list_training_runs_async()).training_runs}
        assert {each.tinker_path for each in (await client.list_checkpoints_async(run)).checkpoints} == {path, saved}
        shown = {each.tinker_path for each in (await client.list_user_checkpoints_async()).checkpoints}
        assert shown >= {path, saved}
        assert run in (await client.get_session_async(session)).training_run_ids
        assert session in (await client.list_sessions_async()).sessions
        sampler = next(iter((await client.get_session_async(session)).sampler_ids))
        assert (await client.get_sampler_async(sampler)).base_model == "tiny"
        if hasattr(model, "save_weights_external_async"):
            external = (await result_of(model.save_weights_external_async("all"))).path
            assert (await client.get_external_weights_urls_async(external)).urls
            await client.delete_checkpoint_from_tinker_path_async(external)
        await client.set_checkpoint_ttl_from_tinker_path_async(path, 7200)
        await client.delete_checkpoint_async(run, "sampler_weights/out")
        await client.delete_checkpoint_from_tinker_path_async(path)
        assert (await client.list_checkpoints_async(run)).checkpoints == []

    asyncio.run(run())


def rest_of_the_clients(service):
    """What no other function calls, and has an answer."""
    model = ready(service.create_lora_training_client("tiny", rank=4))
    client = service.create_rest_client()
    path = model.save_state("point").result().path
    model.load_state(path).result()
    run = client.get_training_run(model.model_id).result()
    assert (run.base_model, run.lora_rank) == ("tiny", 4)
    saved = model.save_weights_for_sampler("out").result().path
    sampler = ready(model.create_sampling_client(saved))
    assert sampler.get_base_model() == "tiny"
    prompt, params = types.ModelInput.from_ints(ROWS[1]), types.SamplingParams(max_tokens=4, temperature=0.0)
    (wanted,) = sampler.sample(prompt, 1, params).result().sequences
    if hasattr(sampler, "get_sampler_handle"):
        again = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=sys.argv[2])
        assert again.sample(prompt, 1, params).result().sequences[0].tokens == wanted.tokens
    for each in (model, sampler):  # of the folder that this process runs beside
        assert each.get_tokenizer().encode("law", add_special_tokens=False)
    number = client.get_session(model.holder.get_session_id()).result().sampler_ids[0]
    assert client.get_sampler(number).result().model_path == saved
    client.delete_checkpoint(model.model_id, "sampler_weights/out").result()
    assert [each.tinker_path for each in client.list_checkpoints(model.model_id).result().checkpoints] == [path]


def refusals(service):
    """What a service does not have is refused at once, with the reason, by each client that asks for it."""
    from datetime import date

    model = ready(service.create_lora_training_client("tiny", rank=4))
    client, session = service.create_rest_client(), model.holder.get_session_id()
    path, days = f"tinker://{model.model_id}/weights/a", (date(2026, 1, 1), date(2026, 1, 2))
    calls = {
        "publish_checkpoint_from_tinker_path": (path,),
        "unpublish_checkpoint_from_tinker_path": (path,),
        "copy_weights": (path, "project"),
        "assign_session_project": (session, "project"),
        "export_session_trace": (session,),
        "get_audit_log": (),
        "get_billing_usage": (*days,),
        "get_current_checkpoint_storage_usage": (),
    }
    asked = [(client, name, calls[name]) for name in calls]
    if hasattr(types, "SessionSearchRequest"):
        owner = types.AccessibleSearchOwner()
        asked.append((client, "search_sessions", (types.SessionSearchRequest(display_name="a", owner=owner),)))
    if hasattr(tinker, "AdminClient"):
        admin = tinker.AdminClient(base_url=sys.argv[1], api_key=sys.argv[2])
        asked += [(admin, name, values) for name, values in calls.items() if hasattr(admin, name)]
    for of, name, values in asked:
        for form in (name, f"{name}_async"):
            if hasattr(of, form):
                ask = partial(getattr(of, form), *values)
                if form == "get_audit_log_async" and int(version("tinker").split(".")[1]) < 38:
                    ask = partial(model.holder.run_coroutine_threadsafe, ask())  # asserts that it is the SDK's own loop
                problem = raised(ask)
                assert isinstance(problem, tinker.PermissionDeniedError), (form, problem)
                assert "is not served" in str(problem), problem


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
    awaited,
    rest_of_the_clients,
    refusals,
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
