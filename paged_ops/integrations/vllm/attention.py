"""The backend ``PAGED_OPS``: what vLLM asks of it, and what it builds for each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from paged_ops.integrations.vllm.pages import (
    ELEMENTS,
    SCALED_PER_TOKEN,
    Page,
    content_bytes,
    open_page,
)
from paged_ops.integrations.vllm.refusals import check_layer
from paged_ops.integrations.vllm.steps import PagedMetadata, PagedMetadataBuilder

_write_kv = torch.ops.paged.write_kv.default
_attention = torch.ops.paged.attention.out


class PagedBackend(AttentionBackend):  # type: ignore[misc]
    """Attention over keys and values of vLLM's pages."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *ELEMENTS]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        """Return the name under which the platform has registered the backend."""
        return "PAGED_OPS"

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """Return what a layer attends with."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """Return what builds a step's metadata."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        """Say that blocks may have any size."""
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """List every order of a page's memory; where nothing else decides, vLLM takes the first."""
        return tuple(KVCacheLayout)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Make room for the scales in pages that hold them."""
        if not spec.kv_quant_mode.is_per_token_head or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=content_bytes(spec.head_size, spec.head_size_v))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Say that decoders, encoders and cross attention are served."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Say that attention sinks are served."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Say that windows are served."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Say that steps in which tokens see what comes after them are served."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Say that a token's bits don't depend on the batch."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Say that a checkpoint may bring a scale for each head."""
        return True


class PagedImpl(AttentionImpl):  # type: ignore[misc]
    """A layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        check_layer(head_size, kv_cache_dtype, attn_type, sliding_window, others)
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._has_no_cache = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        self._has_layer_scales = (
            kv_cache_dtype in ELEMENTS and kv_cache_dtype not in SCALED_PER_TOKEN
        )
        self._options: dict[str, Any] = {
            "scale": self.scale,
            "sliding_window": sliding_window,
            "softcap": logits_soft_cap or 0.0,
        }
        if alibi_slopes is not None:
            self._options["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        self._opened: tuple[Tensor, Page] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks, which are loaded now, once and not in every call."""
        if self.sinks is not None:
            self._options["sinks"] = self.sinks.detach().float()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values into their slots; what has none is padding."""
        if self._has_no_cache:
            return
        page = self._page(kv_cache, layer)
        rows = min(len(key), len(slot_mapping))
        _write_kv(
            key[:rows],
            value[:rows],
            page.key_cache,
            page.value_cache,
            slot_mapping[:rows],
            key_scale=page.key_scale,
            value_scale=page.value_scale,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend with `query` to what the page holds, or in an encoder to `key` and `value`.

        Parameters
        ----------
        layer
            vLLM's layer.
        query : Tensor
            ``[num_tokens, num_heads, head_size]``, padding included.
        key, value : Tensor or None
            ``[num_tokens, num_kv_heads, head_size]``, which `do_kv_cache_update` has written.
        kv_cache : Tensor
            The layer's page.
        attn_metadata : PagedMetadata or None
            None while vLLM measures how much memory a model takes.
        output : Tensor
            As the query; where the result goes.
        output_scale, output_block_scale
            Refused unless None.

        Returns
        -------
        Tensor
            `output`. Rows of padding are 0.

        Raises
        ------
        NotImplementedError
            For a quantised output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantised output isn't served by paged_ops here")
        step = attn_metadata
        if step is None:
            return output.zero_()
        rows = step.num_actual_tokens
        if self._has_no_cache:
            assert key is not None
            assert value is not None
            page = Page(key[:rows].unsqueeze(1), value[:rows].unsqueeze(1))
        else:
            page = self._page(kv_cache, layer)
        _attention(
            query[:rows],
            page.key_cache,
            page.value_cache,
            step.block_tables,
            step.seq_lens,
            step.query_start_loc,
            causal=step.causal,
            key_scale=page.key_scale,
            value_scale=page.value_scale,
            out=output[:rows],
            **self._options,
        )
        if rows < len(output):
            output[rows:].zero_()
        return output

    def _page(self, kv_cache: Tensor, layer: Any) -> Page:
        """Open the layer's page; once, since it is the same in every step."""
        if self._opened is None or self._opened[0] is not kv_cache:
            page = open_page(kv_cache, self.head_size, self.kv_cache_dtype)
            if self._has_layer_scales:
                page = Page(*page[:2], layer._k_scale, layer._v_scale)
            self._opened = kv_cache, page
        return self._opened[1]
