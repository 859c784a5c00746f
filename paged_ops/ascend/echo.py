"""The kernel that writes back its own arguments: what its answer says of launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paged_ops.ascend.finding import Finding
from paged_ops.ascend.objects import HIDDEN_ARGUMENT

# As op_kernel/echo_arguments_tiling_data.h has them.
BUFFERS, MOST_CORES, WORDS = 4, 128, 16
MARK = 0x5041474544303031
TARGET = 2  # the buffer that the kernel writes
WORD = 1000  # the first of the three words of the tiling

# Places in a record.
_NUMBER, _COUNT, _FIRST, _TILING, _TILING_WORDS = 1, 2, 3, 7, 8


class Answers(NamedTuple):
    """What the device wrote.

    Attributes
    ----------
    records : Tensor
        On the host: int64 ``[BUFFERS, MOST_CORES, WORDS]``.
    address : int
        Of the first buffer on the device.
    launched : int
        Cores that the launch asked for.
    """

    records: Tensor
    address: int
    launched: int

    def addresses(self) -> list[int]:
        """Return what the kernel's pointers should be."""
        return [self.address + i * MOST_CORES * WORDS * 8 for i in range(BUFFERS)]


def explain(answers: Answers) -> Finding:
    """Say whether all arguments arrived, and all cores were there; else, what happened."""
    marked = answers.records[:, :, 0] == MARK
    written = [i for i in range(BUFFERS) if bool(marked[i].any())]
    if not written:
        return Finding(
            "wrong",
            "no core answered",
            "The launch ended without an error and nothing was written to any of the buffers: no "
            "core ran the kernel's code for vector cores, or all its arguments are elsewhere.",
        )
    if written != [TARGET]:
        return _in_another_place(answers, written)
    records = answers.records[TARGET][marked[TARGET]].tolist()
    said = f"{len(records)} cores answered, {answers.launched} were launched"
    numbers = [record[_NUMBER] for record in records]
    counts = {record[_COUNT] for record in records}
    if numbers != list(range(answers.launched)) or counts != {answers.launched}:
        return Finding(
            "wrong",
            f"{said}; their numbers are {numbers}, and they count {sorted(counts)} cores",
            "The kernel ran on other cores than it was launched on. Its type (vector cores only) "
            "was not taken: cce mode makes 1 to 2 of cube and vector cores of every kernel.",
        )
    for record in records:
        if record[_FIRST : _FIRST + BUFFERS] != answers.addresses():
            return Finding(
                "wrong",
                f"core {record[_NUMBER]} was given {_hex(record[_FIRST : _TILING + 1])}, expected "
                f"{_hex(answers.addresses())} and the tiling's address",
                "Pointers don't arrive as they were appended.",
            )
        if record[_TILING_WORDS : _TILING_WORDS + 3] != [WORD, WORD + 1, WORD + 2]:
            return Finding(
                "wrong",
                f"core {record[_NUMBER]} read {record[_TILING_WORDS : _TILING_WORDS + 3]} at "
                f"{record[_TILING]:#x}, expected {WORD} to {WORD + 2}",
                "Pointers arrive, the tiling doesn't: its place holder wasn't replaced by the "
                "device address of a copy, or the copy wasn't there yet.",
            )
    return Finding("passed", said)


def _in_another_place(answers: Answers, written: list[int]) -> Finding:
    """Explain answers that lie in another buffer than the third."""
    said = f"the answer is in buffer {', '.join(str(i + 1) for i in written)}, expected 3"
    if written == [TARGET - 1]:
        return Finding(
            "wrong",
            said,
            "Every argument arrives one place later: the kernel takes the second pointer for its "
            "third. The objects were built in cce mode. " + HIDDEN_ARGUMENT + " No other step can "
            "be right before this one is.",
        )
    shift = f"{TARGET - written[0]:+d}" if len(written) == 1 else "several ways"
    return Finding(
        "wrong", said, f"Arguments arrive in other places than they were appended in ({shift})."
    )


def _hex(words: list[int]) -> str:
    return ", ".join(f"{word:#x}" for word in words)


def new_buffers() -> Tensor:
    """Return the buffers, zeros, on the host."""
    return torch.zeros(BUFFERS, MOST_CORES, WORDS, dtype=torch.int64, device="cpu")
