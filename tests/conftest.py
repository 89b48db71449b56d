"""A tiny random base model and small job files, shared by the tests that train."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import covered_cases
import hypothesis
import more_cases
import pytest
import shape_checks
from _pytest import runner
from cpu_seconds import CpuSeconds
from deep_calls import with_room
from left_behind import LeftBehind

shape_checks.install()

import one_compile  # noqa: E402
import small_jobs  # noqa: E402

from lorafusion_jax.examples import examples_directory  # noqa: E402

# The same cases on every run: a change is judged by what it changes. `--hypothesis-profile=nightly` looks for new ones.
hypothesis.settings.register_profile("same_cases", derandomize=True, deadline=None)
hypothesis.settings.register_profile("batch", max_examples=101, deadline=None)
hypothesis.settings.register_profile("campaign", max_examples=500, deadline=None)
hypothesis.settings.register_profile("nightly", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile("same_cases")

LONGEST = (
    "test_parity",
    "test_rollouts",
    "test_processes",
    "test_against_trl",
    "test_experts",
    "test_drawn_families",
    "test_acceptance",
    "test_session_objectives",
    "test_toy_kind",
    "test_greedy",
    "test_quantised_base",
    "test_objectives",
    "test_generator",
    "test_engine",
    "test_mixed_kinds",
    "test_resident",
    "test_tensor_parallel",
    "test_streams",
    "test_hybrid",
    "test_joint_equals_alone",
    "test_package",
    "test_notebooks",
    "test_docs",
    "test_model_streams",
)
KEPT = {}  # programs of stages that runs of one module share, in order of their last use
MOST_KEPT = 16  # each holds some megabytes of machine code


def pytest_configure(config: pytest.Config) -> None:
    """Eight simulated devices on the CPU, before anything starts a backend: layouts are tested everywhere."""
    import jax
    from absl import logging as absl_logging

    from lorafusion_jax.machine import GPUS_WAIT

    # Every command adds this option, and the key of a kept program has the options: without it from the start, what
    # was compiled before the first command of a process, and in another process, would be compiled once more.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GPUS_WAIT}".strip()
    config.pluginmanager.register(CpuSeconds())
    config.pluginmanager.register(LeftBehind())
    sys.dont_write_bytecode = False  # processes of a suite read what the first has compiled
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    jax.config.update("jax_num_cpu_devices", 8)
    # The first server of a process closes all handlers of logs, and absl's closes the sys.stderr that it was imported
    # with: the file of pytest, if a test has another by then.
    absl_logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
    gc.set_threshold(50_000, 20, 20)  # tracing makes millions of objects that live; looking through them costs a tenth


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        report.outcome = "failed"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    return with_room(partial(runner.pytest_runtest_protocol, item, nextitem))


@pytest.hookimpl(optionalhook=True)  # tests run without xdist, too
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait, for a signal or for another process."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    more_cases.drop_unasked(metafunc)


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests first: begun last, one of them would keep a worker busy while the others wait."""
    covered_cases.mark_covered(items)
    items.sort(key=lambda item: (LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)))


def pytest_collection_finish() -> None:
    forget_garbage()


def forget_garbage() -> None:
    """What lives after a collection lives on; the next collection does not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def forget_programs():
    """forget_programs(): whatever a test runs next is traced again, as code that it has changed must be."""

    def forget():
        import jax

        KEPT.clear()
        jax.clear_caches()

    return forget


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(forget_programs):
    """Compiled programs of a module are of no use to the next one, and make a process grow to gigabytes."""
    yield
    forget_programs()
    forget_garbage()


@pytest.fixture(autouse=True)
def _wrong_types(request):
    """Tests marked `wrong_types` see our own errors, not those of the check of signatures."""
    with shape_checks.off() if request.node.get_closest_marker("wrong_types") else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _same_umask():
    """`serve` and `keys` make files private for the rest of their process, which here runs other tests too."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory):
    """Keeps token and program caches out of the user's. Workers of pytest-xdist share theirs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def unsynced_files():
    """A test cuts no power, so it need not wait for the disk: a run of a second would wait three hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_compiles(tmp_path_factory):
    """Programs of tiny models: compiling is all of the time, so most optimizations are off and results are kept.

    All workers and the processes that tests start share one folder: equal programs compile once in a session. Those
    processes optimize as they like: notebooks also compute.
    """
    import jax

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = os.environ.get(
        "LORAFUSION_TEST_PROGRAMS"
    )  # a folder that outlives a session, for who runs a file many times
    shared = {
        "jax_compilation_cache_dir": kept or str(folder / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")  # on a GPU: as users have it
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shared.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        patch.setattr("lorafusion_jax.session.lowered.lowered_folder", lambda: None)  # tests replace functions
        if jax.default_backend() == "cpu":
            one_compile.share_programs(patch)
        yield


@pytest.fixture(scope="session")
def kept_programs(quick_compiles):
    """Runs of one module share the programs of equal stages: tracing them again takes most of a run.

    Whatever a run changes is an argument of them. Only a trace of backward needs what the trace of forward just left,
    so programs of a run that ended between the two are not used again.
    """
    from lorafusion_jax.session import stage_state
    from lorafusion_jax.session.programs import StagePrograms

    def programs(parts, *arguments):
        key = repr(parts), *arguments
        known = KEPT.pop(key, None)
        layers = None if known is None else known.layers
        if layers is None or layers.forward._cache_size() != sum(
            backward._cache_size() for backward in (layers.backward, layers.backward_giving)
        ):
            known = StagePrograms(parts, *arguments)
        KEPT[key] = known
        if len(KEPT) > MOST_KEPT:
            del KEPT[next(iter(KEPT))]
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_state, "StagePrograms", programs)
        yield


@pytest.fixture(scope="module")
def saves_wait():
    """A checkpoint is on the disk before the next step, so that a test can cut a run right after it on any machine."""
    from lorafusion_jax.training.saver import Saver

    save = Saver.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "save", lambda self, progress, *, wait: save(self, progress, wait=True))
        yield


def write_base(directory: Path, **changes) -> Path:
    """Writes an HF directory of a random tiny model with the tokenizer of the examples."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from benchmarks.saved_model import save_decoder
    from lorafusion_jax.models import Decoder, ModelConfig

    shape = {
        "family": "llama",
        "vocab_size": 3072,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "tie_embeddings": True,
    }
    with jax.default_device(jax.local_devices()[0]):
        model = Decoder(ModelConfig(**(shape | changes)), dtype=jnp.float32, rngs=nnx.Rngs(0))
    save_decoder(model, directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(examples_directory() / "base" / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def make_base() -> Callable[..., Path]:
    """make_base(directory, **shape) → an HF directory of a random tiny model, of another shape where it is told."""
    return write_base


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """A random 2-layer model with tied embeddings."""
    return write_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def deep_base(tmp_path_factory) -> Callable[..., Path]:
    """Random models of 5 layers, with tied embeddings or without: enough for four uneven stages."""
    folder = tmp_path_factory.mktemp("deep")
    return {
        tied: write_base(folder / f"tied-{tied}", num_layers=5, tie_embeddings=tied, vocab_size=3072)
        for tied in (True, False)
    }.__getitem__


@pytest.fixture
def write_rows(tmp_path) -> Callable[..., str]:
    """write_rows(name, count, seed, longest) → name of a file of prompts and completions of different lengths."""
    return partial(small_jobs.write_rows, tmp_path)


@pytest.fixture
def write_job(tmp_path, tiny_base) -> Callable[..., Path]:
    """write_job(adapters, **sections) → path of a job file for the tiny base."""
    return partial(small_jobs.write_job, tmp_path, tiny_base)
