"""Online scheduling of jobs that arrive over time: which jobs share a group, on which GPUs and when; and its simulator.

>>> from scheduling.online import Job, Worker, simulate_cluster
>>> jobs = [Job(name, "ann", "llama-3.1-8b", 60.0 * i, [512, 700, 300], 8, 2000) for i, name in enumerate("abc")]
>>> result = simulate_cluster(jobs, [Worker("host0", 8)], policy="ours")
>>> sorted(result.finish_s) == ["a", "b", "c"]
True
"""

from scheduling.online.check import CheckedPolicy as CheckedPolicy
from scheduling.online.check import Refusal as Refusal
from scheduling.online.check import check_decisions as check_decisions
from scheduling.online.costs import ChangeCosts as ChangeCosts
from scheduling.online.facts import Facts as Facts
from scheduling.online.facts import ShapeFacts as ShapeFacts
from scheduling.online.facts import StageBytes as StageBytes
from scheduling.online.live import LiveCluster as LiveCluster
from scheduling.online.policies.ours import Ours as Ours
from scheduling.online.policies.ours import Settings as Settings
from scheduling.online.rates import Rates as Rates
from scheduling.online.result import ClusterResult as ClusterResult
from scheduling.online.shapes import SHAPES as SHAPES
from scheduling.online.shapes import ModelShape as ModelShape
from scheduling.online.sharing import GroupRate as GroupRate
from scheduling.online.sharing import Mesh as Mesh
from scheduling.online.simulator import POLICIES as POLICIES
from scheduling.online.simulator import make_policy as make_policy
from scheduling.online.simulator import simulate_cluster as simulate_cluster
from scheduling.online.state import ClusterState as ClusterState
from scheduling.online.state import Decision as Decision
from scheduling.online.state import GroupState as GroupState
from scheduling.online.state import JobState as JobState
from scheduling.online.state import Policy as Policy
from scheduling.online.state import UserState as UserState
from scheduling.online.traces import TRACES as TRACES
from scheduling.online.traces import TraceShape as TraceShape
from scheduling.online.traces import generate_trace as generate_trace
from scheduling.online.traces import read_trace as read_trace
from scheduling.online.traces import write_trace as write_trace
from scheduling.online.types import End as End
from scheduling.online.types import Fault as Fault
from scheduling.online.types import Job as Job
from scheduling.online.types import User as User
from scheduling.online.types import Worker as Worker
