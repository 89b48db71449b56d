"""Devices that compute every layer together give the run of one device, and send only sums of activations."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixed import assert_equal, read_trained, write_mixed_job
from more_cases import nightly
from safetensors.numpy import load_file, save_file
from test_resume_layouts import PowerCut, in_the_middle_of_a_batch

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.errors import ConfigError, ErrorList
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.objective.loss import token_losses
from lorafusion_jax.planning.checks import tensor_problems
from lorafusion_jax.planning.memory import MemoryProblem, kept_per_layer, stage_memory
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.training import RunFolder, resume, train

TOLERANCE = 1e-5  # as in test_layouts: sums over devices come in another order
NAMES = ("law", "med")  # two linears each, or all; with dropout of 0.3
TWO = "adapters.med.lora.targets=[k_proj, down_proj]"  # outputs of one are split, inputs of the other; nightly: all
BASES = {  # every bias, also of what is summed; 3 key heads; widths that are no power of two
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "num_heads": 6, "head_dim": 4, "num_kv_heads": 2},
    "norms of heads, a vocabulary that does not divide": {
        "family": "qwen3", "qk_norm": True, "vocab_size": 3073, "tie_embeddings": False, "intermediate_size": 36,
        "num_layers": 3,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory, make_base):
    """bases(name) → a base of two or three layers, with biases that are not zero."""
    made = {}

    def base(name: str):
        if name not in made:
            made[name] = make_base(tmp_path_factory.mktemp("base") / "model", **BASES[name])
            file, draw = made[name] / "model.safetensors", np.random.default_rng(0)
            tensors = load_file(file)
            drawn = {key: draw.normal(size=leaf.shape, scale=0.3) for key, leaf in tensors.items() if "bias" in key}
            save_file(tensors | {key: leaf.astype(np.float32) for key, leaf in drawn.items()}, file)
        return made[name]

    return base


@pytest.fixture(scope="module")
def trained(tmp_path_factory, bases, kept_programs):
    """trained(base, mesh, names, row_parts) → folder of a run, trained once."""
    done = {}

    def run(base: str, mesh: dict, names=NAMES, row_parts: int = 1):
        key = str((base, mesh, names, row_parts))
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            held_out = names[:-1]  # an evaluation compiles passes of its own
            job = write_mixed_job(folder, bases(base), names, held_out, mesh=mesh)
            two = (TWO,) if base == "biases" and "med" in names else ()
            assert train(load_config(job, (*two, f"train.parts={row_parts}")), folder / "run").exit_code == 0
            done[key] = folder / "run"
        return done[key]

    return run


@pytest.mark.parametrize(
    ("base", "mesh", "parts"),
    [
        ("biases", {"tensor": 2}, 1),
        nightly("biases", {"tensor": 2}, 3),  # of four tiles; compiles thrice the kernels
        nightly("norms of heads, a vocabulary that does not divide", {"tensor": 2}, 1),
        nightly(
            "norms of heads, a vocabulary that does not divide", {"tensor": 2, "stages": 2, "layers": [1.5, 1.5]}, 2
        ),
        nightly("biases", {"tensor": 2, "fsdp": 2, "data": 2}, 2),
    ],
    ids=str,
)
def test_devices_of_a_layer_give_the_run_of_one_device(base, mesh, parts, trained):
    names = ("med",) if mesh == {"tensor": 2} else NAMES  # each stage compiles the steps of each adapter
    one, many = trained(base, {}, names), trained(base, mesh, names, row_parts=parts)
    assert_equal(read_trained(one), read_trained(many), TOLERANCE)
    for name in names:  # what PEFT reads has the same names and the same settings
        files = [RunFolder(run).latest(name) for run in (one, many)]
        assert len({(file / "adapter_config.json").read_text() for file in files}) == 1
        shapes = [
            {key: leaf.shape for key, leaf in load_file(file / "adapter_model.safetensors").items()} for file in files
        ]
        assert shapes[0] == shapes[1]


def test_an_adapter_alone_is_what_it_is_beside_another(trained):
    alone, joint = (read_trained(trained("biases", {"tensor": 2}, names)) for names in (("med",), NAMES))
    assert_equal(alone.without_evaluations(), joint.of(("med",)).without_evaluations(), TOLERANCE)


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ({"tensor": 2}, []),
        ({"tensor": 2}, ["mesh.tensor=1"]),
        nightly({"tensor": 2, "data": 2}, ["mesh.data=1", "mesh.stages=2"]),
        nightly({}, ["mesh.tensor=2"]),
    ],
    ids=str,
)
def test_a_run_resumes_here_and_on_another_mesh(mesh, overrides, trained, bases, tmp_path, saves_wait):
    write = partial(write_mixed_job, tmp_path, bases("biases"), NAMES, ("law",), save={"every_steps": 1})
    run = tmp_path / "run"

    def cut(event):
        if event.kind == "step" and in_the_middle_of_a_batch(run):  # sums are under way
            raise PowerCut

    with pytest.raises(PowerCut):
        train(load_config(write(mesh=mesh), (TWO,)), run, listeners=[cut])
    assert resume(run, overrides).exit_code == 0
    assert_equal(read_trained(trained("biases", mesh)), read_trained(run), TOLERANCE if overrides else 0.0)


MODEL = ModelConfig(
    family="llama", vocab_size=96, hidden_size=40, intermediate_size=56, num_layers=1, num_heads=6, num_kv_heads=2,
    head_dim=12,
)  # fmt: skip
SPECS = (AdapterSpec(name="law", rank=4, alpha=8, dropout=0.2, targets=("q_proj", "o_proj", "up_proj", "down_proj")),)
T, TILES = 32, 2


def layer_programs(tensor: int, remat: str, row_parts: int = 1):
    """Programs of a layer, what forward takes, and the shapes of what it returns and leaves for backward."""
    parts = Parts(model=MODEL, specs=SPECS, settings=TrainSettings(parts=row_parts), dtype=jnp.float32, tensor=tensor)
    programs = StagePrograms(parts, stage_meshes(tensor=tensor)[0], Extent(0, 2), remat)
    shape = jax.ShapeDtypeStruct
    frozen = {name: shape(size, jnp.float32) for name, size in MODEL.layer(0).frozen_shapes().items()}
    lora = {name: shape(size, jnp.float32) for name, size in parts.leaves.lora_shapes(1).items()}
    sizes = {"segment_offsets": 2, "segment_lengths": 1, "tile_adapter": TILES, "adapters": 1}
    kinds = {"row_key": np.uint32, "weights": np.float32}
    needed = [name for name in Microbatch._fields if name not in Microbatch._field_defaults]
    batch = Microbatch(**{name: shape((1, sizes.get(name, T)), kinds.get(name, np.int32)) for name in needed})
    inputs = jax.eval_shape(programs.layers.inputs, batch)
    position = Position(*(shape((), np.int32),) * 3)
    block = ((frozen,), lora, position, shape((1, T, MODEL.hidden_size), jnp.float32), inputs)
    return programs.layers, block, *jax.eval_shape(programs.layers.forward, *block)


def compiled_passes(tensor: int, remat: str, row_parts: int = 1) -> list[Any]:
    """A layer's forward and backward programs."""
    layers, block, y, kept = layer_programs(tensor, remat, row_parts)
    sums = {name: jax.ShapeDtypeStruct((tensor, *leaf.shape), leaf.dtype) for name, leaf in block[1].items()}
    lowered = layers.forward.lower(*block), layers.backward.lower(*block, kept, y, sums)
    return [program.compile() for program in lowered]


@pytest.mark.parametrize("remat", ["gemm_inputs", nightly("everything")])
def test_a_pass_of_a_layer_has_two_sums_of_activations_and_sends_nothing_else(remat):
    """Megatron's count: no weight, no gradient of an adapter and no whole input of a projection is sent."""
    sends = r"= \(?\w+\[([\d,]*)\]\S* (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    for program in compiled_passes(2, remat):
        assert re.findall(sends, program.as_text()) == [(f"{T},{MODEL.hidden_size}", "all-reduce")] * 2


def test_sums_of_a_part_and_products_of_another_do_not_wait_for_each_other():
    for parts in (1, 2):
        layers, block, *_ = layer_programs(2, "gemm_inputs", parts)
        beside = products_beside_sums(layers.forward.lower(*block).compiler_ir("hlo").as_hlo_text())
        assert len(beside) == 2 * parts
        assert all((count > 0) == (parts > 1) for count in beside), beside


def products_beside_sums(hlo: str) -> list[int]:
    """Of each all-reduce of a program's HLO: how many products neither lead to it nor follow from it."""
    computations = {head.split()[-1]: body for head, body in re.findall(r"^([^\n]*\S) \{\n(.*?)^\}", hlo, re.M | re.S)}
    multiply: set[str] = set()
    while (
        more := {
            name
            for name, body in computations.items()
            if " dot(" in body or multiply & {*re.findall(r"\w[\w.-]*", body)}
        }
        - multiply
    ):
        multiply |= more
    body = next(body for body in computations.values() if " all-reduce(" in body)
    leads: dict[str, set[str]] = {}  # all that an instruction follows from
    sums, products = [], []
    for line in body.splitlines():
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        words = {*re.findall(r"\w[\w.-]*", rest)}
        leads[name] = {name}.union(*(leads[word] for word in words & leads.keys()))
        if " all-reduce(" in rest:
            sums.append(name)
        elif " dot(" in rest or words & multiply:
            products.append(name)
    return [sum(one not in leads[other] and other not in leads[one] for other in products) for one in sums]


def test_a_device_keeps_and_stores_what_is_predicted():
    """What a forward leaves and the frozen weights are parts, but for sums, norms and inputs of layers."""
    config = ModelConfig(**{**_fields(MODEL), "tie_embeddings": True})
    predicted, kept, layer = {}, {}, config.layer(0)
    for tensor in (1, 2):
        problem = MemoryProblem(
            model=config, adapters=SPECS, optimizers=("adamw",), layers=(Extent(0, 2),), capacity_tokens=T, item=4,
            hopper=False, tensor=tensor,
        )  # fmt: skip
        predicted[tensor] = sum(kept_per_layer(problem).values())
        leaves = jax.tree.leaves(layer_programs(tensor, "gemm_inputs")[-1])
        kept[tensor] = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // tensor
        mesh = stage_meshes(tensor=tensor)[0]
        shapes = {name: (shape, layer.split_axes.get(name)) for name, shape in layer.frozen_shapes().items()}
        shapes |= {"embed": ((config.vocab_size, config.hidden_size), 0), "norm": ((config.hidden_size,), None)}
        stored = sum(4 * np.prod(mesh.weight(shape, axis).shard_shape(shape)) for shape, axis in shapes.values())
        assert stage_memory(problem)[0].frozen == stored
    assert predicted[1] - predicted[2] == kept[1] - kept[2] > 0


def test_losses_of_a_split_vocabulary_are_those_of_the_whole():
    draw = np.random.default_rng(1)
    hidden, head = (draw.normal(size=size).astype(np.float32) for size in ((20, 24), (24, 96)))
    targets, weights = draw.integers(0, 96, 20), (draw.random(20) * (draw.random(20) > 0.3)).astype(np.float32)
    mesh = stage_meshes(tensor=4)[0].mesh
    options = {"soft_cap": 3.0, "logit_scale": 0.7, "chunk": 4}

    def losses(hidden, head, axis=None):
        return token_losses(hidden, head, targets, weights, axis=axis, **options)

    def split(hidden, head):
        parts, whole = jax.sharding.PartitionSpec(None, "tensor"), jax.sharding.PartitionSpec()
        both = jax.value_and_grad(lambda h, w: losses(h, w, "tensor").sum())
        return jax.shard_map(both, mesh=mesh, in_specs=(whole, parts), out_specs=(whole, whole), check_vma=False)(
            hidden, head
        )

    expected = jax.jit(jax.value_and_grad(lambda h, w: losses(h, w).sum()))(hidden, head)
    for ours, theirs in zip(jax.jit(split)(hidden, head), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * float(np.abs(theirs).max()))


REFUSED = {  # what is wrong, the key and value of the job, the base's fields, what the message says
    "key heads": ({}, {}, 4, "2 key and value heads are no multiple of mesh.tensor=4"),
    "columns": ({}, {"intermediate_size": 57}, 2, "57 columns of the MLP are no multiple of mesh.tensor=2"),
    "fused": ({}, {"fused": True}, 2, "it cannot split a fused qkv_proj"),
    "norms over heads": ({}, {"qk_norm": "full"}, 2, "it cannot split norms over all heads of q and k"),
    "quantised": ({"base": {"quantize": "nf4"}}, {}, 2, "it cannot split base.quantize: nf4"),
    "a kind": ({"lora": {"kind": "dora"}}, {}, 2, "tax: it cannot split adapters of lora.kind: dora"),
    "a bias": ({"lora": {"lora_bias": True}}, {}, 2, "tax: it cannot split lora.lora_bias"),
    "tokens": ({"lora": {"trainable_tokens": [3]}}, {}, 2, "tax: it cannot split lora.trainable_tokens"),
    "texts": ({"train": {"samples": 1}}, {}, 2, "makes no text during training"),
    "rollouts": (
        {"objective": {"name": "grpo"}, "rollout": {"reward": "exact", "group": 4}, "data": {"max_length": 512}},
        {},
        2,
        "tax: a base that devices share writes no answers for rollouts",
    ),
    "scores": (
        {"data": {"eval": "tax.jsonl"}, "eval": {"score": "score.py:short"}},
        {},
        2,
        "tax: a base that devices share writes no answers for eval.score",
    ),
    "parts": ({"train": {"parts": 2}}, {}, 1, "train.parts=2 has no effect on devices that compute whole layers"),
}


@pytest.mark.parametrize(("sections", "fields", "tensor", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_split_is_refused_by_name(sections, fields, tensor, says, tmp_path):
    (tmp_path / "tax.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (tmp_path / "score.py").write_text("def short(prompts, completions): return [0.0] * len(prompts)\n")
    job = {"base": {"model": "none"}, "adapters": [{"name": "tax", "data": {"train": "tax.jsonl"}}]}
    (tmp_path / "jobs.yaml").write_text(json.dumps(job | {"mesh": {"tensor": tensor}} | _merged(job, sections)))
    model = ModelConfig(**_fields(MODEL) | fields)
    problems = tensor_problems(load_config(tmp_path / "jobs.yaml", ()), model)
    assert {problem.code for problem in problems} == {"mesh.tensor" if tensor > 1 else "train.parts"}
    assert any(says in str(problem) for problem in problems), problems
    assert all(problem.fix for problem in problems)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"mesh\.tensor=2 needs a run of one process"):
        stage_meshes(tensor=2, data=2)


def _fields(model: ModelConfig) -> dict:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


def _merged(job: dict, sections: dict) -> dict:
    return {name: job.get(name, {}) | values for name, values in sections.items()}


def test_a_run_that_cannot_be_split_ends_before_it_is_loaded(bases, tmp_path):
    config = load_config(write_mixed_job(tmp_path, bases("biases"), ("law",), mesh={"tensor": 4}), ())
    with pytest.raises((ConfigError, ErrorList), match="2 key and value heads"):
        train(config, tmp_path / "run")
    config = load_config(write_mixed_job(tmp_path, bases("biases"), ("law",), mesh={"tensor": 2, "data": 8}), ())
    with pytest.raises(ConfigError, match="× 2 tensor"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "state").exists()
