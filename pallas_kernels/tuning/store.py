"""Writing of the tables of `config_store`, and the configuration class of each kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile

from pallas_kernels import config_store
from pallas_kernels.config_store import DATA as DATA
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
    """Writes a table atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"device": table.device, "conditions": table.conditions}
    lines = ",\n".join("    " + json.dumps(dataclasses.asdict(entry)) for entry in table.entries)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "entries": [\n' + lines + "\n  ]\n}\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
