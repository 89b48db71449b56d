"""Trains the adapters of a job: the loop, its run folder, saves and exports."""

from lorafusion_jax.checkpoint.folder import RunFolder as RunFolder
from lorafusion_jax.config.specs import adapter_specs as adapter_specs
from lorafusion_jax.training.loop import Interrupted as Interrupted
from lorafusion_jax.training.resume_run import resume as resume
from lorafusion_jax.training.start import train as train
from lorafusion_jax.training.state import RunResult as RunResult
