"""Packed causal attention: rows see the earlier rows of their document; blocks of other documents cost nothing."""

from .api import Saved as Saved
from .api import attention_backward as attention_backward
from .api import attention_forward as attention_forward
from .api import why_not as why_not
from .blocks import document_rows as document_rows
from .common import AttentionConfig as AttentionConfig
