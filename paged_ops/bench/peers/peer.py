"""What every peer offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paged_ops.bench.workloads import Inputs

Call = Callable[[], "Tensor | Sequence[Tensor]"]
"""Returns ``[tokens, heads, head_dim]``, of all sequences or of each."""


class Unsupported(Exception):
    """A peer can't run a workload; the message says why."""


def filling(result: Tensor, op: Callable[..., object], *arguments: object) -> Call:
    """Return a call of an op that writes into tensors among its arguments; it returns `result`."""

    def call() -> Tensor:
        op(*arguments)
        return result

    return call


@dataclass(frozen=True)
class Quantised:
    """Attention over a cache of a peer's own 8-bit elements.

    Attributes
    ----------
    attention : callable
        Makes the call to time, with a cache that holds the K and V of a workload.
    bytes_per_row : float
        Of a token's K and V in one head: elements, and what is kept beside them.
    """

    attention: Callable[[Inputs], Call]
    bytes_per_row: float


@dataclass(frozen=True)
class Latent:
    """Decode over latent rows: one KV head, whose values are the first elements of its keys.

    Attributes
    ----------
    query : Tensor
        ``[batch, num_heads, head_dim]``.
    cache : Tensor
        ``[num_blocks, block_size, 1, head_dim]``.
    head_dim_v : int
        Elements of a value.
    block_tables, seq_lens : Tensor
        Of the sequences.
    """

    query: Tensor
    cache: Tensor
    head_dim_v: int
    block_tables: Tensor
    seq_lens: Tensor


@dataclass(frozen=True)
class Peer:
    """An implementation of attention that ours is compared with.

    Attributes
    ----------
    package : str or None
        The distribution whose version is reported. None: a part of torch.
    absence : callable
        Returns in one line why the peer can't serve on this machine, or None if it can.
    attention : callable
        Makes the call to time; everything that is done once is done here.
    write : callable or None
        Makes a call that writes the K and V of a workload into the peer's own cache.
    kernel : callable or None
        Returns which of its kernels the peer takes for a workload, where it has several.
    quantised : mapping of str to Quantised
        By dtype, as the peer calls it.
    latent : callable or None
        Makes a call that attends to latent rows.
    on_request : bool
        Whether the benchmark takes the peer only where it is named, because it takes minutes.
    """

    package: str | None
    absence: Callable[[], str | None]
    attention: Callable[[Inputs], Call]
    write: Callable[[Inputs], Callable[[], object]] | None = None
    kernel: Callable[[Inputs], str] | None = None
    quantised: Mapping[str, Quantised] = field(default_factory=dict)
    latent: Callable[[Latent], Call] | None = None
    on_request: bool = False
