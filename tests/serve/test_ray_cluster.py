"""Workers on a Ray cluster of simulated nodes. Needs the extra ray; run by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
from campaigns.node_kills import Nodes
from campaigns.service_process import PATIENCE_S, Server, specs, wait_for
from campaigns.service_trials import faults_of
from safetensors.numpy import load_file
from small_jobs import write_rows

from lorafusion_jax.serve.client import Client

# Ray leaves files open, and forks beside the threads of jax.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    environment = pytest.MonkeyPatch()
    environment.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of workers, which the nodes start
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, namespace="lorafusion", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    environment.undo()


def serve(home, base, address):
    from lorafusion_jax.serve.control.controller import Controller
    from lorafusion_jax.serve.server import open_database
    from lorafusion_jax.serve.settings import Settings

    settings = Settings(
        home=home,
        bases={"tiny": base},
        places={4: 2},
        gpus=0,
        ray=address,
        workers_at=("127.0.0.1", 17071),
        reproducible=True,
        save_s=1.0,
        lease_s=20.0,
        base={"dtype": "float32"},
        batch={"capacity_tokens": 128, "tile_tokens": 16},
        train={"block_layers": 1},
    )
    db = open_database(settings)
    return db, Controller(settings, db)


def submit(db, name: str) -> str:
    from lorafusion_jax.serve.store.jobs import Jobs

    spec = {
        "name": name, "base": "tiny", "data": {"train": "rows", "max_length": 32, "on_long": "drop"}, "seed": 3,
        "lora": {"rank": 4, "targets": ["q_proj"]}, "optim": {"lr": 0.01}, "objective": {}, "weight": 1.0,
        "batch": {"global_samples": 4}, "steps": None, "epochs": 200,
    }  # fmt: skip
    with db.write() as connection:
        return Jobs(db).submit(connection, "ana", spec)["id"]


def show(db, job: str) -> dict:
    from lorafusion_jax.serve.store.jobs import Jobs

    with db.read() as connection:
        row = Jobs(db).get(connection, job)
    assert row["state"] not in ("failed", "rejected"), json.dumps({key: str(value) for key, value in row.items()})
    return row


def test_a_job_survives_its_node_and_a_restart_of_the_server(cluster, tmp_path, tiny_base):
    home = tmp_path / "home"
    (home / "datasets" / "rows").mkdir(parents=True)
    shutil.copyfile(tmp_path / write_rows(tmp_path, "rows", 16, longest=10), home / "datasets" / "rows" / "data.jsonl")
    db, controller = serve(home, tiny_base, cluster.address)
    controller.start()
    alone = submit(db, "alone")
    wait_for(lambda: show(db, alone)["state"] == "done")
    moved = submit(db, "moved")
    wait_for(lambda: show(db, moved)["state_step"] >= 1)
    controller.close(stop_worker=False)  # as a kill leaves it: the worker is a detached actor
    db.close()
    db, controller = serve(home, tiny_base, cluster.address)
    controller.start()
    wait_for(lambda: controller.connected)
    assert show(db, moved)["tries"] == 0  # it trained on
    lost = next(node for node in cluster.worker_nodes)
    cluster.add_node(num_cpus=1)
    cluster.remove_node(lost, allow_graceful=False)
    wait_for(lambda: show(db, moved)["state"] == "done")
    assert show(db, moved)["tries"] == 1
    controller.close()
    db.close()
    ours, theirs = (
        load_file(next((home / "jobs" / job / "adapter").glob("step-*")) / "adapter_model.safetensors")
        for job in (moved, alone)
    )
    assert [key for key in ours if not (ours[key] == theirs[key]).all()] == []


def test_jobs_survive_the_head_of_the_cluster(tmp_path, tiny_base):
    """The server accepts jobs without it, and goes on once there is another head at its address."""
    nodes = Nodes(17073)
    server = Server(tmp_path / "home", tiny_base, save_s=0.3, lease_s=4.0, more=options(nodes))
    server.start()
    ((owner, spec),) = specs(tmp_path, 1, epochs=60)
    client = Client(server.url, server.keys[owner])
    alone = client.submit(spec).wait(PATIENCE_S)
    weights = load_file(alone.adapter(tmp_path / "alone") / "adapter_model.safetensors")
    moved = client.submit(spec)
    wait_for(lambda: moved.show()["step"] >= 1)
    nodes.close()
    wait_for(lambda: moved.show()["state"] == "queued")
    later = client.submit(spec)
    wait_for(lambda: later.show()["state"] == "queued")
    other = Nodes(17073)
    try:
        for job in (moved, later):
            job.wait(PATIENCE_S)
            assert faults_of(server, owner, job.id, weights, tmp_path) == []
        assert later.show()["tries"] == 0
    finally:
        server.end(signal.SIGTERM)
        other.close()


def options(nodes: Nodes) -> tuple[str, ...]:
    return "--ray", nodes.address, "--workers-at", "127.0.0.1:17072", "--gpus", "0"


HELD = """
import json, sys, ray
ray.init(address=sys.argv[1], namespace="lorafusion", log_to_driver=False)
rooms = [room["name"] for room in ray.util.placement_group_table().values() if room["state"] != "REMOVED"]
print(json.dumps(rooms + ray.util.list_named_actors()))
"""


def held(nodes: Nodes) -> list[str]:
    """Names of the placement groups and actors of a cluster."""
    command = [sys.executable, "-c", HELD, nodes.address]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_what_a_service_held_is_given_back(tmp_path, tiny_base):
    """By SIGTERM to the server at once; after a kill of the server when its worker ends."""
    nodes = Nodes()
    server = Server(tmp_path / "home", tiny_base, save_s=0.3, lease_s=4.0, more=options(nodes))
    ((owner, spec),) = specs(tmp_path, 1, epochs=4000)
    try:
        for how in (signal.SIGTERM, signal.SIGKILL):
            server.start()
            client = Client(server.url, server.keys[owner])
            job = client.submit(spec)
            wait_for(lambda job=job: job.show()["step"] >= 1)
            assert len(held(nodes)) == 2
            worker = server.worker()
            server.end(how)
            if how == signal.SIGKILL:
                assert len(held(nodes)) == 2  # it trains on
                os.kill(worker, signal.SIGKILL)
            wait_for(lambda: not held(nodes))
    finally:
        nodes.close()
