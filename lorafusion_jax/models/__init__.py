"""Decoder-only language models: one decoder for all families, see `lorafusion_jax.families`."""

from ..config.model import ModelConfig as ModelConfig
from ..families.rope import Rope as Rope
from ..families.rope import RopeScaling as RopeScaling
from .attention import AttentionImplementation as AttentionImplementation
from .attention import attention as attention
from .decoder import Decoder as Decoder
from .loading import FrozenReader as FrozenReader
from .loading import load_decoder as load_decoder
from .loading import load_frozen as load_frozen
from .loading import open_frozen as open_frozen
from .saving import save_decoder as save_decoder
from .segments import Segments as Segments
from .segments import segment_bucket as segment_bucket
