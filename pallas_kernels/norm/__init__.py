"""Root-mean-square norm of rows, optionally fused with the preceding residual addition."""

from pallas_kernels.norm.api import add_rms_norm as add_rms_norm
from pallas_kernels.norm.api import rms_norm as rms_norm
from pallas_kernels.norm.api import rms_norm_with_residual as rms_norm_with_residual
