"""The ops and the pool over several processes, started by torchrun, joined by torch.distributed.

Importing this package registers how the ops work on DTensors (`sharding`).
"""

import paged_ops.ops.sharding  # noqa: F401  (registers the rules)
from paged_ops.distributed.context_attention import context_parallel_attention
from paged_ops.distributed.context_batch import (
    ContextBatch,
    build_context_batch,
    split_context,
)
from paged_ops.distributed.request_transfer import (
    TransferRefused,
    receive_request,
    send_request,
)

__all__ = [
    "ContextBatch",
    "TransferRefused",
    "build_context_batch",
    "context_parallel_attention",
    "receive_request",
    "send_request",
    "split_context",
]
