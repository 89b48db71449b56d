"""Figures of sentences that code computes: what the product predicts is never older than it.

`make tables` writes them, a test fails if a document has others, and a text that a document no longer has is an error.
Measured figures of sentences change with their rows alone: `data/stated_numbers.csv` says from which row each is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from benchmarks import predicted

NUMBER = r"\d(?:[\d. ]*\d)?(?:e-\d+)?"
PLANNING, MODELS, QUANTISED = "docs/pages/planning.md", "docs/pages/models.md", "docs/pages/quantised.md"


class Figure(NamedTuple):
    """A text of a document whose numbers are computed.

    Args:
        document: path in the repository.
        text: as in the document, but for line breaks; `{}` stands for a number.
        values: the numbers, as they are shown.
    """

    document: str
    text: str
    values: Callable[[], Iterable[str]]


FIGURES = (
    Figure(QUANTISED, "| `nf4` | {} | is dequantised", partial(predicted.bytes_a_weight, "nf4")),
    Figure(QUANTISED, "`nf4_single` | 1, {} | is dequantised", partial(predicted.bytes_a_weight, "nf4_single")),
    Figure(QUANTISED, "about {} % of a row's norm each", predicted.rounding_to_fp8),
    Figure(PLANNING, "by default {} GiB for 131 072 tokens", predicted.loss_of_long_sample),
    Figure(
        PLANNING,
        "memory/stage s0 {} s1 {} s2 {} s3 {} GiB of 140 fits",
        partial(predicted.stages_of_70b, "gemm_inputs"),
    ),
    Figure(
        PLANNING,
        "memory/stage s0 {} s1 {} s2 {} s3 {} GiB of 140 does not fit to make it fit: batch.capacity_tokens: {} or",
        partial(predicted.stages_of_70b, "everything", suggestion=True),
    ),
    Figure("docs/pages/several-gpus.md", "inputs of all layers, {} GiB of the last row", predicted.inputs_of_layers),
    Figure(MODELS, "rank 8 on all experts of Qwen3-30B-A3B is {} billion", predicted.parameters_of_experts),
    Figure(
        MODELS,
        "2 bytes a weight: {} GB for gpt-oss-20b. With four adapters of rank 16 on attention and microbatches of 8 192 "
        "tokens, `plan` predicts {} GB in all, without products that are computed twice, and {} GB with everything "
        "saved",
        predicted.gpt_oss_20b,
    ),
    Figure(
        MODELS,
        "the table of inputs ({} GB of E2B's {} in bfloat16) is split by columns",
        predicted.inputs_of_gemma_4_e2b,
    ),
    Figure(MODELS, "inputs of a microbatch ({} kB a token of E2B)", predicted.row_of_gemma_4_e2b),
    Figure(PLANNING, "| Qwen3-30B-A3B's shape | attention | {} |", predicted.layer_of_experts),
    Figure(PLANNING, "| Qwen3-30B-A3B's shape | attention and experts | {} |", predicted.layer_of_experts),
    *(
        Figure(
            PLANNING, f"| Qwen3.5-9B's shape, {mixer} | all projections | {{}} |",
            partial(predicted.layer_of_hybrid, name),
        )
        for mixer, name in (("gated delta net", "gated delta net"), ("attention", "gated attention"))
    ),
)  # fmt: skip


def with_figures(document: str, text: str) -> str:
    """Returns the text of a document with the numbers of its figures.

    Raises:
        ValueError: a figure is not there exactly once.
    """
    for figure in FIGURES:
        if figure.document == document:
            shape, values = pattern(figure.text), tuple(figure.values())
            count = len(shape.findall(text))
            if count != 1 or shape.groups != len(values):
                raise ValueError(f"{document} has {count} times: {figure.text}")
            text = shape.sub(lambda match, values=values: replaced(match, values), text)
    return text


def pattern(text: str) -> re.Pattern[str]:
    """Finds a text, with a group for each number `{}`, whatever its line breaks."""
    return re.compile(r"\s+".join(f"({NUMBER})".join(map(re.escape, word.split("{}"))) for word in text.split()))


def replaced(match: re.Match[str], values: tuple[str, ...]) -> str:
    """Returns the matched text with other numbers."""
    shown, at = [], match.start()
    for number, value in enumerate(values, 1):
        shown += [match.string[at : match.start(number)], value]
        at = match.end(number)
    return "".join([*shown, match.string[at : match.end()]])
