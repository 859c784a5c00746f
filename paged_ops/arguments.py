"""Arguments that are numbers: read as Python ints and floats, or refused."""

from __future__ import annotations

import operator

INT32_MAX = 2**31 - 1
"""Block ids and sequence lengths travel in int32 tensors."""

FLOAT32_MAX = (2 - 2**-23) * 2.0**127


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


def checked_float(name: str, value: object, minimum: float = -FLOAT32_MAX) -> float:
    """Return a number as a float that float32 can hold, or refuse it with its name and limits."""
    limit = "a finite float32" if minimum else "a finite float32, 0 (off) or more"
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected {limit}") from None
    except OverflowError:
        number = float("inf")
    if not minimum <= number <= FLOAT32_MAX:
        raise ValueError(f"{name} is {value}, expected {limit}")
    return number
