"""The base model cut into stages, and the events of a plan executed on them: one stage is plain single-device training."""
