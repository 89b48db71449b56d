"""Experiment trackers, loaded only for jobs that enable them. A tracker that fails never ends a run."""

from lorafusion_jax.report.trackers.open import handovers as handovers
from lorafusion_jax.report.trackers.open import missing_packages as missing_packages
from lorafusion_jax.report.trackers.open import trackers as trackers
