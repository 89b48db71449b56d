"""Whole training runs by other programs, on the same card and the same lengths as ours.

| file | what it is |
|---|---|
| `__main__.py` | one command: the frozen floor, ours, and every peer, one process after another |
| `torch_peers.py` | transformers + PEFT as they come, and with every trick that a careful user knows |
| `packing.py` | the batches and microbatches that every peer gets |
| `lorafusion.py` | LoRAFusion's kernels inside PEFT's layers, from a checkout that the user names |
| `report.py` | table and plot |
"""
