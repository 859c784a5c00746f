"""From requests to the index tensors that the ops take."""

from paged_ops.batch.batch import Batch, build_batch
from paged_ops.batch.decode import DecodeBatches

__all__ = ["Batch", "DecodeBatches", "build_batch"]
