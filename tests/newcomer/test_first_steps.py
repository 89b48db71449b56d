"""A newcomer in an empty folder: the job file and the commands of README and "Get started", as they are printed there.

Their base is the tiny one of the examples, under the name that the pages use, and their data are rows of the examples.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import yaml

from lorafusion_jax.cli.main import run
from lorafusion_jax.examples import examples_directory

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "pages"
README, START = ROOT / "README.md", DOCS / "get-started.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROWS = {"law": 40, "law_eval": 6, "chat": 24}
# Pages whose commands run nightly on a run of two adapters, and commands of theirs that need more than a CPU.
ON_A_RUN = {
    "generate.md": ("lorafusion chat",),  # a terminal: cli/test_generate_command.py
    "handover.md": ("lorafusion handover", "--push", "--merge"),  # servers and a hub: cli/test_handover*.py
    "planning.md": (),
    "quantised.md": (),
    "several-gpus.md": ("sbatch", "examples/demo.yaml"),  # a cluster; the demo on four devices
}
# Pages whose commands run elsewhere, or nowhere: why.
NOT_HERE = {
    "README.md": "below, with its own job",
    "get-started.md": "below, with its own job",
    "cluster.md": "wants Ray on several nodes; serve/test_ray_cluster.py has simulated ones",
    "kernels.md": "a GPU and its tools; cli/test_tune.py",
    "online.md": "cli/test_simulate_command.py",
    "service.md": "serve/test_acceptance.py",
    "training-api.md": "serve/test_acceptance.py and peers/",
}
SMALL = {
    "base": {"model": "models/Llama-3.1-8B"},
    "data": {"max_length": 128, "train": "data/law.jsonl"},
    "batch": {"capacity_tokens": 128, "global_samples": 8},
    "train": {"block_layers": 1, "max_steps": 2},
    "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]},
    "adapters": [{"name": "law"}, {"name": "med"}],
}


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def shown(page: Path) -> list[str]:
    """Every command line in a block of commands, with its continuation, without prompt and comment."""
    texts = [block.replace("\\\n", " ") for language in ("", "console") for block in blocks(page, language)]
    lines = [re.sub(r"\s{2,}#.*", "", line.removeprefix("$ ")) for text in texts for line in text.splitlines()]
    return [
        line
        for line in lines
        if re.match(r"([A-Z_]+=\S+ |srun |sbatch |python -m |[\w.]*/)*lorafusion |sbatch|ray ", line)
    ]


def commands(page: Path) -> list[list[str]]:
    """The commands of the command-line section, in order, without comments."""
    text = page.read_text(encoding="utf-8")
    if page == START:
        table = text[text.index("## Commands") : text.index("## Models and data")]
        lines = re.findall(r"^\| `(lorafusion [^`]+)`", table, re.MULTILINE)
    else:
        lines = [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("lorafusion ")]
    return [shlex.split(re.sub(r" \[[^]]*\]", "", line.partition("   #")[0])) for line in lines]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """What the pages take for granted: models/Llama-3.1-8B and data/*.jsonl."""
    monkeypatch.chdir(tmp_path)
    examples = examples_directory()
    shutil.copytree(examples / "base", tmp_path / "models" / "Llama-3.1-8B")
    (tmp_path / "data").mkdir()
    for name, count in ROWS.items():
        source = "ask_eval" if name.endswith("_eval") else "ask"
        with (examples / "data" / f"{source}.jsonl").open(encoding="utf-8") as file:
            (tmp_path / "data" / f"{name}.jsonl").write_text("".join(islice(file, count)), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("page", [README, START], ids=["readme", "get-started"])
def test_the_job_file_of_the_page_is_checked_previewed_and_planned(page, folder, capsys):
    (job,) = blocks(page, "yaml")
    (folder / "jobs.yaml").write_text(job)
    shown = {words[1]: words[1:] for words in commands(page)}
    for name in ("check", "data", "plan"):
        if name in shown:
            assert run(shown[name]) == 0, capsys.readouterr().err
    assert (folder / "plan.json").is_file()
    assert "chat-lr2e-4" in capsys.readouterr().out


def test_the_first_job_file_that_init_prints_loads(folder, capsys):
    assert run(["init"]) == 0
    (folder / "jobs.yaml").write_text(capsys.readouterr().out)
    run(["check", "jobs.yaml"])
    assert "error[config." not in capsys.readouterr().err


def in_shell(binaries: Path, words: list[str], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "XLA_", "JAX_"))}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
    done = subprocess.run(words, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def binaries(tmp_path_factory) -> Path:
    """bin folder of an environment with the wheel, and nothing of the checkout."""
    home = tmp_path_factory.mktemp("installed")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "build", "--quiet", "--wheel", "--out-dir", home / "dist", ROOT], check=True, cwd=home)
    (wheel,) = (home / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    lock = ROOT / "requirements.lock"
    python = home / "venv" / "bin" / "python"
    subprocess.run([*uv, "pip", "install", "-q", "--python", python, "--constraint", lock, wheel], check=True, cwd=home)
    return home / "venv" / "bin"


# They need an interrupted or running run, a GPU, a terminal, or the extra `serve`.
LATER = ("resume", "add", "tune", "generate", "chat", "serve")


@pytest.mark.nightly
@pytest.mark.parametrize("page", [README, START], ids=["readme", "get-started"])
def test_every_command_of_the_page_runs_from_an_installed_wheel(page, folder, binaries):
    (job,) = blocks(page, "yaml")
    (folder / "jobs.yaml").write_text(job)
    for words in commands(page):
        if words[1] in LATER:
            continue
        words = [word for word in words if word != "--watch"]
        in_shell(binaries, words, folder)
    exported = {path.name for path in (folder / "out" / "law").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= exported


def test_every_page_with_commands_runs_or_says_why_not():
    with_commands = {page.name for page in [README, *DOCS.glob("*.md")] if shown(page)}
    assert with_commands == set(ON_A_RUN) | set(NOT_HERE)


@pytest.mark.nightly
@pytest.mark.parametrize("page", ON_A_RUN)
def test_commands_of_a_page_run_on_a_finished_run(page, folder, binaries):
    """Where a page shows several ways into one run folder, each finds it new."""
    (folder / "jobs.yaml").write_text(yaml.safe_dump(SMALL))
    (folder / "prompts.jsonl").write_text('{"prompt": "Who may appeal?"}\n')
    before = ["lorafusion train jobs.yaml --out runs/exp1", "lorafusion export runs/exp1 law --to out/law"]
    lines = before[: 1 if page == "handover.md" else 2]  # it exports itself
    lines += [line for line in shown(DOCS / page) if not any(part in line for part in ON_A_RUN[page])]
    for line in lines:
        words = shlex.split(line)
        if words[:2] == ["lorafusion", "train"]:
            shutil.rmtree(folder / words[words.index("--out") + 1], ignore_errors=True)
        in_shell(binaries, ["env", "JAX_NUM_CPU_DEVICES=8", *words], folder)
