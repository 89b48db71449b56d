"""The base model cut into stages, and a plan executed on them; one stage is plain single-device training."""
