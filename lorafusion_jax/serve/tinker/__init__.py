"""The training API: Tinker's protocol beside `/v1`, by the same keys and in the same sessions."""
