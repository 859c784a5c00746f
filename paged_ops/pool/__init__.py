"""The memory that blocks lie in: one pool of keys and values for each layer."""

from paged_ops.pool.kv_cache import PagedKVCache
from paged_ops.pool.snapshot import restore_snapshot, save_snapshot

__all__ = ["PagedKVCache", "restore_snapshot", "save_snapshot"]
