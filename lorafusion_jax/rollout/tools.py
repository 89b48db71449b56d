"""What a tool says between two answers, as tokens of the conversation."""

from __future__ import annotations

from lorafusion_jax.data.tokenizer import Tokenizer

ASKED, ANSWERED = "ask", "answer"


def reply_tokens(tokenizer: Tokenizer, reply: str, end_token: int | None) -> list[int]:
    """Encodes a reply after an answer: through the chat template as a user's message, where there is one.

    Args:
        end_token: that ended the answer; it is not encoded again.

    Raises:
        TemplateProblem: the template cannot render it.
    """
    template = tokenizer.chat_template
    if template is None:
        return tokenizer.encode(reply)
    turns = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    replied = [*turns, {"role": "user", "content": reply}]
    begun = template.render(template.with_arguments(turns))
    conversation = template.render(template.with_arguments(replied), add_generation_prompt=True)
    if not conversation.startswith(begun):  # a template that writes earlier turns anew, such as without their thoughts
        return tokenizer.encode(reply)
    following = conversation[begun.rindex(ANSWERED) + len(ANSWERED) :]
    tokens = tokenizer.encode(following)
    return tokens[1:] if tokens[:1] == [end_token] else tokens
