"""lorafusion simulate: tables, plots and pages from a trace; invalid traces are errors."""

import json

import pytest
from typer.testing import CliRunner

from lorafusion_jax.cli.main import app, run
from scheduling.online import Worker, generate_trace, write_trace


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(write_trace(generate_trace("steady", jobs=12, workers=[Worker("host0", 8)], seed=1)))
    return path


def test_policies_are_compared_in_a_table_and_drawn(trace, tmp_path):
    page = tmp_path / "new" / "replay.html"
    told = CliRunner().invoke(app, ["simulate", str(trace), "--gpus", "8", "--policy", "ours", "fifo", "-o", str(page)])
    assert told.exit_code == 0, told.output
    assert [line.split()[0] for line in told.output.splitlines()[1:3]] == ["ours", "fifo"]
    assert "12 jobs on 8 GPUs" in page.read_text()
    assert page.with_suffix(".svg").read_text().startswith("<svg")


def test_policies_may_follow_an_example(tmp_path):
    """The first free word behind `--policy ours` is a policy, as printed in the help, not a trace."""
    example = ["--example", str(tmp_path / "made-up.csv"), "--gpus", "8", "--policy", "fifo", "srtf"]
    told = CliRunner().invoke(app, ["simulate", *example, "-o", str(tmp_path / "a.html")])
    assert told.exit_code == 0, told.output
    assert [line.split()[0] for line in told.output.splitlines()[1:3]] == ["fifo", "srtf"]


def test_json_has_every_figure(trace, tmp_path):
    told = CliRunner().invoke(app, ["simulate", str(trace), "--gpus", "8", "--json", "-o", str(tmp_path / "a.html")])
    answer = json.loads(told.output)
    assert answer["jobs"] == 12
    assert {"jct_mean_s", "jct_p99_s", "utilisation", "slowdown_p99", "fairness"} <= answer["policies"]["ours"].keys()


def test_slower_gpus_take_longer(trace, tmp_path):
    told = ["simulate", str(trace), "--gpus", "8", "--policy", "fifo", "--json", "-o", str(tmp_path / "a.html")]
    answers = [json.loads(CliRunner().invoke(app, [*told, *more]).output) for more in ((), ("--device", "a100"))]
    means = [answer["policies"]["fifo"]["jct_mean_s"] for answer in answers]
    assert means[1] > 2 * means[0]  # a third of the products of an H200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "luck"], "simulate.policy"),
        (["--device", "tpu"], "plan.device"),
        (["-o", "page.txt"], "output.ending"),
        (["--gpus", "1"], "online.job-too-large"),
    ],
)
def test_invalid_arguments_exit_with_2(trace, tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    big = generate_trace("steady", jobs=3, workers=[Worker("host0", 8)], seed=1, bases={"llama-3.1-70b": 1.0})
    trace.write_text(write_trace(big))
    assert run(["simulate", str(trace), *arguments]) == 2
    assert message in capfd.readouterr().err


def test_a_broken_trace_names_its_line(trace, capfd):
    lines = trace.read_text().splitlines()
    trace.write_text(
        "\n".join([*lines[:2], lines[2].replace("llama", "lama").replace("qwen", "qven").replace("mis", "miss")])
    )
    assert run(["simulate", str(trace)]) == 2
    told = capfd.readouterr().err
    assert "online.unknown-base" in told
    assert f"{trace} line 3" in told.replace("\n", "")


def test_a_spreadsheets_text_is_read_and_another_encoding_is_named(trace, tmp_path, capfd):
    page, text = tmp_path / "a.html", trace.read_text()
    trace.write_text(text, encoding="utf-8-sig")
    assert run(["simulate", str(trace), "--gpus", "8", "-o", str(page)]) == 0
    trace.write_bytes(text.replace("user0", "us\xe9r").encode("latin-1"))
    assert run(["simulate", str(trace), "--gpus", "8", "-o", str(page)]) == 2
    assert "simulate.trace" in capfd.readouterr().err


def test_an_example_is_made_and_can_be_simulated_again(tmp_path):
    trace, page = tmp_path / "new" / "trace.csv", tmp_path / "a.html"
    told = CliRunner().invoke(app, ["simulate", "--example", str(trace), "--gpus", "16", "--json", "-o", str(page)])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["jobs"] == 60
    again = CliRunner().invoke(app, ["simulate", str(trace), "--gpus", "16", "--json", "-o", str(page)])
    assert json.loads(again.output)["policies"] == json.loads(told.output)["policies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "simulate.trace"),
        (["TRACE", "--example", "other.csv"], "simulate.trace"),
        (["--example", "TRACE"], "simulate.exists"),
    ],
)
def test_one_trace_is_simulated_and_none_is_replaced(trace, arguments, message, capsys):
    content = trace.read_text()
    assert run(["simulate", *(str(trace) if word == "TRACE" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert trace.read_text() == content
