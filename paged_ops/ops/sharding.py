"""How the ops work on DTensors: heads over ranks, everything else everywhere.

A rule says which dimension of each tensor counts heads. If the pool is sharded by heads, each rank
runs the op on the heads that it has; if it is replicated, so is the work, except that the query
heads of a single KV head may be sharded. A pool is never moved: what an op wrote into a moved copy
would be lost.

Importing this module registers the rules, once for the process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

import paged_ops.ops.registration  # noqa: F401  (registers the ops)


class Heads(NamedTuple):
    """Which dimension counts heads; a tensor that is not named has none.

    Attributes
    ----------
    arguments : dict of str to int
        Of each argument. -1 is the last one, if there is any.
    results : tuple of int
        Of each result.
    """

    arguments: dict[str, int]
    results: tuple[int, ...]


_CACHES = {"key_cache": 2, "value_cache": 2}
_SCALES = {"key_scale": -1, "value_scale": -1}
_KEYWORDS = ("alibi_slopes", "sinks", *_SCALES, "tree_mask", "key_ranges", "out")
_ATTENTION = {"query": 1, **_CACHES, **_SCALES, "alibi_slopes": 0, "sinks": 0}

WRITERS = ("write_kv.default", "copy_blocks.default")
"""Ops that write keyword arguments, which DTensor takes for results: it is told what to do."""

HEADS = {
    "attention.default": Heads(_ATTENTION, (1,)),
    "attention.out": Heads({**_ATTENTION, "out": 1}, (1,)),
    "attention_with_lse.default": Heads(_ATTENTION, (1, 1)),
    "write_kv.default": Heads({"key": 1, "value": 1, **_CACHES, **_SCALES}, ()),
    "merge_states.default": Heads({"out_a": 1, "lse_a": 1, "out_b": 1, "lse_b": 1}, (1, 1)),
    "copy_blocks.default": Heads({**_CACHES, **_SCALES}, ()),
    "gather_kv.default": Heads({**_CACHES, **_SCALES}, (1, 1)),
}
"""The rule of each op."""

Strategy = tuple[list[Placement | None], list[Placement | None]]
"""Placements of the results, and of the tensors among the arguments, in their order."""


def _strategies(name: str, tensors: dict[str, Any]) -> list[Strategy]:
    """Return the ways in which an op may run on tensors that are placed as these are."""
    for given, spec in tensors.items():
        if spec.mesh.ndim != 1:
            raise ValueError(
                f"paged::{name}: {given} is on a mesh of {spec.mesh.ndim} dimensions, expected 1: "
                f"the ranks that heads are sharded over, as mesh['tp']"
            )
    rule = HEADS[name]
    everywhere = _placed(rule, tensors, set())
    by_heads = _placed(rule, tensors, set(tensors))
    if "key_cache" not in tensors:
        return [everywhere, by_heads]
    if _pool_is_sharded(name, tensors):
        _refuse_split_groups(name, tensors)
        return [by_heads]
    if "query" not in tensors or tensors["key_cache"].shape[2] > 1:
        return [everywhere]
    return [everywhere, _placed(rule, tensors, set(tensors) - _CACHES.keys() - _SCALES.keys())]


def _placed(rule: Heads, tensors: dict[str, Any], sharded: set[str]) -> Strategy:
    """Shard the heads of some tensors, and with them those of the results."""
    results: list[Placement | None] = [
        Shard(dim) if sharded else Replicate() for dim in rule.results
    ]
    arguments: list[Placement | None] = []
    for name, spec in tensors.items():
        dim, rank = rule.arguments.get(name), len(spec.shape)
        on_heads = name in sharded and dim is not None and rank > 0
        arguments.append(Shard(dim % rank) if on_heads and dim is not None else Replicate())
    return results, arguments


def _pool_is_sharded(name: str, tensors: dict[str, Any]) -> bool:
    """Say how the pool is placed, or refuse a placement that would have to be changed."""
    placements = {cache: tensors[cache].placements[0] for cache in _CACHES}
    for cache, placement in placements.items():
        if placement not in (Replicate(), Shard(2)) or placement != placements["key_cache"]:
            raise ValueError(
                f"paged::{name}: {cache} is placed {placement}, expected Shard(dim=2) or Replicate "
                f"for both caches: an op never moves a pool"
            )
    return bool(placements["key_cache"] == Shard(2))


def _refuse_split_groups(name: str, tensors: dict[str, Any]) -> None:
    """Refuse a number of ranks that would part a KV head from its query heads."""
    key_cache = tensors["key_cache"]
    num_kv_heads, ranks = key_cache.shape[2], key_cache.mesh.size()
    if num_kv_heads % ranks:
        raise ValueError(
            f"paged::{name}: key_cache has {num_kv_heads} KV heads, expected a multiple of "
            f"{ranks}: the ranks that they are sharded over"
        )


def _refuse_keywords(name: str, tensors: dict[str, Any], strategies: list[Strategy]) -> None:
    """Refuse keyword arguments that would have to be moved: DTensor leaves them as they are."""
    for position, (argument, spec) in enumerate(tensors.items()):
        wanted = [arguments[position] for _, arguments in strategies]
        if argument in _KEYWORDS and spec.placements[0] not in wanted:
            raise ValueError(
                f"paged::{name}: {argument} is placed {spec.placements[0]}, expected "
                f"{' or '.join(map(str, wanted))}: keyword arguments are not redistributed"
            )


class _Spec(NamedTuple):
    """Where a tensor lies, under the names that DTensor's own description has."""

    mesh: DeviceMesh
    shape: torch.Size
    placements: tuple[Placement, ...]


def _spec(tensor: Tensor, mesh: DeviceMesh) -> _Spec:
    """Describe a tensor; a plain one is the same on all ranks."""
    if isinstance(tensor, DTensor):
        return _Spec(tensor.device_mesh, tensor.shape, tuple(tensor.placements))
    return _Spec(mesh, tensor.shape, (Replicate(),))


def _register(name: str) -> None:
    op, overload = name.split(".")
    function = getattr(getattr(torch.ops.paged, op), overload)
    names = [argument.name for argument in function._schema.arguments]

    def strategies(*args: Any, **kwargs: Any) -> list[Strategy]:
        given = dict(zip(names, args, strict=False)) | kwargs
        # What DTensor hands over for a tensor has placements; scalars and None are left out.
        tensors = {key: value for key, value in given.items() if hasattr(value, "placements")}
        found = _strategies(name, tensors)
        _refuse_keywords(name, tensors, found)
        return found

    def write(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a writer on the local parts of its tensors; the written ones are never moved."""
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        mesh = next(v.device_mesh for v in given.values() if isinstance(v, DTensor))
        specs = {key: _spec(v, mesh) for key, v in given.items() if isinstance(v, Tensor)}
        try:
            ((_, placements),) = strategies(**specs)
        except ValueError as error:
            raise RuntimeError(str(error)) from None  # as DTensor raises those of the other ops
        with torch.no_grad():
            for key, placement in zip(specs, placements, strict=True):
                if isinstance(given[key], DTensor):
                    given[key] = given[key].redistribute(placements=[placement]).to_local()
        return func(**given)

    if name in WRITERS:
        torch.library.register_torch_dispatch(function, DTensor, write)
    else:
        register_sharding(function)(strategies)


for _name in HEADS:
    _register(_name)
