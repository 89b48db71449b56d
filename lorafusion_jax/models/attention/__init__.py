"""Packed causal attention with three implementations. Segments are isolated from each other."""

from .api import AttentionImplementation as AttentionImplementation
from .api import attention as attention
from .api import default_implementation as default_implementation
