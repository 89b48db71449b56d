"""silu(gate) · up with the LoRA branches around it, in one pass over the wide arrays, for Hopper.

The products before the gate are left to cuBLAS, without their low-rank parts; those are added here, where the wide
arrays are read anyway, and S = drop(h) A of the projection after the gate is made while h is at hand:

    forward    g = gate + S_g B_g,  u = up + S_u B_u,  h = silu(g) · u,  S = drop(h) A
    backward   dh = dh0 + mask * (dS A^T),  dg, du from dh,  dA = drop(h)^T dS        (h is made again)
    wide       and dS_g = dg B_g^T,  dB_g = S_g^T dg,  the same for u, while dg and du are at hand (ranks of 16)

A warpgroup owns 64 rows (forward) or 64 columns (backward) at a time, in the wide pass a tile; results overwrite the
tiles they came from.
"""

from pallas_kernels.mlp.hopper.gate.backward import gate_backward as gate_backward
from pallas_kernels.mlp.hopper.gate.config import RANK as RANK
from pallas_kernels.mlp.hopper.gate.config import BackwardInputs as BackwardInputs
from pallas_kernels.mlp.hopper.gate.config import GateConfig as GateConfig
from pallas_kernels.mlp.hopper.gate.config import Places as Places
from pallas_kernels.mlp.hopper.gate.config import WideGateConfig as WideGateConfig
from pallas_kernels.mlp.hopper.gate.forward import gate_forward as gate_forward
from pallas_kernels.mlp.hopper.gate.wide import wide_gate_backward as wide_gate_backward
