"""The benchmark ``python -m paged_ops.bench serving``."""
