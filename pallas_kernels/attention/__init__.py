"""Packed causal attention: rows attend to the earlier rows of their document; other documents' blocks are skipped."""

from pallas_kernels.attention.api import Described as Described
from pallas_kernels.attention.api import Saved as Saved
from pallas_kernels.attention.api import attention_backward as attention_backward
from pallas_kernels.attention.api import attention_forward as attention_forward
from pallas_kernels.attention.api import unsupported_reason as unsupported_reason
from pallas_kernels.attention.hopper.blocks import document_rows as document_rows
from pallas_kernels.attention.hopper.config import AttentionConfig as AttentionConfig
