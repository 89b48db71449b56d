"""A call on a mesh: how its operands are split, and the op of each shard."""
