"""Loads a model onto a mesh of four devices and compares it with the same model on one.

python sharded_loading.py MODEL_DIR
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.models import load_decoder, loading

ADAPTERS = (AdapterSpec(name="a", rank=2, alpha=4),)


def main(model_dir: str) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))
    read_slice, most = loading.read_slice, {}

    def watched(stored, name, index):
        part = read_slice(stored, name, index)
        most[name] = max(most.get(name, 0), part.size)
        return part

    loading.read_slice = watched

    def rule(name, shape):
        split = ("rows", "columns") if name.endswith("kernel") else ("rows", None) if name.startswith("embed") else ()
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 2), *split))

    alone = load_decoder(model_dir, ADAPTERS, dtype=jnp.float32)
    most.clear()
    spread = load_decoder(model_dir, ADAPTERS, dtype=jnp.float32, sharding=rule)
    pairs = zip(nnx.to_flat_state(nnx.state(alone)), nnx.to_flat_state(nnx.state(spread)), strict=True)
    for (path, wanted), (_, got) in pairs:
        name = ".".join(map(str, path))
        assert got[...].sharding.is_equivalent_to(rule(name, got.shape), got[...].ndim), name
        np.testing.assert_array_equal(got[...], wanted[...], err_msg=name)
    assert most["model.layers.1.mlp.up_proj.weight"] == 16 * 24 // 4, "a device read more than its part"
    assert most["model.embed_tokens.weight"] == 48 * 16 // 2, "a device read more than its part"
    print("same")


if __name__ == "__main__":
    main(sys.argv[1])
