"""The mutants of the Ascend kernels can be made; `python -m tests.sim.mutations` runs them."""

from __future__ import annotations

import itertools

from tests.sim.kernel_calls import OP_KERNEL
from tests.sim.mutations import MUTANTS
from tests.support.mutants import problems


def test_the_guard_of_each_mutant_stands_once_in_its_file() -> None:
    assert problems(itertools.chain(*MUTANTS.values()), OP_KERNEL) == []
