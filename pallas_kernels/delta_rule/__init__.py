"""The gated delta rule: a memory of keys and values that decays, over packed samples.

`api` has the op, `reference` its meaning row by row, `xla` the form in chunks, `chunks` the layout of rows in chunks.
"""

from pallas_kernels.delta_rule.api import delta_rule_step as delta_rule_step
from pallas_kernels.delta_rule.api import delta_rule_with_states as delta_rule_with_states
from pallas_kernels.delta_rule.api import gated_delta_rule as gated_delta_rule
