"""The group of ranks that torchrun has started: gloo, one thread each.

Every rank runs the same tests in the same order. Without torchrun there is nothing to collect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

collect_ignore_glob = [] if "RANK" in os.environ else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _group() -> Iterator[None]:
    torch.set_num_threads(1)
    # Long, because processes may have to wait for a core.
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    yield
    dist.destroy_process_group()
