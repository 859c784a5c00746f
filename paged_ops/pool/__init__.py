"""The memory that blocks lie in: one pool of keys and values for each layer."""
