"""config.json as transformers writes it: python saved_configs.py > tests/models/saved_configs.jsonl

Of every family, the defaults of transformers; of published models, what transformers reads and saves again.
"""

import copy
import json
import sys
from pathlib import Path

from transformers import logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as TEXT_PARTS

sys.path.append(str(Path(__file__).parents[1] / "models"))
from published import SERVED

NOT_IN_TRANSFORMERS = ("kimi_k2", "bailing_moe")
UNPUBLISHED = (
    "ministral",
    "ministral3",
    "gemma4_unified_text",
    "glm",
    "cohere",
    "lara_mini",
)  # here
WITHOUT_HEAD = {"mistral4": "Mistral4ForCausalLM"}  # its class with a head is not in the list
SIZES = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "glm4_moe": {"num_attention_heads": 32},  # by default it has heads of 42, half of which cannot turn in pairs
}


def saved(values: dict) -> dict:
    """What `save_pretrained` writes."""
    return json.loads(CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values)).to_json_string())


def main() -> None:
    logging.set_verbosity_error()
    published = {name: values for name, values in SERVED.items() if values["model_type"] not in NOT_IN_TRANSFORMERS}
    families = dict.fromkeys([*UNPUBLISHED, *(values["model_type"] for values in published.values())])
    classes = TEXT_PARTS | WITHOUT_HEAD | ARCHITECTURES
    defaults = {
        family: saved({"model_type": family, "architectures": [classes[family]]} | SIZES.get(family, {}))
        for family in families
    }
    for part, configs in (("defaults", defaults), ("published", {name: saved(v) for name, v in published.items()})):
        for name, values in configs.items():
            values.pop("transformers_version")
            print(json.dumps({"part": part, "name": name, "config": values}))


main()
