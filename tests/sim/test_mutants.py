"""The mutants of the Ascend kernels and of the simulated device can be made.

`python -m tests.sim.mutations` and `python -m tests.sim.device_mutations` run them.
"""

from __future__ import annotations

import itertools

from tests.sim import device_mutations
from tests.sim.build import ROOT
from tests.sim.kernel_calls import OP_KERNEL
from tests.sim.mutations import MUTANTS
from tests.support.mutants import Mutant, chosen, problems


def test_the_guard_of_each_mutant_stands_once_in_its_file() -> None:
    assert problems(itertools.chain(*MUTANTS.values()), OP_KERNEL) == []


def test_the_guard_of_each_mutant_of_the_simulated_device_stands_once_in_its_file() -> None:
    mutants = itertools.chain(*device_mutations.MUTANTS.values())
    assert problems(mutants, ROOT / device_mutations.SIMULATOR) == []


def test_words_choose_mutants_by_their_fault_their_file_and_their_unit() -> None:
    flag = Mutant("a flag left out", "ring.h", "a", "b")
    mutants = {"attention": (flag,), "write_kv": (Mutant("half a cap", "cap.h", "a", "b"),)}
    assert chosen(mutants, []) == mutants
    for word, unit in {"flag": "attention", "cap.h": "write_kv", "write": "write_kv"}.items():
        assert chosen(mutants, [word]) == {unit: mutants[unit]}
