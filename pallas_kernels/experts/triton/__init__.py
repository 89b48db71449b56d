"""The projections of experts as Triton kernels: `backend` is what the op calls."""
