"""The objectives that job files can name. Never imports jax.

To add one, add a row. Other packages can install an entry point of the group `lorafusion_jax.objectives` that loads an
`Objective`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lorafusion_jax.objective.cit import CIT
from lorafusion_jax.objective.cpo import CPO, ORPO, SIMPO
from lorafusion_jax.objective.distill import DISTILL
from lorafusion_jax.objective.dpo import DPO, IPO
from lorafusion_jax.objective.kto import KTO
from lorafusion_jax.objective.policy import CISPO, DFT, GRPO, GSPO, IMPORTANCE_SAMPLING, REINFORCE, RLOO
from lorafusion_jax.objective.ppo import PPO
from lorafusion_jax.objective.protocol import SFT, Objective
from lorafusion_jax.objective.reward import REWARD

OBJECTIVES: Mapping[str, Objective] = {
    "sft": SFT.objective,
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
    "orpo": ORPO,
    "simpo": SIMPO,
    "cpo": CPO,
    "grpo": GRPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "ppo": PPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
    "importance_sampling": IMPORTANCE_SAMPLING,
    "dft": DFT,
    "cit": CIT,
    "distill": DISTILL,
    "reward": REWARD,
}
