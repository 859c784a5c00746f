"""The steps on the device, in order: each asks of it one thing more than those before.

A step runs in a process of its own (`paged_ops.ascend.run_step`), so that one that hangs or dies
leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from paged_ops import functional, reference
from paged_ops.ascend import echo
from paged_ops.ascend import objects as object_files
from paged_ops.ascend.comparison import compare
from paged_ops.ascend.finding import Finding
from paged_ops.ascend.runtime import kernels_folder, npu, wait

DTYPE = torch.float16
ROUNDING = 2 * torch.finfo(DTYPE).eps


class Step(NamedTuple):
    """One thing that is tried on the device.

    Attributes
    ----------
    name, shows : str
        What it is called, and what works if it passes.
    unit : str
        The source of op_kernel whose object it needs; empty: none.
    if_hung : str
        What it means where it doesn't come to an end.
    run : callable
        Takes the seconds that the device may take.
    kernel : str
        What PAGED_NPU_KERNEL has to be.
    """

    name: str
    shows: str
    unit: str
    if_hung: str
    run: Callable[[float], Finding]
    kernel: str = ""


def device(limit: float) -> Finding:
    """Start the device and move a tensor there and back."""
    there = _there(torch.arange(1000, device="cpu"))
    wait(limit)
    if there.cpu().tolist() != list(range(1000)):
        return Finding("wrong", "a tensor doesn't come back as it was", "torch_npu itself fails.")
    return Finding("passed", f"{npu().get_device_name()}, {npu().device_count()} devices")


def objects(limit: float) -> Finding:
    """Look at the objects of the kernels for this chip."""
    folder = kernels_folder()
    if not folder.is_dir():
        return Finding(
            "wrong",
            f"there is no {folder}",
            f"No kernels were built for this chip: build with PAGED_SOC={npu().get_device_name()}.",
        )
    needed = {folder / f"{step.unit}.o" for step in STEPS if step.unit}
    found = sorted(needed | set(folder.glob("*.o")))
    what, why = object_files.described(
        fault for path in found for fault in object_files.faults(path)
    )
    if what:
        return Finding("wrong", f"in {folder}: {what}", why)
    return Finding("passed", f"{len(found)} in {folder}")


def arguments(limit: float) -> Finding:
    """Let each core write back what it was given."""
    buffers = _there(echo.new_buffers())
    launched = torch.ops.paged._npu_echo_arguments(buffers, echo.WORD)
    wait(limit)
    return echo.explain(echo.Answers(buffers.cpu(), buffers.data_ptr(), launched))


def write_kv(limit: float) -> Finding:
    """Write 40 tokens into slots all over a pool."""
    blocks, block_size, heads, head_dim = 12, 16, 2, 64
    rows = _normal(2, 40, heads, head_dim)
    slots = torch.randperm(blocks * block_size, device="cpu")[:40]
    slots[7] = -1
    before = _normal(2, blocks, block_size, heads, head_dim)
    want = before.clone()
    reference.write_kv(rows[0], rows[1], want[0], want[1], slots)
    caches, there = _there(before), _there(rows)
    functional.write_kv(there[0], there[1], caches[0], caches[1], _there(slots))
    wait(limit)
    return _compare_blocks(caches.cpu(), want, before)


def copy_blocks(limit: float) -> Finding:
    """Copy blocks onto each other in a circle, and one to several."""
    before = _normal(2, 12, 16, 2, 64)
    mapping = torch.tensor([[0, 1], [1, 2], [2, 0], [5, 7], [5, 8], [11, 3]], device="cpu")
    want = before.clone()
    reference.copy_blocks(want[0], want[1], mapping)
    caches = _there(before)
    functional.copy_blocks(caches[0], caches[1], _there(mapping))
    wait(limit)
    return _compare_blocks(caches.cpu(), want, before)


def merge_states(limit: float) -> Finding:
    """Merge two results of 70 tokens."""
    outs, lses = _normal(2, 70, 6, 128), _normal(2, 70, 6).float()
    want, _ = reference.merge_states(outs[0].double(), lses[0], outs[1].double(), lses[1])
    out, lse = _there(outs), _there(lses)
    got, _ = functional.merge_states(out[0], lse[0], out[1], lse[1])
    wait(limit)
    return compare(got.cpu(), want, torch.full_like(want, torch.nan), ROUNDING)


def attention_of(
    lengths: list[int], queries: list[int], num_heads: int, num_kv_heads: int
) -> Callable[[float], Finding]:
    """Make a step of attention over sequences of these lengths, with so many query tokens each."""

    def run(limit: float) -> Finding:
        block_size, head_dim = 128, 128
        width = -(-max(lengths) // block_size)
        tables = torch.randperm(len(lengths) * width, device="cpu").int().view(len(lengths), width)
        caches = _normal(2, len(lengths) * width, block_size, num_kv_heads, head_dim)
        query = _normal(sum(queries), num_heads, head_dim)
        starts = torch.tensor([0, *queries], device="cpu").cumsum(0).int()
        index = (tables, torch.tensor(lengths, device="cpu").int(), starts)
        exact = caches.double()
        want = reference.attention(query.double(), exact[0], exact[1], *index)
        nothing = torch.full_like(query, torch.nan)
        got = _there(nothing)
        there = _there(caches)
        functional.attention(_there(query), there[0], there[1], *map(_there, index), out=got)
        wait(limit)
        return compare(got.cpu(), want, nothing, ROUNDING)

    return run


def _there(tensor: Tensor) -> Tensor:
    return tensor.to("npu")


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cpu").to(DTYPE)


def _compare_blocks(got: Tensor, want: Tensor, before: Tensor) -> Finding:
    """Compare caches exactly, a row for each slot of keys, then of values."""
    return compare(got.flatten(0, 2), want.flatten(0, 2), before.flatten(0, 2), 0.0)


_NO_MEETING = (
    "No core waits for another one here: a pipe waits for a flag that is never set, or the loop "
    "over the work never ends because its numbers arrived wrongly."
)
_MEETING = (
    "Cores wait for each other (SyncAll): fewer run than were launched, or the kernel's type, "
    "which gives it the flags for that, was not taken."
)
_GROUP = (
    "Cube and vector cores wait for each other's flags: one half isn't in the object or doesn't "
    "run, its type was not taken, or a flag was set that the other half doesn't wait for. The "
    "pipe's own flags on a cube core (M_MTE1, 0 to 2) are another place to look."
)

STEPS = (
    Step("device", "torch_npu", "", "torch_npu itself hangs: see npu-smi info.", device),
    Step("objects", "how kernels were compiled", "", "", objects),
    Step(
        "arguments",
        "launches on all cores, with each argument in its place",
        "echo_arguments",
        "The kernel does next to nothing: it isn't the one that runs, or the launch's schedule "
        "(all cores at once) waits for cores that others hold.",
        arguments,
    ),
    Step("write_kv", "copies by the address of a slot", "write_kv", _NO_MEETING, write_kv),
    Step("copy_blocks", "the meeting of all cores", "copy_blocks", _MEETING, copy_blocks),
    Step("merge_states", "vector arithmetic", "merge_states", _NO_MEETING, merge_states),
    Step(
        "attention on vector cores",
        "attention of one sequence on one core",
        "attention",
        _NO_MEETING,
        attention_of([100], [1], 2, 1),
        "vector",
    ),
    Step(
        "attention split over vector cores",
        "states of pieces, through the workspace",
        "attention",
        _MEETING,
        attention_of([1500], [1], 2, 1),
        "vector",
    ),
    Step(
        "attention on one group",
        "the exchange between a cube core and its two vector cores",
        "attention_mixed",
        _GROUP,
        attention_of([200], [5], 4, 1),
        "mixed",
    ),
    Step(
        "attention on all groups",
        "decode, prefill and long sequences in one call",
        "attention_mixed",
        _GROUP + " One group alone was tried in the step before.",
        attention_of([1300, 300, 128, *range(1, 22)], [40, 300, 1] + [1] * 21, 8, 2),
        "mixed",
    ),
)
"""In their order; a step after a failed "arguments" can't be right and isn't run."""
