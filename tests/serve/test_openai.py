"""OpenAI's API by HTTP: models, completions and chats, whole and streamed. The worker of `bigram_worker` answers."""

from __future__ import annotations

import asyncio
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

from lorafusion_jax.serve.api.app import Guard
from lorafusion_jax.serve.api.completion_bodies import ChatBody
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import add_key, revoke_key

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
        ("/completions", text("a", n=True), "n: Input should be a valid integer"),  # not 1
        ("/completions", text("a", stream="no"), "stream: Input should be a valid boolean"),
        ("/chat/completions", chat("a", tools=[{"type": "function"}]), "tools"),
        ("/chat/completions", chat("a", response_format={"type": "json_object"}), "response_format: texts are not"),
        ("/chat/completions", chat("a", moderation={"model": "m"}), "moderation"),
        ("/chat/completions", chat("a", max_completion_tokens=7), "max_completion_tokens"),
        ("/chat/completions", chat("a", web_search_options={}), "web_search_options"),  # its defaults search
        ("/chat/completions", chat("a", prediction={}), "prediction"),
        ("/chat/completions", chat("a", stop=["b"] * 17), "stop: a text, or a list of at most 16"),
        ("/chat/completions", chat("a", stop=["b", ""]), "stop: texts of 1 to"),
        ("/chat/completions", chat([{"type": "text"}]), "messages.0.content: a part of the type text has the key text"),
        ("/chat/completions", chat([{"type": "text", "text": "a", "lang": "en"}]), "a part of text has no key lang"),
        ("/chat/completions", chat(5), "messages.0.content: a text of at most"),
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
    more = {"prompt_cache_retention": "24h", "stop": ["\u2028", "b" * 100], "temperature": 1}
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


def test_a_stream_ends_with_its_key(service):
    """Also one whose parts follow each other without a pause."""
    with service.db.write() as connection:
        name, key = add_key(connection, "eve")
    body = json.dumps(text("one two three", max_tokens=10**6, stream=True)).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{service.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"choices" in answer.readline()
        with service.db.write() as connection:
            revoke_key(connection, name)
        last = [line for line in answer.read().split(b"\n\n") if line][-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "api.key"


@pytest.mark.parametrize(
    ("path", "is_said"), [("/v1/chat/completions", True), ("/v1/completions", True), ("/v1/events", False)]
)
def test_a_stream_that_the_end_of_the_service_cuts_says_so(monkeypatch, path, is_said):
    """Its connection ends as that of a whole answer does. Events go on at the next server, without a word."""
    sent = []

    async def stream(guard, scope, receive, send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        raise asyncio.CancelledError

    async def send(message) -> None:
        sent.append(message)

    monkeypatch.setattr(Guard, "_look", stream)
    asyncio.run(Guard(stream, None, ["*"], [])({"type": "http", "path": path, "method": "POST"}, send, send))
    last = sent[-1]["body"]
    assert sent[-1]["more_body"] is False
    assert bool(last) == is_said
    if is_said:
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == ("api.ends", "server_error")


def test_without_a_worker_it_says_so(start_service, tmp_path, tiny_base):
    running = start_service(tmp_path / "home", tiny_base)
    headers = {"Authorization": f"Bearer {running.keys['ana']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{running.url}/v1/completions", json.dumps(text("a")).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as problem:
        assert (problem.code, json.loads(problem.read())["error"]["code"]) == (503, "api.no-worker")
        assert problem.headers["Retry-After"]


WRONG_PROMPTS = [[True, 5], [[5, "6"]], [5.0], [], [[]], ["a", [1]], [1, "a"], [7, -1], {"text": "a"}, 5.5, None]
WRONG_PROMPTS += [["a"] * 129, [[1]] * 129]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=lambda prompt: str(prompt)[:20])
def test_wrong_prompts_are_told_what_prompts_are(service, prompt):
    status, content = ask(service, "/completions", text(prompt))
    problems = json.loads(content)["problems"]
    assert (status, len(problems), problems[0]["where"]) == (422, 1, "prompt")
    assert "a list of token ids (from 0), or 1 to 128 of either" in problems[0]["what"]


@pytest.mark.parametrize("prompt", ["one two", [5, 6], ["one", "two"], [[5], [6, 7]], ["one two"] * 128])
def test_prompts_are_one_or_many_texts_or_token_ids(service, prompt):
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(answer_to(service, "/completions", text(prompt, max_tokens=2))["choices"]) == (
        len(prompt) if many else 1
    )


@pytest.mark.parametrize("more", [{"prompt": [5, 1 << 40]}, {"logit_bias": {str(1 << 40): 1}}])
def test_tokens_that_the_model_does_not_have_are_refused(service, more):
    status, content = ask(service, "/completions", text("one") | more)
    assert (status, json.loads(content)["error"]["code"]) == (422, "generate.token")
    assert answer_to(service, "/completions", text("one"))["choices"]  # the worker goes on


def test_a_developer_is_heard_where_the_template_knows_a_system_only(service):
    said = [
        [{"role": role, "content": "be brief"}, {"role": "user", "content": "hello"}]
        for role in ("system", "developer")
    ]
    system, developer = (answer_to(service, "/chat/completions", chat("") | {"messages": turns}) for turns in said)
    assert developer["choices"][0]["message"] == system["choices"][0]["message"]
    assert developer["usage"] == system["usage"]


def test_a_role_that_the_template_refuses_has_a_fix_for_a_client(service):
    body = chat("") | {"messages": [{"role": "critic", "content": "no"}]}
    status, content = ask(service, "/chat/completions", body)
    error = json.loads(content)["error"]
    assert (status, error["code"]) == (422, "generate.template")
    assert "/v1/completions" in error["message"]
    assert "--" not in error["message"]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"name": "eve"}, "name of message 0"),  # documented, and nothing that this template writes
        ({"thinking": "so"}, "thinking of message 0"),
        ({"mood": "good"}, "there is no key messages.0.mood"),
        ({"audio": {"id": "a"}}, "messages.0.audio"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "tool_calls belong to messages of the role assistant"),
        ({"tool_call_id": "c"}, "tool_call_id belong to messages of the role tool"),
        ({"refusal": "no"}, "a content or a refusal"),
    ],
)
def test_keys_of_messages_are_written_or_refused(service, more, where):
    body = chat("") | {"messages": [{"role": "user", "content": "hello"} | more]}
    status, content = ask(service, "/chat/completions", body)
    assert (status, where in json.loads(content)["error"]["message"]) == (422, True), content


def test_an_answer_can_be_sent_back_as_it_came(service):
    answer = answer_to(service, "/chat/completions", chat("hello"))["choices"][0]["message"]
    turns = [{"role": "user", "content": "hello"}, answer | {"annotations": [], "tool_calls": None}]
    turns += [{"role": "assistant", "content": None, "refusal": "not that"}, {"role": "user", "content": "again"}]
    assert answer_to(service, "/chat/completions", chat("") | {"messages": turns})["choices"]


def call(name: str, number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_results_are_given_in_the_order_of_their_calls():
    called = {"role": "assistant", "tool_calls": [call("rain", "c1"), call("wind", "c2")]}
    results = [{"role": "tool", "tool_call_id": number, "content": number} for number in ("c2", "c1")]
    turns = ChatBody(model="a", messages=[called, *results, {"role": "user", "content": "so"}]).values()["messages"]
    assert [turn.get("content") for turn in turns] == [None, "c1", "c2", "so"]
    for wrong in ({"tool_call_id": "c3"}, {"tool_call_id": "c1", "name": "wind"}, {"name": "sun"}):
        with pytest.raises(ValidationError, match=r"messages.1.(tool_call_id|name): the assistant's message before"):
            ChatBody(model="a", messages=[called, {"role": "tool", "content": "5"} | wrong])
    old = {"role": "assistant", "function_call": {"name": "rain", "arguments": "{}"}}
    turns = ChatBody(model="a", messages=[old, {"role": "function", "name": "rain", "content": "5"}]).values()[
        "messages"
    ]
    assert [turn["role"] for turn in turns] == ["assistant", "tool"]
    assert turns[0]["tool_calls"][0]["function"]["name"] == "rain"
