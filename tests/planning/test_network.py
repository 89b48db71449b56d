"""Links between the hosts of a run: where they are, and what the stages wait for them."""

from __future__ import annotations

import pytest

from lorafusion_jax.config.run_sections import MeshSettings
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.planning.network import network_of, with_network
from scheduling import AdapterJob, CostModel, LinkCost, PassCost, StageCost, make_plan, simulate

UNIT = StageCost(forward=PassCost(fixed_s=1.0), backward=PassCost(fixed_s=1.0))
NEAR = LinkCost(fixed_s=1e-5, token_s=1e-9)


def costs(stages):
    return CostModel(stages=(UNIT,) * stages, transfer_s=NEAR.fixed_s, transfer_token_s=NEAR.token_s, source="by hand")


@pytest.mark.parametrize(
    ("stages", "data", "processes", "far"),
    [
        (4, 1, 1, []),
        (4, 1, 2, [1]),  # stages 0 and 1 are in one process
        (4, 1, 4, [0, 1, 2]),
        (2, 2, 2, []),  # each has both stages of a replica
        (2, 2, 4, [0]),
    ],
)
def test_the_links_between_processes_are_those_of_hosts(stages, data, processes, far):
    network = network_of("h200", processes, gigabytes=2, microseconds=30)
    linked = with_network(costs(stages), MeshSettings(stages=stages, data=data), network, token_bytes=1000)
    slow = LinkCost(fixed_s=30e-6, token_s=1000 / 2e9)
    assert [linked.link(stage) for stage in range(stages - 1)] == [
        slow if stage in far else NEAR for stage in range(stages - 1)
    ]
    assert ("links of 2 GB/s and 30 µs" in linked.source) == bool(far)


def test_replicas_of_a_process_share_its_link():
    linked = with_network(
        costs(2), MeshSettings(stages=2, data=2, fsdp=2), network_of("h200", 4, gigabytes=1), token_bytes=1000
    )
    assert linked.link(0).token_s == pytest.approx(2 * 1000 / 1e9)  # two replicas of one copy of the base


def test_processes_that_cannot_share_a_mesh_are_refused():
    with pytest.raises(ConfigError, match=r"mesh\.processes.* 2 processes cannot share"):
        with_network(costs(3), MeshSettings(stages=3), network_of("h200", 2), token_bytes=1)


def test_stages_wait_for_a_slow_link():
    """A message takes four passes. Two microbatches are under way: 1 + 4 + 2 + 4 + 1 units for two slots, of which a
    stage works in four."""
    plan = make_plan([AdapterJob("a", [128] * 64, 64)], capacity_tokens=128, num_stages=2)
    network = network_of("cpu", 2, gigabytes=128e-9, microseconds=0)  # 128 bytes a second
    linked = with_network(costs(2), MeshSettings(stages=2), network, token_bytes=4)
    near, far = (simulate(plan, model).bubble_share for model in (costs(2), linked))
    assert near == pytest.approx(0.0, abs=1e-4)
    assert far == pytest.approx(2 / 3, abs=0.01)
