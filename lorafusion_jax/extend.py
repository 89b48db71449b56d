"""What packages import to extend lorafusion-jax: one object per extension, found by its entry point.

    from lorafusion_jax.extend import Schedule

Nothing here imports jax. `docs/pages/extending.md` has an example of each; `docs/pages/stability.md` says what stays.
"""

from lorafusion_jax.adapters.kind import AdapterKind as AdapterKind
from lorafusion_jax.adapters.kind import Leaf as Leaf
from lorafusion_jax.config.data_sources import Source as Source
from lorafusion_jax.families.family import Family as Family
from lorafusion_jax.objective import Objective as Objective
from lorafusion_jax.objective import Sample as Sample
from lorafusion_jax.objective import Segment as Segment
from lorafusion_jax.optim.schedules import Schedule as Schedule
from lorafusion_jax.optim.table import Optimizer as Optimizer
from lorafusion_jax.weights.table import ArraySpec as ArraySpec
from lorafusion_jax.weights.table import StoredKind as StoredKind
