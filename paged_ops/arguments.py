"""Integer arguments: read as Python ints, or refused."""

from __future__ import annotations

import operator

INT32_MAX = 2**31 - 1
"""Block ids and sequence lengths travel in int32 tensors."""


def checked_int(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return an integer argument as an int, or refuse it with its name, value and limits."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None
    if number < minimum or (maximum is not None and number > maximum):
        limit = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
        raise ValueError(f"{name} is {number}, expected {limit}")
    return number
