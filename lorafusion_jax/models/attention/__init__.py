"""Packed causal attention with three implementations. Segments are isolated from each other."""

from lorafusion_jax.models.attention.api import AttentionImplementation as AttentionImplementation
from lorafusion_jax.models.attention.api import attention as attention
from lorafusion_jax.models.attention.api import default_implementation as default_implementation
