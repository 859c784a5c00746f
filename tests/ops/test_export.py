"""A decoder step as an exported program: the pool is an input, another process runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import paged_ops
from paged_ops import PagedKVCache
from tests.support.checks import relative_error

# The exporter and Inductor warn about their own deprecated parts.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 4, 2, 8, 4
DIM = NUM_HEADS * HEAD_DIM

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]


class Layer(nn.Module):
    """Project, write, attend, project back, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(
        self,
        x: Tensor,
        kv_blocks: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        rows = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        query, key, value = rows.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        key_cache, value_cache = kv_blocks.unbind(1)
        paged_ops.write_kv(key, value, key_cache, value_cache, slot_mapping)
        attended = paged_ops.attention(query, key_cache, value_cache, block_tables, seq_lens)
        return x + self.out(attended.flatten(1)).relu()


class Step(nn.Module):
    """Token ids to logits; the pool of each layer is an argument, not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(
        self,
        tokens: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        slot_mapping: Tensor,
        pools: list[Tensor],
    ) -> Tensor:
        x = self.embedding(tokens)
        for layer, kv_blocks in zip(self.layers, pools, strict=True):
            x = layer(x, kv_blocks, block_tables, seq_lens, slot_mapping)
        return x @ self.embedding.weight.t()


def make_inputs(batch: int, width: int, num_blocks: int) -> Inputs:
    """Return the arguments of a step on a pool of random contents."""
    cache = PagedKVCache(NUM_LAYERS, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pools = [cache.kv_blocks(layer).normal_() for layer in range(NUM_LAYERS)]
    block_tables = torch.randperm(num_blocks)[: batch * width].view(batch, width).to(torch.int32)
    seq_lens = torch.full((batch,), width * BLOCK_SIZE - 1, dtype=torch.int32)
    slot_mapping = block_tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 2
    return torch.randint(32, (batch,)), block_tables, seq_lens, slot_mapping, pools


RUN_ELSEWHERE = """
import sys, torch, paged_ops
folder, form = sys.argv[1:]
if form == "exported":
    step = torch.export.load(f"{folder}/step.pt2").module()
else:
    step = torch._inductor.aoti_load_package(f"{folder}/compiled.pt2")
calls = torch.load(f"{folder}/inputs.pt")
with torch.no_grad():
    torch.save([(step(*inputs), inputs[-1]) for inputs in calls], f"{folder}/{form}.pt")
"""


def run_elsewhere(folder: Path, form: str) -> list[tuple[Tensor, list[Tensor]]]:
    """Load and run one form of the step in a new process; return outputs and pools."""
    command = [sys.executable, "-W", "ignore", "-c", RUN_ELSEWHERE, str(folder), form]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: list[tuple[Tensor, list[Tensor]]] = torch.load(folder / f"{form}.pt")
    return results


@torch.no_grad()
def test_an_exported_step_runs_in_another_process_for_other_batches_and_pools(
    tmp_path: Path,
) -> None:
    step, size = Step().eval(), Dim.DYNAMIC
    rows = {0: size}
    exported = torch.export.export(
        step,
        make_inputs(batch=3, width=2, num_blocks=16),
        dynamic_shapes=(rows, {0: size, 1: size}, rows, rows, [rows] * NUM_LAYERS),
    )
    torch.export.save(exported, tmp_path / "step.pt2")
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "compiled.pt2"))
    calls = [make_inputs(*sizes) for sizes in ((3, 2, 16), (7, 4, 40), (2, 3, 40), (16, 9, 150))]
    torch.save(calls, tmp_path / "inputs.pt")
    assert (tmp_path / "compiled.pt2").stat().st_size < 4 << 20  # no pool in it
    found = run_elsewhere(tmp_path, "exported"), run_elsewhere(tmp_path, "compiled")
    for inputs, *results in zip(calls, *found, strict=True):
        before = inputs[-1][0].clone()
        want = step(*inputs)
        assert not torch.equal(inputs[-1][0], before)
        for output, pools in results:
            assert relative_error(output, want.double()) <= 1e-5
            for pool, kv_blocks in zip(pools, inputs[-1], strict=True):
                assert relative_error(pool, kv_blocks.double()) <= 1e-5
