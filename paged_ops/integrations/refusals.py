"""What the functions of other libraries refuse, in the words of their callers.

The ops check all of this again, under their own names: here it is said under those of the caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_ops.arguments import checked_int
from paged_ops.dtypes import FLOAT_DTYPES


def check_tensor(
    name: str,
    tensor: object,
    shape: dict[str, int | None],
    dtypes: tuple[torch.dtype, ...],
    like: Tensor,
    *,
    is_dense: bool = False,
) -> None:
    """Refuse a tensor of another shape, dtype or device.

    Parameters
    ----------
    name : str
        What the caller calls it.
    tensor : object
        What was given.
    shape : dict of str to (int or None)
        The name of each dimension, and its size if only one is right.
    dtypes : tuple of torch.dtype
        Those that are right.
    like : Tensor
        A tensor on the device that is right.
    is_dense : bool
        Whether the last dimension must be dense.

    Raises
    ------
    ValueError
        It is another one; with what it is, and what was expected.
    TypeError
        It is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, expected a tensor")
    sizes = zip(tensor.shape, shape.values(), strict=False)
    is_right = tensor.dim() == len(shape) and all(size in (have, None) for have, size in sizes)
    if not is_right or tensor.dtype not in dtypes or tensor.device != like.device:
        named = (f"{key} {size}" if size is not None else key for key, size in shape.items())
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, expected "
            f"{' or '.join(map(str, dtypes))} [{', '.join(named)}] on {like.device}"
        )
    if is_dense and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}.stride(-1) is {tensor.stride(-1)}, expected 1: it must be dense")


def check_heads(
    query: tuple[str, Tensor], key: tuple[str, Tensor], value: tuple[str, Tensor], rank: int
) -> None:
    """Refuse queries, or keys and values of `rank` dimensions, that don't fit each other."""
    (q_name, q), (k_name, k), (v_name, v) = query, key, value
    ranks = {3: ("total_q",), 4: ("batch", "seqlen")}
    heads: dict[str, int | None] = {"num_heads": None, "head_dim": None}
    dims = ranks[q.dim() if isinstance(q, Tensor) and q.dim() in ranks else 4]
    check_tensor(q_name, q, dict.fromkeys(dims) | heads, FLOAT_DTYPES, q, is_dense=True)
    rows = ("total_k",) if rank == 3 else ("num_blocks", "block_size")
    sizes = dict.fromkeys(rows) | {"num_kv_heads": None, "head_dim": q.shape[-1]}
    check_tensor(k_name, k, sizes, (q.dtype,), q, is_dense=True)
    sizes = dict(zip(sizes, k.shape, strict=True)) | {"head_dim": None}
    check_tensor(v_name, v, sizes, (q.dtype,), q, is_dense=True)
    for name, tensor, size in ((k_name, k, k.shape[-2]), (v_name, v, v.shape[-1])):
        if not size or 0 in tensor.shape[1:]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected no size of 0")
    if not q.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{q_name} has {q.shape[-2]} heads, expected a multiple of {k.shape[-2]}, those of "
            f"{k_name}"
        )


def check_offsets(
    name: str, offsets: Tensor, batch: int | None, like: Tensor, end: int, *, is_whole: bool = False
) -> int:
    """Refuse where sequences begin, unless that never decreases and ends with at most `end`.

    Returns
    -------
    int
        How many sequences there are. If they have to be the whole, they begin with 0 and end with
        `end`.
    """
    size = None if batch is None else batch + 1
    check_tensor(name, offsets, {"batch + 1": size}, (torch.int32,), like)
    values = offsets.tolist()
    if not values or (is_whole and (values[0], values[-1]) != (0, end)):
        raise ValueError(f"{name} is {values}, expected it to begin with 0 and to end with {end}")
    for i, value in enumerate(values):
        least = values[i - 1] if i else 0
        if not least <= value <= end:
            raise ValueError(f"{name}[{i}] is {value}, expected {least} to {end}")
    return len(values) - 1


def check_limit(name: str, limit: object, lengths: Tensor) -> None:
    """Refuse a limit that a sequence exceeds."""
    longest = int(lengths.max()) if len(lengths) else 0
    if checked_int(name, limit, 0) < longest:
        raise ValueError(f"{name} is {limit}, expected {longest} or more, the longest sequence")


def check_lengths(name: str, lengths: Tensor, capacity: int | list[int], why: str) -> None:
    """Refuse lengths that are negative or more than there is room for, one for all or for each."""
    capacities = [capacity] * len(lengths) if isinstance(capacity, int) else capacity
    for i, (length, room) in enumerate(zip(lengths.tolist(), capacities, strict=True)):
        if not 0 <= length <= room:
            raise ValueError(f"{name}[{i}] is {length}, expected 0 to {room}: {why}")


def check_blocks(
    name: str, table: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int
) -> None:
    """Refuse entries of a table that sequences of these lengths need and the cache hasn't."""
    starts = torch.arange(table.shape[-1], device=table.device) * block_size
    unknown = ((table < 0) | (table >= num_blocks)) & (starts < seq_lens[:, None])
    for where in unknown.nonzero()[:1].tolist():
        raise ValueError(
            f"{name}{where} is {int(table[tuple(where)])}, expected 0 to {num_blocks - 1}: the "
            f"cache has {num_blocks} blocks"
        )


def check_tables(
    name: str, table: Tensor, seq_lens: Tensor, lengths_name: str, cache: Tensor
) -> None:
    """Refuse a table that doesn't fit the cache, or that sequences are longer than."""
    sizes: dict[str, int | None] = {"batch": len(seq_lens), "max_blocks_per_seq": None}
    check_tensor(name, table, sizes, (torch.int32,), cache)
    num_blocks, block_size = cache.shape[:2]
    capacity = table.shape[1] * block_size
    for i, length in enumerate(seq_lens.tolist()):
        if length > capacity:
            raise ValueError(
                f"{lengths_name} gives sequence {i} {length} tokens, expected at most {capacity}: "
                f"{name} has {table.shape[1]} blocks of {block_size} tokens in a row"
            )
    check_blocks(name, table, seq_lens, num_blocks, block_size)


def check_slopes(slopes: Tensor | None, batch: int, query: Tensor) -> None:
    """Refuse ALiBi slopes that are neither one for each head nor one for each sequence and head."""
    if slopes is None:
        return
    sizes: dict[str, int | None] = {"num_heads": query.shape[-2]}
    if isinstance(slopes, Tensor) and slopes.dim() == 2:
        sizes = {"batch": batch, **sizes}
    dtypes = tuple(dict.fromkeys((torch.float32, query.dtype)))
    check_tensor("alibi_slopes", slopes, sizes, dtypes, query)
