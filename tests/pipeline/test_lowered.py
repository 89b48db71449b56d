"""Programs in lowered form: a later start traces nothing, and computes the same."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.data.assemble import assemble, stacked
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.models.stream import Stream
from lorafusion_jax.session import lowered
from lorafusion_jax.session.layer_programs import LayerPrograms
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.session.stage_weights import LayerWeights

LAYERS, TOKENS = 2, 32
MODEL = ModelConfig(
    family="qwen3", vocab_size=40, hidden_size=24, intermediate_size=40, num_layers=LAYERS, num_heads=3, num_kv_heads=1,
    head_dim=8,
)  # fmt: skip
SPECS = (
    AdapterSpec(name="ash", rank=3, alpha=5, dropout=0.2, seed=7, targets=("q_proj", "down_proj")),
    AdapterSpec(name="oak", rank=2, alpha=2, targets=("down_proj", "v_proj")),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lowered, "lowered_folder", lambda: tmp_path)
    return tmp_path


def traced(identity="same", factor=2.0):
    """A jitted function, and how often it was traced."""
    count = SimpleNamespace(traces=0)

    def scale(x, others):
        count.traces += 1
        return {"x": x * factor, "others": [other + 1 for other in others]}

    return jax.jit(lowered.kept(scale, identity)), count


def test_a_later_process_traces_nothing(folder):
    first, traces = traced()
    made = first(jnp.arange(4.0), (jnp.int32(3),))
    again, later = traced(factor=3.0)  # what a changed source would compute is not looked at: the identity is the same
    chex.assert_trees_all_equal(again(jnp.arange(4.0), (jnp.int32(3),)), made)
    assert (traces.traces, later.traces, len(list(folder.iterdir()))) == (1, 0, 1)


def test_keys_that_layers_pass_on_are_part_of_a_program(folder):
    def double(carried):
        return Stream(2 * carried.x_TD, dict(carried.shared))

    carried = Stream(jnp.ones((4, 2)), {"self_attn": (jnp.ones((4, 1, 2)), jnp.zeros((4, 1, 2)))})
    made, again = (jax.jit(lowered.kept(double, "same"))(carried) for _ in range(2))
    chex.assert_trees_all_equal(again, made)
    assert isinstance(again, Stream)
    assert len(list(folder.iterdir())) == 1


def test_anything_else_is_another_program(folder):
    traced()[0](jnp.arange(4.0), (jnp.int32(3),))
    calls = {
        "identity": ("other", (jnp.arange(4.0), (jnp.int32(3),))),
        "shape": ("same", (jnp.arange(5.0), (jnp.int32(3),))),
        "dtype": ("same", (jnp.arange(4), (jnp.int32(3),))),
        "structure": ("same", (jnp.arange(4.0), [jnp.int32(3)])),
    }
    for name, (identity, operands) in calls.items():
        function, traces = traced(identity)
        function(*operands)
        assert traces.traces == 1, name
    assert len(list(folder.iterdir())) == 1 + len(calls)


@pytest.mark.parametrize("broken", [b"", b"x" * 40, None])
def test_a_damaged_file_is_written_again(folder, broken):
    traced()[0](jnp.arange(4.0), ())
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] if broken is None else broken)
    function, traces = traced()
    assert function(jnp.arange(4.0), ())["x"].tolist() == [0, 2, 4, 6]
    assert traces.traces == 1
    assert lowered.read_program(file) is not None


def test_a_program_of_a_gpu_finds_the_runtimes_of_its_kernels(tmp_path):
    """Mosaic's kernels do not run in a process that has neither traced one nor imported Mosaic."""
    program = export.export(jax.jit(lambda x: x + 1), platforms=["cuda"])(jnp.arange(3.0))
    file = tmp_path / "add.program"
    lowered._write(file, program)
    code = (
        "import sys, pathlib; from lorafusion_jax.session.lowered import read_program;"
        "loaded = lambda: {'jax.experimental.mosaic.gpu', 'jax.experimental.pallas.triton'} <= set(sys.modules);"
        f"print(loaded(), read_program(pathlib.Path({str(file)!r})).platforms, loaded())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False ('cuda',) True\n"


def test_what_jax_cannot_export_runs_as_it_is(folder):
    double = jax.jit(
        lowered.kept(lambda x: jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct((), x.dtype), x), "host")
    )
    assert float(double(jnp.float32(4))) == 8
    assert not list(folder.iterdir())


def test_without_a_cache_of_programs_nothing_is_kept(tmp_path):
    config = SimpleNamespace(jax_compilation_cache_dir=None, jax_enable_compilation_cache=True)
    assert [lowered_folder(config, folder) for folder in (None, "gs://bucket/x", str(tmp_path))] == [
        None, None, tmp_path / "lowered",
    ]  # fmt: skip


def lowered_folder(config, folder):
    config.jax_compilation_cache_dir = folder
    return lowered.folder_of(config)


def stage(model=MODEL, specs=SPECS):
    parts = Parts(model=model, specs=specs, settings=TrainSettings(implementation="xla"), dtype=jnp.float32)
    return parts, StagePrograms(parts, stage_meshes()[0], Extent(0, 2 * LAYERS), "gemm_inputs")


FIRST = Position.of(Extent(0, 2 * LAYERS), 0)


def run(parts, programs):
    """Outputs of the programs of a block of layers, on random arrays."""
    layers = programs.layers
    draw = np.random.default_rng(5)

    def arrays(shapes):
        return {name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()}

    frozen = tuple(LayerWeights(arrays(parts.frozen_shapes())) for _ in range(LAYERS))
    lora = arrays(parts.leaves.lora_shapes(LAYERS))
    sums = arrays({name: (1, *shape) for name, shape in parts.leaves.lora_shapes(LAYERS).items()})
    empty = assemble((), capacity_tokens=TOKENS, tile_tokens=16, max_segments=2, max_adapters=2)
    owner = np.array([0, 1], np.int32)
    batch = empty._replace(
        tile_adapter=owner, adapters=owner, row_adapter=owner.repeat(16), row_key=np.arange(TOKENS, dtype=np.uint32)
    )
    x, dy = (jnp.asarray(draw.normal(size=(1, TOKENS, MODEL.hidden_size)), jnp.float32) for _ in range(2))
    inputs = layers.inputs(stacked([batch]))
    y, residuals = layers.forward(frozen, lora, FIRST, x, inputs)
    dx, total = layers.backward(frozen, lora, FIRST, x, inputs, residuals, dy, sums)
    held_out = layers.evaluate(frozen, lora, FIRST, x, layers.inputs_without_dropout(stacked([batch])))
    return jax.device_get((y, dx, total, held_out))


def count_traces(monkeypatch):
    counts = {"forward": 0, "backward": 0, "evaluate": 0}

    def counted(name, trace):
        def call(self, *operands):
            counts[name] += 1
            return trace(self, *operands)

        return call

    for name in counts:
        attribute = f"_run_{name}_layer"
        monkeypatch.setattr(LayerPrograms, attribute, counted(name, getattr(LayerPrograms, attribute)))
    return counts


def test_programs_of_layers_are_bitwise_the_same_from_their_files(folder, monkeypatch):
    counts = count_traces(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(lowered, "lowered_folder", lambda: None)
        direct = run(*stage())
    assert set(counts.values()) == {1}  # for all layers

    chex.assert_trees_all_equal(run(*stage()), direct)
    assert set(counts.values()) == {2}

    next(folder.glob("backward-*")).unlink()  # backward alone needs to know what forward leaves
    renamed = tuple(dataclasses.replace(spec, name=spec.name[::-1]) for spec in SPECS)
    chex.assert_trees_all_equal(run(*stage(specs=renamed)), direct)
    assert counts == {"forward": 2, "backward": 3, "evaluate": 2}
    assert len(list(folder.iterdir())) == 3


def test_programs_with_code_of_other_packages_are_not_kept(monkeypatch):
    _, programs = stage()
    identity = programs.layers._identity()
    assert identity is not None
    assert " at 0x" not in identity  # another process would never find its files
    monkeypatch.setattr("lorafusion_jax.session.layer_programs.ADAPTER_KINDS", {"theirs": None})
    assert programs.layers._identity() is None
