"""How many cores a plan counts on: what the device says of itself, else what its chip has."""

from __future__ import annotations

import pytest

from tests.sim import tiling as host

CHIPS = {
    "Ascend910B1": 24,
    "Ascend910B2": 24,
    "Ascend910B2C": 24,
    "Ascend910B3": 20,
    "Ascend910B4": 20,
    "Ascend910B4-1": 20,
    "Ascend910_9362": 20,
    "Ascend910_9372": 20,
    "Ascend910_9381": 24,
    "Ascend910_9382": 24,
    "Ascend910_9391": 24,
    "Ascend910_9392": 24,
}


def cube_cores(name: str, cube: int = 0, vector: int = 0, arch: int = 0) -> int:
    cores: int = host.library().soc_cube_cores(name.encode(), cube, vector, arch)
    return cores


@pytest.mark.parametrize("name", CHIPS)
def test_a_chip_whose_device_says_nothing_has_the_cores_of_the_table(name: str) -> None:
    assert cube_cores(name) == CHIPS[name]
    assert cube_cores(name, arch=2201) == CHIPS[name]


@pytest.mark.parametrize(
    ("said", "groups"),
    [
        ((24, 48), 24),
        ((12, 24), 12),
        ((25, 50), 25),
        ((12, 20), 10),  # a group has two vector cores
        ((10, 48), 10),
        ((1, 2), 1),
        ((0, 48), 24),  # no answer, or none that could be
        ((24, 0), 24),
        ((24, 1), 24),
        ((-1, -2), 24),
    ],
)
def test_what_a_device_says_of_its_cores_goes_before_the_table(
    said: tuple[int, int], groups: int
) -> None:
    assert cube_cores("Ascend910B1", *said, 2201) == groups
    assert cube_cores("Ascend910B1", *said) == groups


def test_a_chip_that_is_not_in_the_table_needs_the_architecture_and_the_cores() -> None:
    assert cube_cores("Ascend910B9") == 0
    assert cube_cores("Ascend910B9", 30, 60) == 0
    assert cube_cores("Ascend910B9", arch=2201) == 0
    assert cube_cores("Ascend910B9", 30, 60, 2201) == 30


@pytest.mark.parametrize("name", ["Ascend910B1", "Ascend950PR"])
def test_a_device_of_another_architecture_is_refused(name: str) -> None:
    assert cube_cores(name, 30, 60, 3510) == 0
