"""Recipes of the unmodified cookbook with local data: python cookbook_recipes.py URL KEY BASE FOLDER [NAME…].

BASE has the tokenizer. Its recipes find server and key in the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path

import chz
import datasets
from tinker_cookbook import renderers, tokenizer_utils
from tinker_cookbook.distillation import sdft, train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, PromptOnlyDataset, TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.recipes.sdft.datasets import SDFTDataset
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from transformers import AutoTokenizer

RENDERER = "role_colon"
MODEL = "tiny"
QUESTIONS = ["Say one.", "Say two.", "Say three.", "Say four."]
ANSWERS = ["one", "two", "three", "four"]
COMMON = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=MODEL, renderer_name=RENDERER, max_length=96, batch_size=2
)


def settings(folder: Path, name: str) -> dict:
    shared = {"model_name": MODEL, "recipe_name": name, "renderer_name": RENDERER, "lora_rank": 4}
    return shared | {"log_path": str(folder / name), "base_url": os.environ["TINKER_BASE_URL"], "learning_rate": 1e-3}


def renderer() -> renderers.Renderer:
    return renderers.get_renderer(RENDERER, tokenizer_utils.get_tokenizer(MODEL))


def sft(folder: Path) -> None:
    file = folder / "chats.jsonl"
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats * 2))
    data = FromConversationFileBuilder(common_config=COMMON, file_path=str(file), test_size=2)
    config = supervised.Config(**settings(folder, "sft"), dataset_builder=data, num_epochs=1, eval_every=2)
    asyncio.run(supervised.main(config))


def arithmetic(folder: Path) -> None:
    data = ArithmeticDatasetBuilder(
        batch_size=2, model_name_for_tokenizer=MODEL, renderer_name=RENDERER, n_batches=2, group_size=2
    )
    config = rl.Config(**settings(folder, "rl"), dataset_builder=data, max_tokens=4, eval_every=0, save_every=1)
    asyncio.run(rl.main(config))


@chz.chz
class Comparisons(ComparisonDatasetBuilder):
    def get_train_and_test_datasets(self):
        rows = [{"prompt": question, "chosen": a} for question, a in zip(QUESTIONS, ANSWERS, strict=True)]
        return datasets.Dataset.from_list(rows), None

    def example_to_labeled_comparison(self, example):
        comparison = Comparison(
            prompt_conversation=[{"role": "user", "content": example["prompt"]}],
            completion_A=[{"role": "assistant", "content": example["chosen"]}],
            completion_B=[{"role": "assistant", "content": "no"}],
        )
        return LabeledComparison(comparison=comparison, label="A")


def preferences(folder: Path) -> None:
    data = DPODatasetBuilderFromComparisons(common_config=COMMON, comparison_builder=Comparisons())
    train_dpo.main(train_dpo.Config(**settings(folder, "dpo"), dataset_builder=data, eval_every=0))


@chz.chz
class Prompts(RLDatasetBuilder):
    async def __call__(self):
        tokenizer = tokenizer_utils.get_tokenizer(MODEL)
        return PromptOnlyDataset(QUESTIONS, 2, 2, renderer(), tokenizer), None


def on_policy(folder: Path) -> None:
    data = DistillationDatasetConfig(
        dataset_builder=Prompts(), teacher_config=TeacherConfig(base_model=MODEL), groups_per_batch=2
    )
    config = train_on_policy.Config(
        **settings(folder, "on-policy"), dataset_configs=[data], max_tokens=4, eval_every=0, save_every=1
    )
    asyncio.run(train_on_policy.main(config))


def self_distillation(folder: Path) -> None:
    data = SDFTDataset(QUESTIONS, ANSWERS, batch_size=2, group_size=1, renderer=renderer())
    config = sdft.Config(**settings(folder, "sdft"), max_tokens=4, topk=5, eval_every=0, save_every=1)
    asyncio.run(sdft.main(config, data))


RECIPES = (sft, arithmetic, preferences, on_policy, self_distillation)


def main(url: str, key: str, base: str, folder: str, *names: str) -> int:
    os.environ |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": key}
    tokenizer_utils.register_tokenizer(MODEL, lambda: AutoTokenizer.from_pretrained(base))
    print("tinker", version("tinker"), "cookbook", version("tinker-cookbook"), flush=True)
    problems = 0
    for recipe in RECIPES:
        if names and recipe.__name__ not in names:
            continue
        try:
            recipe(Path(folder))
            print(f"{recipe.__name__}: passed", flush=True)
        except BaseException:
            problems += 1
            print(f"{recipe.__name__}: failed\n{traceback.format_exc()}", flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
