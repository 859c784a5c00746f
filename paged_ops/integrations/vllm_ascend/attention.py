"""What vllm-ascend builds for a layer, and for a group of layers: attention and its metadata.

The words are vllm-ascend's, the names those of its ``attention_v1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm_ascend.attention import attention_v1 as ascend

import paged_ops
from paged_ops.integrations.vllm_ascend.refusals import check_layer


@dataclass(frozen=True)
class Step:
    """What the ops read of a step, on the device: the runner's own tensors.

    vllm-ascend's metadata has the lengths on the host and copies ``query_start_loc`` anew in every
    step. A captured graph has to find both where they were, so these are views of the tensors that
    the runner writes into.

    Attributes
    ----------
    seq_lens : Tensor
        ``[num_reqs]``, int32.
    query_start_loc : Tensor
        ``[num_reqs + 1]``, int32.
    num_tokens : int
        Rows of the query that belong to these requests; what follows is padding.
    """

    seq_lens: Tensor
    query_start_loc: Tensor
    num_tokens: int

    @classmethod
    def of(cls, common: Any) -> Step:
        """Take a step's tensors from what the runner gives to every builder.

        Where the batch is full, the runner has no length for the request that it adds as padding,
        so that request is left out.
        """
        seq_lens = common.seq_lens[: common.num_reqs]
        num_reqs = len(seq_lens)
        return cls(
            seq_lens,
            common.query_start_loc[: num_reqs + 1],
            int(common.query_start_loc_cpu[num_reqs]),
        )


class PagedMetadataBuilder(ascend.AscendAttentionMetadataBuilder):  # type: ignore[misc]
    """vllm-ascend's builder; its metadata get a `Step` as well."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Say that a graph may be captured of batches whose requests have equally many new tokens.

        Of other batches vllm-ascend pads no requests, so a graph would meet another number of them.
        """
        return ascend.AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build a step's metadata from those of the runner."""
        if not isinstance(common_attn_metadata.causal, bool):
            raise NotImplementedError("causal for each request isn't served by paged_ops here")
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.paged_step = Step.of(common_attn_metadata)
        return metadata


class PagedImpl(ascend.AttentionImpl):  # type: ignore[misc]
    """A layer's attention: writes the new keys and values, then attends, whatever the phase."""

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
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        config = ascend.get_current_vllm_config()
        check_layer(config, head_size, kv_cache_dtype, attn_type, others)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.options: dict[str, Any] = {
            "scale": self.scale,
            "sliding_window": sliding_window,
            "softcap": logits_soft_cap or 0.0,
            "sinks": sinks,
        }
        if alibi_slopes is not None:
            self.options["alibi_slopes"] = torch.tensor(
                alibi_slopes, dtype=torch.float32, device=config.device_config.device
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks, which are loaded now, once and not in every call."""
        if self.sinks is not None:
            sinks = self.sinks.detach()
            self.options["sinks"] = sinks.cpu().float().to(sinks.device)

    @staticmethod
    def update_graph_params(*arguments: Any, **options: Any) -> None:
        """Change nothing: a replayed graph reads lengths, tables and slots on the device.

        vllm-ascend calls this for every replay.
        """

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Tensor
    ) -> None:
        """Write keys and values into their slots; what has none is padding."""
        key_cache, value_cache = kv_cache[0], kv_cache[1]
        rows = len(slot_mapping)
        key = key[:rows].view(rows, self.num_kv_heads, key_cache.shape[-1])
        value = value[:rows].view(rows, self.num_kv_heads, value_cache.shape[-1])
        paged_ops.write_kv(key, value, key_cache, value_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write `key` and `value`, attend with `query`.

        Parameters
        ----------
        layer
            vLLM's layer.
        query : Tensor
            ``[num_tokens, num_heads, head_size]``, padding included.
        key, value : Tensor or None
            ``[num_tokens, num_kv_heads, head_size]``; None where they are in the cache already.
        kv_cache
            Key cache and value cache, ``[num_blocks, block_size, num_kv_heads, head_size]`` each.
        attn_metadata
            From `PagedMetadataBuilder`; None while vLLM measures how much memory a model takes.
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
            For a quantised output, or scales of keys and values.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantised output isn't served by paged_ops here")
        if attn_metadata is None:
            return output.zero_()
        if (layer._k_scale_float, layer._v_scale_float) != (1.0, 1.0):
            raise NotImplementedError(
                f"scales of keys and values are {layer._k_scale_float} and "
                f"{layer._v_scale_float}, expected 1.0: no others are served by paged_ops here"
            )
        shares = self.kv_sharing_target_layer_name is not None
        if key is not None and value is not None and not shares:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            ascend.notify_kv_cache_written()
        ascend.record_attention_compute_start()
        key_cache, value_cache = kv_cache[0], kv_cache[1]
        step, rows = attn_metadata.paged_step, attn_metadata.paged_step.num_tokens
        heads = rows, self.num_heads
        paged_ops.attention(
            query[:rows].view(*heads, key_cache.shape[-1]),
            key_cache,
            value_cache,
            attn_metadata.block_tables[: len(step.seq_lens)],
            step.seq_lens,
            step.query_start_loc,
            causal=attn_metadata.causal,
            out=output[:rows].view(*heads, value_cache.shape[-1]),
            **self.options,
        )
        if rows < len(output):
            output[rows:].zero_()
        return output
