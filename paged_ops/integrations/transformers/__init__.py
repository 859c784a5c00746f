"""Hugging Face transformers over the paged cache. Needs the package, ``paged-ops[transformers]``.

`register` makes the attention known; `PagedCache` is the cache of ``model.generate``; `PackedModel`
runs a model over the tokens of many requests at once, for an engine with a scheduler of its own;
`replace_paged_eager` serves transformers' own continuous batching.
"""

from paged_ops.integrations.transformers.attention import register
from paged_ops.integrations.transformers.cache import PagedCache
from paged_ops.integrations.transformers.continuous_batching import replace_paged_eager
from paged_ops.integrations.transformers.packed import PackedModel

__all__ = ["PackedModel", "PagedCache", "register", "replace_paged_eager"]
