"""The data sets in examples/ are what their script's table says."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import load_samples, load_tokenizer
from lorafusion_jax.data.sources import read_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
SETS = {
    "ask.jsonl": "messages",
    "explain.jsonl": "prompt",
    "module.csv": "instruction",
    "reference.json": "conversations",
    "cards.jsonl": "text",
}


@pytest.mark.parametrize(("name", "format"), SETS.items())
def test_example_set_loads_and_holds_its_evaluation_out(tmp_path, name, format):
    tokenizer = load_tokenizer(EXAMPLES / "base")
    held_out = name.replace(".", "_eval.")
    for source, least in ((name, 300), (held_out, 30)):
        samples = load_samples(
            source,
            settings=DataSettings(train=name, max_length=1024),
            tokenizer=tokenizer,
            adapter=name,
            base_dir=EXAMPLES / "data",
            cache_dir=tmp_path,
        )
        assert samples.report.format == format
        assert len(samples) == samples.report.rows >= least
        assert samples.report.cut == 0
    rows = [{json.dumps(row) for row in read_rows(source, EXAMPLES / "data").values} for source in (name, held_out)]
    assert not rows[0] & rows[1]


def test_the_script_of_the_base_traces_a_step_in_bfloat16(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    make_base = importlib.import_module("make_base")
    graph, params, rest = make_base.new_model(make_base.model_config(width=128, layers=1))
    optimizer, train, _ = make_base.make_programs(graph, rest, rows=2, row_tokens=32, attention=None)
    stream = jax.ShapeDtypeStruct((99,), jnp.uint16)
    state = jax.eval_shape(train, params, optimizer.init(params), stream, jax.random.key(0), jnp.ones(2))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
