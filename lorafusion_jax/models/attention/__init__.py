"""Packed causal attention: one call, three implementations, each isolated between segments."""

from .api import AttentionImplementation as AttentionImplementation
from .api import attention as attention
from .api import default_implementation as default_implementation
