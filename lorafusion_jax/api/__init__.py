"""The commands `plan`, `train` and `resume` as Python calls, with results that show themselves in notebooks.

`lorafusion_jax` offers the names: `lf.load_job`, `lf.plan`, `lf.train`, `lf.resume`, `lf.open_run`.
"""
