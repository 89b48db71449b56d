"""The table of measured tile sizes: what it holds, when it is believed, and the tuner that writes it."""

import dataclasses

import pytest

from pallas_kernels.arg_specs import LinearSpec
from pallas_kernels.triton.da import DaConfig
from pallas_kernels.tuning import store
from pallas_kernels.tuning.search import candidates
from pallas_kernels.tuning.tune import tune


def entry(config, *, p20, p50, p80, out_features=256):
    return store.Entry(
        kernel="da", tokens=512, in_features=256, out_features=out_features, rank=16, rate=0.1,
        config=dataclasses.asdict(config), p20_us=p20, p50_us=p50, p80_us=p80,
    )  # fmt: skip


def test_a_measured_configuration_is_taken_only_where_it_is_clearly_faster():
    own, close, fast = DaConfig(), DaConfig(block_k=64), DaConfig(block_k=256)
    entries = (entry(own, p20=9, p50=10, p80=11), entry(close, p20=8, p50=8.5, p80=9.5))
    table = store.Table(device="d", conditions={}, entries=entries)
    key = store.key("da", 512, 256, 1024, 16)  # a pass over x: the width of the output does not matter
    assert table.best(key, own) == own
    wider = dataclasses.replace(table, entries=(*entries, entry(fast, p20=5, p50=6, p80=7)))
    assert wider.best(key, own) == fast
    assert wider.best(store.key("da", 1024, 256, 256, 16), own) == own  # never measured
    assert wider.best(key, DaConfig(num_stages=2)) == DaConfig(num_stages=2)  # nothing to compare it with


def test_tables_survive_the_disk_and_reject_other_files(tmp_path):
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


def test_the_shipped_table_holds_only_configurations_that_exist():
    table = store.shipped("NVIDIA H200")
    assert len(table.entries) > 100
    assert {"jax", "date"} <= set(table.conditions)
    for item in table.entries:
        assert dataclasses.asdict(store.CONFIGS[item.kernel](**item.config)) == item.config
    assert store.shipped("a card nobody measured").entries == ()


def test_tuner_measures_every_candidate_once_and_goes_on_where_it_stopped(tmp_path):
    spec, path, seen = LinearSpec(tokens=256, in_features=256, out_features=512, tile=128), tmp_path / "t.json", []
    wanted = [c for c in candidates(spec, quick=True) if not c.kernel.startswith("mosaic")]
    table = tune([spec], path, quick=True, progress=seen.append)
    assert seen[-1].done == seen[-1].total == len(wanted)
    assert len(table.entries) + seen[-1].failed == len(wanted)
    assert store.load(path) == table
    part = dataclasses.replace(table, entries=table.entries[2:])
    store.save(part, path)
    again = tune([spec], path, quick=True)
    assert {(e.key, str(e.config)) for e in again.entries} == {(e.key, str(e.config)) for e in table.entries}
    assert again.entries[: len(part.entries)] == part.entries  # kept, not measured again
