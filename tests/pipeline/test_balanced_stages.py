"""The choices of routers go from a stage to the next also where that is in another process."""

import pytest
from mixed import assert_equal, read_trained
from small_jobs import write_job, write_rows
from test_processes import BITWISE, start, wait

from lorafusion_jax.config import load_config
from lorafusion_jax.families.experts import Experts
from lorafusion_jax.training import train


@pytest.mark.nightly
def test_two_processes_train_with_a_loss_of_routers_as_one_does(make_base, kept_programs, tmp_path):
    experts = Experts(width=32, inner=12, count=5, active=2)
    base = make_base(tmp_path / "base", family="qwen3_moe", qk_norm=True, experts=experts)
    adapters = [
        {
            "name": "fir",
            "data": {"train": write_rows(tmp_path, "fir", 6, longest=8)},
            "lora": {"rank": 2, "targets": ["v_proj"]},
            "batch": {"global_samples": 3},
        }
    ]
    job = write_job(tmp_path, base, adapters, mesh={"stages": 2}, train={"router_aux": 3.0})
    assert train(load_config(job), tmp_path / "one").exit_code == 0
    left = wait(start(2, 1, "train", str(job), "--out", str(tmp_path / "two")))
    assert [process.code for process in left] == [0, 0], left[0].err + left[1].err
    assert_equal(read_trained(tmp_path / "one"), read_trained(tmp_path / "two"), BITWISE)
