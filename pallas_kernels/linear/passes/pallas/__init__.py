"""The small passes as kernels in Pallas's Triton lowering (sm_80 and newer); see `linear.passes`."""

from pallas_kernels.linear.passes.pallas.bank import transposed_bank as transposed_bank
from pallas_kernels.linear.passes.pallas.bits import keep_words as keep_words
from pallas_kernels.linear.passes.pallas.da import da as da
from pallas_kernels.linear.passes.pallas.down import down as down
from pallas_kernels.linear.passes.pallas.dsdb import dsdb as dsdb
from pallas_kernels.linear.passes.pallas.extra import extra_down as extra_down
from pallas_kernels.linear.passes.pallas.extra import extra_sums as extra_sums
from pallas_kernels.linear.passes.pallas.extra import extra_up as extra_up
from pallas_kernels.linear.passes.pallas.join import join as join
from pallas_kernels.linear.passes.pallas.sums import sum_partials as sum_partials
