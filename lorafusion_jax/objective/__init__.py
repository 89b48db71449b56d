"""Objectives of training. Their table and protocol need no jax; the token losses that they use are in `loss`."""

from lorafusion_jax.objective.protocol import Objective as Objective
from lorafusion_jax.objective.protocol import Sample as Sample
from lorafusion_jax.objective.protocol import Segment as Segment
