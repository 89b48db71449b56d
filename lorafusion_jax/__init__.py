"""Trains several LoRA adapters of one frozen base model together, each as if it were alone.

`modules` has LoRA layers for any Flax model, `training` the whole job from a job file to exported adapters, and `cli`
the command `lorafusion`. Importing this package imports nothing else.
"""
