"""How the programs of a stage are compiled, and how they add up gradients."""

from unittest import mock

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.session import stage_jit
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_jit import ROUNDS

MODEL = ModelConfig(
    family="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8,
)  # fmt: skip


def options(implementation):
    """Of every program of a stage on an H200, by the function's name."""
    parts = Parts(
        model=MODEL, specs=(AdapterSpec(name="law", rank=4, alpha=8),),
        settings=TrainSettings(implementation=implementation),
    )  # fmt: skip
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    stage = stage_meshes()[0]
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)),
        mock.patch.object(jax, "jit", wraps=jax.jit) as jit,
    ):
        StagePrograms(parts, stage, Extent(0, 4), "everything")
    return {
        getattr(call.args[0], "func", call.args[0]).__name__: call.kwargs["compiler_options"]
        for call in jit.call_args_list
        if "compiler_options" in call.kwargs
    }


@pytest.mark.parametrize(("implementation", "told"), [(None, True), ("pallas_mosaic_gpu", True), ("xla", False)])
def test_layers_are_compiled_as_the_kernels_want_it(implementation, told):
    compiler = options(implementation)
    triton = {"xla_gpu_enable_triton_gemm": False} if told else {}
    assert [compiler[name] for name in ("_forward", "_backward", "_evaluate")] == [ROUNDS | triton] * 3
    assert compiler["_head"] == ROUNDS  # its second product is slower without Triton's


def test_weights_are_gathered_beside_computing_unless_the_user_says_otherwise(monkeypatch):
    flag = "xla_gpu_enable_latency_hiding_scheduler"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert [stage_jit.hidden_gathers(fsdp) for fsdp in (1, 4)] == [{}, {flag: True}]
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/x --{flag}=false")
    assert stage_jit.hidden_gathers(4) == {}
