"""Model families: a file per mechanism of a layer, and a table of families as fields over them; the configuration of a
model. Without jax."""
