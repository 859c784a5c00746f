"""From requests to the index tensors that the ops take."""

from paged_ops.batch.batch import Batch, build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.batch.key_ranges import build_key_ranges
from paged_ops.batch.packed import PackedKeys, attention_packed, view_packed

__all__ = [
    "Batch",
    "DecodeBatches",
    "PackedKeys",
    "attention_packed",
    "build_batch",
    "build_key_ranges",
    "view_packed",
]
