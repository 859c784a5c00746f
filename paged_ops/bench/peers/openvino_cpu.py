"""OpenVINO's paged attention on the CPU: a model of that one operation.

The operation also writes the K and V of the new tokens into the cache, in every call. It is meant
for the models that OpenVINO converts, so another version may ask for other inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from paged_ops.bench.peers.peer import Call, Peer, Quantised, Unsupported, filling
from paged_ops.bench.workloads import HEAD_DIM, Inputs, Workload

PACKAGE = "openvino"
_BLOCK_SIZE = 32  # its kernels have no other one
_CACHES = "key_cache", "value_cache"
_LONGEST_PROMPT = 8192


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
    # Copies, head-major.
    caches = (
        cache.transpose(1, 2).contiguous() for cache in (inputs.key_cache, inputs.value_cache)
    )
    request = _compiled(inputs.workload, inputs.workload.dtype).create_infer_request()
    return _call(request, inputs, *caches)


def _attention_u8(inputs: Inputs) -> Call:
    """Return a call over a cache of bytes that the operation has filled itself, as prompts."""
    block_size, lengths = inputs.key_cache.shape[1], inputs.workload.seq_lens
    if block_size != _BLOCK_SIZE:
        raise Unsupported(f"block size {block_size} is not {_BLOCK_SIZE}")
    if max(lengths) > _LONGEST_PROMPT:
        raise Unsupported(f"filling its cache with {max(lengths)} tokens would take minutes")
    compiled = _compiled(inputs.workload, torch.uint8)
    key_cache, value_cache = (_zeros(compiled.input(name), inputs) for name in _CACHES)
    request = compiled.create_infer_request()
    tokens = zip(*(rows.split(list(lengths)) for rows in inputs.gathered()), strict=True)
    for table, (key, value) in zip(inputs.block_tables, tokens, strict=True):
        length, blocks = len(key), -(-len(key) // block_size)
        rows = key.new_zeros(length, inputs.query[0].numel()), key.flatten(1), value.flatten(1)
        index = _integers(0), _integers(0, length), table[:blocks].clone(), _integers(0, blocks)
        arguments = *rows, key_cache, value_cache, *index, torch.tensor(length, dtype=torch.int32)
        output = torch.empty_like(rows[0])  # borrowed, so it has to live
        _prepare(request, arguments, output)
        request.infer()
    return _call(request, inputs, key_cache, value_cache)


def _zeros(cache: Any, inputs: Inputs) -> Tensor:
    """Return a cache of as many blocks as a workload has, of the shape that was compiled."""
    block = [size.get_length() for size in list(cache.partial_shape)[1:]]
    return torch.zeros(len(inputs.key_cache), *block, dtype=torch.uint8)


def _call(request: Any, inputs: Inputs, key_cache: Tensor, value_cache: Tensor) -> Call:
    """Return a call for a workload over caches that hold its K and V."""
    work, output = inputs.workload, torch.empty_like(inputs.query)
    key, value = inputs.new_tokens()
    counts = [-(-length // _BLOCK_SIZE) for length in work.seq_lens]
    tables = zip(inputs.block_tables, counts, strict=True)
    past = [a - b for a, b in zip(work.seq_lens, work.query_lens, strict=True)]
    arguments = (
        inputs.query.flatten(1),
        key.flatten(1),
        value.flatten(1),
        key_cache,
        value_cache,
        _integers(*past),
        inputs.query_start_loc,
        torch.cat([table[:count] for table, count in tables]),
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.tensor(max(work.seq_lens), dtype=torch.int32),
    )
    _prepare(request, arguments, output.flatten(1))
    # The call holds the tensors whose memory OpenVINO has only borrowed.
    return filling(output, lambda *held: request.infer(), *arguments)


def _prepare(request: Any, arguments: Sequence[Tensor], output: Tensor) -> None:
    for index, tensor in enumerate(arguments):
        request.set_input_tensor(index, _borrowed(tensor))
    request.set_output_tensor(0, _borrowed(output))


def _integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _compiled(workload: Workload, cache_dtype: torch.dtype) -> Any:
    import openvino

    properties = {
        "INFERENCE_PRECISION_HINT": _kind(workload.dtype),
        "KV_CACHE_PRECISION": _kind(cache_dtype),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    try:
        return openvino.Core().compile_model(_model(workload), "CPU", properties)
    except RuntimeError as error:
        raise Unsupported(f"no model: {str(error).splitlines()[-1]}") from error


def _model(workload: Workload) -> Any:
    """Build the model: ten inputs, and constants that leave every further feature unused."""
    import numpy
    import openvino
    from openvino import opset13
    from openvino._pyopenvino.op import _PagedAttentionExtension

    kind, integer = _kind(workload.dtype), openvino.Type.i32
    heads = workload.num_kv_heads
    cache, any_kind = openvino.PartialShape([-1] * 4), openvino.Type.dynamic  # as compiled
    given = [opset13.parameter([-1, workload.num_heads * HEAD_DIM], kind, name="query")]
    given += [opset13.parameter([-1, heads * HEAD_DIM], kind) for _ in ("key", "value")]
    given += [opset13.parameter(cache, any_kind, name=name) for name in _CACHES]
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


def _kind(dtype: torch.dtype) -> Any:
    from openvino import Type

    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    return getattr(Type, (names | {torch.uint8: "u8"}).get(dtype, "i32"))


def _borrowed(tensor: Tensor) -> Any:
    """Return an OpenVINO tensor on the same memory, which it does not keep alive."""
    import openvino

    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    shape = openvino.Shape(tensor.shape)
    return openvino.Tensor(bits.numpy(), shape, _kind(tensor.dtype))


# Keys have a scale and a zero of 4 bytes for each channel of a block, values for each row.
_KEY_BYTES, _VALUE_BYTES = HEAD_DIM + 8 * HEAD_DIM / _BLOCK_SIZE, HEAD_DIM + 8

PEER = Peer(
    PACKAGE,
    absence,
    _attention,
    quantised={"u8": Quantised(_attention_u8, _KEY_BYTES + _VALUE_BYTES)},
)
