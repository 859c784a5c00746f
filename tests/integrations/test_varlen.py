"""torch's varlen_attn on the CPU, after it was enabled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

from paged_ops.integrations import varlen
from tests.integrations.test_flash_attn import TOLERANCE, Rules, reference

QUERY_LENS, KEY_LENS = [3, 1, 0, 4], [20, 5, 3, 4]


@pytest.fixture(autouse=True, scope="module")
def _enabled() -> None:
    varlen.enable()
    varlen.enable()


def starts(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def paged_call(**options: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the arguments of a call with pages, and the keys and values of each sequence."""
    pool = torch.randn(2, 24, 4, 2, 32)
    table = torch.randperm(24)[:20].view(4, 5).int()
    rows = pool[:, table.long()].flatten(2, 3)
    arguments = {
        "query": torch.randn(sum(QUERY_LENS), 4, 32),
        "key": pool[0],
        "value": pool[1],
        "cu_seq_q": starts(QUERY_LENS),
        "cu_seq_k": None,
        "max_q": 4,
        "max_k": 20,
        "enable_gqa": True,
        "seqused_k": torch.tensor(KEY_LENS).int(),
        "block_table": table,
    }
    return arguments | options, [rows[:, i, :length] for i, length in enumerate(KEY_LENS)]


def expect(query: Tensor, sequences: list[Tensor], rules: Rules) -> tuple[Tensor, Tensor]:
    parts = [
        reference(part, *sequence, rules, None)
        for part, sequence in zip(query.split(QUERY_LENS), sequences, strict=True)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (4, 0), (2, 1), (3, -1)])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_with_pages_it_equals_the_definition(
    window_size: tuple[int, int], scale: float | None
) -> None:
    call, sequences = paged_call(window_size=window_size, scale=scale)
    out, lse = varlen_attn(**call, return_aux=AuxRequest(lse=True))
    rules = Rules(False, window_size, 0.0, scale)
    expected, expected_lse = expect(call["query"], sequences, rules)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    torch.testing.assert_close(lse.double(), expected_lse, **TOLERANCE)
    written = torch.full_like(out, torch.nan)
    varlen_attn_out(written, **call)
    assert torch.equal(written, out)


def test_without_pages_it_equals_the_definition() -> None:
    query = torch.randn(sum(QUERY_LENS), 4, 32)
    keys = torch.randn(2, sum(KEY_LENS), 4, 32)
    offsets = starts(QUERY_LENS), starts(KEY_LENS)
    rules = Rules(True, (-1, -1), 0.0, None)
    out = varlen_attn(query, *keys, *offsets, 4, 20, window_size=(-1, 0))
    expected, _ = expect(query, list(keys.split(KEY_LENS, 1)), rules)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    used = torch.tensor([19, 5, 0, 4]).int()
    out = varlen_attn(query, *keys, *offsets, 4, 20, window_size=(-1, 0), seqused_k=used)
    cut = [x[:, :n] for x, n in zip(keys.split(KEY_LENS, 1), used.tolist(), strict=True)]
    torch.testing.assert_close(out.double(), expect(query, cut, rules)[0], **TOLERANCE)


@pytest.mark.filterwarnings("ignore")
def test_it_compiles() -> None:
    call, _ = paged_call(window_size=(-1, 0))
    with torch.no_grad():
        compiled = torch.compile(varlen_attn, fullgraph=True)
        assert torch.equal(compiled(**call), varlen_attn(**call))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqused_k": None}, "seqused_k is None"),
        ({"block_table": None, "key": torch.rand(9, 2, 32)}, "cu_seq_k is None"),
        ({"window_size": (-5, 0)}, r"window_size\[0\] is -5"),
        (
            {"seqused_k": torch.tensor([21, 1, 1, 1]).int()},
            "seqused_k gives sequence 0 21 tokens, expected at most 20: block_table has 5 blocks",
        ),
        ({"seqused_k": torch.tensor([1, -2, 1, 1]).int()}, r"seqused_k\[1\] is -2, expected 0"),
        ({"seqused_k": torch.tensor([1, 1, 1, 1])}, "seqused_k is torch.int64"),
        ({"seqused_k": torch.tensor([1, 1, 1]).int()}, r"seqused_k is torch.int32 \[3\]"),
        ({"block_table": torch.full((4, 5), 24).int()}, r"block_table\[0, 0\] is 24, expected 0"),
        ({"block_table": torch.zeros(3, 5).int()}, r"block_table is torch.int32 \[3, 5\]"),
        ({"cu_seq_q": torch.tensor([0, 3, 4, 4, 9]).int()}, r"cu_seq_q is \[0, 3, 4, 4, 9\]"),
        ({"scale": math.inf}, "scale is inf"),
        ({"value": torch.rand(24, 4, 1, 32)}, "value is .*num_kv_heads 2"),
    ],
)
def test_it_refuses_by_name(change: dict[str, Any], message: str) -> None:
    call, _ = paged_call()
    with pytest.raises(ValueError, match=message):
        varlen_attn(**(call | change))
