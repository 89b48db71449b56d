"""Trains several LoRA adapters of one frozen base model together, with the results of separate training.

`modules` contains LoRA layers for Flax models, `training` runs jobs from a job file to exported adapters, and `cli` is
the command `lorafusion`. Importing this package imports nothing else.
"""
