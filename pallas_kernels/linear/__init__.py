"""Linear layers with the LoRA of one or many adapters."""
