"""PEFT folders: adapter_config.json, names and tensors, in and out; combining and merging adapters."""
