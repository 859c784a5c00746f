"""What the layers of a step share: vLLM's tensors, as the ops take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from paged_ops.integrations.vllm.refusals import check_group


@dataclass
class PagedMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step of a group of layers.

    Attributes
    ----------
    block_tables, seq_lens, query_start_loc, slot_mapping : Tensor
        vLLM's own tensors, under the ops' names.
    num_actual_tokens : int
        Rows of the query that belong to requests; what follows is padding.
    causal : bool
        Whether a token sees only what comes before it.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor
    num_actual_tokens: int
    causal: bool


class PagedMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds a step's `PagedMetadata`, once for all layers of a group."""

    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_group(kv_cache_spec)
        self._is_cross = isinstance(kv_cache_spec, CrossAttentionSpec)
        self._has_no_cache = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedMetadata:
        """Take a step's tensors from what vLLM's runner gives to every builder."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal for each request isn't served by paged_ops here")
        block_tables = common.block_table_tensor
        if self._has_no_cache:
            # The new keys are the cache: blocks of one token, of which row i is block i.
            tokens = torch.arange(int(common.max_seq_len), dtype=torch.int32)
            block_tables = common.query_start_loc[:-1, None] + tokens
        return PagedMetadata(
            block_tables=block_tables,
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=int(common.query_start_loc_cpu[-1]),
            causal=common.causal and not self._is_cross,
        )

    def update_block_table(
        self, metadata: PagedMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> PagedMetadata:
        """Return the step of another group of layers, which differs in where blocks are."""
        return replace(metadata, block_tables=blk_table, slot_mapping=slot_mapping)
