"""Projections of a mixture of experts with the LoRA of many adapters: rows sorted by (expert, adapter).

`api` has the op, `rows` the sorting, `sizes` the numbers of rows.
"""
