"""Requests from rank to rank, with nobody at the other end."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch

from paged_ops.blocks.manager import BlockManager
from paged_ops.distributed import request_transfer
from paged_ops.pool.kv_cache import PagedKVCache


class Line:
    """Stands for torch.distributed: says what the other rank would, and keeps what it is told."""

    def __init__(self, *messages: Any) -> None:
        self.messages, self.sent = list(messages), list[Any]()

    def send_object_list(self, objects: list[Any], **_: object) -> None:
        self.sent += objects

    def recv_object_list(self, objects: list[Any], **_: object) -> None:
        objects[:] = [self.messages.pop(0)]

    def send(self, *_: object, **__: object) -> None:
        pass

    def recv(self, content: torch.Tensor, **_: object) -> None:
        content.zero_()


def what_is_sent(
    manager: BlockManager, cache: PagedKVCache, request: Hashable, patch: pytest.MonkeyPatch
) -> Any:
    """Return the message with which a request begins to be sent."""
    line = Line({"rows": []})
    patch.setattr(request_transfer, "dist", line)
    request_transfer.send_request(manager, cache, request, 1)
    return line.sent[0]
