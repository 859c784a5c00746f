"""The front door: one attention layer with its own pool and its own books."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn
from torch.autograd import forward_ad

from paged_ops.arguments import checked_float, checked_int
from paged_ops.batch.batch import Batch, checked_query_lens, read_rows
from paged_ops.batch.decode import DecodeBatches
from paged_ops.blocks.errors import UnknownRequest
from paged_ops.blocks.holding import Prompt
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager
from paged_ops.functional import attention, write_kv
from paged_ops.ops.checks import AttentionOptions, check_query, check_rows
from paged_ops.pool.kv_cache import PagedKVCache

INT64_MAX = 2**63 - 1


class PagedAttention(nn.Module):
    """Attention over a paged cache that it owns: allocate, call, free.

    A request has a length, the tokens that `forward` has written, and room, the tokens that its
    blocks are held for. `allocate` makes room; `forward` writes tokens into it, making more room
    where there is too little, whole blocks of it. `manager` counts room; `num_tokens` gives the
    length. Both objects are there to be looked at; change what they hold through this class.

    The bookkeeping is Python, so `forward` runs eagerly, and from one thread at a time. To compile
    a model, use `PagedKVCache`, `BlockManager` and the ops.

    Parameters
    ----------
    num_heads : int
        Heads of the query, a multiple of `num_kv_heads`.
    head_dim : int
        Elements per head.
    block_size : int
        Tokens per block.
    num_blocks : int
        Blocks of the pool.
    num_kv_heads : int, optional
        Heads of key and value. None: `num_heads`.
    dtype : torch.dtype
        float32, float16 or bfloat16; of all inputs, and of the pool unless `cache_dtype` is given.
    device : torch.device or str, optional
        Where the pool and all inputs lie. None: torch's default device.
    layout : {"HND", "NHD"}
        As `PagedKVCache`.
    cache_dtype, scale_granularity
        As `PagedKVCache`. Scales per head or tensor are set by ``layer.cache.set_scales(0, ...)``.
    scale : float, optional
        Factor of the scores. None: ``head_dim ** -0.5``.
    sliding_window : int, optional
        How many keys a query sees, its own included. None: all up to its own. Blocks that have
        left the window of every later query go back to the pool.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0: they stay as they are.
    alibi_slopes : torch.Tensor, optional
        ``[num_heads]`` float32: ``slope * (key position - query position)`` is added to a score.
    sinks : torch.Tensor, optional
        ``[num_heads]`` float32: one more logit in each row's softmax, with no value.

    Attributes
    ----------
    cache : PagedKVCache
        The pool, of one layer.
    manager : BlockManager
        The books of the pool.

    Raises
    ------
    ValueError, TypeError
        An argument is out of its range or of the wrong kind.
    MemoryError
        The pool is larger than the memory available.

    Examples
    --------
    >>> layer = PagedAttention(num_heads=4, head_dim=8, num_kv_heads=2, num_blocks=64)
    >>> layer.allocate("a", 20)
    >>> prompt = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    >>> layer(*prompt, requests=["a"], query_lens=[5]).shape
    torch.Size([5, 4, 8])
    >>> token = torch.randn(1, 4, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    >>> layer(*token, requests=["a"]).shape
    torch.Size([1, 4, 8])
    >>> layer.num_tokens("a"), layer.manager.num_tokens("a")
    (6, 20)
    >>> layer.free("a")
    """

    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        block_size: int = 16,
        num_blocks: int = 1024,
        num_kv_heads: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        layout: str = "HND",
        cache_dtype: torch.dtype | None = None,
        scale_granularity: str = "token",
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = checked_int("num_heads", num_heads, 1)
        self.num_kv_heads = checked_int(
            "num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, 1
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}, expected a multiple of num_kv_heads, {num_kv_heads}"
            )
        if scale is not None:
            scale = checked_float("scale", scale)
        softcap = checked_float("softcap", softcap, 0)
        if sliding_window is not None:
            sliding_window = checked_int("sliding_window", sliding_window, 1, INT64_MAX)
        self.scale = scale
        self.sliding_window = sliding_window
        self.softcap = softcap
        self.cache = PagedKVCache(
            1,
            num_blocks,
            block_size,
            self.num_kv_heads,
            head_dim,
            dtype,
            device,
            layout=layout,
            cache_dtype=cache_dtype,
            scale_granularity=scale_granularity,
        )
        self.manager = BlockManager(
            num_blocks, block_size, prefix_caching=False, sliding_window=sliding_window
        )
        self._device = self.cache.device
        self._decodes = DecodeBatches(self.manager, self._device)
        self._register_per_head("alibi_slopes", alibi_slopes)
        self._register_per_head("sinks", sinks)
        # Length of each request. Never more than its room, which the manager counts. A block may
        # be shared while one owner, the parent of a fork, still has room in it; only that owner
        # writes there, past the length of all others. They have no room in the block, so making
        # some is an append to a partial shared block: the manager gives them a copy.
        self._lengths: dict[Hashable, int] = {}

    def allocate(self, request: Hashable, num_tokens: int) -> None:
        """Make room for a request's first `num_tokens` tokens, those it has already included.

        Once this has returned, `forward` finds a block for each of these tokens. Asking again for
        as much or for less changes nothing.

        Parameters
        ----------
        request : Hashable
            The request. It is made if it does not exist.
        num_tokens : int
            Tokens in all, 0 or more.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free. Nothing was changed.
        ValueError, TypeError
            `num_tokens` is negative or no integer, or `request` can't be hashed.
        """
        num_tokens = checked_int("num_tokens", num_tokens, 0)
        prompt = Prompt(num_tokens, None, (), [])
        with self.manager.lock, self.manager.ledger as ledger:
            if _knows(ledger, request):
                self.cache.copy_blocks(ledger.make_room([request], [num_tokens]))
            else:
                ledger.refuse_admission(prompt, 0)
                _note(ledger, self._lengths.pop, request, None)
                ledger.admit(request, prompt, 0)
                self._lengths[request] = 0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        requests: Sequence[Hashable],
        query_lens: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Append new tokens to requests, and attend from each to its request up to itself.

        Parameters
        ----------
        query : torch.Tensor
            ``[num_tokens, num_heads, head_dim]``: the new tokens, request after request.
        key, value : torch.Tensor
            ``[num_tokens, num_kv_heads, head_dim]``.
        requests : sequence of Hashable
            The requests, each once. All must have been allocated.
        query_lens : sequence of int, optional
            New tokens of each request, 0 or more. None: 1 each.

        Returns
        -------
        torch.Tensor
            ``[num_tokens, num_heads, head_dim]``, of the query's dtype.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free for all the new tokens together.
        UnknownRequest
            A request was never allocated, or was freed.
        ValueError, TypeError
            A tensor has another shape, dtype or device than expected, or a length or a request is
            wrong.
        RuntimeError
            The ops would refuse a tensor, because its last dimension isn't dense; in their words.
        NotImplementedError
            A tensor requires a gradient. In all these cases nothing was changed: no table, no
            length, no element of the pool.

        Notes
        -----
        A call that is broken off anywhere, by a KeyboardInterrupt too, leaves either every length
        as it was, and can be repeated, or has happened: `num_tokens` tells.
        """
        new = checked_query_lens(requests, query_lens)
        self._refuse_rows(sum(new), query=query, key=key, value=value)
        cache = self.cache
        caches, scales = cache.layer(0), cache.scales(0)
        options: AttentionOptions = {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "key_scale": scales["key_scale"],
            "value_scale": scales["value_scale"],
        }
        check_query("attention", query, *caches, **options)
        check_rows(key, value, *caches)
        lengths = self._lengths_with(requests, new)
        if cache.device != self._device:
            self._decodes = DecodeBatches(self.manager, cache.device)
            self._device = cache.device
        with self.manager.lock, self.manager.ledger as ledger:
            # If the write is refused or broken off, the room is given back; what has been written
            # by then lies behind the end of every request.
            batch = self._begin(ledger, requests, new, lengths)
            write_kv(key, value, *caches, batch.slot_mapping, **scales)
        index = batch.block_tables, batch.seq_lens, batch.query_start_loc
        output = attention(query, *caches, *index, **options)
        self._end(dict(zip(requests, lengths, strict=True)))
        return output

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Make a request that begins with all tokens of another one and shares their blocks.

        Room beyond those tokens stays the parent's. From here on the two go their own ways.

        Parameters
        ----------
        parent : Hashable
            The request to begin with.
        child : Hashable
            The name of the new request. It must not exist.

        Raises
        ------
        UnknownRequest
            `parent` does not exist.
        ValueError
            `child` exists.
        """
        length = self.num_tokens(parent)
        with self.manager.lock, self.manager.ledger as ledger:
            held = ledger.find(parent)
            ledger.refuse_existing("child", child)
            _note(ledger, self._lengths.pop, child, None)
            ledger.fork(held, child)
            ledger.cut(ledger.find(child), length)
            self._lengths[child] = length

    def free(self, request: Hashable) -> None:
        """End a request and give back its blocks.

        Parameters
        ----------
        request : Hashable
            The request.

        Raises
        ------
        UnknownRequest
            The request does not exist, or was freed already.
        """
        length = self.num_tokens(request)
        with self.manager.lock, self.manager.ledger as ledger:
            _note(ledger, self._lengths.update, {request: length})
            ledger.end(request)
            del self._lengths[request]

    def num_tokens(self, request: Hashable) -> int:
        """Return the length of a request: the tokens that `forward` has written.

        Parameters
        ----------
        request : Hashable
            The request.

        Raises
        ------
        UnknownRequest
            The request does not exist.
        """
        try:
            return self._lengths[request]
        except KeyError:
            raise UnknownRequest(request) from None

    @property
    def kv_blocks(self) -> torch.Tensor:
        """The pool, ``[num_blocks, 2, block_size, num_kv_heads, head_dim]``, as a view."""
        return self.cache.kv_blocks(0)

    def extra_repr(self) -> str:
        """Describe the layer in the module's repr."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, scale={self.scale}, "
            f"sliding_window={self.sliding_window}, softcap={self.softcap}"
        )

    def _refuse_rows(self, num_tokens: int, **tensors: torch.Tensor) -> None:
        """Refuse what isn't for this layer, whether or not the ops would take it."""
        cache = self.cache
        dtype, device, head_dim = cache.dtype, cache.device, cache.head_dim
        for name, rows in tensors.items():
            if not isinstance(rows, torch.Tensor):
                raise TypeError(f"{name} is {type(rows).__name__}, expected a tensor")
            num_heads = self.num_heads if name == "query" else self.num_kv_heads
            expected = num_tokens, num_heads, head_dim
            if rows.shape != expected:
                raise ValueError(f"{name} has shape {list(rows.shape)}, expected {list(expected)}")
            if rows.dtype != dtype:
                raise TypeError(f"{name} is {rows.dtype}, expected {dtype}, as the pool")
            if rows.device != device:
                raise ValueError(f"{name} is on {rows.device}, expected {device}")
            grad = rows.requires_grad and torch.is_grad_enabled()
            if grad or forward_ad.unpack_dual(rows).tangent is not None:
                raise NotImplementedError(
                    f"{name} requires a gradient, and PagedAttention has none: it is for "
                    "inference; call it under torch.no_grad() or torch.inference_mode()"
                )

    def _lengths_with(self, requests: Sequence[Hashable], new: list[int]) -> list[int]:
        """Return the length of each request with so many new tokens."""
        try:
            return [self._lengths[r] + count for r, count in zip(requests, new, strict=True)]
        except KeyError as error:
            raise UnknownRequest(error.args[0]) from None

    def _begin(
        self, ledger: Ledger, requests: Sequence[Hashable], new: list[int], lengths: list[int]
    ) -> Batch:
        """Make room for so many tokens of each request in open books, and say where they go."""
        # Whole blocks: they are held anyway, and the next steps find their room made.
        size = ledger.block_size
        room = [-(-length // size) * size for length in lengths]
        self.cache.copy_blocks(ledger.make_room(requests, room))
        if new.count(1) == len(new):
            return self._decodes.next(self._decodes.read(ledger, requests, lengths))
        return read_rows(ledger, requests, new, lengths).build(self._device)

    def _end(self, lengths: dict[Hashable, int]) -> None:
        """Say that the requests have these lengths now; what has left the window is given back."""
        if self.sliding_window is None:
            self._lengths.update(lengths)
            return
        with self.manager.lock, self.manager.ledger as ledger:
            was = {request: self._lengths[request] for request in lengths}
            _note(ledger, self._lengths.update, was)
            for request, length in lengths.items():
                ledger.commit(ledger.find(request), length)
            self._lengths.update(lengths)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> PagedAttention:
        """Move the layer as the module. A cast leaves the numbers per head as they are.

        It is meant for the model's numbers. These are float32 in the kernels anyway, and what
        rounding takes from them is lost for good.
        """
        exact = {name: getattr(self, name) for name in ("alibi_slopes", "sinks")}
        nn.Module._apply(self, fn, recurse)
        for name, tensor in exact.items():
            moved = getattr(self, name)
            if moved is not None and moved.dtype != tensor.dtype:
                setattr(self, name, tensor.to(moved.device))
        return self

    def _register_per_head(self, name: str, tensor: torch.Tensor | None) -> None:
        """Keep one number per head with the module, so that it moves with it."""
        if tensor is not None:
            if tensor.shape != (self.num_heads,) or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, expected torch.float32 "
                    f"[{self.num_heads}], one number per head"
                )
            with torch.inference_mode(False):  # kept, so an ordinary tensor
                tensor = tensor.detach().to(self.cache.device, copy=True)
        self.register_buffer(name, tensor, persistent=False)


def _note(ledger: Ledger, undo: Callable[..., object], *arguments: object) -> None:
    """Let a change of the lengths be taken back with the change of the books that is under way."""
    ledger.note((ledger, undo, *arguments))


def _knows(ledger: Ledger, request: Hashable) -> bool:
    """Say whether a request exists."""
    try:
        ledger.find(request)
    except UnknownRequest:
        return False
    return True
