"""Trains several LoRA adapters of one frozen base model together, with the results of separate training.

    import lorafusion_jax as lf

    job = lf.load_job("jobs.yaml")
    lf.plan(job)
    run = lf.train(job, "runs/exp1")

`modules` has LoRA layers for any Flax model; its names are here, too. Names are looked up when they are used: importing
this package imports nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lorafusion_jax.api.generation import generate as generate
    from lorafusion_jax.api.generation import open_generator as open_generator
    from lorafusion_jax.api.jobs import Job as Job
    from lorafusion_jax.api.jobs import load_job as load_job
    from lorafusion_jax.api.plans import JobPlan as JobPlan
    from lorafusion_jax.api.plans import plan as plan
    from lorafusion_jax.api.reports import ReportView as ReportView
    from lorafusion_jax.api.reports import make_report as make_report
    from lorafusion_jax.api.runs import Run as Run
    from lorafusion_jax.api.runs import open_run as open_run
    from lorafusion_jax.api.runs import resume as resume
    from lorafusion_jax.api.runs import train as train
    from lorafusion_jax.api.training import AdamParams as AdamParams
    from lorafusion_jax.api.training import Datum as Datum
    from lorafusion_jax.api.training import training_client as training_client
    from lorafusion_jax.errors import LoraFusionError as LoraFusionError
    from lorafusion_jax.modules import AdapterSpec as AdapterSpec
    from lorafusion_jax.modules import LinenLoRA as LinenLoRA
    from lorafusion_jax.modules import Session as Session
    from lorafusion_jax.modules import apply_lora as apply_lora
    from lorafusion_jax.modules import lora_report as lora_report
    from lorafusion_jax.modules import merge_adapter as merge_adapter
    from lorafusion_jax.modules import quantize_base as quantize_base
    from lorafusion_jax.modules import register_linear as register_linear
    from lorafusion_jax.modules import unmerge_adapter as unmerge_adapter
    from lorafusion_jax.modules import use_adapters as use_adapters
    from lorafusion_jax.optim.per_adapter import active_adapters as active_adapters
    from lorafusion_jax.optim.per_adapter import per_adapter as per_adapter
    from lorafusion_jax.peft.combine import combine_adapters as combine_adapters
    from lorafusion_jax.peft.own_model import load_checkpoint as load_checkpoint
    from lorafusion_jax.peft.own_model import load_peft as load_peft
    from lorafusion_jax.peft.own_model import save_checkpoint as save_checkpoint
    from lorafusion_jax.peft.own_model import save_peft as save_peft

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
