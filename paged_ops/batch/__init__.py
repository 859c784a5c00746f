"""From requests to the index tensors that the ops take."""

from paged_ops.batch.batch import Batch, build_batch
from paged_ops.batch.decode import DecodeBatches
from paged_ops.batch.key_ranges import build_key_ranges

__all__ = ["Batch", "DecodeBatches", "build_batch", "build_key_ranges"]
