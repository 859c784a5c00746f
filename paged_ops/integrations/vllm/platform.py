"""The platform: vLLM's own for this CPU, with a choice of attention."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import paged_ops

# Below vLLM's own logger, so that it is shown as vLLM's lines are.
_logger = init_logger("vllm.paged_ops")

_BACKENDS = {
    "PAGED_OPS": "paged_ops.integrations.vllm.attention.PagedBackend",
    "PAGED_OPS_MLA": "paged_ops.integrations.vllm.latent.PagedLatentBackend",
}

for _name, _path in _BACKENDS.items():
    if _name not in AttentionBackendEnum.__members__:
        register_backend(_name, _path)

_OURS = (None, *(AttentionBackendEnum[name] for name in _BACKENDS))

_UsualPlatform: Any = resolve_obj_by_qualname(cpu_platform_plugin())


class PagedCpuPlatform(_UsualPlatform):  # type: ignore[misc]
    """vLLM's platform for this CPU, which attends with `paged_ops` unless told otherwise.

    ``--attention-backend CPU_ATTN`` (or ``CPU_MLA``, ``AMX_MLA``) leaves the attention to vLLM.
    """

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Name the backend's class for layers of one kind.

        Parameters
        ----------
        selected_backend : AttentionBackendEnum or None
            What the user chose.
        attn_selector_config
            What the layers need.
        num_heads : int or None
            Not looked at.

        Raises
        ------
        NotImplementedError
            `paged_ops` doesn't serve these layers.
        """
        if attn_selector_config.use_sparse or selected_backend not in _OURS:
            chosen: str = super().get_attn_backend_cls(
                selected_backend, attn_selector_config, num_heads
            )
            return chosen
        # What it imports needs a platform, and this module makes one.
        from paged_ops.integrations.vllm.refusals import check_selection

        path = _BACKENDS["PAGED_OPS_MLA" if attn_selector_config.use_mla else "PAGED_OPS"]
        check_selection(resolve_obj_by_qualname(path), attn_selector_config)
        _logger.info_once("paged_ops attends, CPU variant %s", paged_ops.backend_info().cpu_isa)
        return path

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Let vLLM adapt its configuration to the CPU, but not to its own latent attention.

        Without a matrix unit that wants blocks of 16, whole prompts and no prefix cache. The
        rotation of queries is left to torch: vLLM's operator for the CPU doesn't rotate those of
        latent attention, whose heads lie apart in memory, as the model means it.
        """
        model = vllm_config.model_config
        is_latent = model is not None and getattr(model, "use_mla", False)
        if not is_latent or vllm_config.attention_config.backend not in _OURS:
            super().check_and_update_config(vllm_config)
            return
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block_size = cache.block_size if cache.user_specified_block_size else 128
        has_prefixes, has_chunks = cache.enable_prefix_caching, scheduler.enable_chunked_prefill
        num_tokens = scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        cache.block_size, cache.enable_prefix_caching = block_size, has_prefixes
        scheduler.enable_chunked_prefill = has_chunks
        scheduler.max_num_batched_tokens = num_tokens
        custom_ops = vllm_config.compilation_config.custom_ops
        if "+rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")
