"""Our policy: groups that fill their GPUs, short jobs first, and every slowdown within its bound.

`claims` says what a job is worth, `worth` what a group is worth, `packing` which waiting jobs would share a group, and
`search` holds the draft that `moves` improve. `policy` orders the moves.
"""

from scheduling.online.policies.ours.policy import Ours as Ours
from scheduling.online.policies.ours.settings import Settings as Settings
