"""OpenVINO's paged attention on the CPU: a model of that one operation.

The operation also writes the K and V of the new tokens into the cache, in every call. It is meant
for the models that OpenVINO converts, so another version may ask for other inputs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from paged_ops.bench.peers.peer import Call, Peer, Unsupported, filling
from paged_ops.bench.workloads import HEAD_DIM, Inputs, Workload

PACKAGE = "openvino"
_BLOCK_SIZE = 32  # its kernels have no other one


def absence() -> str | None:
    """Return why it can't serve, or None."""
    for name in (PACKAGE, "numpy"):
        if find_spec(name) is None:
            return f"{name} is not installed"
    try:
        from openvino._pyopenvino.op import _PagedAttentionExtension  # noqa: F401
    except ImportError as error:
        return f"this OpenVINO has no paged attention: {error}"
    return None


def _attention(inputs: Inputs) -> Call:
    block_size = inputs.key_cache.shape[1]
    if block_size != _BLOCK_SIZE:
        raise Unsupported(f"block size {block_size} is not {_BLOCK_SIZE}")
    import openvino

    kind = _kind(inputs.workload.dtype)
    properties = {
        "INFERENCE_PRECISION_HINT": kind,
        "KV_CACHE_PRECISION": kind,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    try:
        model = openvino.Core().compile_model(_model(inputs.workload), "CPU", properties)
    except RuntimeError as error:
        raise Unsupported(f"no model: {str(error).splitlines()[-1]}") from error
    request = model.create_infer_request()
    arguments, output = _arguments(inputs), torch.empty_like(inputs.query)
    for index, tensor in enumerate(arguments):
        request.set_input_tensor(index, _borrowed(tensor))
    request.set_output_tensor(0, _borrowed(output.flatten(1)))
    # The call holds the tensors whose memory OpenVINO has only borrowed.
    return filling(output, lambda *held: request.infer(), *arguments)


def _model(workload: Workload) -> Any:
    """Build the model: ten inputs, and constants that leave every further feature unused."""
    import numpy
    import openvino
    from openvino import opset13
    from openvino._pyopenvino.op import _PagedAttentionExtension

    kind, integer = _kind(workload.dtype), openvino.Type.i32
    heads = workload.num_kv_heads
    cache = openvino.PartialShape([-1, heads, _BLOCK_SIZE, HEAD_DIM])
    given = [opset13.parameter([-1, workload.num_heads * HEAD_DIM], kind, name="query")]
    given += [opset13.parameter([-1, heads * HEAD_DIM], kind) for _ in ("key", "value")]
    given += [opset13.parameter(cache, kind, name=name) for name in ("key_cache", "value_cache")]
    names = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    given += [opset13.parameter([-1], integer, name=name) for name in names]
    longest = opset13.parameter([], integer, name="max_context_len")

    def constant(value: object, dtype: type = numpy.int32) -> Any:
        return opset13.constant(numpy.array(value, dtype))

    def none(*shape: int, dtype: type = numpy.int32) -> Any:
        return opset13.constant(numpy.zeros(shape or (0,), dtype))

    single = numpy.float32
    sources = [
        *given,
        constant(HEAD_DIM**-0.5, single),
        constant(0),  # sliding_window
        none(dtype=single),  # alibi_slopes
        longest,
        none(),  # score_aggregation_window
        none(),  # rotated_block_indices
        none(0, 0),  # rotation_deltas
        none(0, 0, dtype=single),  # rotation_trig_lut
        none(dtype=single),  # xattention_threshold
        constant(0),  # xattention_block_size
        constant(0),  # xattention_stride
        none(dtype=single),  # sinks
        constant(0),  # adaptive_rkv_start_size
        none(),  # adaptive_rkv_evictable_sizes
        none(),  # adaptive_rkv_diversity_block_set_indices
        none(),  # adaptive_rkv_diversity_block_set_indices_begins
        none(),  # token_type_ids
        none(dtype=numpy.uint8),  # qq_bias
        none(),  # qq_bias_begins
    ]
    node = _PagedAttentionExtension([source.output(0) for source in sources])
    about = node.get_rt_info()
    about["num_k_heads"] = about["num_v_heads"] = heads
    about["k_head_size"] = about["v_head_size"] = HEAD_DIM
    return openvino.Model([opset13.result(node.output(0))], [*given, longest], "attention")


def _arguments(inputs: Inputs) -> list[Tensor]:
    """Return the model's inputs; the caches are copies, head-major."""
    work = inputs.workload
    key, value = inputs.new_tokens()
    counts = [-(-length // _BLOCK_SIZE) for length in work.seq_lens]
    tables = zip(inputs.block_tables, counts, strict=True)
    past = [a - b for a, b in zip(work.seq_lens, work.query_lens, strict=True)]
    return [
        inputs.query.flatten(1),
        key.flatten(1),
        value.flatten(1),
        inputs.key_cache.transpose(1, 2).contiguous(),
        inputs.value_cache.transpose(1, 2).contiguous(),
        torch.tensor(past, dtype=torch.int32),
        inputs.query_start_loc,
        torch.cat([table[:count] for table, count in tables]),
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        torch.tensor(max(work.seq_lens), dtype=torch.int32),
    ]


def _kind(dtype: torch.dtype) -> Any:
    from openvino import Type

    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    return getattr(Type, names.get(dtype, "i32"))


def _borrowed(tensor: Tensor) -> Any:
    """Return an OpenVINO tensor on the same memory, which it does not keep alive."""
    import openvino

    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    shape = openvino.Shape(tensor.shape)
    return openvino.Tensor(bits.numpy(), shape, _kind(tensor.dtype))


PEER = Peer(PACKAGE, absence, _attention)
