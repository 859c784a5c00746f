"""Paged attention for PyTorch: one op family, ``torch.ops.paged.*``, and the block pool it reads.

Importing the package loads the compiled library and registers the ops.
"""

from paged_ops.attention import PagedAttention
from paged_ops.backends import BackendInfo, backend_info, npu_attention_kernel
from paged_ops.batch.batch import Batch, build_batch
from paged_ops.batch.key_ranges import build_key_ranges
from paged_ops.blocks.errors import OutOfBlocks, UnknownRequest
from paged_ops.blocks.manager import BlockManager
from paged_ops.functional import (
    attention,
    attention_with_lse,
    copy_blocks,
    gather_kv,
    merge_states,
    write_kv,
)
from paged_ops.pool.kv_cache import PagedKVCache

__version__ = "0.1.0"

__all__ = [
    "BackendInfo",
    "Batch",
    "BlockManager",
    "OutOfBlocks",
    "PagedAttention",
    "PagedKVCache",
    "UnknownRequest",
    "attention",
    "attention_with_lse",
    "backend_info",
    "build_batch",
    "build_key_ranges",
    "copy_blocks",
    "gather_kv",
    "merge_states",
    "npu_attention_kernel",
    "write_kv",
]
