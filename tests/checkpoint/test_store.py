"""Checkpoints that cannot be written."""

from __future__ import annotations

import time

import numpy as np
import pytest

from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.errors import RunError

THREADS_END_S = 0.5  # those of the writer, after its error


@pytest.mark.parametrize("slots", [(), (3,)])
def test_a_disk_that_takes_no_checkpoint_is_told_once(slots, tmp_path, request, capfd):
    store = StateStore(tmp_path / "run" / "state")
    (tmp_path / "run").mkdir()
    for slot in slots:
        store.save(slot, {"a": np.zeros(4)}, {"slot": slot})
    request.getfixturevalue("no_large_files")
    arrays = {f"a{number}": np.random.default_rng(number).random(100_000) for number in range(8)}
    with pytest.raises(RunError, match=r"save\.failed") as caught:
        store.save(9, arrays, {"slot": 9})
    time.sleep(THREADS_END_S)
    assert "File too large" in caught.value.why
    does = "continues: the checkpoint of slot 3 is intact" if slots else "starts again: no checkpoint was written yet"
    assert caught.value.fix.endswith(f"lorafusion resume {tmp_path / 'run'} {does}")
    assert "Traceback" not in capfd.readouterr().err
