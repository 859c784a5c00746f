"""The backend ``PAGED_OPS_MLA``: latent attention, as in DeepSeek's models.

vLLM takes the tokens of a step apart: new prompts attend over keys and values that are expanded
from the latents, all others over the latents themselves, with queries that the layer has brought
there. Here every token goes the second way, so one call over the page serves a step, whatever the
phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MLAAttentionImpl, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from paged_ops.integrations.vllm.pages import Page, open_latent_page
from paged_ops.integrations.vllm.refusals import check_options
from paged_ops.integrations.vllm.steps import PagedMetadata, PagedMetadataBuilder

_write_kv = torch.ops.paged.write_kv.default
_attention = torch.ops.paged.attention.default


class PagedLatentBackend(MLACommonBackend):  # type: ignore[misc]
    """Attention over the latents of vLLM's pages."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        """Return the name under which the platform has registered the backend."""
        return "PAGED_OPS_MLA"

    @staticmethod
    def get_impl_cls() -> type[PagedLatentImpl]:
        """Return what a layer attends with."""
        return PagedLatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        """Return what builds a step's metadata."""
        return LatentMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Say that the latents may have any size."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        """Say that blocks may have any size."""
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """List every order of a page's memory."""
        return tuple(KVCacheLayout)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Say that a token's bits don't depend on the batch."""
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        """Say that no rank attends to a part of a prompt."""
        return False


@dataclass
class LatentMetadata(PagedMetadata):
    """A step of a group of layers, as vLLM's layer for latent attention reads it.

    Attributes
    ----------
    num_decodes, num_decode_tokens, num_prefills : int
        How many requests and tokens go which way.
    decode
        Not None, since there are such tokens.
    prefill
        None, since there are none.
    """

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    decode: Any = True
    prefill: Any = None


class LatentMetadataBuilder(PagedMetadataBuilder):
    """Builds a step's `LatentMetadata`, once for all layers of a group."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> LatentMetadata:
        """Take a step's tensors from what vLLM's runner gives to every builder."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return LatentMetadata(
            **vars(step),
            num_decodes=len(step.seq_lens),
            num_decode_tokens=step.num_actual_tokens,
        )


class PagedLatentImpl(MLAAttentionImpl):  # type: ignore[misc]
    """A layer's attention."""

    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        **others: Any,
    ) -> None:
        check_options(
            {
                "alibi_slopes": alibi_slopes,
                "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
                **others,
            }
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self._options = {
            "scale": self.scale,
            "sliding_window": sliding_window,
            "softcap": logits_soft_cap or 0.0,
        }

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Write latents and rotated keys side by side; what has no slot is padding."""
        if kv_cache.numel() == 0:
            return
        rows, rank = len(slot_mapping), self.kv_lora_rank
        key_cache = self._page(kv_cache).key_cache
        _write_kv(
            kv_c_normed[:rows].view(rows, 1, rank),
            k_pe[:rows].view(rows, 1, self.head_size - rank),
            key_cache[..., :rank],
            key_cache[..., rank:],
            slot_mapping,
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: LatentMetadata,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """Attend with queries of the latents' size.

        Parameters
        ----------
        q : Tensor or pair of Tensors
            ``[num_tokens, num_heads, head_size]``, maybe in two parts.
        kv_c_and_k_pe_cache : Tensor
            The layer's page, ``[num_blocks, block_size, head_size]``.
        attn_metadata : LatentMetadata
            The step.
        layer
            vLLM's layer.

        Returns
        -------
        tuple of Tensor and None
            Sums of latents, ``[num_tokens, num_heads, kv_lora_rank]``.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        step, page = attn_metadata, self._page(kv_c_and_k_pe_cache)
        output = _attention(
            query,
            page.key_cache,
            page.value_cache,
            step.block_tables,
            step.seq_lens,
            step.query_start_loc,
            causal=step.causal,
            **self._options,
        )
        return output, None

    def _page(self, kv_cache: Tensor) -> Page:
        return open_latent_page(kv_cache, self.kv_lora_rank)
