"""Job files: reading, defaults, sweeps, overrides and validation. Never imports jax."""

from lorafusion_jax.config.load import dump_config as dump_config
from lorafusion_jax.config.load import load_config as load_config
from lorafusion_jax.config.load import parse_config as parse_config
from lorafusion_jax.config.schema import AdapterConfig as AdapterConfig
from lorafusion_jax.config.schema import BaseSettings as BaseSettings
from lorafusion_jax.config.schema import BatchSettings as BatchSettings
from lorafusion_jax.config.schema import DataSettings as DataSettings
from lorafusion_jax.config.schema import JobConfig as JobConfig
from lorafusion_jax.config.schema import LoraSettings as LoraSettings
from lorafusion_jax.config.schema import OptimSettings as OptimSettings
