"""Rows and settings that an objective cannot use: each has its own message, before anything is loaded or written."""

from __future__ import annotations

import csv
import io
import json

import pytest
import small_jobs

from lorafusion_jax.cli.main import run
from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data.tokenized import load_samples
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.objective.choose import choose

PAIR = {"prompt": "one", "chosen": " two", "rejected": " three"}
LABELLED = {"prompt": "one", "completion": " two", "label": True}
SAMPLED = {"prompt": "one", "completion": " two", "advantage": 0.5}
ASKED, REPLIED = {"role": "user", "content": "where"}, {"role": "assistant", "content": "here"}
IDS = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "advantage": 0.5, "old_logprobs": [-1.0, -2.0]}
SYSTEM = {"role": "system", "content": "brief"}
OTHER = {"label": False}
DPO, KTO, GRPO, CISPO, REWARD, CIT = ({"name": name} for name in ("dpo", "kto", "grpo", "cispo", "reward", "cit"))
PARAPHRASED = {"prompt": "one", "paraphrase": "first", "completion": " two"}

ROWS = [  # what is wrong, the objective, the rows, the code and what the message says
    ("no rejected answer", DPO, [{**PAIR, "rejected": None}, PAIR], "data.bad-row", "line 1: it has no rejected"),
    ("no chosen answer", DPO, [PAIR, {**PAIR, "chosen": ""}], "data.bad-row", "line 2: it has no chosen answer"),
    ("equal answers", DPO, [{**PAIR, "rejected": " two"}], "data.bad-row", "chosen and rejected answers are equal"),
    ("text and messages", DPO, [{**PAIR, "chosen": [{"role": "assistant", "content": "two"}]}], "data.bad-row",
     "one of its answers is a text and the other a list of messages"),
    ("single messages without a prompt", DPO, [{"chosen": {"role": "assistant", "content": "a"}, "rejected":
     {"role": "assistant", "content": "b"}, "turns": "one"}], "data.bad-row", "it has no prompt"),
    ("a number as an answer", DPO, [{**PAIR, "chosen": 4}], "data.bad-row", "neither a text nor messages"),
    ("nothing after the prompt", DPO, [{"chosen": "one two", "rejected": "one"}], "data.bad-row",
     "its rejected answer is the beginning of the other one"),
    ("an unknown role", DPO, [{**PAIR, "chosen": [{"role": "oracle", "content": "a"}], "rejected": [{"role": "oracle",
     "content": "b"}]}], "data.bad-row", "has the role 'oracle'"),
    ("a message that is not to be learned", DPO, [{"prompt": [ASKED], "chosen": [REPLIED], "rejected": [REPLIED, ASKED,
     {**REPLIED, "masked": True}]}], "data.bad-row", "message 2 of its rejected answer is excluded from the loss"),
    ("rows of plain examples", DPO, [{"prompt": "one", "completion": " two"}], "data.missing-column",
     "no column 'chosen', which objective dpo needs"),
    ("a label that is a text", KTO, [{**LABELLED, "label": "good"}], "data.bad-row",
     "neither a label that is true or false"),
    ("no label", KTO, [{"prompt": "one", "completion": " two"}], "data.bad-row", "neither a label that"),
    ("a pair with a label", KTO, [{**PAIR, "label": 0}] * 4, "data.bad-row", "a pair and a label"),
    ("a pair with a completion", KTO, [{**PAIR, "completion": " four"}] * 4, "data.bad-row", "a pair and a completion"),
    ("no completion", KTO, [{**LABELLED, "completion": ""}], "data.bad-row", "it has no completion"),
    ("labels of one class", KTO, [{**LABELLED, "prompt": f"one {n}"} for n in range(4)], "objective.data",
     "all 4 labels are true"),
    ("answers of one prompt only", KTO, [{**LABELLED, "completion": f" two {n}"} for n in range(4)], "data.bad-row",
     "all 4 rows of its group have the same prompt"),
    ("a conversation that is not about the prompt", KTO, [{**LABELLED, "completion": [ASKED, REPLIED]}] * 4,
     "data.bad-row", "begins with a turn of the user, which is not its prompt"),
    ("conversations that are not about the prompt", DPO, [{"prompt": "one", "chosen": [ASKED, REPLIED], "rejected":
     [ASKED, {**REPLIED, "content": "no"}]}], "data.bad-row", "begin with something else than its prompt"),
    ("answers to different questions", DPO, [{"chosen": [SYSTEM, ASKED, REPLIED], "rejected": [SYSTEM, {**ASKED,
     "content": "when"}, REPLIED]}], "data.bad-row", "begins with a turn of the user"),
    ("fewer rows than a group", KTO, [LABELLED, {**LABELLED, **OTHER}], "data.no-group", "2 rows are fewer than one"),
    ("no advantage", GRPO, [{"prompt": "one", "completion": " two"}], "data.bad-row", "it has no advantage"),
    ("two kinds of advantages", GRPO, [{**SAMPLED, "advantages": [1.0]}], "data.bad-row", "both an advantage and"),
    ("an advantage that is a text", GRPO, [{**SAMPLED, "advantage": "high"}], "data.bad-row",
     "its advantages are not a number or a list of numbers"),
    ("an infinite advantage", GRPO, [{**SAMPLED, "advantage": 1e999}], "data.bad-row", "a number that is not finite"),
    ("advantages of another length", GRPO, [{**IDS, "advantage": None, "advantages": [1.0, 2.0, 3.0]}], "data.bad-row",
     "its 'advantages' has 3 numbers and its answer 2 tokens"),
    ("log-probabilities of another length", GRPO, [{**IDS, "old_logprobs": [-1.0]}], "data.bad-row",
     "its 'old_logprobs' has 1 numbers and its answer 2 tokens"),
    ("log-probabilities above 0", GRPO, [{**IDS, "old_logprobs": [-1.0, 0.1]}], "data.bad-row", "old_logprobs above 0"),
    ("no log-probabilities", CISPO, [SAMPLED], "data.bad-row", "it has no old_logprobs"),
    ("a completion of ids without a prompt", GRPO, [{**IDS, "prompt_ids": None}], "data.bad-row", "its prompt_ids is"),
    ("no token in the completion", GRPO, [{**IDS, "completion_ids": []}], "data.bad-row", "no token in its answer"),
    ("ids below 0", GRPO, [{**IDS, "prompt_ids": [5, -6]}], "data.bad-row", "no whole numbers from 0"),
    ("ids beyond the vocabulary", GRPO, [{**IDS, "prompt_ids": [5, 99999]}], "data.token-id", "hold tokens that"),
    ("a margin that is a text", REWARD, [{**PAIR, "margin": "large"}], "data.bad-row", "its margin is no number"),
    ("an infinite margin", REWARD, [PAIR, {**PAIR, "margin": 1e999}], "data.bad-row", "line 2"),
    ("no paraphrase", CIT, [{**PARAPHRASED, "paraphrase": ""}] * 4, "data.bad-row", "it has no paraphrase"),
    ("a paraphrase that is the prompt", CIT, [PARAPHRASED] * 3 + [{**PARAPHRASED, "paraphrase": "one"}],
     "data.bad-row", "its paraphrase is its prompt"),
    ("preferences for sft", {"name": "sft"}, [PAIR], "data.other-objective", "objective: {name: dpo}"),
    ("labelled answers for sft", {"name": "sft"}, [LABELLED], "data.other-objective", "objective: {name: kto}"),
    ("advantages for sft", {"name": "sft"}, [SAMPLED], "data.other-objective", "objective: {name: grpo}"),
]  # fmt: skip
SETTINGS = [  # the objective and what the message says
    ({"name": "dpo", "beta": 0}, "'adapters[0].objective.beta' must be more than 0"),
    ({"name": "dpo", "loss": "sigmod"}, "'sigmoid', 'hinge'"),
    ({"name": "dpo", "loss": ["sigmoid", "sft"], "loss_weights": [1.0]}, "a number in loss_weights for each of 2"),
    ({"name": "dpo", "loss": "robust"}, "label_smoothing above 0, which the loss robust needs"),
    ({"name": "dpo", "loss": "hinge", "label_smoothing": 0.1}, "only the losses sigmoid and robust use"),
    ({"name": "dpo", "label_smoothing": 0.5}, "less than 0.5"),
    ({"name": "dpo", "reference": "basis"}, "no adapter 'basis' in the job, and no PEFT folder"),
    ({"name": "cpo", "reference": "base"}, "cpo, which has no reference"),
    ({"name": "ipo", "loss": "hinge"}, "'ipo'"),
    ({"name": "kto", "group": 1}, "2 or more"),
    ({"name": "kto", "group": 64}, "a group of 64 rows, 128 texts of data.max_length=40 do not fit"),
    ({"name": "grpo", "loss": "dr_grpo"}, "completion_tokens if the loss is dr_grpo"),
    ({"name": "grpo", "epsilon": -0.1}, "more than 0"),
    ({"name": "reward", "center": -1}, "0 or more"),
    ({"name": "reward", "reference": "base"}, "reward, which has no reference"),
    ({"name": "distill"}, "distill with a reference, its teacher"),
    ({"name": "simpo", "gama": 1}, "did you mean 'gamma'"),
]


@pytest.fixture
def check(tmp_path, tiny_base, capsys):
    """check(objective, rows) → what `lorafusion check` says, and that it refuses."""

    def run_check(objective: dict, rows: list[dict]) -> str:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        entry = {"name": "one", "data": {"train": "rows.jsonl"}, "objective": objective}
        sections = {"data": {"max_length": 40}, "batch": {"capacity_tokens": 512, "tile_tokens": 16}}
        assert run(["check", str(small_jobs.write_job(tmp_path, tiny_base, [entry], **sections))]) == 2
        shown = capsys.readouterr().err
        assert "Traceback" not in shown
        return " ".join(shown.split())

    return run_check


@pytest.mark.parametrize(("objective", "rows", "code", "says"), [case[1:] for case in ROWS], ids=[c[0] for c in ROWS])
def test_rows_that_an_objective_cannot_use_are_errors(check, objective, rows, code, says):
    shown = check(objective, rows)
    assert f"error[{code}]" in shown
    assert says in shown


@pytest.mark.parametrize(("objective", "says"), SETTINGS, ids=lambda value: str(value)[:40])
def test_settings_that_contradict_each_other_are_errors(check, objective, says):
    assert says in check(objective, [PAIR, LABELLED])


def test_a_prompt_under_another_name_is_asked_for(tmp_path, tiny_base, capsys):
    rows = [{"query": f"one {number}", "chosen": "two", "rejected": "three"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def shown(columns: dict) -> str:
        entry = {"name": "one", "data": {"train": "rows.jsonl", "columns": columns}, "objective": DPO}
        assert run(["check", str(small_jobs.write_job(tmp_path, tiny_base, [entry]))]) == (0 if columns else 2)
        return " ".join("".join(capsys.readouterr()).split())

    assert "fix: data.columns: {prompt: query}" in shown({})
    assert "unused" not in shown({"prompt": "query"})


def test_messages_are_all_different():
    assert len({says for *_, says in (*ROWS, *SETTINGS)}) >= 45


TABLES = [  # objective, a CSV table, and the same rows in JSON
    (KTO, "prompt,completion,label\na, x,True\nb, y,0\nc, z,false\nd, v,1\n", "label", [True, False, False, True]),
    (REWARD, "prompt,chosen,margin,rejected\na, x,0.5, y\nb, y,-2, z\n", "margin", [0.5, -2]),
    (GRPO, "prompt,completion,advantage,old_logprobs\na, x,-1.5,\nb, y,2,\n", "advantage", [-1.5, 2]),
    (CISPO, 'prompt,completion,advantages,old_logprobs\na, x,1,-0.5\nb, y,-1,"-2.5"\n', "old_logprobs", [-0.5, -2.5]),
]


@pytest.mark.parametrize(("objective", "table", "column", "values"), TABLES, ids=[row[0]["name"] for row in TABLES])
def test_csv_has_labels_and_numbers(objective, table, column, values, tiny_base, tmp_path):
    """Every cell of CSV is a text; the tokens and numbers are those of JSON."""
    rows = list(csv.DictReader(io.StringIO(table)))
    typed = [
        {
            key: json.loads(cell) if key in ("advantages", column) and key != "label" else cell
            for key, cell in row.items()
            if cell
        }
        | {column: value}
        for row, value in zip(rows, values, strict=True)
    ]
    (tmp_path / "rows.csv").write_text(table)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in typed))

    def load(kind: str):
        return load_samples(
            f"rows.{kind}",
            settings=DataSettings(train=()),
            tokenizer=load_tokenizer(tiny_base),
            adapter="a",
            base_dir=tmp_path,
            cache_dir=tmp_path / "cache",
            objective=choose(objective["name"], {"group": 2} if objective is KTO else {}),
        )

    assert load("csv").digest == load("jsonl").digest
    (tmp_path / "rows.csv").write_text(table.replace("\nb, y,", "\nb, y,maybe "))
    with pytest.raises(LoraFusionError, match=r"its .* is 'maybe"):
        load("csv")


MEDIA = [
    ({"name": "sft"}, {"messages": [ASKED | {"content": "<image> what?"}, REPLIED], "images": ["a.png"]}),
    (DPO, {**PAIR, "prompt": "<video> what?", "videos": ["a.mp4"]}),
]


@pytest.mark.parametrize(("objective", "row", "code"), [
    *((objective, row, "data.media") for objective, row in MEDIA),
    (DPO, {"question": "one", "chosen": " two", "rejected": " three"}, "data.no-prompt"),
])  # fmt: skip
def test_what_would_be_left_out_is_refused(objective, row, code, tiny_base, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    entry = {"name": "a", "data": {"train": "rows.jsonl"}, "objective": objective}
    assert run(["check", str(small_jobs.write_job(tmp_path, tiny_base, [entry]))]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize(("loss", "noted"), [("dapo", True), ("grpo", False)])
def test_a_ratio_of_sequences_with_a_loss_of_tokens_is_noted(loss, noted):
    chosen = choose("grpo", {"ratio": "sequence", "loss": loss})
    assert bool(chosen.objective.review({}, chosen.options)) == noted
