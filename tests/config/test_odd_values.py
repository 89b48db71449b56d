"""Every key of a job file with every odd value: what is not meant is refused with its key, and nothing is converted.

The table says which odd values are values of a key. Every other one is refused, and the message names the key.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from lorafusion_jax.config import schema
from lorafusion_jax.config.explain import SWEPT
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import Source
from lorafusion_jax.config.schema import DEFAULTS, SHARED, SINGLE_DEFAULTS
from lorafusion_jax.config.sweep import LISTS_BY_NATURE
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.objective.table import OBJECTIVES

JOB = {"base": {"model": "base"}, "adapters": [{"name": "law", "data": {"train": "law.jsonl"}}]}

BLANK = ("", " ", "\n", "\t ")
CONTROL = ("a\0", "a\x1b[2J", "a\nb", "\x7f")
SHELL = ("~", "~/law.jsonl", "file:///law.jsonl", "https://example.org/law.jsonl")
FOLDERS = (".", "..", "/", "data/")
HUB = ("hf:", "hf:../../x", "hf:/x", "hf:a/b/c", "hf:org/set:")
ORDINARY = ("law", "1", "16.0", " 16 ", "1_000", "0x10", "yes", "no", "on", "true", "null", "nan", "inf", "-1")
EXPONENTS = ("1e1", "1e-4")
LARGE = (2**31, 10**400, 1e30, 1e308, math.inf)
NUMBERS = (True, False, 0, -0.5, 0.5, 1, 2, 16.0, 1.5, 2**31 - 1, *LARGE, math.nan, 1e-320)
HOLDERS = ([], [[]], [None], ["", "a"], ["q_proj", "q_proj"], {}, {"a": 1}, {"": ""}, {1: 2})
ODD = (None, *BLANK, *CONTROL, *SHELL, *FOLDERS, *HUB, *ORDINARY, *EXPONENTS, *NUMBERS, *HOLDERS, "x" * 5000)

TEXTS = (*FOLDERS, *HUB, *ORDINARY, *EXPONENTS)
FILES = (*ORDINARY, *EXPONENTS)
FLAGS = (True, False)
COUNTS = (1, 2, 16.0, 2**31 - 1)
NOT_NEGATIVE = (0, 0.5, 1, 2, 16.0, 1.5, 2**31 - 1, 2**31, 1e30, *EXPONENTS)
POSITIVE = NOT_NEGATIVE[1:]
FRACTIONS = (0, 0.5, "1e-4")
SHORT = (0.5, 1, 2, 16.0, 1.5, *EXPONENTS)
REVISIONS = ("law", "1", "16.0", "1_000", "0x10", "yes", "no", "on", "true", "null", "nan", "inf", *EXPONENTS, "data/")

MEANT: dict[str, tuple] = {  # key → odd values that it has as they are
    "base.model": TEXTS,
    "base.revision": (*REVISIONS, None),
    "base.hub_id": (None,),
    "base.cache_quantized": FLAGS,
    "batch.global_samples": COUNTS,
    "batch.tile_tokens": (16.0,),
    "mesh.stages": (1, 2, 16.0),
    "mesh.data": (1, 2, 16.0),
    "mesh.fsdp": (1, 2, 16.0),
    "mesh.tensor": (1, 2, 16.0),
    "mesh.layers": (None,),
    "save.every_steps": (*COUNTS, None),
    "save.every_minutes": (*SHORT, None),
    "save.keep": COUNTS,
    "save.best": FLAGS,
    "halving.first_step": (*COUNTS, None),
    "halving.first_share": (0.5, 1e-320, "1e-4", None),
    "halving.factor": (2, 16.0),
    "early_stop.patience": (None,),  # a number also needs held-out data
    "early_stop.metric": (),
    "early_stop.greater_is_better": (*FLAGS, None),
    "early_stop.min_delta": NOT_NEGATIVE,
    "train.max_steps": (*COUNTS, None),
    "train.block_layers": (*COUNTS, None),
    "train.parts": (1, 2, 4.0),
    "train.implementation": (None,),
    "train.attention": (None,),
    "train.loss_chunk": (2**31 - 1,),
    "train.router_aux": NOT_NEGATIVE,
    "train.eval_every_steps": (*COUNTS, None),
    "train.plan_seconds": SHORT,
    "train.samples": (0, 1, 2, 16.0),
    "train.sample_tokens": (1, 2, 16.0),
    "train.log_every_s": (0, *SHORT, None),
    "train.places": ({}, {1: 2}),
    "train.resident": (*COUNTS, None),
    "report.tensorboard": FLAGS,
    "report.wandb": (*(text for text in TEXTS if not set("/:") & set(text)), "~", "~/law.jsonl", None),
    "report.mlflow": (*SHELL, *TEXTS, None),
    "report.trackio": (*SHELL, *TEXTS, None),
    **dict.fromkeys(("handover.vllm", "handover.sglang"), ("https://example.org/law.jsonl", None)),
    "handover.prompt": (),  # both need a server
    "handover.key_file": (None,),
    "data.train": (*FILES, "data/"),
    "data.eval": (*FILES, "data/", 0.5, 1e-320, None),
    "data.columns": ({},),
    "data.where": ({}, {"a": 1}, {"a": True}),
    "data.chat_template": (None,),
    "data.max_length": COUNTS[1:-1],  # the last does not fit into a microbatch
    "lora.rank": (1, 2, 16.0),
    "lora.alpha": POSITIVE,
    "lora.dropout": FRACTIONS,
    "lora.rslora": FLAGS,
    "lora.rank_pattern": ({}, {"a": 1}),
    "lora.alpha_pattern": ({}, {"a": 1}),
    "lora.layers_to_transform": (0, 1, 2, None),
    "lora.exclude": (*SHELL, *TEXTS, []),
    "lora.lora_bias": FLAGS,
    "lora.trainable_tokens": (None,),
    "lora.init_from": (*TEXTS, None),
    "lora.same_base": FLAGS,
    "optim.lr": POSITIVE,
    "optim.lr_ratio": (*POSITIVE, {}, None),
    "optim.warmup": (0, 0.5, 1, 2, 16.0, 2**31 - 1, *EXPONENTS),
    "optim.min_lr_ratio": (0, 0.5, 1, "1e-4"),
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.clip": NOT_NEGATIVE,
    "optim.b1": (*FRACTIONS, None),
    "optim.b2": (*FRACTIONS, None),
    "optim.eps": (*POSITIVE, None),
    "optim.momentum": (*FRACTIONS, None),
    "optim.options": ({},),
    "objective.reference": (None,),
    "rollout.prompts": (None,),  # of an adapter without rewards, keys have their defaults
    "rollout.reward": (None, []),
    "rollout.temperature": (1,),
    "rollout.stop": ([],),
    "rollout.tool": (None,),
    "rollout.turns": (1,),
    "rollout.lag": (0,),
    "eval.score": (None,),
    "eval.samples": (1, 2, 16.0),
    "eval.max_tokens": COUNTS,
    **dict.fromkeys(("eval.timeout_s", "eval.memory_gb", "eval.disk_mb"), SHORT),
    "epochs": COUNTS,
    "seed": (0, *COUNTS, 2**31),
    "weight": POSITIVE,
    "priority": (0, 1, -1, 2, 16.0, 100, -100),
    "name": (*(text for text in ORDINARY if text[:1] not in " -"), *EXPONENTS),
}  # fmt: skip


def keys() -> list[str]:
    sections = {**SHARED, **DEFAULTS}
    of_sections = (f"{name}.{key}" for name, model in sections.items() for key in model.model_fields)
    return [*of_sections, *SINGLE_DEFAULTS, "name"]


def complaint(key: str, value: object) -> str:
    """The errors of a job in which one value is odd; empty if it is taken."""
    job = copy.deepcopy(JOB)
    table = job["adapters"][0] if key in ("name", "data.train") else job
    *sections, last = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
    table[last] = value
    try:
        parse_config(Source(path=Path("jobs.yaml"), values=job))
    except LoraFusionError as problem:
        return str(problem)
    return ""


def is_meant(key: str, value: object) -> bool:
    meant = MEANT.get(key, ())
    section, _, option = key.partition(".")
    if value == [None] and section in SWEPT and (section, option) not in LISTS_BY_NATURE:  # a sweep of one value
        return None in meant
    return any(type(value) is type(other) and value == other for other in meant)


@pytest.mark.parametrize("key", keys())
def test_what_is_not_meant_is_refused(key):
    wrong = []
    for value in ODD:
        text = complaint(key, value)
        if is_meant(key, value) == bool(text):
            wrong.append(f"{value!r:.60}: {text or 'taken'}")
        elif text and ((key not in text and key.rpartition(".")[2] not in text) or len(text) > 6000):
            wrong.append(f"{value!r:.60} does not name its key: {text}")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_every_key():
    assert not set(MEANT) - set(keys())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_options_of_objectives_follow_the_same_rule(name):
    from lorafusion_jax.objective.choose import choose, objective

    for field in dataclasses.fields(objective(name).options):
        option, default = field.name, field.default
        if isinstance(default, bool | int | float):
            for value in ("", "16", "yes", *(() if isinstance(default, bool) else (True,)), [], {}):
                with pytest.raises(ValueError, match=option):
                    choose(name, {option: value})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("lora.rank", "16", "must be a whole number, not '16'.\n  where: jobs.yaml\n  fix: e.g. lora.rank: 16"),
        ("report.tensorboard", "yes", "'report.tensorboard' must be true or false, not 'yes'."),
        ("data.train", ".", "must be a file, a folder with a name or a glob as ./*.jsonl, not all that is in '.'"),
        ("data.train", "", "must be a text that is not empty, not ''"),
        ("base.model", "~/llama", f"a path without ~, which only a shell expands: {Path.home()}/llama"),
        ("data.eval", 1, "must be a file, or the share of data.train to hold out, between 0 and 1, not 1"),
        ("data.eval", True, "must be a file, or the share of data.train to hold out, between 0 and 1, not True"),
        ("data.eval", "hf:../../x", "must be hf:org/set or hf:org/set:split, not 'hf:../../x'"),
        ("lora.targets", ["q_proj", "v_proj", "q_proj"], "a list of different names; q_proj stands there twice"),
        ("optim.warmup", 1e30, "'optim.warmup' must be 2147483647 or less, not 1e+30"),
        ("optim.lr_ratio", {"magnitude": 4}, "for the group 'magnitude', which adapters of kind lora do not have"),
    ],
)  # fmt: skip
def test_messages_say_what_is_meant(key, value, text):
    assert text in complaint(key, value)


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("optim.lr=1e-4,2e-4", "optim.lr=[1e-4,2e-4]"),
        ("adapters.law.lora.rank=4 8", "adapters.law.lora.rank=[4,8]"),
        ("batch.global_samples=4,8", "batch.global_samples=[4,8]"),
        ("adapters.law.lora.rank='16'", "adapters.law.lora.rank=16"),
    ],
)
def test_a_fix_of_what_was_typed_can_be_typed(typed, fix):
    with pytest.raises(LoraFusionError, match=re.escape(f"fix: e.g. {fix}")):
        parse_config(Source(path=Path("jobs.yaml"), values=copy.deepcopy(JOB)), [typed])
    parse_config(Source(path=Path("jobs.yaml"), values=copy.deepcopy(JOB)), [fix])


def test_no_key_has_a_type_that_converts():
    """A bare `int`, `float`, `bool` or `str` would take "16", "yes" or an empty text."""

    def of(model: type[BaseModel]):
        for name, field in model.model_fields.items():
            yield f"{model.__name__}.{name}", field

    bare = [
        name
        for model in [*SHARED.values(), *DEFAULTS.values(), schema.AdapterConfig]
        for name, field in of(model)
        if field.annotation in (int, float, bool, str) and not field.metadata
    ]
    assert bare == ["BaseSettings.quantize"]  # checked by its table
