"""What a stock client of OpenAI's API asks of a service: models, texts and chats, whole and streamed, mistakes.

Run by `test_openai_client.py`: python openai_calls.py URL KEY MODEL…
"""

from __future__ import annotations

import asyncio
import sys

import openai

url, key, *names = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
checks = 0


def check(holds: object, what: str) -> None:
    global checks
    if not holds:
        raise SystemExit(f"failed: {what}")
    checks += 1


def refused(kind: type[Exception], **more: object) -> str:
    try:
        client.chat.completions.create(model=names[0], messages=MESSAGES, **more)
    except kind as problem:
        return str(problem)
    raise SystemExit(f"failed: nothing was refused of {more}")


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
listed = [model.id for model in client.models.list()]
check(listed == names, f"the models are {listed}")
check(client.models.retrieve(names[-1]).id == names[-1], "a model by its name")

for name in names:
    whole = client.chat.completions.create(
        model=name, messages=MESSAGES, max_completion_tokens=9, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = whole.choices[0]
    check(choice.message.role == "assistant" and choice.finish_reason == "length", "a chat has its end")
    check(whole.usage.completion_tokens == 9 == len(choice.logprobs.content), "tokens are counted")
    check(len(choice.logprobs.content[0].top_logprobs) == 2, "the most probable tokens are listed")
    stream = client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=9, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text == choice.message.content, "a stream has the text of the whole")
    check(chunks[-1].usage == whole.usage, "a stream counts tokens")

    texts = client.completions.create(model=name, prompt=["one two", "three"], max_tokens=5, n=2, temperature=0)
    check(len({choice.index for choice in texts.choices}) == 4, "two answers to each of two prompts")
    check(texts.choices[0].text == texts.choices[1].text != texts.choices[2].text, "answers are by prompt")
    parts = client.completions.create(model=name, prompt="one two", max_tokens=5, temperature=0, stream=True)
    check("".join(part.choices[0].text for part in parts) == texts.choices[0].text, "texts stream")

drawn = [
    client.completions.create(model=names[0], prompt="one two", seed=seed, temperature=1.2, top_p=0.9).choices[0].text
    for seed in (5, 5)
]
check(drawn[0] == drawn[1], "a seed decides")
client.completions.create(model=names[0], prompt=[1, 2, 3], stop=["x"], extra_body={"top_k": 3, "min_p": 0.1})
check("tools" in refused(openai.UnprocessableEntityError, tools=[{"type": "function"}]), "tools are refused by name")
check("temperature" in refused(openai.UnprocessableEntityError, temperature=-1), "values are checked")
try:
    client.models.retrieve("nobody")
except openai.NotFoundError as problem:
    check(problem.param == "model", "the field is named")
try:
    openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
except openai.AuthenticationError:
    checks += 1


async def many() -> list[str | None]:
    """32 chats at once, of which every other is streamed."""
    together = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)

    async def one(number: int) -> str | None:
        name = names[number % len(names)]
        if number % 2:
            chat = await together.chat.completions.create(model=name, messages=MESSAGES, max_tokens=9, temperature=0)
            return chat.choices[0].message.content
        chunks = await together.chat.completions.create(
            model=name, messages=MESSAGES, max_tokens=9, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

    return await asyncio.gather(*map(one, range(32)))


answers = asyncio.run(many())
check(len(set(answers)) <= len(names) and len(answers) == 32, "many at once get the answers of each alone")
print(f"{checks} checks passed, openai {openai.__version__}")
