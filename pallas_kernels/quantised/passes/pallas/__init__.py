"""The small passes as kernels in Pallas's Triton lowering."""

from pallas_kernels.quantised.passes.pallas.finish import finish as finish
from pallas_kernels.quantised.passes.pallas.rows import round_rows as round_rows
