"""Every model type of transformers with its default config.json: python model_types.py, a line each."""

import json
import warnings

from transformers import logging
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAPPINGS = [  # of the class that a base of this type has in config.json
    getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM")
] + [modeling_auto.MODEL_MAPPING_NAMES]


def main() -> None:
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for model_type in CONFIG_MAPPING:
        architecture = next((names[model_type] for names in MAPPINGS if model_type in names), None)
        try:
            config = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
        except Exception:  # some need sizes
            config = {}
        names = {} if architecture is None else {"architectures": [architecture]}
        print(json.dumps(config | names | {"model_type": model_type}))


main()
