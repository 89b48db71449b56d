"""Conversations with which chat templates are compared, as Hugging Face's `apply_chat_template` takes them."""

from __future__ import annotations

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def says(content: str | None, *calls: dict, **more) -> dict:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {}) | more


def system(content: str) -> dict:
    return {"role": "system", "content": content}


def calls(city: str, number: int = 0) -> dict:
    # Mistral's templates want nine letters and digits
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def calls_by_text(city: str) -> dict:
    """As OpenAI writes calls: the arguments are a text."""
    return calls(city) | {"function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}


def answers(content: str, number: int = 0) -> dict:
    return {"role": "tool", "name": "get_weather", "content": content, "tool_call_id": f"call{number:05d}"}


# name → messages, tools
CONVERSATIONS: dict[str, tuple[list[dict], list[dict] | None]] = {
    "one turn": ([user("2+2?"), says("four")], None),
    "system": ([system("Be brief."), user("2+2?"), says("four")], None),
    "two turns": ([user("2+2?"), says("four"), user("3+3?"), says("six")], None),
    "system and two turns": ([system("Be brief."), user("2+2?"), says("four"), user("3+3?"), says("six")], None),
    "white space": ([user(" a "), says("one \n"), user("b\n"), says("  two")], None),
    "answer of many lines": ([user("Write."), says("def f():\n    return 1\n\n\nprint(f())")], None),
    "the same answer twice": ([user("yes?"), says("yes"), user("yes?"), says("yes")], None),
    "letters of other scripts": ([user("é🎉?"), says("東京 → é")], None),
    "an answer that looks like a header": ([user("a"), says("<b>assistant"), user("c"), says("<|user|>d")], None),
    "an answer that begins like markup": ([user("a"), says("<"), user("c"), says("|")], None),
    "reasoning": ([user("2+2?"), says("<think>\nadd\n</think>\n\nfour")], None),
    "reasoning in earlier turns": (
        [
            user("2+2?"),
            says("<think>\nadd\n</think>\n\nfour"),
            user("3+3?"),
            says("<think>\nagain\n</think>\n\nsix"),
        ],
        None,
    ),
    "reasoning of its own key": ([user("2+2?"), says("four", reasoning_content="add")], None),
    "tools without a call": ([user("hi"), says("hello")], [WEATHER]),
    "a call": ([user("Rome?"), says("", calls("Rome"))], [WEATHER]),
    "a call and an answer": (
        [user("Rome?"), says(None, calls("Rome")), answers("sunny"), says("It is sunny.")],
        [WEATHER],
    ),
    "a text and a call": (
        [user("Rome?"), says("Let me see.", calls("Rome")), answers("sunny"), says("It is sunny.")],
        [WEATHER],
    ),
    "a call with arguments as text": (
        [user("Rome?"), says(None, calls_by_text("Rome")), answers("sunny"), says("It is sunny.")],
        [WEATHER],
    ),
    "calls of two tools": (
        [
            system("Be brief."),
            user("Rome, Oslo?"),
            says(None, calls("Rome", 1), calls("Oslo", 2)),
            answers("sunny", 1),
            answers("rain", 2),
            says("Sunny and rain."),
        ],
        [WEATHER],
    ),
    "calls in earlier turns": (
        [
            user("Rome?"),
            says("<think>\nask\n</think>\n\n", calls("Rome")),
            answers("sunny"),
            says("<think>\nsay\n</think>\n\nSunny."),
            user("thanks"),
            says("You are welcome."),
        ],
        [WEATHER],
    ),
    "tokens of the template in a question": ([user("What is <|im_end|> or </s>?"), says("an end token")], None),
}
