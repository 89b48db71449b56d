"""Which sample of which adapter runs when: plans for several LoRA adapters that share one base model.

Knows only lengths; standard library and numpy (scipy inside one file).
"""

from scheduling.bounds import lower_bound as lower_bound
from scheduling.errors import PlanError as PlanError
from scheduling.planner import make_plan as make_plan
from scheduling.types import AdapterJob as AdapterJob
from scheduling.types import Plan as Plan
from scheduling.types import SampleRef as SampleRef
from scheduling.types import Slot as Slot
from scheduling.verify import Violation as Violation
from scheduling.verify import find_violations as find_violations
from scheduling.verify import verify_plan as verify_plan
