"""Plans and simulates the training of several LoRA adapters that share one base model.

A plan says which sample of which adapter runs in which slot. Planning needs only sample lengths, the standard library
and numpy (scipy in one file). From lengths to a timeline:

>>> from scheduling import AdapterJob, default_cost_model, make_plan, simulate
>>> jobs = [AdapterJob("law", [700, 300, 512] * 8, 4), AdapterJob("med", [900, 100] * 9, 2)]
>>> plan = make_plan(jobs, capacity_tokens=2048, num_stages=4)
>>> timeline = simulate(plan, default_cost_model(num_stages=4))
>>> sorted(timeline.finish_s)
['law', 'med']
"""

from scheduling.baselines import batch_by_batch as batch_by_batch
from scheduling.baselines import one_after_another as one_after_another
from scheduling.baselines import tuned as tuned
from scheduling.bounds import formula_bound as formula_bound
from scheduling.bounds import lower_bound as lower_bound
from scheduling.comparison import TimelineComparison as TimelineComparison
from scheduling.comparison import compare_timelines as compare_timelines
from scheduling.cost_model import CostModel as CostModel
from scheduling.cost_model import LinkCost as LinkCost
from scheduling.cost_model import Measurement as Measurement
from scheduling.cost_model import PassCost as PassCost
from scheduling.cost_model import StageCost as StageCost
from scheduling.cost_model import fit_cost_model as fit_cost_model
from scheduling.cost_parts import CostParts as CostParts
from scheduling.cost_parts import GatherCost as GatherCost
from scheduling.cost_parts import read_cost_model as read_cost_model
from scheduling.cost_parts import shared_parts as shared_parts
from scheduling.cost_parts import stages_from_parts as stages_from_parts
from scheduling.errors import PlanError as PlanError
from scheduling.pipeline import Event as Event
from scheduling.pipeline import Program as Program
from scheduling.pipeline import forward_then_backward as forward_then_backward
from scheduling.pipeline import issue_order as issue_order
from scheduling.pipeline import one_forward_one_backward as one_forward_one_backward
from scheduling.plan import Plan as Plan
from scheduling.planner import make_plan as make_plan
from scheduling.plots import timeline_html as timeline_html
from scheduling.plots import timeline_svg as timeline_svg
from scheduling.plots import timeline_text as timeline_text
from scheduling.plots import to_perfetto as to_perfetto
from scheduling.rates import default_cost_model as default_cost_model
from scheduling.rates import default_cost_parts as default_cost_parts
from scheduling.replan import replan as replan
from scheduling.serialize import PlanOutline as PlanOutline
from scheduling.serialize import outline_from_lines as outline_from_lines
from scheduling.simulate import simulate as simulate
from scheduling.statistics import AdapterStatistics as AdapterStatistics
from scheduling.statistics import Limit as Limit
from scheduling.statistics import PlanStatistics as PlanStatistics
from scheduling.statistics import plan_statistics as plan_statistics
from scheduling.timeline import Pause as Pause
from scheduling.timeline import Span as Span
from scheduling.timeline import Timeline as Timeline
from scheduling.types import AdapterJob as AdapterJob
from scheduling.types import Layout as Layout
from scheduling.types import SampleRef as SampleRef
from scheduling.types import Slot as Slot
from scheduling.verify import Violation as Violation
from scheduling.verify import find_violations as find_violations
from scheduling.verify import verify_plan as verify_plan
