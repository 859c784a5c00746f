"""The simulated runtime under the real torch_npu, and the ops' way from npu tensors to a kernel.

``python -m tests.npu_environment -m pytest tests/sim/test_acl.py`` runs these. What the ops compute
is tested elsewhere, for every device; here it is that they get there.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_ops
from paged_ops import reference
from tests import npu_environment as environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = [
    pytest.mark.skipif(
        not environment.is_simulated(), reason=environment.why_not() or "the NPU here is a real one"
    ),
    # torch_npu gives some that say nothing about these tests.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 8, 16, 2, 64


@pytest.fixture(scope="module", autouse=True)
def _npu() -> None:
    if environment.is_simulated():
        environment.load()


def runtime() -> ctypes.CDLL:
    return ctypes.CDLL(environment.RUNTIME)


def launches() -> dict[str, Any]:
    answer: dict[str, Any] = environment.report()["launches"]
    return answer


def run_python(code: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with environment variables changed or (None) removed."""
    changed = {**os.environ, **variables}
    kept = {name: value for name, value in changed.items() if value is not None}
    prelude = "import torch; from tests import npu_environment as environment; environment.load()\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code], env=kept, cwd=ROOT, capture_output=True, text=True
    )


class Decode:
    """One decode step of three sequences, on the CPU."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.query = torch.randn(3, 4, HEAD_DIM).to(dtype)
        self.pool = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM).to(dtype)
        self.block_tables = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 0]], dtype=torch.int32)
        self.seq_lens = torch.tensor([40, 17, 20], dtype=torch.int32)

    def arguments(self, device: str | None = None) -> list[Tensor]:
        query, pool, tables, lengths = self.query, self.pool, self.block_tables, self.seq_lens
        if device is not None:
            query, tables, lengths = (t.to(device) for t in (query, tables, lengths))
            pool = environment.to_npu(pool, device)
        return [query, pool[:, 0], pool[:, 1], tables, lengths]

    def assert_right(self, output: Tensor) -> None:
        query, key_cache, value_cache, tables, lengths = self.arguments()
        want = reference.attention(
            query.double(), key_cache.double(), value_cache.double(), tables, lengths
        )
        assert (output.cpu().double() - want).abs().max() < 2e-3


# The libraries


def test_each_entry_point_that_the_npu_wheel_needs_is_there() -> None:
    from tests.sim.acl import build

    wheel = build.loaded_with_torch_npu(build.package_directory("torch_npu"))
    needed = set().union(*(build.symbols(library, "undefined") for library in wheel))
    defined = build.symbols(build.OUTPUT / "lib" / build.RUNTIME, "defined")
    assert len(needed) > 50
    assert not {
        name
        for name in needed - defined
        if not any(name in build.symbols(library, "defined") for library in wheel)
    }


def test_an_entry_point_that_the_simulated_npu_lacks_returns_an_error_and_is_counted() -> None:
    generated = (ROOT / "build" / "sim" / "acl" / "unimplemented_entry_points.cpp").read_text()
    names = re.findall(r"int (\w+)\(\)", generated)
    assert "aclopCompileAndExecute" in names
    before = environment.report()["unimplemented"]
    for name in names:
        assert getattr(runtime(), name)() != 0
    after = environment.report()["unimplemented"]
    assert all(after[name] == before.get(name, 0) + 1 for name in names)


def test_the_npu_part_declares_functions_as_the_wheel_does() -> None:
    from tests.sim.acl import build

    headers = build.package_directory("torch_npu") / "include" / "third_party" / "acl" / "inc"
    includes = ["-isystem", headers, "-I", ROOT / "paged_ops" / "csrc"]
    source = HERE / "acl" / "signatures.cpp"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-std=c++20", "-fsyntax-only", *includes, source], check=True)


# Tensors


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
    ids=str,
)
def test_a_tensor_comes_back_from_the_npu_as_it_went(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 7) * 20).to(dtype)
    there = tensor.npu()
    assert there.device == torch.device("npu:0")
    assert there.dtype == dtype
    assert torch.equal(there.cpu(), tensor)


def test_views_of_an_npu_tensor_come_back_right() -> None:
    tensor = torch.arange(120).reshape(4, 5, 6)
    there = tensor.npu()
    for view in (
        lambda t: t[1:3],
        lambda t: t[:, 2],
        lambda t: t.transpose(0, 2),
        lambda t: t[:, :, ::2],
        lambda t: t.reshape(20, 6).t(),
        lambda t: t[2, 1:, 3:].unsqueeze(0).expand(3, 4, 3),
    ):
        assert torch.equal(view(there).cpu(), view(tensor))


def test_copies_into_views_of_an_npu_tensor_write_these_elements_alone() -> None:
    tensor = torch.zeros(4, 6)
    there = tensor.npu()
    for target in (tensor, there):
        target[:, 1::2].copy_(torch.arange(12.0).view(4, 3))
        target.t()[0].copy_(target[:, 1])
        target[2:, 2:4] = target[:2, 1:3].clone()
    assert torch.equal(there.cpu(), tensor)


def test_a_tensor_moves_from_one_npu_to_another() -> None:
    tensor = torch.randn(3, 4)
    assert torch.equal(tensor.to("npu:1").to("npu:0").cpu(), tensor)
    assert torch.npu.device_count() == 2


def test_to_npu_keeps_strides_and_offset() -> None:
    view = torch.arange(48).view(4, 2, 6)[1:, 1, ::2]
    there = environment.to_npu(view)
    assert there.stride() == view.stride()
    assert there.storage_offset() == view.storage_offset()
    assert torch.equal(there.cpu(), view)


def test_zeros_on_the_npu_are_zeros() -> None:
    assert torch.equal(torch.zeros(3, 5, device="npu").cpu(), torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fresh_npu_memory_is_nan(dtype: torch.dtype) -> None:
    assert torch.empty(7, 9, dtype=dtype, device="npu").cpu().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_fresh_npu_memory_is_no_valid_index(dtype: torch.dtype) -> None:
    assert (torch.empty(7, 9, dtype=dtype, device="npu").cpu() > 2**30).all()


def test_an_operator_that_the_simulated_npu_lacks_is_an_error_and_not_silence() -> None:
    tensor = torch.ones(3).npu()
    before = environment.report()["unimplemented"].get("aclopCompileAndExecute", 0)
    with pytest.raises(RuntimeError, match="isn't implemented"):
        tensor + tensor
    assert environment.report()["unimplemented"]["aclopCompileAndExecute"] > before
    with pytest.raises(RuntimeError, match="isn't implemented"):
        tensor.half()


def test_a_copy_beyond_its_npu_allocation_is_refused() -> None:
    tensor = torch.zeros(4).npu()
    source = (ctypes.c_char * 4096)()
    size, host_to_device = ctypes.c_size_t(4096), 1
    address = ctypes.c_void_p(tensor.data_ptr())
    assert runtime().aclrtMemcpy(address, size, source, size, host_to_device) != 0
    assert torch.equal(tensor.cpu(), torch.zeros(4))


def test_more_than_the_memory_of_the_npu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no room"):
        torch.empty(2**40, dtype=torch.int8, device="npu")


def test_the_host_cannot_follow_a_pointer_into_npu_memory() -> None:
    done = run_python(
        "import ctypes\n"
        "tensor = torch.ones(4).npu()\n"
        "print(tensor.cpu().sum().item(), flush=True)\n"
        "ctypes.string_at(tensor.data_ptr(), 4)"
    )
    assert "4.0" in done.stdout
    assert done.returncode == -signal.SIGSEGV


# From an op to its kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_attention_on_npu_tensors_launches_its_kernel(dtype: torch.dtype) -> None:
    decode = Decode(dtype)
    before = launches()["count"]
    output = paged_ops.attention(*decode.arguments("npu:0"))
    last = launches()["last"]
    assert launches()["count"] == before + 1
    name = str(dtype).removeprefix("torch.")
    mixed = "" if dtype == torch.float32 else "mixed_"  # the cube takes 16-bit types
    assert last["kernel"] == f"paged_attention_{mixed}{name}"
    assert last["device"] == 0
    assert last["batch"]  # its cores may wait for each other
    assert output.device == torch.device("npu:0")
    assert (output.cpu().double() - _exact(decode)).abs().max() < 2e-2


def _exact(decode: Decode) -> Tensor:
    query, key_cache, value_cache, tables, lengths = decode.arguments()
    return reference.attention(
        query.double(), key_cache.double(), value_cache.double(), tables, lengths
    )


def test_every_op_on_npu_tensors_gives_what_it_gives_on_the_cpu() -> None:
    decode = Decode()
    here, there = decode.arguments(), decode.arguments("npu:0")
    lse = paged_ops.attention_with_lse(*there)[1]
    assert torch.allclose(lse.cpu(), paged_ops.attention_with_lse(*here)[1], atol=1e-5)
    out = torch.empty(decode.query.shape, dtype=decode.query.dtype, device="npu")
    torch.ops.paged.attention.out(*there, out=out)
    assert torch.equal(out.cpu(), paged_ops.attention(*there).cpu())
    new = torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM).half()
    for slots in (torch.tensor([5, -1, 77]), torch.tensor([9, 9, 3], dtype=torch.int32)):
        paged_ops.write_kv(new[0], new[1], here[1], here[2], slots)
        paged_ops.write_kv(new[0].npu(), new[1].npu(), there[1], there[2], slots.npu())
    pairs = torch.tensor([[0, 1], [1, 2], [3, 0]])
    paged_ops.copy_blocks(here[1], here[2], pairs)
    paged_ops.copy_blocks(there[1], there[2], pairs.npu())
    assert torch.equal(there[1].cpu(), here[1])
    assert torch.equal(there[2].cpu(), here[2])
    states = (decode.query, torch.randn(3, 4), decode.query.flip(0).contiguous(), torch.randn(3, 4))
    want = paged_ops.merge_states(*states)
    got = paged_ops.merge_states(*(state.npu() for state in states))
    assert torch.allclose(got[0].cpu().float(), want[0].float(), atol=2e-3)
    assert torch.allclose(got[1].cpu(), want[1], atol=1e-5)


def test_gather_kv_on_npu_tensors_gives_what_it_gives_on_the_cpu() -> None:
    decode = Decode()
    want = paged_ops.gather_kv(*decode.arguments()[1:])
    got = paged_ops.gather_kv(*decode.arguments("npu:0")[1:])
    assert launches()["last"]["kernel"] == "paged_gather_kv_16bit"
    for there, here in zip(got, want, strict=True):
        assert there.device == torch.device("npu:0")
        assert torch.equal(there.cpu(), here)


def test_float8_caches_on_the_npu_are_refused_by_every_op_by_name() -> None:
    query, _, _, tables, lengths = Decode().arguments("npu:0")
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    new = torch.zeros(1, NUM_KV_HEADS, HEAD_DIM).half().npu()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        caches = [torch.zeros(shape, dtype=torch.uint8).view(dtype).npu() for _ in range(2)]
        for call, arguments in (
            (paged_ops.attention, (query, *caches, tables, lengths)),
            (paged_ops.write_kv, (new, new, *caches, torch.tensor([0]).npu())),
            (paged_ops.copy_blocks, (*caches, torch.tensor([[0, 1]]).npu())),
            (paged_ops.gather_kv, (*caches, tables, lengths)),
        ):
            with pytest.raises(RuntimeError, match=f"{dtype} on an NPU, .* a 910B has no float8"):
                call(*arguments)


def test_key_ranges_on_the_npu_are_refused_by_name() -> None:
    pool = torch.randn(2, 2, 16, 1, 32).npu()
    index = torch.tensor([[1]], dtype=torch.int32).npu(), torch.ones(1, dtype=torch.int32).npu()
    ranges = torch.zeros(1, 2, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match=r"key_ranges is a tensor, expected None: .* NPU"):
        paged_ops.attention(torch.randn(1, 2, 32).npu(), *pool.unbind(1), *index, key_ranges=ranges)


def test_a_tree_mask_of_any_strides_is_read() -> None:
    decode = Decode()
    here, there = decode.arguments(), decode.arguments("npu:0")
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    mask = torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.bool)
    on_npu = mask.npu()
    for each in (
        on_npu,
        mask.T.contiguous().npu().T,
        on_npu[:, :1].expand(3, 2),
        on_npu[:1].expand(3, 2),
    ):
        want = paged_ops.attention(*here, starts, tree_mask=each.cpu())
        got = paged_ops.attention(*there, starts.npu(), tree_mask=each)
        assert launches()["last"]["kernel"] == "paged_attention_float16"
        assert torch.allclose(got.cpu().float(), want.float(), atol=2e-3)


def test_an_op_runs_on_the_npu_of_its_tensors_whichever_is_current() -> None:
    decode = Decode()
    arguments = decode.arguments("npu:1")
    assert torch.npu.current_device() == 0
    output = paged_ops.attention(*arguments)
    assert output.device == torch.device("npu:1")
    assert launches()["last"]["device"] == 1
    assert torch.npu.current_device() == 0
    decode.assert_right(output)


def test_an_op_runs_in_the_current_npu_stream() -> None:
    decode = Decode()
    arguments = decode.arguments("npu:0")
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        paged_ops.attention(*arguments)
    assert launches()["last"]["stream"] == stream.npu_stream
    paged_ops.attention(*arguments)
    assert launches()["last"]["stream"] == torch.npu.current_stream().npu_stream
    assert launches()["last"]["stream"] != stream.npu_stream


def test_tensors_on_the_cpu_and_the_npu_are_refused_together() -> None:
    decode = Decode()
    here, there = decode.arguments(), decode.arguments("npu:0")
    with pytest.raises(RuntimeError, match=r"block_tables is on cpu, expected npu:0 like query"):
        paged_ops.attention(*there[:3], here[3], there[4])


def test_lists_with_a_stride_are_read_right_on_the_npu() -> None:
    decode = Decode()
    arguments = decode.arguments("npu:0")
    arguments[3] = environment.to_npu(decode.block_tables.t().contiguous().t())
    arguments[4] = torch.stack([decode.seq_lens, decode.seq_lens + 1], dim=1).npu()[:, 0]
    decode.assert_right(paged_ops.attention(*arguments))


def test_a_shape_that_no_npu_kernel_serves_is_refused_with_its_limit() -> None:
    query, cache = torch.zeros(1, 2, 40).half(), torch.zeros(2, BLOCK_SIZE, 2, 40).half()
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    arguments = [t.npu() for t in (query, cache, cache, table, length)]
    with pytest.raises(RuntimeError, match=r"paged::attention: head_dim is 40, expected"):
        paged_ops.attention(*arguments)


def test_no_tokens_launch_nothing_on_the_npu() -> None:
    decode = Decode()
    query, key_cache, value_cache, tables, lengths = decode.arguments("npu:0")
    before = launches()["count"]
    output = paged_ops.attention(query[:0], key_cache, value_cache, tables[:0], lengths[:0])
    assert output.shape == (0, 4, HEAD_DIM)
    no_slots = torch.zeros(0, dtype=torch.int64).npu()
    paged_ops.write_kv(query[:0, :2], query[:0, :2], key_cache, value_cache, no_slots)
    paged_ops.copy_blocks(key_cache, value_cache, torch.zeros(0, 2, dtype=torch.int64).npu())
    assert launches()["count"] == before


BAD_VALUES = {
    "a block id past the pool": ("block_tables", (1, 1), 99),
    "a negative block id": ("block_tables", (0, 0), -1),
    "a negative length": ("seq_lens", (2,), -1),
    "a length past the table": ("seq_lens", (0,), 49),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_bad_values_on_the_npu_are_refused_as_on_the_cpu_when_asked_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, index, value = BAD_VALUES[kind]
    decode = Decode()
    getattr(decode, name)[index] = value
    with pytest.raises(RuntimeError) as on_cpu:
        paged_ops.attention(*decode.arguments())
    arguments = decode.arguments("npu:0")
    paged_ops.attention(*arguments)  # nobody looks: the kernel stays inside its tensors
    monkeypatch.setenv("PAGED_CHECK", "1")
    before = launches()["count"]
    with pytest.raises(RuntimeError) as on_npu:
        paged_ops.attention(*arguments)
    assert str(on_npu.value) == str(on_cpu.value)
    assert launches()["count"] == before


@pytest.mark.parametrize("slot", [-2, NUM_BLOCKS * BLOCK_SIZE])
def test_bad_slots_on_the_npu_write_nothing_and_are_refused_when_asked_for(
    slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decode()
    _, key_cache, value_cache, _, _ = decode.arguments("npu:0")
    rows = torch.randn(1, NUM_KV_HEADS, HEAD_DIM).half().npu()
    slots = torch.tensor([slot]).npu()
    paged_ops.write_kv(rows, rows, key_cache, value_cache, slots)
    assert torch.equal(key_cache.cpu(), decode.pool[:, 0])
    monkeypatch.setenv("PAGED_CHECK", "1")
    with pytest.raises(RuntimeError, match=rf"slot_mapping\[0\] is {slot}, expected"):
        paged_ops.write_kv(rows, rows, key_cache, value_cache, slots)


def test_bad_block_pairs_on_the_npu_copy_nothing_and_are_refused_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = Decode()
    _, key_cache, value_cache, _, _ = decode.arguments("npu:0")
    pairs = torch.tensor([[0, NUM_BLOCKS]]).npu()
    paged_ops.copy_blocks(key_cache, value_cache, pairs)
    assert torch.equal(key_cache.cpu(), decode.pool[:, 0])
    monkeypatch.setenv("PAGED_CHECK", "1")
    with pytest.raises(RuntimeError, match=r"block_mapping\[0, 1\] is 8, expected 0 to 7"):
        paged_ops.copy_blocks(key_cache, value_cache, pairs)


def test_a_captured_npu_graph_follows_lengths_and_tables_that_change() -> None:
    decode = Decode()
    arguments = decode.arguments("npu:0")
    graph = torch.npu.NPUGraph()
    before = launches()["count"]
    with torch.npu.graph(graph):
        output = paged_ops.attention(*arguments)
    assert launches()["count"] == before
    for seq_lens in ([40, 17, 20], [5, 48, 33], [1, 2, 0]):
        decode.seq_lens.copy_(torch.tensor(seq_lens))
        decode.block_tables.copy_(torch.randperm(NUM_BLOCKS).repeat(2)[:9].view(3, 3))
        arguments[3].copy_(decode.block_tables)
        arguments[4].copy_(decode.seq_lens)
        graph.replay()
        decode.assert_right(output)
    assert launches()["count"] == before + 3


def test_values_cannot_be_checked_while_an_npu_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = Decode().arguments("npu:0")
    monkeypatch.setenv("PAGED_CHECK", "1")
    graph = torch.npu.NPUGraph()
    with (
        pytest.raises(RuntimeError, match=r"block_tables can't be copied to the host"),
        torch.npu.graph(graph),
    ):
        paged_ops.attention(*arguments)


def test_an_op_comes_after_what_torch_npu_has_queued_before_it() -> None:
    """By default torch_npu queues its operators: here several hundred copies into the query."""
    done = run_python(
        "import paged_ops\n"
        "from tests.sim.test_acl import Decode\n"
        "decode = Decode(torch.float32)\n"
        "arguments = decode.arguments('npu:0')\n"
        "paged_ops.attention(*arguments)\n"
        "query = torch.empty_like(arguments[0])\n"
        "stale = torch.zeros_like(arguments[0])\n"
        "for _ in range(500):\n"
        "    query.copy_(stale)\n"
        "query.copy_(arguments[0])\n"
        "output = paged_ops.attention(query, *arguments[1:])\n"
        "query.copy_(stale)\n"
        "decode.assert_right(output)\n",
        ASCEND_LAUNCH_BLOCKING=None,
        TASK_QUEUE_ENABLE="1",
        PYTORCH_NO_NPU_MEMORY_CACHING=None,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("cores", "blocks"), [(None, 40), ("9", 18), ("unsaid", 40)])
def test_a_launch_has_the_cores_of_the_device_or_else_of_its_chip(
    cores: str | None, blocks: int
) -> None:
    done = run_python(
        "import paged_ops\n"
        "rows, cache = torch.ones(200, 1, 16).npu(), torch.zeros(13, 16, 1, 16).npu()\n"
        "paged_ops.write_kv(rows, rows, cache, cache.clone(), torch.arange(200).npu())\n"
        "print(torch.npu.get_device_name(), environment.report()['launches']['last']['blocks'])\n",
        PAGED_SIM_SOC="Ascend910B4",
        PAGED_SIM_CORES=cores,
    )
    assert f"Ascend910B4 {blocks}" in done.stdout, done.stderr


def test_an_npu_kernel_that_breaks_a_rule_or_is_missing_fails_the_call() -> None:
    from tests.sim.harness import build_kernel

    folder = ROOT / "build" / "sim" / "broken_kernels"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "write_kv.o"
    link.unlink(missing_ok=True)
    link.symlink_to(
        build_kernel(HERE / "acl" / "broken" / "write_kv.cpp", includes=(ROOT / "op_kernel",))
    )
    done = run_python(
        "import paged_ops\n"
        "cache = torch.zeros(2, 16, 1, 16).npu()\n"
        "rows, slots = torch.ones(2, 1, 16).npu(), torch.tensor([0, 1]).npu()\n"
        "def message(call, *arguments):\n"
        "    try:\n"
        "        call(*arguments)\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "message(paged_ops.write_kv, rows, rows, cache, cache.clone(), slots)\n"
        "message(paged_ops.copy_blocks, cache, cache.clone(), torch.tensor([[0, 1]]).npu())\n",
        PAGED_KERNELS=str(folder),
    )
    assert "paged::write_kv: aclrtLaunchKernelWithConfig returned 507035" in done.stdout
    assert re.search(r"write_kv.cpp:\d+ core \d+ gm-bounds", done.stdout)
    assert "called with key torch.float32 [2, 1, 16]" in done.stdout
    assert "paged::copy_blocks: there is no NPU kernel at" in done.stdout
    assert "copy_blocks.o" in done.stdout
