"""OpenAI's API by HTTP: models, completions and chats, whole and streamed. The worker of `bigram_worker` answers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from bigram_worker import BigramProcess
from campaigns.service_process import wait_for
from pydantic import ValidationError
from training_service import TrainingService

from lorafusion_jax.serve.api.completion_bodies import CompletionBody
from lorafusion_jax.serve.store import tables as t

LONG = "the law, the law, the law"


@pytest.fixture(scope="module")
def service(tmp_path_factory, tiny_base):
    running = TrainingService(tmp_path_factory.mktemp("openai") / "home", tiny_base)
    now = time.time()
    with running.db.write() as connection:
        for number, (owner, name) in enumerate((("ana", "law"), ("ana", "law"), ("ben", "med"))):
            job = {"id": f"job-{number}", "owner": owner, "name": name, "base": "tiny", "spec": {}, "state": "done"}
            connection.execute(t.jobs.insert().values(job | {"created": now + number}))
            row = {"id": f"ad-{number}", "job": f"job-{number}", "owner": owner, "step": 3, "sha256": ""}
            connection.execute(t.artifacts.insert().values(row | {"path": f"jobs/{number}", "created": now + number}))
    while not running.controller.connected:
        time.sleep(0.01)
    yield running
    running.close()


def ask(service: TrainingService, path: str, body: Any = None, owner: str = "ana") -> tuple[int, Any]:
    sent = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {service.keys[owner]}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{service.url}/v1{path}", sent, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read()


def answer_to(service: TrainingService, path: str, body: Any = None, owner: str = "ana") -> Any:
    status, content = ask(service, path, body, owner)
    assert status == 200, content
    return json.loads(content)


def events(service: TrainingService, path: str, body: Any) -> list[Any]:
    """The values of a stream, without its last line."""
    status, content = ask(service, path, body | {"stream": True})
    assert status == 200, content
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0} | more


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12} | more


def test_models_are_the_base_and_what_the_key_may_see(service):
    listed = answer_to(service, "/models")
    assert [entry["id"] for entry in listed["data"]] == ["tiny", "law", "ad-0"]  # of one name the newest
    assert [entry["id"] for entry in answer_to(service, "/models", owner="ben")["data"]] == ["tiny", "med"]
    assert all(entry["object"] == "model" and isinstance(entry["created"], int) for entry in listed["data"])
    assert [answer_to(service, f"/models/{name}")["adapter"] for name in ("law", "job-0", "ad-0")] == [
        "ad-1", "ad-0", "ad-0",
    ]  # fmt: skip
    status, content = ask(service, "/models/med")
    assert (status, json.loads(content)["error"]["param"]) == (404, "model")


def test_a_completion_has_the_shape_of_openai(service):
    answer = answer_to(service, "/completions", text("one two three", n=2, logprobs=2))
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert (answer["object"], answer["model"], len(answer["choices"])) == ("text_completion", "tiny", 2)
    choice = answer["choices"][0]
    assert choice["text"].startswith("one two three")
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 20
    assert choice["logprobs"]["text_offset"][1] == len(choice["logprobs"]["tokens"][0])
    prompt = answer["usage"]["prompt_tokens"]
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 40, "total_tokens": prompt + 40}


def test_adapters_answer_by_the_name_of_their_job(service):
    base, law = (
        answer_to(service, "/completions", text("one two three", model=model))["choices"][0]["text"]
        for model in ("tiny", "law")
    )
    assert base.split()[0] != law.split()[0]
    assert ask(service, "/completions", text("one", model="med"))[0] == 404


@pytest.mark.parametrize("more", [{}, {"stop": ["law"]}, {"stop": "w, the law"}])
def test_streamed_texts_are_those_of_the_whole_answer(service, more):
    whole = answer_to(service, "/completions", text(LONG, n=2, **more))
    chunks = events(service, "/completions", text(LONG, n=2, stream_options={"include_usage": True}, **more))
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert len(chunks) > 3 or "stop" in more


def test_chats_go_through_the_template_and_stream_deltas(service):
    whole = answer_to(service, "/chat/completions", chat("hello there", logprobs=True, top_logprobs=2))
    choice = whole["choices"][0]
    assert (whole["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert whole["usage"]["prompt_tokens"] > 2
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 12
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    chunks = events(service, "/chat/completions", chat(parts))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/completions", text("a", echo=True), "echo"),
        ("/completions", text("a", presence_penalty=0.5), "presence_penalty"),
        ("/completions", text("a", guided_json={}), "guided_json"),
        ("/completions", text("a", temperature=-1), "temperature"),
        ("/chat/completions", chat("a", tools=[{"type": "function"}]), "tools"),
        ("/chat/completions", chat("a", response_format={"type": "json_object"}), "response_format"),
        ("/chat/completions", chat("a", max_completion_tokens=7), "max_completion_tokens"),
        ("/chat/completions", chat("a", web_search_options={}), "web_search_options"),  # its defaults search
        ("/chat/completions", chat("a", prediction={}), "prediction"),
        ("/chat/completions", chat("a", stop=["b"] * 17), "stop: a text, or a list of at most 16"),
        ("/chat/completions", chat("a", stop=["b", ""]), "stop: texts of 1 to"),
        ("/chat/completions", chat(None), "a message of the role user needs a content"),
        ("/chat/completions", chat([]), "a message of the role user needs a content"),
        ("/chat/completions", chat("a", top_logprobs=2), "top_logprobs needs logprobs"),
        ("/chat/completions", chat([{"type": "image_url", "image_url": {"url": ""}}]), "image_url"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(service, path, body, where):
    status, content = ask(service, path, body)
    error = json.loads(content)["error"]
    assert status == 422
    assert where in error["message"]
    assert error["message"] == error["message"].lstrip(": ")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 0), ("logit_bias", {"word": 1})])
def test_a_setting_is_refused_with_a_reason_of_its_own(service, name, value):
    status, content = ask(service, "/chat/completions", chat("a", **{name: value}))
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (422, name)
    assert "job" not in error["message"]


def test_values_that_ask_for_nothing_are_taken(service):
    more = {"prompt_cache_retention": "24h", "stop": ["\u2028", "b" * 100]}
    more |= {"presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "store": False, "tools": [], "n": None}
    assert answer_to(service, "/chat/completions", chat("a, [b", **more))["choices"]


def test_mistakes_of_prompts_have_a_status_also_in_a_stream(service):
    status, content = ask(service, "/completions", text("", stream=True))
    error = json.loads(content)["error"]
    assert (status, error["code"]) == (422, "generate.empty-prompt")
    assert "later" not in error["message"]  # it would be as wrong then
    status, content = ask(service, "/chat/completions", chat("a", top_p=0) | {"stream": True})
    assert (status, json.loads(content)["error"]["code"]) == (422, "generate.setting")


def test_a_client_that_leaves_ends_its_completion(service):
    body = json.dumps(text("one two three", max_tokens=100_000, stream=True)).encode()
    headers = {"Authorization": f"Bearer {service.keys['ana']}", "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(f"{service.url}/v1/completions", body, headers), timeout=60)
    future = json.loads(answer.readline().removeprefix(b"data: "))["id"].removeprefix("cmpl-")
    answer.close()
    wait_for(lambda: future in BigramProcess.cancelled)


def test_without_a_worker_it_says_so(start_service, tmp_path, tiny_base):
    running = start_service(tmp_path / "home", tiny_base)
    headers = {"Authorization": f"Bearer {running.keys['ana']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{running.url}/v1/completions", json.dumps(text("a")).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as problem:
        assert (problem.code, json.loads(problem.read())["error"]["code"]) == (503, "api.no-worker")
        assert problem.headers["Retry-After"]


@pytest.mark.parametrize("prompt", [[True, 5], [[5, "6"]], [5.0]])
def test_prompts_of_other_values_than_token_ids_are_refused(prompt):
    assert CompletionBody(model="a", prompt=[[5], [6, 7]]).prompt == [[5], [6, 7]]
    with pytest.raises(ValidationError, match="valid integer"):
        CompletionBody(model="a", prompt=prompt)
