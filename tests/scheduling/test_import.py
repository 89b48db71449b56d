"""The package imports neither JAX nor the other packages."""

import subprocess
import sys


def test_imports_neither_jax_nor_scipy_nor_the_product():
    code = "import sys, scheduling; print(sorted({name.split('.')[0] for name in sys.modules}))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("jax", "scipy", "lorafusion_jax", "pallas_kernels", "matplotlib"):
        assert f"'{name}'" not in names
