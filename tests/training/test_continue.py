"""An exported adapter is where the next run starts."""

from lorafusion_jax.config import load_config
from lorafusion_jax.report.summary import final_rows
from lorafusion_jax.training import train


def test_a_peft_folder_continues_where_it_ended(write_job, write_rows, tmp_path):
    adapter = {
        "name": "law",
        "data": {"train": write_rows("law", 9, longest=8), "eval": write_rows("held", 4, longest=8)},
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "optim": {"lr": 1e-2},
        "batch": {"global_samples": 3},
    }
    train(load_config(write_job([adapter])), tmp_path / "first")
    adapter["lora"]["init_from"] = str(tmp_path / "first" / "adapters" / "law" / "latest")
    train(load_config(write_job([adapter])), tmp_path / "second")
    first, second = final_rows(tmp_path / "first")["law"], final_rows(tmp_path / "second")["law"]
    assert second["before"] == first["after"]  # the same weights, so the same float
    assert first["before"] != first["after"] != second["after"]
