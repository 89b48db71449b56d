"""Rewards, functions within limits, and advantages; what functions may do wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest

from lorafusion_jax.config.rollout_section import RolloutSettings, read_rewards
from lorafusion_jax.data.rollouts import PromptRow
from lorafusion_jax.errors import RunError
from lorafusion_jax.rollout.drawn import advantages_of
from lorafusion_jax.rollout.functions import Functions
from lorafusion_jax.rollout.rewards import rewards_of

CODE = """
import os, signal, subprocess, time
from pathlib import Path

def lengths(completions): return [len(text) for text in completions]
def some(prompts, completions, answer, **columns):
    print("heard by nobody")
    rows = zip(prompts, completions, answer)
    return [None if right is None else float(prompt in text) for prompt, text, right in rows]
def raises(completions): return [1 / 0 for _ in completions]
def decodes(completions): return __import__("json").loads("no")
def leaves(completions): os._exit(7)
def exits(completions): raise SystemExit("enough")
def hangs(completions): time.sleep(60)
def nan(completions): return [float("nan")] * len(completions)
def huge(completions): return [1e9] * len(completions)
def short(completions): return [1.0]
def text(completions): return "good"
def words(completions): return ["good"] * len(completions)
def large(completions): return bytearray(1 << 40)
def fills(completions):
    for number in range(1000):
        Path(f"part-{number}").write_bytes(bytes(1 << 20))
    time.sleep(60)
def tool(row, turns): fills(turns)
def one_file(completions):
    with open("whole", "wb") as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
def talks(completions):
    for _ in range(3):
        print("x" * (1 << 20) + "mega", flush=True)
    return [1.0] * len(completions)
def is_told_to_end(completions):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return [float(subprocess.call(["sh", "-c", "kill -TERM $$"])) for _ in completions]
def starts_others(completions):
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)
"""
PROMPTS = [
    PromptRow(prompt=prompt, tokens=[1], row={"prompt": prompt, "answer": answer})
    for prompt, answer in (("a", "x"), ("b", None), ("c", "z z"))
]
TEXTS = ["a!", "b", " z z\n"]


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "code.py").write_text(CODE)
    functions = Functions(RolloutSettings(timeout_s=2.0, disk_mb=5.0, memory_gb=2.0), folder, folder / "log")
    yield functions
    functions.close()


def reward(functions, *rewards):
    return rewards_of(read_rewards(list(rewards)), PROMPTS, TEXTS, functions)


def test_rewards_are_added_with_their_weights(functions):
    summed = reward(functions, {"exact": "answer", "weight": 2}, {"match": "^[ab]"}, "code.py:some")
    assert summed.tolist() == [0 + 1 + 1, 0 + 1, 2 + 0 + 0]  # `some` does not judge the second
    assert np.isnan(reward(functions, "code.py:some")).tolist() == [False, True, False]
    assert reward(functions, {"function": "code.py:lengths", "weight": -0.5}).tolist() == [-1, -0.5, -2.5]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "ZeroDivisionError: division by zero, line 10 of code.py"),
        ("exits", "SystemExit: enough"),
        ("leaves", "code 7"),
        ("hangs", "timeout_s=2"),
        ("starts_others", "timeout_s=2"),
        ("nan", "completion 0 has the reward nan"),
        ("huge", "1000000000"),
        ("short", "1 numbers for 3 completions"),
        ("text", "TypeError: it returned str, not a list with a number for each completion."),
        ("words", "could not convert"),
        ("decodes", "line 1 column 1 (char 0), line 11 of code.py"),
        ("large", "MemoryError"),
        ("fills", "disk_mb=5"),
        ("one_file", "File too large"),
    ],
)
def test_what_goes_wrong_is_named_and_the_next_call_works(functions, name, says):
    with pytest.raises(RunError) as raised:
        reward(functions, f"code.py:{name}")
    assert says in str(raised.value)
    assert f"code.py:{name}" in str(raised.value)
    assert reward(functions, "code.py:lengths").tolist() == [2, 1, 5]


def test_what_functions_print_counts_as_no_file_of_theirs(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    functions = Functions(RolloutSettings(disk_mb=5.0), tmp_path, log := tmp_path / "log")
    try:
        for _ in range(4):  # 12 MB
            assert reward(functions, "code.py:talks").tolist() == [1.0, 1.0, 1.0]
    finally:
        functions.close()
    logs = [tmp_path / "log.before", log]
    assert all(0 < file.stat().st_size <= 5 << 20 for file in logs)
    printed = "".join(file.read_text() for file in logs)
    assert printed.endswith("mega\n")
    assert printed.count("mega\n") * (1 << 20) > 5 << 20  # the newest


def test_functions_end_with_the_run_and_not_before(functions, tmp_path):
    """A cluster's scheduler tells every process of a run to end, and the run saves; what functions start does end."""
    assert reward(functions, "code.py:is_told_to_end").tolist() == [-signal.SIGTERM] * 3
    code = (
        f"import sys; sys.path[:] = {sys.path}; from pathlib import Path; "
        "from lorafusion_jax.config.rollout_section import RolloutSettings; "
        "from lorafusion_jax.rollout.functions import Functions; "
        f"functions = Functions(RolloutSettings(), Path('{tmp_path}')); "
        "functions.call('match', 'a', {'completions': []}); "
        "print(functions._process.pid, flush=True); "
        "functions.call('function', 'code.py:hangs', {'prompts': [], 'completions': [], 'columns': {}})"
    )
    (tmp_path / "code.py").write_text(CODE)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        process = psutil.Process(int(run.stdout.readline()))
        run.kill()
    process.wait(30)


def test_functions_import_what_the_caller_can(tmp_path, monkeypatch):
    (tmp_path / "words.py").write_text("GOOD = 3.0")
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "code.py").write_text("import words\ndef good(completions): return [words.GOOD] * len(completions)")
    monkeypatch.chdir(tmp_path)
    functions = Functions(RolloutSettings(), folder)
    try:
        assert reward(functions, "code.py:good").tolist() == [3.0, 3.0, 3.0]
    finally:
        functions.close()


def test_a_tool_has_the_limits_of_rewards(functions):
    with pytest.raises(RunError, match=r"code\.py:tool .*disk_mb=5"):
        functions.call("tool", "code.py:tool", {"turns": [[PROMPTS[0].row, ["a!"]]]})
    assert reward(functions, "code.py:lengths").tolist() == [2, 1, 5]


def test_a_slow_regular_expression_ends(functions):
    with pytest.raises(RunError, match="took longer"):
        rewards_of(read_rewards({"match": "(a|a)*b"}), PROMPTS[:1], ["a" * 40], functions)


def test_the_folder_of_functions_is_deleted(functions):
    reward(functions, "code.py:lengths")
    scratch = Path(functions._scratch)
    assert scratch.is_dir()
    functions.close()
    assert not scratch.exists()


def test_folders_of_killed_runs_are_deleted_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, next_run = (Functions(RolloutSettings(), tmp_path) for _ in range(2))
    killed, unlike = tmp_path / "lorafusion-functions-killed", tmp_path / "lorafusion-other"
    killed.mkdir()
    unlike.mkdir()
    try:
        reward(living, {"match": "a"})
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))
        reward(next_run, {"match": "a"})
        assert set(tmp_path.iterdir()) == {unlike, Path(living._scratch), Path(next_run._scratch)}
    finally:
        living.close()
        next_run.close()


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = [float(len(text)) for text in asked["completions"]]
        body = json.dumps({"rewards": rewards if self.path == "/good" else rewards[1:]}).encode()
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_an_address_judges(functions):
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert reward(functions, {"url": f"{address}/good"}).tolist() == [2, 1, 5]
        for path, says in (("short", "2 numbers for 3 completions"), ("broken", "HTTP Error 500")):
            with pytest.raises(RunError, match=says):
                reward(functions, {"url": f"{address}/{path}"})
        server.shutdown()
    with pytest.raises(RunError, match="refused"):
        reward(functions, {"url": f"{address}/good"})


def test_advantages_are_the_formulas():
    rewards = np.random.default_rng(0).normal(size=(3, 4))
    mean, centred = rewards.mean(1, keepdims=True), rewards - rewards.mean(1, keepdims=True)
    others = (rewards.sum(1, keepdims=True) - rewards) / 3
    expected = {
        "group": centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4),
        "batch": centred / (rewards.std(ddof=1) + 1e-4),
        "mean": rewards - mean,
        "leave_one_out": rewards - others,
        "global": rewards - rewards.mean(),
        "none": rewards,
    }
    for estimator, advantages in expected.items():
        np.testing.assert_allclose(advantages_of(rewards, estimator), advantages, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ["group", "batch", "mean", "leave_one_out", "global"])
def test_equal_rewards_have_no_advantage_by_rounding(estimator):
    rewards = np.array([[0.7] * 6, [0.7] * 5 + [np.nan]])  # sums of 0.7 round
    assert not advantages_of(rewards, estimator).any()


@pytest.mark.parametrize("estimator", ["group", "batch", "mean", "leave_one_out", "global", "none"])
def test_an_answer_that_is_not_judged_changes_nothing(estimator):
    judged = np.array([[1.0, 2.0, 4.0], [3.0, 3.0, 0.0]])
    with_hole = np.concatenate([judged, np.full((2, 1), np.nan)], axis=1)
    advantages = advantages_of(with_hole, estimator)
    assert advantages[:, 3].tolist() == [0, 0]
    np.testing.assert_allclose(advantages[:, :3], advantages_of(judged, estimator), rtol=1e-12)
    alone = advantages_of(np.array([[np.nan, np.nan, 2.0]]), estimator)
    assert np.isfinite(alone).all()
