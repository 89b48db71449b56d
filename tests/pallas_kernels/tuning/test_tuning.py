"""Tables of measured tile sizes: content, validity, and the tuner that writes them."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import A10, A100, H200, L40
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_kernels as pk
from benchmarks.kernel_sections import benchmark_specs
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.tuning_table import check_table
from pallas_kernels import policy
from pallas_kernels.arg_specs import LinearSpec, make_arrays, tuning_specs
from pallas_kernels.device import shared_memory_bytes
from pallas_kernels.linear.hopper.gemm_config import GemmConfig as MosaicGemmConfig
from pallas_kernels.linear.passes.config import (
    DaConfig,
    DownConfig,
    DsdbConfig,
    da_config,
    down_config,
    dsdb_config,
    fit_pass,
)
from pallas_kernels.linear.triton.gemm import GemmConfig as TritonGemmConfig
from pallas_kernels.linear.triton.gemm import gemm_config as triton_gemm_config
from pallas_kernels.tuning import search, store
from pallas_kernels.tuning import tune as tuner
from pallas_kernels.tuning.search import candidates
from pallas_kernels.tuning.tune import key_of, tune

LAYER = LinearSpec(tokens=2048, in_features=1024, out_features=1024, adapters=2)


def entry(config, *, p20, p50, p80, out_features=256, rate=0.1):
    return store.Entry(
        kernel="da", tokens=512, in_features=256, out_features=out_features, rank=16, rate=rate,
        config=dataclasses.asdict(config), p20_us=p20, p50_us=p50, p80_us=p80,
    )  # fmt: skip


def da_key(tokens=512, out_features=256, *, dropout=True):
    return store.key("da", tokens, 256, out_features, 16, dropout=dropout)


def table_of(*entries):
    return store.Table(device="d", conditions={}, entries=entries)


def test_a_measured_configuration_needs_a_clear_advantage():
    built_in, close, fast = DaConfig(), DaConfig(block_k=64), DaConfig(block_k=256)
    table = table_of(entry(built_in, p20=9, p50=10, p80=11), entry(close, p20=8, p50=8.5, p80=9.5))
    key = da_key(out_features=1024)  # a pass over x: the width of the output does not matter
    assert table.best(key, built_in) == built_in
    wider = table_of(*table.entries, entry(fast, p20=5, p50=6, p80=7))
    assert wider.best(key, built_in) == fast
    assert wider.best(da_key(1024), built_in) == built_in  # never measured
    assert wider.best(key, DaConfig(num_stages=2)) == DaConfig(num_stages=2)  # nothing to compare it with


def test_times_with_dropout_do_not_apply_without():
    built_in, fast = DaConfig(), DaConfig(block_k=256)
    table = table_of(entry(built_in, p20=9, p50=10, p80=11), entry(fast, p20=5, p50=6, p80=7, rate=0.5))
    assert table.best(da_key(), built_in) == fast  # keep bits cost the same at every rate
    assert table.best(da_key(dropout=False), built_in) == built_in
    plain, dropping = (dataclasses.replace(LAYER, rate=rate) for rate in (0.0, 0.1))
    differ = {kernel for kernel in store.CONFIGS if key_of(plain, kernel) != key_of(dropping, kernel)}
    assert differ == {"down", "da", "mosaic_down", "mosaic_da", "mosaic_dx", "triton_dx"}


def lower(spec, backend, device=H200):
    """Forward and backward of a layer on a GPU, as far as the choice of tiles."""
    arrays = jax.eval_shape(lambda: make_arrays(spec))

    def step(arrays):
        def layer(x, a, b):
            rest = {name: arrays[name] for name in ("scale", "dropout")}
            if spec.adapters == 1:
                options = {**rest, "scale": rest["scale"][0], "implementation": backend}
                return pk.lora_linear(x, arrays["w"], a[0], b[0], **options)
            rest["tile_adapter"] = arrays["tile_adapter"]
            return pk.multi_lora_linear(x, arrays["w"], a, b, implementation=backend, **rest)

        y, vjp = jax.vjp(layer, arrays["x"], arrays["a"], arrays["b"])
        return y, *vjp(arrays["dy"])

    jax.clear_caches()  # a call that was traced before would not ask for a configuration
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jax.eval_shape(step, arrays)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapters": 1, "rate": 0.1},
        {"rate": 0.1, "out_features": 8192},
        {"rank": 64, "rate": 0.1, "tile": 64},
        {"rank": 64, "in_features": 8192, "out_features": 2048},
        {"rank": 256, "rate": 0.1, "tile": 64},
    ],
)
def test_the_tuner_measures_the_heuristic_choice(monkeypatch, changes, quick):
    spec, asked = dataclasses.replace(LAYER, **changes), []

    def best(self, key, heuristic):
        asked.append((key[0], key, heuristic))
        return heuristic

    monkeypatch.setattr(store.Table, "best", best)
    lower(spec, "pallas_triton")
    expected = {"triton_fwd", "triton_dx"}
    if spec.rank <= policy.MAX_RANK:  # of more, Hopper's kernels take the first 16: tuning rank 16 measures them
        lower(spec, "pallas_mosaic_gpu")
        expected |= {"mosaic_fwd"}
    choices = list(candidates(spec, quick=quick))
    measured = [(c.kernel, key_of(spec, c.kernel), c.config) for c in choices]
    assert [kernel for kernel, *rest in asked if (kernel, *rest) not in measured] == []
    assert expected <= {kernel for kernel, *_ in asked}
    assert len(measured) == len({str(what) for what in measured})  # none twice
    kernels = [kernel for kernel, *_ in measured]
    assert all(kernels.count(kernel) > 1 for kernel in kernels)  # one alone decides nothing


@pytest.mark.parametrize(
    ("kernel", "backend", "fast", "tile"),
    [
        ("mosaic_fwd", "pallas_mosaic_gpu", MosaicGemmConfig(split_n=False, stages=3), 128),  # blocks of two tiles
        ("mosaic_fwd", "pallas_mosaic_gpu", MosaicGemmConfig(stages=3), 64),
        ("triton_fwd", "pallas_triton", TritonGemmConfig(num_stages=2), 128),
        ("triton_dx", "pallas_triton", TritonGemmConfig(num_stages=2), 128),
        ("triton_dx", "pallas_triton", TritonGemmConfig(num_stages=2), 64),
    ],
)
def test_a_configuration_must_fit_every_tile_of_an_adapter(monkeypatch, kernel, backend, fast, tile):
    from pallas_kernels.linear.hopper import backend as hopper
    from pallas_kernels.linear.triton import backend as triton

    used, module = [], hopper if backend == "pallas_mosaic_gpu" else triton

    def gemm(lhs, rhs, *arrays, transposed, config, **options):
        used.append(("dx" if transposed else "fwd", config))
        return lhs @ (rhs.T if transposed else rhs)

    monkeypatch.setattr(module, "gemm", gemm)
    monkeypatch.setattr(store.Table, "best", lambda self, key, default: fast if key[0] == kernel else default)
    lower(dataclasses.replace(LAYER, tile=tile), backend)
    part = kernel.split("_")[1]
    assert [config == fast for name, config in used if name == part] == [tile == 128]


@pytest.mark.parametrize(("device", "kib"), [(A100, 163), (A10, 99), (L40, 99)])
def test_products_of_smaller_gpus_have_candidates_that_may_fit(device, kib):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        heuristic, *others = [c.config for c in candidates(LAYER) if c.kernel == "triton_fwd"]
    assert heuristic.shared_bytes(16, 2) <= kib * 1024
    assert len(others) >= 4
    for config in others:  # two of three stages are under way
        assert 2 * (config.block_m + config.block_n) * config.block_k * (config.num_stages - 1) <= kib * 1024


@pytest.mark.parametrize(("dtype", "taken"), [("bfloat16", True), ("float32", False)])
def test_tiles_that_ran_on_a_device_are_taken_in_types_of_their_size(monkeypatch, tmp_path, dtype, taken):
    from pallas_kernels import config_store
    from pallas_kernels.linear.triton import backend as triton

    used, spec = [], dataclasses.replace(LAYER, dtype=dtype)
    large, key = TritonGemmConfig(num_stages=3), key_of(LAYER, "triton_fwd")  # 99 KiB by the careful estimate: too much
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=L40)):
        heuristic = triton_gemm_config(LAYER.in_features, LAYER.out_features, 16, LAYER.tile, jnp.dtype(dtype).itemsize)
        assert large.shared_bytes(16, 2) > shared_memory_bytes()
    row = {"kernel": key[0], "tokens": key[1], "in_features": key[2], "out_features": key[3], "rank": 16, "rate": 0.0}
    times = [{"p20_us": us, "p50_us": us, "p80_us": us} for us in (2.0, 1.0)]
    entries = [
        store.Entry(**row, config=dataclasses.asdict(config), **own_times)
        for config, own_times in zip((heuristic, large), times, strict=True)
    ]
    store.save(store.Table(device=L40.device_kind, conditions={}, entries=tuple(entries)), tmp_path / "t.json")
    config_store.use(tmp_path / "t.json")

    def gemm(lhs, rhs, *arrays, transposed, config, **options):
        used.extend([] if transposed else [config])
        return lhs @ (rhs.T if transposed else rhs)

    monkeypatch.setattr(triton, "gemm", gemm)
    lower(spec, "pallas_triton", L40)
    config_store.forget(L40.device_kind)
    assert used == [large if taken else heuristic]


@pytest.mark.parametrize("rank", [16, 64])
def test_the_pass_over_x_includes_the_low_rank_part_if_calls_do(rank):
    spec = dataclasses.replace(LAYER, rank=rank, rate=0.1)
    candidate = next(c for c in candidates(spec) if c.kernel == "mosaic_da")

    def run():
        inputs, copies = search.make_inputs(spec)
        return candidate.run(inputs, candidate.config, copies["x"][0], copies["w"][0])

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(run))]
    assert shapes == [(1024, rank), *([(2048, 1024)] if rank > 16 else [])]


def test_tables_round_trip_and_reject_other_files(tmp_path):
    path = tmp_path / "new" / store.file_name("NVIDIA H200")
    assert path.name == "nvidia_h200.json"
    assert store.load(path) is None
    table = store.Table(
        device="NVIDIA H200", conditions={"jax": "0"}, entries=(entry(DaConfig(), p20=1.0, p50=2.0, p80=3.0),)
    )
    store.save(table, path)
    assert store.load(path) == table
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.write_text('{"device": "x"}')
    with pytest.raises(ValueError, match="no tuning table"):
        store.load(path)


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        ({"config": {**dataclasses.asdict(DaConfig()), "mask": "shared"}}, "options of da have changed: mask"),
        ({"config": {"block_t": 64}}, "options of da have changed: block_k, blocks_per_chunk"),
        ({"kernel": "da_of_old"}, "there is no kernel 'da_of_old'"),
    ],
)
def test_a_table_of_an_older_version_is_refused_with_the_reason(tmp_path, old, reason):
    path = tmp_path / "old.json"
    raw = dataclasses.asdict(entry(DaConfig(), p20=1.0, p50=2.0, p80=3.0)) | old
    path.write_text(json.dumps({"device": "d", "conditions": {}, "entries": [raw]}))
    with pytest.raises(ValueError, match=f"no tuning table: {reason}.*; delete it and tune again"):
        store.load(path)
    with pytest.raises(
        ConfigError, match="not a table of this version"
    ) as caught:  # `lorafusion tune`, before it measures
        check_table(path)
    assert (caught.value.code, caught.value.where) == ("tune.old-table", str(path))
    assert caught.value.why.startswith(reason)
    check_table(tmp_path / "not there yet.json")


def test_the_built_in_table_has_valid_choices_with_a_baseline():
    table = store.shipped("NVIDIA H200")
    assert len(table.entries) > 100
    assert {"jax", "date"} <= set(table.conditions)
    baselines = set()
    for item in table.entries:
        assert dataclasses.asdict(store.CONFIGS[item.kernel](**item.config)) == item.config
        for adapters in (1, 4):  # the heuristic minds whether there are several, the key does not
            spec = LinearSpec(
                tokens=item.tokens, in_features=item.in_features, out_features=item.out_features, rank=item.rank,
                rate=item.rate, adapters=adapters,
            )  # fmt: skip
            first = next((c.config for c in candidates(spec) if c.kernel == item.kernel), None)
            baselines |= {item.key} if first is not None and table.has(item.key, first) else set()
    assert baselines == {item.key for item in table.entries}
    assert store.shipped("a card nobody measured").entries == ()


def test_the_named_shapes_cover_the_built_in_table():
    for quick in (True, False):
        keys = {key_of(spec, kernel) for spec in tuning_specs(quick=quick) for kernel in store.CONFIGS}
        assert {entry.key for entry in store.shipped("NVIDIA H200").entries} <= keys
    assert {(s.tokens, s.in_features, s.out_features, s.rank, s.rate) for s in benchmark_specs()} <= {
        (s.tokens, s.in_features, s.out_features, s.rank, s.rate) for s in tuning_specs()
    }


def failing(candidate, *, all_of_them=False):
    def run(*arguments):
        if all_of_them or candidate.config.num_stages == 3:
            raise RuntimeError("too much shared memory\nand a page of the compiler's own words")
        return candidate.run(*arguments)

    return dataclasses.replace(candidate, run=run)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_failures_are_reported_and_not_stored(monkeypatch, tmp_path, all_of_them):
    spec, path, seen = LinearSpec(tokens=256, in_features=256, out_features=512), tmp_path / "t.json", []
    group = [c for c in candidates(spec, quick=True) if c.kernel == "down"]
    broken = [failing(c, all_of_them=all_of_them) for c in group]
    gone = [dataclasses.asdict(c.config) for c in group if all_of_them or c.config.num_stages == 3]
    assert 0 < len(gone) <= len(group)
    monkeypatch.setattr(tuner, "_groups", lambda spec, quick: {"down": broken})
    table = tune([spec], path, quick=True, progress=seen.append)
    assert [failure.config for failure in seen[-1].failed] == gone
    assert {(f.kernel, f.shape, f.reason) for f in seen[-1].failed} == {
        ("down", spec.name, "RuntimeError: too much shared memory")
    }
    assert [entry.config for entry in table.entries if entry.config in gone] == []
    assert len(table.entries) == len(group) - len(gone)
    assert path.exists() != all_of_them  # a table of nothing is none


def test_tuner_measures_every_candidate_once_and_can_be_continued(tmp_path):
    spec, path, seen = LinearSpec(tokens=256, in_features=256, out_features=512, tile=128), tmp_path / "t.json", []
    wanted = [c for c in candidates(spec, quick=True) if not c.kernel.startswith("mosaic")]
    table = tune([spec], path, quick=True, progress=seen.append)
    assert seen[-1].done == seen[-1].total == len(wanted)
    assert len(table.entries) + len(seen[-1].failed) == len(wanted)
    assert store.load(path) == table
    part = dataclasses.replace(table, entries=(table.entries[0], *table.entries[2:]))
    store.save(part, path)
    again = tune([spec], path, quick=True)
    assert {(e.key, str(e.config)) for e in again.entries} == {(e.key, str(e.config)) for e in table.entries}
    assert again.entries[: len(part.entries)] == part.entries  # kept, not measured again


def test_the_baseline_is_timed_again_with_new_candidates(monkeypatch, tmp_path):
    spec, path, timed = dataclasses.replace(LAYER, rate=0.1), tmp_path / "t.json", []
    down = [c for c in candidates(spec) if c.kernel == "down"]
    of_another_tile = dataclasses.replace(down[1].config, block_t=256)

    def measure(spec, group):
        timed.append([c.config for c in group])
        row = entry(DaConfig(), p20=1.0, p50=2.0, p80=3.0)
        sizes = {"tokens": spec.tokens, "in_features": spec.in_features, "out_features": spec.out_features}
        return [
            dataclasses.replace(row, kernel=c.kernel, config=dataclasses.asdict(c.config), **sizes) for c in group
        ], []

    monkeypatch.setattr(tuner, "_measure", measure)
    monkeypatch.setattr(tuner, "_groups", lambda spec, quick: {"down": down})
    strange = measure(spec, [dataclasses.replace(down[1], config=of_another_tile)])[0]
    table = tune([spec], path)
    without_choice = (*table.entries[1:], *strange)
    store.save(dataclasses.replace(table, entries=without_choice), path)  # without the heuristic's choice
    again = tune([spec], path)
    assert timed[1:] == [[c.config for c in down]] * 2
    assert again.entries == (*strange, *table.entries)  # replaced; what another job measured stays


def test_a_table_of_another_device_is_not_continued(tmp_path):
    path = tmp_path / "t.json"
    store.save(dataclasses.replace(table_of(), device="NVIDIA A100"), path)
    with pytest.raises(ValueError, match=r"holds times of NVIDIA A100, this device is cpu: write to another file"):
        tune([LAYER], path)
    with pytest.raises(ConfigError) as caught:  # `lorafusion tune`, before it measures
        check_table(path)
    assert caught.value.code == "tune.other-device"
    assert store.load(path).entries == ()


def test_a_table_records_all_versions_of_its_times(monkeypatch, tmp_path):
    path = tmp_path / "t.json"
    old = {"jax": "0.0.1", "jaxlib": tuner.conditions()["jaxlib"], "date": "2020-01-01"}
    store.save(store.Table(device=jax.devices()[0].device_kind, conditions=old), path)
    monkeypatch.setattr(tuner, "_measure", lambda spec, group: ([entry(DaConfig(), p20=1.0, p50=2.0, p80=3.0)], []))
    monkeypatch.setattr(tuner, "_groups", lambda spec, quick: {"da": [c for c in candidates(spec) if c.kernel == "da"]})
    for _ in range(2):  # the second time the same versions: told once
        now, recorded = tuner.conditions(), tune([LAYER], path).conditions
        both = {"jax": f"0.0.1, {now['jax']}", "date": f"2020-01-01, {now['date']}"}
        assert recorded == now | both
    assert store.load(path).conditions == recorded


ROOMS = {  # KiB for a program; sm_90, sm_80, sm_86, sm_89
    "NVIDIA H200": 227, "NVIDIA A100-SXM4-80GB": 163, "NVIDIA A10": 99, "NVIDIA L40S": 99,
}  # fmt: skip
ASKED = [  # what Triton asked for, compiled for sm_90 (four adapters, 2048 x 4096 -> 4096)
    (DownConfig(block_t=64, block_k=64, num_stages=4), 16, 2, False, 40960),
    (DownConfig(block_t=64, block_k=64, num_stages=4), 32, 4, True, 96256),
    (DownConfig(block_t=64, block_k=128, num_stages=3), 64, 2, True, 110592),
    (DownConfig(block_t=64, block_k=128, num_stages=3), 64, 4, True, 167936),
    (DownConfig(block_t=64, block_k=64, num_stages=3), 256, 4, True, 184320),
    (DaConfig(block_t=64, block_k=128, num_stages=4), 16, 2, True, 43012),
    (DaConfig(block_t=64, block_k=64, num_stages=3), 256, 2, False, 81924),
    (DaConfig(block_t=64, block_k=64, num_stages=3), 256, 4, True, 100356),
    (DsdbConfig(block_t=64, blocks_per_chunk=2, block_n=64, num_stages=4), 16, 2, False, 81920),
    (DsdbConfig(block_t=64, blocks_per_chunk=2, block_n=128, num_stages=3), 64, 2, False, 180224),
    (DsdbConfig(block_t=64, blocks_per_chunk=2, block_n=128, num_stages=3), 64, 4, False, 237568),
    (DsdbConfig(block_t=64, blocks_per_chunk=1, block_n=64, num_stages=3), 256, 2, False, 221184),
    (DsdbConfig(block_t=64, blocks_per_chunk=1, block_n=64, num_stages=3), 256, 4, False, 233472),
]


@pytest.mark.parametrize(("config", "rank", "item", "drops", "asked"), ASKED)
def test_a_pass_stays_within_its_stated_shared_memory(config, rank, item, drops, asked):
    assert asked <= config.shared_bytes(rank, item, drops=drops) <= 1.6 * asked + 65536


@pytest.mark.parametrize(
    ("capability", "kind", "kib"),
    [
        ("8.0", "any name", 163),
        ("8.6", "NVIDIA A10", 99),
        ("8.6", "NVIDIA RTX A1000 Laptop GPU", 99),
        ("8.9", "NVIDIA L40S", 99),
        ("9.0", "NVIDIA H200", 227),
        ("10.0", "NVIDIA B200", 227),
        ("12.0", "NVIDIA GeForce RTX 5090", 99),
        ("13.7", "of the future", 99),
    ],
)
def test_an_attached_gpu_has_the_shared_memory_of_its_capability(monkeypatch, capability, kind, kib):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability, device_kind=kind)])
    assert shared_memory_bytes() == kib * 1024


@pytest.mark.parametrize(("name", "kib"), ROOMS.items())
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("rank", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("tile", [16, 128])
def test_tiles_of_triton_passes_fit_the_device(name, kib, item, rank, tile):
    device = AbstractDevice(device_kind=name, num_cores=108, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for config in (
            down_config(8192, 4096, rank, tile), da_config(8192, 4096, rank, tile), dsdb_config(8192, 4096, rank, tile),
        ):  # fmt: skip
            fitted = fit_pass(config, rank, item, drops=True)
            assert fitted.shared_bytes(rank, item, drops=True) <= kib * 1024
            assert tile % fitted.block_t == 0
            if (name, item) == ("NVIDIA H200", 2):
                assert fitted == config, "what was measured there"


@pytest.mark.parametrize(("name", "kib"), ROOMS.items())
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("rank", [16, 32, 64, 128, 256])
def test_tiles_of_triton_products_fit_the_device(name, kib, item, rank):
    device = AbstractDevice(device_kind=name, num_cores=108, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        config = triton_gemm_config(4096, 14336, rank, 128, item)
    assert config.shared_bytes(rank, item) <= kib * 1024
    if (name, item) == ("NVIDIA H200", 2) and rank <= 64:
        assert (config.block_n, config.block_k, config.num_stages) == (256, 64, 3), "what was measured there"
