"""Writing of the tables of `config_store`, and the configuration class of each kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile

from pallas_kernels import config_store
from pallas_kernels.config_store import DATA as DATA
from pallas_kernels.config_store import FORMAT as FORMAT
from pallas_kernels.config_store import Entry as Entry
from pallas_kernels.config_store import Table as Table
from pallas_kernels.config_store import file_name as file_name
from pallas_kernels.config_store import key as key
from pallas_kernels.config_store import shipped as shipped
from pallas_kernels.linear.hopper.da import DropDaConfig
from pallas_kernels.linear.hopper.down import DropDownConfig
from pallas_kernels.linear.hopper.dsdb import WideDsdbConfig
from pallas_kernels.linear.hopper.gemm_config import GemmConfig as HopperGemmConfig
from pallas_kernels.linear.passes.config import DaConfig, DownConfig, DsdbConfig
from pallas_kernels.linear.triton.gemm import GemmConfig as TritonGemmConfig

CONFIGS = {
    "down": DownConfig,
    "dsdb": DsdbConfig,
    "da": DaConfig,
    "mosaic_down": DropDownConfig,
    "mosaic_da": DropDaConfig,
    "mosaic_dsdb": WideDsdbConfig,
    "mosaic_fwd": HopperGemmConfig,
    "mosaic_dx": HopperGemmConfig,
    "triton_fwd": TritonGemmConfig,
    "triton_dx": TritonGemmConfig,
}


def load(path: pathlib.Path) -> Table | None:
    """Reads a table of this version's kernels; None if there is no file.

    Raises:
        ValueError: the file is not a table of this version.
    """
    return config_store.load(path, CONFIGS)


def save(table: Table, path: pathlib.Path) -> None:
    """Writes a table atomically; one in use must be read again by `config_store.use`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(text_of(table))
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def text_of(table: Table) -> str:
    """The file of a table, with one line for each of its times."""
    head = {"format": FORMAT, "device": table.device, "conditions": table.conditions, "digest": table.digest}
    rows = {
        "ops": [row.to_json() for row in table.ops],
        "entries": [dataclasses.asdict(entry) for entry in table.entries],
    }
    lists = [
        f'  "{name}": [\n' + ",\n".join("    " + json.dumps(row) for row in lines) + "\n  ]"
        for name, lines in rows.items()
    ]
    return json.dumps(head, indent=2)[:-2] + ",\n" + ",\n".join(lists) + "\n}\n"
