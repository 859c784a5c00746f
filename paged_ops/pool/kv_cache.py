"""The block pool: the memory that the keys and values of all requests live in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypedDict

import torch
from torch import nn

from paged_ops.dtypes import FLOAT_DTYPES, as_bytes
from paged_ops.functional import copy_blocks
from paged_ops.pool.memory import zeros
from paged_ops.pool.scales import CacheScales, first_scale
from paged_ops.pool.sending import send_blocks
from paged_ops.pool.sizes import Sizes


class Scales(TypedDict):
    """The scales of a layer, to be splatted into the ops."""

    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None


class PagedKVCache(nn.Module):
    """The keys and values of every layer, cut into blocks of `block_size` tokens.

    Each layer's pool is one buffer, registered but never part of a ``state_dict``. The keys and
    the values of a block lie side by side, so that a block is copied or sent as one piece. Views
    of a pool have the same shapes whatever the layout in memory:

    - ``kv_blocks(layer)``: ``[num_blocks, 2, block_size, num_kv_heads, head_dim]``, keys at
      index 0 and values at index 1 of the second dimension;
    - ``layer(i)``: the pair ``key_cache, value_cache`` that the ops take;
    - ``scales(i)``: the ops' keyword arguments ``key_scale`` and ``value_scale``.

    Take the views inside ``forward``, not before: then a compiled graph changes the pool in place.

    A pool on the CPU costs no memory until its blocks are written: its pages are zeros that the
    system commits one by one. It can't be copied with ``deepcopy`` nor pickled.

    Parameters
    ----------
    num_layers : int
        Layers of the model, 1 or more.
    num_blocks : int
        Blocks per layer, 1 to 2**31 - 1. A block id means the same block in every layer.
    block_size : int
        Tokens per block, 1 or more.
    num_kv_heads : int
        Heads of the keys and values, 1 or more.
    head_dim : int
        Elements of a key per head, 1 or more.
    dtype : torch.dtype
        float32, float16 or bfloat16: of new keys and values.
    device : torch.device or str, optional
        Where the pool lies. None: torch's default device.
    head_dim_v : int, optional
        Elements of a value per head. None: `head_dim`.
    layout : {"HND", "NHD"}
        Order in memory inside a block: head by head, which is faster to attend to, or token by
        token.
    cache_dtype : torch.dtype, optional
        Of the pool's elements: int8, float8_e4m3fn or float8_e5m2, which stand for themselves
        times a scale. None: `dtype`, without scales.
    scale_granularity : {"token", "head", "tensor"}
        What has a scale of its own in a quantised pool. "token": every token and head; ``write_kv``
        chooses it. "head" and "tensor": every head, or the whole layer; `set_scales` sets it, and
        until then it is NaN for int8, so that all output is, and 1 for float8.

    Raises
    ------
    ValueError, TypeError
        An argument is out of its range or of the wrong kind.
    MemoryError
        The device has too little memory available. The message shows the arithmetic.

    See Also
    --------
    PagedKVCache.num_blocks_for : the number of blocks that fit into given memory.

    Examples
    --------
    >>> cache = PagedKVCache(num_layers=2, num_blocks=64, block_size=16, num_kv_heads=4,
    ...                      head_dim=32)
    >>> cache.kv_blocks(0).shape
    torch.Size([64, 2, 16, 4, 32])
    >>> key_cache, value_cache = cache.layer(1)
    >>> key_cache.shape
    torch.Size([64, 16, 4, 32])
    >>> cache.num_bytes
    2097152
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        head_dim_v: int | None = None,
        layout: str = "HND",
        cache_dtype: torch.dtype | None = None,
        scale_granularity: str = "token",
    ) -> None:
        super().__init__()
        heads = num_kv_heads, head_dim, head_dim_v
        elements = dtype, cache_dtype, scale_granularity
        sizes = Sizes.checked(num_layers, block_size, *heads, *elements)
        device = _device(device)
        self.num_blocks = sizes.checked_num_blocks(num_blocks, device)
        self._block_layout = sizes.block_layout(self.num_blocks, layout)
        self.layout = layout
        self.num_layers = sizes.num_layers
        self.block_size = sizes.block_size
        self.num_kv_heads = sizes.num_kv_heads
        self.head_dim = sizes.head_dim
        self.head_dim_v = sizes.head_dim_v
        self.scale_granularity = sizes.scale_granularity
        self._dtype = dtype
        self._scale_form = sizes.scale_form(self._block_layout)
        for layer in range(self.num_layers):
            pool = zeros(self._block_layout.buffer_shape, sizes.cache_dtype, device)
            self.register_buffer(f"layer_{layer}", pool, persistent=False)
        for layer in range(self.num_layers if self._scale_form else 0):
            self.register_buffer(f"scales_{layer}", self._new_scales(device), persistent=False)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two caches of a layer, as views of its pool.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.

        Returns
        -------
        key_cache : torch.Tensor
            ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        value_cache : torch.Tensor
            ``[num_blocks, block_size, num_kv_heads, head_dim_v]``.

        Raises
        ------
        IndexError
            There is no such layer.
        """
        return self._block_layout.caches(self._pool(layer))

    def scales(self, layer: int) -> Scales:
        """Return the scales of a layer, as keyword arguments of the ops.

        Take them inside ``forward``, as the caches.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.

        Returns
        -------
        dict
            ``"key_scale"`` and ``"value_scale"``, float32 views of one buffer: ``[num_blocks,
            block_size, num_kv_heads]``, ``[num_kv_heads]`` or ``[]`` by `scale_granularity`. Both
            are None where the pool isn't quantised, which the ops take as well.

        Raises
        ------
        IndexError
            There is no such layer.

        Examples
        --------
        >>> from paged_ops import attention, write_kv
        >>> cache = PagedKVCache(1, 8, 4, 2, 16, cache_dtype=torch.int8)
        >>> key, value = torch.randn(2, 3, 2, 16).unbind(0)
        >>> write_kv(key, value, *cache.layer(0), torch.tensor([4, 5, 6]), **cache.scales(0))
        >>> tables, lens = torch.tensor([[1]]).int(), torch.tensor([3]).int()
        >>> attention(key[2:], *cache.layer(0), tables, lens, **cache.scales(0)).shape
        torch.Size([1, 2, 16])
        """
        self._pool(layer)
        if self._scale_form is None:
            return {"key_scale": None, "value_scale": None}
        key_scale, value_scale = self._scale_form.halves(self._scale_buffer(layer))
        return {"key_scale": key_scale, "value_scale": value_scale}

    def set_scales(
        self, layer: int, key_scale: torch.Tensor | float, value_scale: torch.Tensor | float
    ) -> None:
        """Set the scales of a layer whose `scale_granularity` is "head" or "tensor".

        Do so before anything is written: elements that are there would stand for other numbers.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.
        key_scale, value_scale : torch.Tensor or float
            Above 0: a number, or ``[num_kv_heads]`` of them where each head has its own. The
            largest magnitude over the largest element (127, 448 or 57344) uses the whole range.

        Raises
        ------
        ValueError
            A scale is out of range or of another shape, or the pool has none to be set. Nothing
            was changed.
        IndexError
            There is no such layer.

        Examples
        --------
        >>> cache = PagedKVCache(1, 8, 4, 2, 16, cache_dtype=torch.int8, scale_granularity="head")
        >>> cache.set_scales(0, torch.tensor([0.02, 0.03]), 0.01)
        >>> cache.scales(0)["value_scale"]
        tensor([0.0100, 0.0100])
        """
        self._pool(layer)
        form = self._scales_there_are()
        given = {"key_scale": key_scale, "value_scale": value_scale}
        new = [form.checked(name, scale) for name, scale in given.items()]
        self._scale_buffer(layer).copy_(torch.stack(new))

    def kv_blocks(self, layer: int) -> torch.Tensor:
        """Return the pool of a layer as one view.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.

        Returns
        -------
        torch.Tensor
            ``[num_blocks, 2, block_size, num_kv_heads, head_dim]``.

        Raises
        ------
        IndexError
            There is no such layer.
        ValueError
            Keys and values differ in size, so no single view shows both.
        """
        return self._block_layout.kv_blocks(self._pool(layer))

    def kv_scales(self, layer: int) -> torch.Tensor:
        """Return the scales of a layer as one view, as `kv_blocks` shows its elements.

        For what wants K's and V's in one tensor, such as the inputs of an exported program.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.

        Returns
        -------
        torch.Tensor
            float32 ``[num_blocks, 2, block_size, num_kv_heads]``, ``[2, num_kv_heads]`` or ``[2]``
            by `scale_granularity`; K at index 0 and V at index 1 of the dimension of size 2.

        Raises
        ------
        IndexError
            There is no such layer.
        ValueError
            The pool isn't quantised.
        """
        self._pool(layer)
        return self._scales_there_are().view(self._scale_buffer(layer))

    def copy_blocks(self, mapping: torch.Tensor | Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks onto others, in every layer.

        All blocks are read before any is written, so chains and swaps work.

        Parameters
        ----------
        mapping : torch.Tensor or iterable of (int, int)
            ``[n, 2]`` int64 or int32 on the pool's device: (source, destination) block ids. What
            `BlockManager.append` returns can be given as it is. An empty one copies nothing.

        Raises
        ------
        RuntimeError
            An id is out of range, or a destination comes twice. Nothing was copied.
        """
        if not isinstance(mapping, torch.Tensor):
            pairs = list(mapping)
            if not pairs:
                return
            mapping = torch.tensor(pairs, device=self.device)
        for layer in range(self.num_layers):
            copy_blocks(*self.layer(layer), mapping, **self.scales(layer))

    def send_blocks(
        self,
        destination: PagedKVCache,
        copies: Sequence[tuple[int, int]],
        non_blocking: bool = False,
    ) -> None:
        """Copy whole blocks into another pool, of the same shapes, in every layer.

        This is how requests are swapped out and in: to a pool on the host and back, with the
        copies of a `Transfer`. It may run in another thread, or on another stream, than the rest:
        the transfer holds its blocks meanwhile. Scales per token go along; those per head or tensor
        have to be the same in both pools.

        Parameters
        ----------
        destination : PagedKVCache
            The other pool. Only its number of blocks and its device may differ.
        copies : sequence of (int, int)
            (block here, block there). No block there comes twice.
        non_blocking : bool
            Whether to return before copies between devices have been made, where they can.

        Raises
        ------
        ValueError
            The pools don't match, an id is out of range, or a destination comes twice. Nothing
            was copied.
        """
        send_blocks(self, destination, copies, non_blocking)

    def block_parts(self, layer: int) -> list[torch.Tensor]:
        """Return all that the blocks of a layer hold, for whatever moves whole blocks elsewhere.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.

        Returns
        -------
        list of torch.Tensor
            Views whose first dimension is the block: the elements, and the scales where each token
            has its own. Elements of one byte come as integers: torch indexes no float8 tensor with
            another one.

        Raises
        ------
        IndexError
            There is no such layer.
        """
        elements = as_bytes(self._pool(layer))
        if self.scale_granularity == "token":
            return [elements, self._scale_buffer(layer)]
        return [elements]

    def chosen_scales(self) -> list[list[str]]:
        """Return what `set_scales` has set in each layer, in words that compare, NaN included.

        Blocks go from pool to pool without these scales, so they have to be the same in both. The
        list is empty where there are none to be set.
        """
        if self.scale_granularity in (None, "token"):
            return []
        buffers = [self._scale_buffer(layer) for layer in range(self.num_layers)]
        return [[str(scale) for scale in buffer.flatten().tolist()] for buffer in buffers]

    @property
    def dtype(self) -> torch.dtype:
        """Element type of new keys and values."""
        return self.cache_dtype if self.scale_granularity is None else self._dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Element type of the pool."""
        return self._pool(0).dtype

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self._pool(0).device

    @property
    def num_bytes(self) -> int:
        """Size of all blocks over all layers, with their scales per token, committed or not."""
        return sum(part.nbytes for i in range(self.num_layers) for part in self.block_parts(i))

    @classmethod
    def num_blocks_for(
        cls,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        head_dim_v: int | None = None,
        cache_dtype: torch.dtype | None = None,
        scale_granularity: str = "token",
        num_bytes: int | None = None,
        memory_fraction: float | None = None,
    ) -> int:
        """Return how many blocks fit into so many bytes, or into a share of the memory.

        Parameters
        ----------
        num_layers, block_size, num_kv_heads, head_dim, dtype, device, head_dim_v
            As for the class.
        cache_dtype, scale_granularity
            As for the class. Scales per token count as part of their blocks.
        num_bytes : int, optional
            Bytes for the pool, all layers together.
        memory_fraction : float, optional
            Share, above 0 and up to 1, of the memory that is available on `device` now. Nothing
            is set aside beyond it. Give this or `num_bytes`, not both.

        Returns
        -------
        int
            The number of blocks, 1 or more.

        Raises
        ------
        ValueError, TypeError
            An argument is out of its range or of the wrong kind, or not one block fits.
        MemoryError
            The device can't say how much memory is available; give `num_bytes`.

        Examples
        --------
        >>> PagedKVCache.num_blocks_for(num_layers=2, block_size=16, num_kv_heads=4, head_dim=32,
        ...                             num_bytes=2**21)
        64
        """
        heads = num_kv_heads, head_dim, head_dim_v
        elements = dtype, cache_dtype, scale_granularity
        sizes = Sizes.checked(num_layers, block_size, *heads, *elements)
        return sizes.num_blocks_for(_device(device), num_bytes, memory_fraction)

    def extra_repr(self) -> str:
        """Describe the pool in the module's repr."""
        sizes = "num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "head_dim_v"
        kinds = "layout", "dtype", "cache_dtype", "scale_granularity"
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in (*sizes, *kinds))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a PagedKVCache can't be copied or pickled: its pool has {self.num_bytes} bytes; "
            f"make a new one instead"
        )

    def _pool(self, layer: int) -> torch.Tensor:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layer is {layer!r}, expected an integer")
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer is {layer}, expected 0 to {self.num_layers - 1}")
        pool: torch.Tensor = getattr(self, f"layer_{layer}")
        return pool

    def _scale_buffer(self, layer: int) -> torch.Tensor:
        buffer: torch.Tensor = getattr(self, f"scales_{layer}")
        return buffer

    def _scales_there_are(self) -> CacheScales:
        """Return the form of the scales, or refuse a pool without any."""
        if self._scale_form is None:
            raise ValueError(f"cache_dtype is {self.cache_dtype}, expected a quantised one")
        return self._scale_form

    def _new_scales(self, device: torch.device) -> torch.Tensor:
        """Return the scales of a new layer: zeros, or what shows that they have to be set."""
        form = self._scales_there_are()
        scales = zeros(form.buffer_shape, torch.float32, device)
        return scales if form.is_per_token else scales.fill_(first_scale(self.cache_dtype))

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> PagedKVCache:
        """Move the pool as the module, or refuse what it can't be cast to.

        A cast changes no quantised element and no scale. It is meant for the model's numbers, so it
        changes what new keys and values are.
        """
        with torch.inference_mode(False):  # so that the pool may be changed outside it
            dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
            if dtype not in FLOAT_DTYPES:
                raise ValueError(f"dtype is {dtype}, expected one of {FLOAT_DTYPES}")

            def moved(tensor: torch.Tensor) -> torch.Tensor:
                like = fn(tensor.new_empty(0))
                kept = self.scale_granularity is not None and like.dtype != tensor.dtype
                return tensor.to(like.device) if kept else fn(tensor)

            nn.Module._apply(self, moved, recurse)
            self._dtype = dtype
        return self


def _device(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)
