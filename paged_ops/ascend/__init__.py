"""The first runs on an Ascend NPU: ``python -m paged_ops.ascend`` tries it step by step."""
