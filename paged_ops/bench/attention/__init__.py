"""The benchmark ``python -m paged_ops.bench attention``."""
