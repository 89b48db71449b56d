"""Our policy: groups that fill their GPUs, short jobs first, and every slowdown within its bound.

`claims` says what a job is worth, `worth` what a group is worth, and `search` holds the draft that moves improve:
`urgent` jobs, `packs` of waiting jobs, `members` and `sizes` of groups. `policy` orders the moves.
"""

from scheduling.online.policies.ours.policy import Ours as Ours
from scheduling.online.policies.ours.settings import Settings as Settings
