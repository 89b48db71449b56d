"""Decoder-only language models: one decoder for all families, see `lorafusion_jax.families`."""

from lorafusion_jax.families.model import ModelConfig as ModelConfig
from lorafusion_jax.families.rope import Rope as Rope
from lorafusion_jax.families.rope import RopeScaling as RopeScaling
from lorafusion_jax.models.attention import AttentionImplementation as AttentionImplementation
from lorafusion_jax.models.attention import attention as attention
from lorafusion_jax.models.decoder import Decoder as Decoder
from lorafusion_jax.models.loading import FrozenReader as FrozenReader
from lorafusion_jax.models.loading import open_frozen as open_frozen
from lorafusion_jax.models.segments import Segments as Segments
from lorafusion_jax.models.segments import segment_bucket as segment_bucket
