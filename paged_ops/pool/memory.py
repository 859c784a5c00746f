"""The memory of a device: how much there is for a pool, and zeros that take none until written."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from paged_ops.pool.cgroups import available_to_groups


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that a new pool could take on a device; None where nothing says so.

    On the CPU this is the system's count, swap excluded, or what a control group of this process, a
    container's for example, has left of its limit if that is less. On an accelerator it is what the
    driver calls free, and what torch's allocator has set aside and not handed out.
    """
    if device.type == "cpu":
        counts = [_available_on_cpu(), available_to_groups()]
        return min((count for count in counts if count is not None), default=None)
    if device.type == "meta":
        return None
    module = torch.get_device_module(device)
    try:
        free: int = module.mem_get_info(device)[0]
        unused: int = module.memory_reserved(device) - module.memory_allocated(device)
    except AttributeError:
        return None
    return free + unused


def _available_on_cpu() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on the CPU, without touching them.

    torch.zeros writes every page, at about a second per GiB. Anonymous private memory from the
    system is zero as well, and each page is committed when it is first written. The tensor keeps
    the mapping alive. Made outside inference mode so that the pool may be changed outside it.
    """
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        try:
            pages = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise MemoryError(
                f"the system refused {num_bytes} bytes for a pool: {error}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Blocks lie at random, so every one of them would miss the TLB with pages of 4 KiB. A
            # kernel without huge pages says no, and nothing is lost.
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)
