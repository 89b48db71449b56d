"""Job files: defaults, sweeps, overrides, and reports of all errors."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import small_jobs
import yaml

from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config import dump_config, load_config, sweep
from lorafusion_jax.config.job_checks import ineffective
from lorafusion_jax.config.load import parse_config, read_resolved
from lorafusion_jax.config.overrides import unreached
from lorafusion_jax.config.read import Source, read_source
from lorafusion_jax.config.schema import DEFAULTS, SHARED, SINGLE_DEFAULTS
from lorafusion_jax.errors import ConfigError, ErrorList
from lorafusion_jax.peft.folder import write_adapter

SMALL = """
base: {model: some/model}
adapters:
  - {name: law, data: {train: law.jsonl}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(text)
    return path


def errors_of(path: Path, overrides=()) -> dict[str, str]:
    with pytest.raises((ConfigError, ErrorList)) as caught:
        load_config(path, overrides)
    return {error.code: str(error) for error in getattr(caught.value, "errors", [caught.value])}


def test_minimal_job_has_four_lines(tmp_path):
    config = load_config(write(tmp_path, SMALL))
    assert [adapter.name for adapter in config.adapters] == ["law"]
    assert config.adapters[0].lora.rank == 16
    assert config.adapters[0].global_samples == 16
    assert Path(config.directory) == tmp_path


def test_adapters_override_shared_defaults_key_by_key(tmp_path):
    config = load_config(
        write(
            tmp_path,
            """
base: {model: m}
lora: {rank: 4, alpha: 8}
optim: {lr: 2e-4}
batch: {global_samples: 6}
epochs: 2
adapters:
  - {name: a, data: {train: a.jsonl}, lora: {rank: 64}}
  - {name: b, data: {train: b.jsonl}, batch: {global_samples: 3}, epochs: 5, optim: {name: sgd}}
""",
        )
    )
    a, b = config.adapters
    assert (a.lora.rank, a.lora.alpha, a.global_samples, a.epochs) == (64, 8, 6, 2)
    assert (b.lora.rank, b.global_samples, b.epochs, b.optim.name) == (4, 3, 5, "sgd")
    assert a.optim.lr == b.optim.lr == 2e-4  # YAML reads 2e-4 as text


def test_lists_expand_to_a_sweep_and_targets_do_not(tmp_path):
    config = load_config(
        write(
            tmp_path,
            """
base: {model: m}
adapters:
  - {name: chat, data: {train: c.jsonl}, lora: {rank: [8, 32], targets: [q_proj, v_proj]}, optim: {lr: [1e-4, 2e-4]}}
""",
        )
    )
    assert [adapter.name for adapter in config.adapters] == [
        "chat-rank8-lr1e-4",
        "chat-rank8-lr2e-4",
        "chat-rank32-lr1e-4",
        "chat-rank32-lr2e-4",
    ]
    assert [(a.lora.rank, a.optim.lr) for a in config.adapters] == [(8, 1e-4), (8, 2e-4), (32, 1e-4), (32, 2e-4)]
    assert all(a.lora.targets == ["q_proj", "v_proj"] for a in config.adapters)


@pytest.mark.parametrize(("rates", "names"), [
    ([1e-3, 0.01], ["1e-3", "1e-2"]),
    (["1e-3", 0.015], ["1e-3", "1.5e-2"]),
    ([0.01, 0.05], ["0.01", "0.05"]),
    ([1, 2e-4], ["1", "2e-4"]),
])  # fmt: skip
def test_fractions_of_a_list_share_a_notation_in_names(rates, names):
    """A run keeps the names that it began with: its config.yaml has them, and no lists."""
    entries = sweep.expand({"name": "law", "optim": {"lr": rates}})
    assert [entry["name"] for entry in entries] == [f"law-lr{name}" for name in names]
    assert [entry["optim"]["lr"] for entry in entries] == rates
    assert [sweep.expand(entry) for entry in entries] == [[entry] for entry in entries]


def test_lists_that_make_too_many_adapters_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(sweep, "MOST_ADAPTERS", 4)
    assert len(sweep.expand({"name": "law", "seed": [0, 1], "optim": {"lr": [1, 2]}})) == 4
    with pytest.raises(ConfigError, match="make 6 adapters") as refused:
        sweep.expand({"name": "law", "seed": [0, 1], "optim": {"lr": [1, 2, 3]}})
    assert refused.value.code == "config.too-many-adapters"


def test_an_override_that_an_adapter_has_anyway_reaches_it(tmp_path):
    path = write(tmp_path, SMALL.rstrip().removesuffix("}") + ", optim: {lr: 0.5}}")
    assert unreached(read_source(path), ["optim.lr=0.5"]) == []
    (note,) = unreached(read_source(path), ["optim.lr=0.25"])
    assert "does not reach law" in note


def test_a_shared_list_sweeps_every_adapter(tmp_path):
    config = load_config(write(tmp_path, SMALL + "optim: {lr: [1e-4, 2e-4]}\n"))
    assert [adapter.name for adapter in config.adapters] == ["law-lr1e-4", "law-lr2e-4"]


def test_overrides_reach_sections_and_adapters(tmp_path):
    path = write(tmp_path, SMALL)
    config = load_config(path, ["train.max_steps=20", "adapters.law.optim.lr=1e-3", "lora.rank=4"])
    assert config.train.max_steps == 20
    assert config.adapters[0].optim.lr == 1e-3
    assert config.adapters[0].lora.rank == 4


@pytest.mark.parametrize("override", ["train.max_steps", "adapters.nobody.optim.lr=1", "adapters=3=4,[", "=3"])
def test_overrides_of_unknown_settings_are_errors(tmp_path, override):
    assert errors_of(write(tmp_path, SMALL), [override])


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("mesh.stages=none", "'mesh.stages'", "must be a whole number, not 'none'"),
        ("mesh.layers=none", "'mesh.layers'", "must be a list of numbers"),
        ("mesh.layers=[20.3, 11.7]", "mesh.layers", "must be a list of numbers, each 1 or more, whole or with a half"),
        ("mesh.layers=[true, 3]", "mesh.layers", "must be a list of numbers, each 1 or more, whole or with a half"),
        ("mesh.stages=true", "'mesh.stages'", "must be a whole number, not 'true'"),
        ("lora.rank=[8, true]", "lora.rank", "must be a whole number, not 'true'"),
        ("optim.lr=true", "'optim.lr'", "must be a number, not 'true'"),
        ("train.log_every_s=false", "'train.log_every_s'", "must be a number, not 'false'"),
        ("mesh={stages: 0}", "'mesh.stages'", "must be 1 or more, not 0"),
        ("mehs.stages=2", "'mehs'", "did you mean 'mesh'"),
        ("mesh.stags=2", "'mesh.stags'", "did you mean 'stages'"),
        ("adapters.law.lora.rank=x", "'adapters[0].lora.rank'", "must be a whole number, not 'x'"),
        ("lora.targets=[1, 2]", "'lora.targets'", "must be a text or a list of texts"),
        ("adapters.law.data.max_length=9000", "law", "does not fit"),
        ("batch.capacity_tokens=8200", "capacity_tokens=8200", "multiple of"),
        ("adapters=3", "'adapters'", "must be a list"),
    ],
)
def test_errors_quote_the_override(tmp_path, override, key, expected):
    path = write(tmp_path, SMALL + "mesh: {stages: 1}\nlora: {rank: 4}\n")
    (text,) = errors_of(path, [override]).values()
    assert f"{override} on the command line" in text
    assert key in text
    assert expected in text
    assert str(path) not in text


def test_errors_name_the_source_of_the_value(tmp_path):
    path = write(tmp_path, SMALL + "mesh: {stages: 1}\nlora: {rank: 0}\n")
    errors = errors_of(path, ["mesh.stages=2", "mesh.stages=x"])
    assert "mesh.stages=x on the command line" in errors["config.override"]
    assert "line 6" in errors["config.value"]


def test_override_of_an_unknown_adapter_lists_the_known_ones(tmp_path):
    (text,) = errors_of(write(tmp_path, SMALL), ["adapters.lew.optim.lr=3"]).values()
    assert "there is no 'lew'" in text
    assert "fix: one of: law" in text


def test_one_adapter_of_a_sweep_cannot_be_overridden(tmp_path):
    (text,) = errors_of(write(tmp_path, SMALL), ["adapters.law-lr1e-4.optim.lr=3"]).values()
    assert "those of a sweep are set all at once" in text


def test_list_errors_show_an_example(tmp_path):
    assert "mesh.layers=[20.5, 11.5]" in errors_of(write(tmp_path, SMALL), ["mesh.layers=3"])["config.override"]
    assert "mesh.layers: [20.5, 11.5]" in errors_of(write(tmp_path, SMALL + "mesh: {layers: 3}"))["config.value"]


JUNK = (None, "x", -1, 0.5, float("nan"), 1e300, [], [0], [None], {}, {"a": 1}, {1: 2})


def complaints(values: dict) -> str:
    try:
        parse_config(Source(path=Path("jobs.yaml"), values=values))
    except (ConfigError, ErrorList) as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("section", [*SHARED, *DEFAULTS, *SINGLE_DEFAULTS])
def test_errors_do_not_use_pydantic_terms(section):
    model = SHARED.get(section) or DEFAULTS.get(section)
    sections = [{field: value} for field in model.model_fields for value in JUNK] if model else JUNK
    texts = [complaints(yaml.safe_load(SMALL) | {section: values}) for values in sections]
    assert sum(map(bool, texts)) >= len(texts) / 2
    assert not [text for text in texts if re.search(r"\b([Ii]nput|valid|tuple|string|integer|dictionary|Keys)\b", text)]


@pytest.mark.parametrize("section", DEFAULTS)
def test_a_list_of_nothing_is_no_sweep_of_a_shared_section(section):
    assert f"'{section}' must be a table" in complaints(yaml.safe_load(SMALL) | {section: [None]})
    assert complaints(yaml.safe_load(SMALL) | {section: None}) == ""  # a section without a value is an empty one


def test_five_errors_are_reported_together_with_lines_and_suggestions(tmp_path):
    path = write(
        tmp_path,
        """
base: {modle: some/model}
lora: {rank: -4}
batch: {capacity_tokens: 1000}
adaptrs: 3
adapters:
  - {name: law, data: {train: law.jsonl}, optim: {schedule: cosin}}
""",
    )
    with pytest.raises(ErrorList) as caught:
        load_config(path)
    text = str(caught.value)
    assert "did you mean 'model'?" in text
    assert "line 2" in text
    assert "did you mean 'adapters'?" in text
    assert "'base.model' is required" in text
    assert "'lora.rank'" in text
    assert "-4" in text
    assert "'adapters[0].optim.schedule'" in text
    assert "'cosin'" in text
    assert "batch.capacity_tokens: 1024" in text


def test_a_wrong_shared_default_is_reported_once(tmp_path):
    path = write(
        tmp_path,
        """
base: {model: m}
lora: {rank: many}
adapters:
  - {name: a, data: {train: a.jsonl}}
  - {name: b, data: {train: b.jsonl}}
""",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).count("error[") == 1


def test_duplicate_keys_are_errors(tmp_path):
    assert "config.twice" in errors_of(write(tmp_path, SMALL + "lora: {rank: 4}\nlora: {rank: 8}\n"))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "config.empty"),
        ("- 1\n- 2\n", "config.empty"),
        ("base: {model: m\nadapters: [", "config.syntax"),
        ("base: {model: m}\nadapters: []\n", "config.no-adapters"),
        ("base: {model: m}\nadapters: [3]\n", "config.type"),
        ("base: {model: m}\nadapters: [{data: {train: a}}]\n", "config.required"),
        ("base: {model: m}\nadapters: [{name: a}]\n", "config.required"),
        ("base: {model: m}\nadapters: [{name: ../a, data: {train: a}}]\n", "config.value"),
        ("base: {model: m}\nadapters: [{name: a, data: {train: [a, 3]}}]\n", "config.value"),
        (
            "base: {model: m}\nadapters: [{name: a, data: {train: a}}, {name: a, data: {train: b}}]\n",
            "config.duplicate-name",
        ),
        (
            "base: {model: m}\nadapters: [{name: a, data: {train: a}, batch: {capacity_tokens: 4}}]\n",
            "config.shared-key",
        ),
        (SMALL + "batch: {capacity_tokens: 8200}\n", "config.capacity"),
        (SMALL + "data: {max_length: 9000}\n", "config.max-length"),
        (SMALL + "lora: {targets: [q_prj]}\n", "lora.unknown-target"),
        (SMALL + "optim: {lr: .nan}\n", "config.value"),
        (SMALL + "lora: {dropout: 1.0}\n", "config.value"),
    ],
)
def test_each_mistake_has_its_own_code(tmp_path, text, code):
    assert code in errors_of(write(tmp_path, text))


def test_a_missing_file_names_the_command_that_makes_one(tmp_path):
    assert "lorafusion init" in errors_of(tmp_path / "nothing.yaml")["config.missing"]
    (tmp_path / "jobs.yaml").touch()
    assert f"did you mean '{tmp_path / 'jobs.yaml'}'?" in errors_of(tmp_path / "jbos.yaml")["config.missing"]
    assert "lorafusion init" in errors_of(tmp_path / "nothing.yaml")["config.missing"]


def test_toml_equals_yaml(tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text('base = {model = "some/model"}\n[[adapters]]\nname = "law"\ndata = {train = "law.jsonl"}\n')
    assert load_config(path) == load_config(write(tmp_path, SMALL))


def test_a_resolved_configuration_reads_back_equal(tmp_path):
    config = load_config(write(tmp_path, SMALL + "optim: {lr: [1e-4, 2e-4]}\n"))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert read_resolved(tmp_path / "config.yaml") == config


def test_a_setting_that_was_renamed_is_refused_by_both_names(tmp_path):
    for file, overrides in ((SMALL + "train: {keep: nothing}\n", ()), (SMALL, ("train.keep=nothing",))):
        errors = errors_of(write(tmp_path, file), overrides)
        assert list(errors) == ["config.renamed-key"]
        assert "'train.keep' is now 'train.remat'" in errors["config.renamed-key"]


def test_settings_without_effect_are_named(tmp_path):
    config = load_config(write(tmp_path, SMALL + "optim: {name: adamw, momentum: 0.9}\n"))
    assert ineffective(config) == ["law: optim.momentum has no effect with adamw"]
    config = load_config(write(tmp_path, SMALL + "lora: {kind: vera, alpha: 8, rslora: true, rank: 4}\n"))
    assert ineffective(config) == [f"law: lora.{key} has no effect with kind vera" for key in ("alpha", "rslora")]
    config = load_config(write(tmp_path, SMALL + "priority: -3\n"))
    assert ineffective(config) == ["law: priority=-3 has no effect in a run: a service orders jobs by it"]
    for reference, init_from, learns in (("base", "null", False), ("base", "org", True), ("start", "org", False)):
        more = f"objective: {{name: distill, reference: {reference}}}\nlora: {{init_from: {init_from}}}\n"
        config = load_config(write(tmp_path, SMALL + more))
        assert any("its teacher is what it starts as" in note for note in ineffective(config)) is not learns
    two = SMALL.replace("adapters:", "adapters:\n  - {name: med, data: {train: x.jsonl}}", 1)
    config = load_config(write(tmp_path, two + "train: {resident: 1, places: {8: 1}}\n"))
    assert [note for note in ineffective(config) if "places" in note] == [
        "train.places has no effect with train.resident: adapters that join take turns, too"
    ]


def test_init_prints_a_valid_job(tmp_path):
    from lorafusion_jax.cli.init import TEXT

    config = load_config(write(tmp_path, TEXT))
    assert [adapter.name for adapter in config.adapters] == ["law", "chat-lr1e-4", "chat-lr2e-4"]


def test_patterns_that_peft_may_have_sorted_are_noted(tmp_path, tiny_base):
    spec = AdapterSpec(
        name="law", rank=2, alpha=4, targets=("q_proj", "v_proj"),
        patterns=Patterns(rank=2, alpha=4, alphas=((r"0\..*_proj", 6.0), ("q_proj", 8.0), ("v_proj", 6.0))),
    )  # fmt: skip
    shapes = {"q_proj": (32, 32), "v_proj": (32, 16)}
    arrays = {
        f"layers.{layer}.self_attn.{name}": (np.ones((shape[0], 2), np.float32), np.ones((2, shape[1]), np.float32))
        for layer in range(2)
        for name, shape in shapes.items()
    }
    write_adapter(arrays, spec, "base", tmp_path / "start")
    rows = small_jobs.write_rows(tmp_path, "law", 2)
    adapter = {"name": "law", "data": {"train": rows}, "lora": {"init_from": "start", "dropout": 0}}
    config = load_config(small_jobs.write_job(tmp_path, tiny_base, [adapter], lora={}))
    (note,) = [note for note in ineffective(config) if "alpha_pattern" in note]
    assert "'q_proj'" in note
    assert "layers.0.self_attn.q_proj" in note
    assert "'v_proj'" not in note  # both patterns say the same of it


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("base:\n\tmodel: m\n", "spaces, not with tabs"),
        ("base: {model: m\nadapters: [", "close each { and ["),
        ("base: {model: 'm}\n", "close the quotes"),
        ("base: {model: @m}\n", "begins with this character in quotes"),
        ("base:\n  model: a: b\n", "': ' in quotes"),
        ("base:\n  model: m\n data: {}\n", "same column"),
    ],
)
def test_a_file_that_is_no_yaml_says_how_to_repair_it(tmp_path, text, fix):
    assert fix in errors_of(write(tmp_path, text))["config.syntax"].rpartition("fix: ")[2]


@pytest.mark.parametrize("name", ["rows.jsonl", "my rows.csv", "rows.jsonl.gz", "Rows.PARQUET"])
def test_a_data_file_given_as_a_job_says_how_to_make_one_for_it(tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "b"}\n')
    fix = errors_of(tmp_path / name)["config.data-file"].rpartition("fix: ")[2]
    assert shlex.split(fix) == shlex.split(f"lorafusion new --base FOLDER --data '{tmp_path / name}' -o jobs.yaml")


@pytest.mark.parametrize(
    ("extra", "fix"),
    [
        ("eval: {every_steps: 4}\n", "write train.eval_every_steps"),
        ("eval_every_steps: 4\n", "write train.eval_every_steps"),
        ("train: {epochs: 2}\n", "epochs is a key of an adapter, or of the whole file"),
        ("lora: {lr: 1e-4}\n", "write optim.lr"),
        ("lora: {rnak: 4}\n", "did you mean 'rank'?"),
        ("name: law\n", "write optim.name or objective.name"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_its_place(tmp_path, extra, fix):
    assert fix in errors_of(write(tmp_path, SMALL + extra))["config.unknown-key"]


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("train: {max_steps: 4}", "train holds for the whole run: write it beside adapters"),
        ("train: law.jsonl", "write data.train"),
        ("max_steps: 4", "write train.max_steps, for the whole run"),
        ("rank: 4", "write lora.rank"),
    ],
)
def test_a_key_of_an_adapter_in_the_wrong_place_is_told_its_place(tmp_path, setting, fix):
    text = SMALL.replace("law.jsonl}", f"law.jsonl}}, {setting}")
    assert fix in errors_of(write(tmp_path, text))["config.unknown-key"]


def test_a_fix_that_names_a_place_holds_when_it_is_followed(tmp_path):
    load_config(write(tmp_path, SMALL + "train: {eval_every_steps: 4, max_steps: 4}\noptim: {lr: 1e-4}\nepochs: 2\n"))


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("optim.schedule=constant_with_warmup", "optim.schedule: constant; optim.warmup"),
        ("optim.schedule=cosine_with_min_lr", "optim.schedule: cosine; optim.min_lr_ratio"),
        ("optim.name=paged_adamw_8bit", "optim.name: adamw;"),
        ("optim.name=adamwx", "not 'adamwx'; did you mean 'adamw'?\n"),
        ("objective.name=srt", "not 'srt'; did you mean 'sft'?\n"),
    ],
)
def test_a_value_of_another_program_is_answered_with_ours(tmp_path, setting, fix):
    assert fix in errors_of(write(tmp_path, SMALL), [setting])["config.override"]


JOB_JSON = '{"base": {"model": "m"}, "adapters": [{"name": "law", "data": {"train": "law.jsonl"}}]}'
JOB_TOML = '[base]\nmodel = "m"\n[[adapters]]\nname = "law"\n[adapters.data]\ntrain = "law.jsonl"\n'


@pytest.mark.parametrize(("name", "text"), [("job.yaml", JOB_JSON), ("job.json", JOB_JSON), ("job.toml", JOB_TOML)])
def test_a_job_file_of_any_editor_is_read_or_told_how_to_convert_it(tmp_path, name, text):
    """Editors on Windows write a byte order mark, other line ends, or UTF-16."""
    file = tmp_path / name
    file.write_bytes(text.encode())
    expected = load_config(file)
    file.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert load_config(file) == expected
    for encoding in ("utf-16", "utf-16le", "utf-16be", "utf-32"):
        file.write_bytes(text.encode(encoding))
        with pytest.raises(ConfigError, match=f"it is text in {encoding.upper()}") as raised:
            load_config(file)
        assert f"iconv -f {encoding} -t utf-8 {file} > " in raised.value.fix


@pytest.mark.parametrize("name", ["x" * 300, "a\0b.yaml", "\ud800/jobs.yaml"])
def test_what_no_file_can_be_called_is_missing(name):
    with pytest.raises(ConfigError, match=r"config\.missing"):
        load_config(Path(name))
