"""What `paged_ops.integrations.vllm_ascend` meets of vllm-ascend, which can't be installed here.

The names, fields and signatures of its ``vllm_ascend.attention.attention_v1``, and of the parts of
vLLM that this module imports. Of what they do there is as much as the package sees: the builder
keeps lengths on the host, makes a new ``query_start_loc`` in each step and cuts the slots, the
backend answers with its classes, or others under context parallelism.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

written: list[str] = []
"""Of which layers connectors were told that keys and values are there."""

started: list[int] = []
"""Grows whenever attention begins."""


# ------------------------------------------------------------------ vLLM


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionImpl:
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        pass


class AttentionMetadataBuilder:
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


def config(
    dtype: torch.dtype = torch.float16, device: str = "cpu", **changed: Any
) -> SimpleNamespace:
    """Return vLLM's configuration of a decoder that needs nothing special."""
    usual = {
        "model_config": SimpleNamespace(dtype=dtype, runner_type="generate"),
        "device_config": SimpleNamespace(device=torch.device(device)),
        "quant_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**{**usual, **changed})


current = config()


def get_current_vllm_config() -> SimpleNamespace:
    return current


# ------------------------------------------------------------------ vllm-ascend


class AscendAttentionState(Enum):
    PrefillNoCache = 0
    PrefillCacheHit = 1
    DecodeOnly = 2
    ChunkedPrefill = 3
    SpecDecoding = 4


@dataclass
class AscendCommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    _seq_lens_cpu: Tensor | None = None
    seq_lens_cpu: Tensor | None = None
    attn_state: AscendAttentionState | None = None
    num_input_tokens: int = 0
    actual_seq_lengths_q: list[int] = field(default_factory=list)


@dataclass
class AscendMetadata:
    attn_mask: Tensor | None = None
    attn_state: AscendAttentionState | None = AscendAttentionState.ChunkedPrefill
    num_actual_tokens: int = 0
    seq_lens: Tensor | None = None
    seq_lens_cpu: Tensor | None = None
    seq_lens_list: list[int] | None = None
    actual_seq_lengths_q: list[int] | None = None
    query_start_loc: Tensor | None = None
    max_query_len: int | None = None
    block_tables: Tensor | None = None
    slot_mapping: Tensor | None = None
    causal: bool = True
    model_runner_type: str = ""


class AscendAttentionMetadataBuilder(AttentionMetadataBuilder):
    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: AscendCommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AscendMetadata:
        common, n = common_attn_metadata, common_attn_metadata.num_reqs
        starts = common.query_start_loc_cpu[: n + 1]
        assert common._seq_lens_cpu is not None
        seq_lens, table = common._seq_lens_cpu[:n], common.block_table_tensor
        missing = n - len(seq_lens)
        if missing:
            seq_lens = torch.cat([seq_lens, seq_lens.new_ones(missing)])
            more = torch.zeros(n, table.shape[1], dtype=table.dtype)
            more[: len(table)] = table.cpu()
            table = more.to(self.device)
        return AscendMetadata(
            attn_state=common.attn_state,
            num_actual_tokens=common.num_actual_tokens,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_list=seq_lens.tolist(),
            actual_seq_lengths_q=starts[1:].tolist(),
            query_start_loc=starts.to(self.device),
            max_query_len=common.max_query_len,
            block_tables=table,
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            causal=bool(common.causal),
            model_runner_type=self.vllm_config.model_config.runner_type,
        )


class AscendAttentionBackendImpl(AttentionImpl):
    pass


class AscendAttentionDCPImpl(AscendAttentionBackendImpl):
    pass


class AscendAttentionDCPMetadataBuilder(AscendAttentionMetadataBuilder):
    pass


is_context_parallel = False


def _choose_impl() -> type:
    return AscendAttentionDCPImpl if is_context_parallel else AscendAttentionBackendImpl


def _choose_builder() -> type:
    usual, other = AscendAttentionMetadataBuilder, AscendAttentionDCPMetadataBuilder
    return other if is_context_parallel else usual


class AscendAttentionBackend:
    get_impl_cls = staticmethod(_choose_impl)
    get_builder_cls = staticmethod(_choose_builder)


def notify_kv_cache_written(layer_name: str = "") -> None:
    written.append(layer_name)


def record_attention_compute_start() -> None:
    started.append(len(started))


# ------------------------------------------------------------------ as a module


@contextmanager
def installed() -> Iterator[ModuleType]:
    """Let imports of vllm-ascend find this, as it was when it was first imported."""
    names = ("vllm_ascend", "vllm_ascend.attention", "vllm_ascend.attention.attention_v1")
    here = sys.modules[__name__]
    sys.modules |= {name: ModuleType(name) for name in names[:-1]} | {names[-1]: here}
    sys.modules[names[1]].attention_v1 = here  # type: ignore[attr-defined]
    try:
        yield here
    finally:
        for name in names:
            del sys.modules[name]
        AscendAttentionBackend.get_impl_cls = staticmethod(_choose_impl)
        AscendAttentionBackend.get_builder_cls = staticmethod(_choose_builder)
