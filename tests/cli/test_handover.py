"""What users take away: all adapters at once, other dtypes, results in the card, uploads, combined adapters."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors import safe_open

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.cli import export
from lorafusion_jax.digests import is_intact
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.servers import commands, why_not_in_vllm


def dtypes(folder) -> set[str]:
    with safe_open(folder / "adapter_model.safetensors", "np") as opened:
        return {str(opened.get_tensor(key).dtype) for key in opened.keys()}  # noqa: SIM118 (no mapping)


def test_all_adapters_are_exported_at_once_in_another_dtype(lorafusion, finished, tmp_path):
    _, run = finished
    to = tmp_path / "to law"
    outcome = lorafusion("export", run, "--all", "--dtype", "bfloat16", "--to", to)
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in to.iterdir()) == ["law", "med"]
    modules = f"'law={to / 'law'}' 'med={to / 'med'}'"
    assert f"--max-lora-rank 8 --lora-modules {modules}" in outcome.out
    assert "convert_lora_to_gguf.py --base" in outcome.out
    for name in ("law", "med"):
        folder = to / name
        assert dtypes(folder) == {"bfloat16"}
        assert is_intact(folder)
        (_, ours), (_, trained) = read_adapter(folder), read_adapter(run / "adapters" / name / "latest")
        for path, pair in ours.items():
            for tensor, wanted in zip(pair, trained[path], strict=True):
                np.testing.assert_allclose(tensor, wanted, rtol=2**-8, atol=1e-38)
    card = (to / "law" / "README.md").read_text()
    assert "| step | training loss | held-out loss |" in card
    assert "| 6 | " in card
    assert "Training loss of steps 1 to 6: `" in card
    again = lorafusion("export", run, "--all", "--to", to)
    assert (again.code, again.errors) == (2, ["export.exists"])


def test_many_exports_are_one_line(lorafusion, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MOST_LINES", 1)
    outcome = lorafusion("export", finished[1], "--all", "--to", tmp_path / "out")
    assert [line for line in outcome.out.splitlines() if "exported" in line or "re-read" in line] == [
        f"exported 2 adapters: {tmp_path / 'out'}/NAME, each read again"
    ]
    assert "Training loss of steps 1 to 4" in (tmp_path / "out" / "med" / "README.md").read_text()


@pytest.mark.parametrize(
    "arguments",
    [(), ("law", "--all"), ("law", "--dtype", "int4"), ("law", "--merge", "--dtype", "float32"), ("--all", "--merge"),
     ("law", "--push", "nothing")],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(lorafusion, finished, tmp_path, arguments):
    outcome = lorafusion("export", finished[1], *arguments, "--to", tmp_path / "out")
    assert (outcome.code, outcome.errors) == (2, ["export.options"])
    assert not (tmp_path / "out").exists()


def test_an_export_without_its_words_says_the_whole_command(lorafusion, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = lorafusion("export", finished[1])
    command = f"lorafusion export {finished[1]} law --to out/NAME"
    assert outcome.err.count(f"fix: {command}") == 2
    assert lorafusion(*command.split()[1:]).code == 0


def test_a_push_needs_the_hub_and_says_what_was_not_uploaded(lorafusion, finished, tmp_path, monkeypatch):
    calls = []

    class Client:
        def create_repo(self, name, **options):
            calls.append((name, options["private"]))

        def upload_folder(self, repo_id, folder_path):
            if "bad" in repo_id:
                raise OSError("no route")
            calls.append((repo_id, folder_path))

    push = ("export", finished[1], "law", "--push")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert lorafusion(*push, "org/law", "--to", tmp_path / "a").errors == ["export.no-hub"]
    assert not (tmp_path / "a").exists()
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Client))
    assert lorafusion(*push, "org/law", "--to", tmp_path / "a").code == 0
    assert calls == [("org/law", True), ("org/law", str(tmp_path / "a"))]
    outcome = lorafusion(*push, "org/bad", "--to", tmp_path / "b")
    assert outcome.errors == ["export.push"]
    assert "no route" in outcome.err
    assert (tmp_path / "b" / "adapter_config.json").is_file()


def test_adapters_of_a_run_are_combined(lorafusion, finished, tmp_path):
    _, run = finished
    outcome = lorafusion("combine", "law=0.7", "med=-0.3", "--run", run, "--to", tmp_path / "both")
    assert outcome.code == 0, outcome.err
    assert f"--base {RunFolder(run).read_config().base.model}" in outcome.out
    spec, _ = read_adapter(tmp_path / "both")
    ranks = [read_adapter(run / "adapters" / name / "latest")[0].rank for name in ("law", "med")]
    assert spec.rank == sum(ranks)
    for arguments in (("law",), ("law", "law=2"), ("law", "nobody"), ("law", "med=much")):
        assert lorafusion("combine", *arguments, "--run", run, "--to", tmp_path / "new").errors == ["combine.adapters"]
    assert not (tmp_path / "new").exists()


def test_other_programs_are_named_where_they_keep_the_meaning_of_an_adapter():
    plain = AdapterSpec(name="law", rank=16, alpha=32)
    folder = Path("out/law")
    assert len(commands("base", {"law": (plain, folder)})) == 2
    assert [line.split()[0] for line in commands("base", {"law": (replace(plain, rslora=True), folder)})] == ["vllm"]
    assert [line.split()[0] for line in commands("base", {"law": (replace(plain, rank=600), folder)})] == ["python"]
    assert commands("base", {"law": (replace(plain, kind="dora"), folder)}) == []
    mixed = commands("base", {"law": (plain, folder), "med": (replace(plain, kind="dora"), Path("out/med"))})
    assert "med" not in mixed[0]
    experts = replace(plain, targets=("q_proj", "experts_gate_up_proj", "experts_down_proj"))
    folders = {"law": (experts, folder), "med": (replace(plain, rslora=True), Path("out/med"))}
    assert "law=out/law med=out/med" in commands("base", folders, "gpt_oss")[0]
    assert "law" not in commands("base", folders, "mixtral")[0]  # vLLM would leave out the experts
    *_, law, med = shlex.split(commands("base", folders, "olmoe")[0])
    assert (json.loads(law), med) == ({"name": "law", "path": "out/law", "is_3d_lora_weight": True}, "med=out/med")
    assert "--enable-mixed-moe-lora-format" in commands("base", folders, "olmoe")[0]


@pytest.mark.parametrize(("model_type", "target", "why"), [
    ("bamba", "q_proj", "no LoRA for bamba"), ("glm4", "gate_up_proj", "gate_up_proj in two parts"),
    ("glm4", "o_proj", ""), ("phi3", "gate_up_proj", ""), ("gpt_neox", "query_key_value", ""),
    ("glm_moe_dsa", "experts", ""), ("lfm2_moe", "experts", ""), ("deepseek_v32", "experts", ""),
    ("nemotron_h", "experts", "nemotron_h's experts"), ("llama4", "o_proj", ""), ("olmo_hybrid", "g_proj", ""),
    ("", "q_proj", "depends on the base"), ("gpt2", "c_attn", "no LoRA for gpt2"),
    ("bailing_moe_v2", "attention_dense", ""), ("sarvam_mla", "experts", ""), ("exaone", "q_proj", "other names"),
    ("sarvam_moe", "experts", "other names"), ("lara_mini", "o_proj", "no class"),
])  # fmt: skip
def test_no_command_is_printed_for_what_vllm_does_not_load(model_type, target, why):
    on_experts = target == "experts"
    spec = AdapterSpec(name="law", rank=8, alpha=8, targets=tuple(EXPERTS) if on_experts else (target,))
    lines = commands("base", {"law": (spec, Path("out/law"))}, model_type)
    assert [line.split()[0] for line in lines] == ["vllm"] * (not why) + ["python"] * (not on_experts)
    assert any("--enable-mixed-moe-lora-format" in line for line in lines) is (not why and on_experts)
    assert why in (reason := why_not_in_vllm(spec, model_type))
    assert bool(reason) is bool(why)


def test_an_export_names_no_folder_of_its_run_and_its_card_is_one_for_the_hub(lorafusion, finished, tmp_path):
    _, run = finished
    assert lorafusion("export", run, "--all", "--to", tmp_path / "out").code == 0
    files = [file for file in sorted((tmp_path / "out").rglob("*")) if file.is_file()]
    folders = [str(folder).encode() for folder in (run, run.parent, tmp_path)]
    assert not [file.name for file in files if any(folder in file.read_bytes() for folder in folders)]
    for name in ("law", "med"):
        _, block, text = (tmp_path / "out" / name / "README.md").read_text().split("---\n", 2)
        assert yaml.safe_load(block) == {"library_name": "peft", "tags": ["lora"]}  # the keys that the hub knows
        assert f"# {name}" in text


@pytest.mark.parametrize("below", ["", "adapters", "adapters/law"])
def test_a_folder_above_an_adapter_is_no_adapter_and_the_one_below_is_named(
    lorafusion, finished, tiny_base, tmp_path, below
):
    job, run = finished
    above = run / below
    for arguments in (
        ("combine", above, run / "adapters" / "med" / "latest", "--to", tmp_path / "both"),
        ("generate", tiny_base, "hi", "-a", f"law={above}"),
        ("check", job.path, f"lora.init_from={above}"),
        ("check", job.path, f"objective={{name: distill, reference: {above}}}"),
    ):
        outcome = lorafusion(*arguments)
        assert outcome.code == 2
        assert f"{run}/adapters/law/latest" in outcome.err.replace("\n", ""), arguments
