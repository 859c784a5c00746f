"""Running a model without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


@contextmanager
def untouched(model: PreTrainedModel) -> Iterator[None]:
    """Put back what running a model, and setting its attention, changes.

    That is: the attributes of its modules (mode, buffers and whatever a forward notes there), those
    of its configurations, and the random numbers. What hooks of others do stays done.
    """
    owners: list[Any] = [*model.modules(), *_configs(model)]
    places: list[dict[str, Any]] = [vars(owner) for owner in owners]
    places += [module._buffers for module in model.modules()]
    before = [(place, dict(place)) for place in places]
    device = model.device
    cpu_only = device.type in ("cpu", "meta")
    try:
        with torch.random.fork_rng(
            devices=[] if cpu_only else [device],
            device_type="cuda" if cpu_only else device.type,
        ):
            yield
    finally:
        for place, values in before:
            if len(place) != len(values) or any(place.get(k) is not v for k, v in values.items()):
                place.clear()
                place.update(values)


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return the configurations that say which attention each part of a model uses."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())
