"""Refuses rows of another objective: they are never trained as plain examples without being asked."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data.rows import Rows, typed_row
from lorafusion_jax.errors import DataError
from lorafusion_jax.objective.protocol import CellType

MEDIA = tuple((f"{kind}{s}", f"<{kind}>") for kind in ("image", "video", "audio") for s in ("s", ""))
LABEL: Mapping[str, CellType] = {"label": "flag"}
PROMPTS = ("prompt", "messages", "conversations", "instruction", "question")
# columns of the rows → what they hold, an objective for them, and a way to train them with sft after all
KINDS = (
    (
        ("chosen", "rejected"),
        "chosen and rejected answers",
        "dpo",
        "data.columns: {prompt: PROMPT, completion: chosen}",
    ),
    *(
        ((column, "label"), "answers that are labelled good or bad", "kto", f"data.format: {format}")
        for column, format in (("completion", "prompt"), ("messages", "messages"), ("conversations", "conversations"))
    ),
    (("completion", "advantage"), "sampled answers with their advantage", "grpo", "data.format: prompt"),
    (("completion", "advantages"), "sampled answers with their advantages", "grpo", "data.format: prompt"),
)


def refuse_other_rows(rows: Rows, settings: DataSettings, adapter: str, objective: str) -> None:
    """Checks that rows with the columns of another objective are not read as plain examples by mistake.

    Args:
        objective: the adapter's.

    Raises:
        DataError: `data.other-objective`. A format or columns in the job file say that it is no mistake.
    """
    refuse_media(rows, adapter)
    if settings.format != "auto" or settings.columns:
        return
    present = {key for row in rows.values for key in row}
    for columns, content, row_objective, otherwise in KINDS:
        if present.issuperset(columns) and (row_objective != "kto" or _are_labels(rows)):
            prompt = next((name for name in PROMPTS if name in present), PROMPTS[0])
            plain = otherwise.replace("PROMPT", prompt)
            raise DataError(
                "data.other-objective",
                f"{adapter}: its rows hold {content}, and its objective is {objective}.",
                where=rows.source,
                why=f"their columns are {', '.join(sorted(present))}; {objective} would ignore "
                f"{' and '.join(columns[-1:])}",
                fix=f"objective: {{name: {row_objective}}}   or, to train with {objective}, {plain}",
            )


def refuse_media(rows: Rows, adapter: str) -> None:
    """Checks that no text stands for an image or a sound that would be left out.

    Raises:
        DataError: `data.media`.
    """
    bad = [
        (number, f"it has {name!r} and a text with {sign}")
        for number, row in enumerate(rows.values)
        for name, sign in MEDIA
        if row.get(name) and sign in json.dumps({**row, name: None}, default=lambda value: None)
    ]
    if bad:
        message = f"{adapter}: {len(bad)} of {len(rows.values)} rows hold images, videos or sounds."
        raise rows.refuse("data.media", message, bad, fix="rows of texts alone: only texts are trained here")


def _are_labels(rows: Rows) -> bool:
    try:
        labels = [typed_row({"label": row.get("label")}, LABEL if rows.untyped else {}) for row in rows.values]
    except ValueError:
        return False
    return all(row.get("label") in (True, False) for row in labels)
