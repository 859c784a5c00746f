"""The library under the names that other libraries' callers know; each is imported when asked for.

- `paged_ops.integrations.transformers`: Hugging Face transformers (an extra).
- `paged_ops.integrations.flash_attn`: FlashAttention's functions over a KV cache.
- `paged_ops.integrations.flashinfer`: FlashInfer's page tables, to and from block tables.
- `paged_ops.integrations.varlen`: torch's ``varlen_attn`` on the CPU.
- `paged_ops.integrations.vllm_ascend`: the attention of vLLM's decoders on Ascend.
"""
