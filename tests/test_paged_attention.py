"""PagedAttention against attention over the whole sequence in float64."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from paged_ops import reference
from paged_ops.attention import PagedAttention
from paged_ops.blocks.errors import OutOfBlocks, UnknownRequest

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
Step = list[tuple[str, int]]  # requests of one call, and how many new tokens each has


def dense_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend from the last tokens of one sequence to all of it, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    new, length, heads = len(query), len(key), query.shape[1]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    value = value.repeat_interleave(heads // value.shape[1], 1)
    scale = options.get("scale")
    scores = torch.einsum("qhd,khd->hqk", query, key)
    scores *= query.shape[2] ** -0.5 if scale is None else scale
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length) - torch.arange(length - new, length)[:, None]
    if (slopes := options.get("alibi_slopes")) is not None:
        scores += slopes.double()[:, None, None] * distance
    window = options.get("sliding_window") or length
    scores[:, (distance > 0) | (distance <= -window)] = -torch.inf
    if (sinks := options.get("sinks")) is not None:
        column = sinks.double()[:, None, None].expand(-1, new, 1)
        scores = torch.cat([scores, column], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], value)


class Conversation:
    """A PagedAttention, and beside it the keys and values of each request in one piece."""

    def __init__(self, **options: Any) -> None:
        arguments = {"num_kv_heads": KV_HEADS, "block_size": 4, "num_blocks": 32} | options
        self.layer = PagedAttention(HEADS, HEAD_DIM, **arguments)
        self.options = options
        self.keys: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def allocate(self, request: str, num_tokens: int) -> None:
        self.layer.allocate(request, num_tokens)
        self.keys.setdefault(request, torch.empty(0, KV_HEADS, HEAD_DIM))
        self.values.setdefault(request, torch.empty(0, KV_HEADS, HEAD_DIM))

    def fork(self, parent: str, child: str) -> None:
        self.layer.fork(parent, child)
        self.keys[child], self.values[child] = self.keys[parent], self.values[parent]

    def step(self, step: Step) -> None:
        """Feed new tokens to the requests, and compare what comes out."""
        counts = [count for _, count in step]
        query, key, value = random_tokens(sum(counts))
        output = self.layer(query, key, value, [request for request, _ in step], counts)
        assert output.shape == query.shape
        rows = zip(query.split(counts), key.split(counts), value.split(counts), strict=True)
        for (request, _), (q, k, v), got in zip(step, rows, output.split(counts), strict=True):
            self.keys[request] = torch.cat([self.keys[request], k])
            self.values[request] = torch.cat([self.values[request], v])
            want = dense_attention(q, self.keys[request], self.values[request], **self.options)
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
            assert self.layer.num_tokens(request) == len(self.keys[request])
        self.layer.manager.check()


def random_tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(count, HEADS, HEAD_DIM),
        torch.randn(count, KV_HEADS, HEAD_DIM),
        torch.randn(count, KV_HEADS, HEAD_DIM),
    )


# ------------------------------------------------------------------ right results

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "NHD": {"layout": "NHD"},
    "block of 1": {"block_size": 1},
    "block of 3": {"block_size": 3},
    "block of 128": {"block_size": 128},
    "scale": {"scale": 0.1},
    "window": {"sliding_window": 5},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -1.0, 5.0])},
    "all": {
        "scale": 0.5,
        "sliding_window": 6,
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0]),
        "sinks": torch.tensor([0.0, 1.0, -1.0, 5.0]),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prefill_chunks_and_decode_agree_with_attention_over_the_whole_sequence(
    options: dict[str, Any],
) -> None:
    conversation = Conversation(**options)
    conversation.allocate("a", 7)
    conversation.allocate("b", 0)
    conversation.step([("a", 5)])
    conversation.step([("a", 6), ("b", 3)])
    for _ in range(6):
        conversation.step([("b", 1), ("a", 1)])
    conversation.step([("a", 2), ("b", 0)])


@given(st.data())
def test_requests_that_come_fork_and_go_stay_right(data: st.DataObject) -> None:
    conversation = Conversation(block_size=data.draw(st.integers(1, 5)), num_blocks=64)
    conversation.allocate("r0", data.draw(st.integers(0, 6)))
    alive, made = ["r0"], 1
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["step", "step", "fork", "free", "allocate"]))
        chosen = data.draw(st.sampled_from(alive)) if alive else None
        if chosen is None or (action == "allocate" and len(alive) < 4):
            made += 1
            conversation.allocate(f"r{made}", data.draw(st.integers(0, 9)))
            alive.append(f"r{made}")
        elif action == "fork" and len(alive) < 4:
            made += 1
            conversation.fork(chosen, f"r{made}")
            alive.append(f"r{made}")
        elif action == "allocate":
            conversation.allocate(chosen, data.draw(st.integers(0, 20)))
        elif action == "free":
            conversation.layer.free(chosen)
            alive.remove(chosen)
        else:
            counts = st.integers(0, 4)
            conversation.step([(request, data.draw(counts)) for request in alive])
    for request in alive:
        conversation.layer.free(request)
    assert conversation.layer.manager.num_used == 0


@pytest.mark.parametrize("room", [6, 7, 8, 20])
@pytest.mark.parametrize("first", ["parent", "child"])
def test_forks_diverge_whoever_writes_first_and_whatever_room_the_parent_had(
    room: int, first: str
) -> None:
    conversation = Conversation()
    conversation.allocate("parent", room)
    conversation.step([("parent", 6)])
    conversation.fork("parent", "child")
    conversation.step([(first, 1)])
    for _ in range(4):
        conversation.step([("parent", 1), ("child", 1)])
    conversation.allocate("child", 30)
    conversation.fork("child", "grandchild")
    conversation.step([("grandchild", 3), ("parent", 2), ("child", 1)])


def test_siblings_that_grow_in_one_call_each_get_their_own_block() -> None:
    conversation = Conversation()
    conversation.allocate("a", 2)
    conversation.step([("a", 2)])
    for child in "bcd":
        conversation.fork("a", child)
    assert conversation.layer.manager.num_used == 1
    conversation.step([(request, 1) for request in "abcd"])
    assert conversation.layer.manager.num_used == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_gives_half_precision_out(dtype: torch.dtype) -> None:
    layer = PagedAttention(HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, dtype=dtype)
    layer.allocate("a", 5)
    query, key, value = (tensor.to(dtype) for tensor in random_tokens(5))
    output = layer(query, key, value, ["a"], [5])
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), dense_attention(query, key, value), **tolerance())


def tolerance() -> dict[str, float]:
    return {"rtol": 0.02, "atol": 0.02}


def test_strided_inputs_are_taken_as_they_are() -> None:
    layer = PagedAttention(HEADS, HEAD_DIM, num_kv_heads=KV_HEADS)
    layer.allocate("a", 3)
    joined = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM)
    query, key, value = joined.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    output = layer(query, key, value, ["a"], [3])
    want = dense_attention(query, key, value)
    torch.testing.assert_close(output.double(), want, rtol=0, atol=1e-5)


def test_a_call_without_requests_or_without_tokens_has_an_empty_output() -> None:
    layer = PagedAttention(HEADS, HEAD_DIM, num_kv_heads=KV_HEADS)
    assert layer(*random_tokens(0), []).shape == (0, HEADS, HEAD_DIM)
    layer.allocate("a", 0)
    assert layer(*random_tokens(0), ["a"], [0]).shape == (0, HEADS, HEAD_DIM)
    assert layer.num_tokens("a") == 0


# ------------------------------------------------------------------ room


def test_allocate_makes_room_once_however_often_it_is_asked() -> None:
    layer = PagedAttention(HEADS, HEAD_DIM, block_size=4, num_blocks=8)
    for num_tokens, used in [(6, 2), (6, 2), (1, 2), (0, 2), (8, 2), (9, 3), (9, 3)]:
        layer.allocate("a", num_tokens)
        assert layer.manager.num_used == used
        assert layer.num_tokens("a") == 0


def test_tokens_that_were_allocated_for_never_run_out_of_blocks() -> None:
    conversation = Conversation(num_blocks=4)
    conversation.allocate("a", 10)
    conversation.allocate("b", 4)
    assert conversation.layer.manager.num_free == 0
    for _ in range(4):
        conversation.step([("a", 1), ("b", 1)])
    conversation.step([("a", 6)])


def test_room_that_was_made_for_a_fork_counts_the_copy_of_its_shared_block() -> None:
    conversation = Conversation(num_blocks=4)
    conversation.allocate("a", 8)
    conversation.step([("a", 6)])
    conversation.fork("a", "b")
    conversation.allocate("b", 8)
    assert conversation.layer.manager.num_used == 3
    conversation.layer.manager.allocate("other", 4)  # nothing is left
    conversation.step([("b", 2), ("a", 2)])


def test_forward_makes_the_room_that_is_missing() -> None:
    conversation = Conversation()
    conversation.allocate("a", 0)
    conversation.step([("a", 9)])
    assert conversation.layer.manager.num_used == 3


def test_free_gives_back_the_room_as_well_as_the_tokens() -> None:
    conversation = Conversation(num_blocks=8)
    conversation.allocate("a", 30)
    conversation.step([("a", 3)])
    conversation.layer.free("a")
    assert conversation.layer.manager.num_free == 8
    with pytest.raises(UnknownRequest):
        conversation.layer.free("a")
    with pytest.raises(UnknownRequest):
        conversation.layer.num_tokens("a")


# ------------------------------------------------------------------ refusals change nothing


def full_layer() -> PagedAttention:
    """Return a layer of 4 blocks of 4: a and b share 6 tokens, c has 3; one block is free."""
    layer = PagedAttention(HEADS, HEAD_DIM, 4, 4, KV_HEADS)
    layer.allocate("a", 6)
    layer.allocate("c", 3)
    layer(*random_tokens(9), ["a", "c"], [6, 3])
    layer.fork("a", "b")
    return layer


def state_of(layer: PagedAttention) -> Any:
    layer.manager.check()
    books = [
        (layer.manager.block_table(r), layer.manager.num_tokens(r), layer.num_tokens(r))
        for r in "abc"
    ]
    return books, layer.manager.stats(), layer.kv_blocks.tolist()


def call(
    requests: Sequence[Any] = ("c",), query_lens: Any = None, **changes: Callable[[Tensor], Any]
) -> Callable[[PagedAttention], Any]:
    """Return a call of a layer with one token, or as many as asked for, and changed inputs."""
    query_lens_known = isinstance(query_lens, list) and all(type(n) is int for n in query_lens)
    count = max(0, sum(query_lens)) if query_lens_known else len(requests)
    inputs = dict(zip(("query", "key", "value"), random_tokens(count), strict=True))

    def make(layer: PagedAttention) -> Any:
        changed = {name: changes.get(name, lambda t: t)(t) for name, t in inputs.items()}
        return layer(**changed, requests=list(requests), query_lens=query_lens)

    return make


def with_last_dimension_strided(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


REFUSALS: dict[str, tuple[Callable[[PagedAttention], Any], type[Exception], str]] = {
    "too many tokens": (call("c", [6]), OutOfBlocks, "2 blocks asked for, 1 free"),
    "a copy too many": (call("abc", [1, 1, 2]), OutOfBlocks, "2 blocks asked for, 1 free"),
    "unknown": (call("ad"), UnknownRequest, "request 'd' is unknown"),
    "twice": (call("aa"), ValueError, "requests has 'a' twice"),
    "negative": (call("a", [-1]), ValueError, r"query_lens\[0\] is -1"),
    "bool": (call("a", [True]), TypeError, r"query_lens\[0\] is True"),
    "too few lengths": (call("ab", [1]), ValueError, "query_lens has 1 entries, expected 2"),
    "short query": (call("ab", query=lambda t: t[:1]), ValueError, r"query has shape \[1, 4, 8\]"),
    "long key": (call("a", key=lambda t: torch.cat([t, t])), ValueError, r"key has shape \[2, 2"),
    "heads of key": (call("a", key=lambda t: t[:, :1]), ValueError, r"shape \[1, 1, 8\], exp"),
    "heads of query": (call("a", query=lambda t: t[:, :2]), ValueError, "query has shape"),
    "dims of value": (call("a", value=lambda t: t[..., :4]), ValueError, "value has shape"),
    "rank": (call("a", value=lambda t: t[0]), ValueError, r"value has shape \[2, 8\], expected"),
    "dtype": (call("a", key=lambda t: t.half()), TypeError, "key is torch.float16, expected torch"),
    "query dtype": (call("a", query=lambda t: t.double()), TypeError, "query is torch.float64"),
    "device": (call("a", value=lambda t: t.to("meta")), ValueError, "value is on meta, expected"),
    "list": (call("a", key=lambda t: t.tolist()), TypeError, "key is list, expected a tensor"),
    "stride": (call("a", key=with_last_dimension_strided), RuntimeError, r"key.stride\(2\) is 2"),
    "gradient": (
        call("a", value=lambda t: t.requires_grad_()),
        NotImplementedError,
        "value requires a gradient",
    ),
    "allocate too much": (lambda layer: layer.allocate("d", 5), OutOfBlocks, "2 blocks asked"),
    "allocate more": (lambda layer: layer.allocate("c", 9), OutOfBlocks, "2 blocks asked"),
    "allocate -1": (lambda layer: layer.allocate("d", -1), ValueError, "num_tokens is -1"),
    "allocate True": (lambda layer: layer.allocate("d", True), TypeError, "num_tokens is True"),
    "allocate list": (lambda layer: layer.allocate(["d"], 1), TypeError, r"request is \['d'\]"),
    "fork unknown": (lambda layer: layer.fork("d", "e"), UnknownRequest, "'d' is unknown"),
    "fork to existing": (lambda layer: layer.fork("a", "c"), ValueError, "child is 'c', which"),
    "free unknown": (lambda layer: layer.free("d"), UnknownRequest, "'d' is unknown"),
}


@pytest.mark.parametrize(("refused", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_call_says_why_and_changes_no_table_no_length_and_no_element(
    refused: Callable[[PagedAttention], Any], error: type[Exception], message: str
) -> None:
    layer = full_layer()
    before = state_of(layer)
    with pytest.raises(error, match=message):
        refused(layer)
    assert state_of(layer) == before


def test_after_running_out_of_blocks_a_smaller_call_goes_on_where_the_last_one_ended() -> None:
    conversation = Conversation(num_blocks=3)
    conversation.allocate("a", 6)
    conversation.step([("a", 6)])
    with pytest.raises(OutOfBlocks):
        conversation.layer(*random_tokens(7), ["a"], [7])
    conversation.step([("a", 6)])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads is 0, expected 1 or more"),
        ({"num_heads": True}, TypeError, "num_heads is True"),
        ({"num_kv_heads": 3}, ValueError, "num_heads is 4, expected a multiple of num_kv_heads, 3"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads is 0, expected 1 or more"),
        ({"head_dim": 0}, ValueError, "head_dim is 0, expected 1 or more"),
        ({"block_size": 0}, ValueError, "block_size is 0"),
        ({"num_blocks": 0}, ValueError, "num_blocks is 0"),
        ({"num_blocks": -1}, ValueError, "num_blocks is -1"),
        ({"num_blocks": 2**60}, MemoryError, f"num_blocks is {2**60}"),
        ({"num_blocks": 2**31 - 1, "block_size": 2**20}, MemoryError, "= .* bytes, and .* bytes"),
        ({"dtype": torch.float64}, ValueError, "dtype is torch.float64, expected one of"),
        ({"layout": "NDH"}, ValueError, "layout is 'NDH', expected one of"),
        ({"scale": float("nan")}, ValueError, "scale is nan, expected a finite float32"),
        ({"scale": 1e39}, ValueError, r"scale is 1e\+39, expected a finite float32"),
        ({"softcap": -1.0}, ValueError, r"softcap is -1.0, expected a finite float32, 0"),
        ({"softcap": float("inf")}, ValueError, "softcap is inf"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan"),
        ({"sliding_window": 0}, ValueError, "sliding_window is 0, expected 1 to"),
        ({"sliding_window": 1.5}, TypeError, "sliding_window is 1.5"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks is torch.float32 \[2\], expected .* \[4\]"),
        ({"alibi_slopes": torch.zeros(4).half()}, ValueError, r"alibi_slopes is torch.float16 \[4"),
    ],
)
def test_a_layer_that_could_not_work_is_refused_when_it_is_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"num_heads": HEADS, "head_dim": HEAD_DIM} | options
    with pytest.raises(error, match=message):
        PagedAttention(**arguments)


# ------------------------------------------------------------------ the module


def test_kv_blocks_has_the_shape_of_the_article_in_both_layouts_and_shows_what_was_written() -> (
    None
):
    for layout in ("HND", "NHD"):
        layer = PagedAttention(HEADS, HEAD_DIM, 4, 8, KV_HEADS, layout=layout)
        assert layer.kv_blocks.shape == (8, 2, 4, KV_HEADS, HEAD_DIM)
        layer.allocate("a", 3)
        query, key, value = random_tokens(3)
        layer(query, key, value, ["a"], [3])
        (block,) = layer.manager.block_table("a")
        assert torch.equal(layer.kv_blocks[block, 0, :3], key)
        assert torch.equal(layer.kv_blocks[block, 1, :3], value)
        assert layer.kv_blocks.count_nonzero() == key.numel() + value.numel()


def test_the_defaults_are_blocks_of_16_1024_of_them_and_as_many_kv_heads_as_heads() -> None:
    assert PagedAttention(4, 8).kv_blocks.shape == (1024, 2, 16, 4, 8)


def test_a_layer_adds_nothing_to_a_state_dict() -> None:
    layer = PagedAttention(4, 8, alibi_slopes=torch.zeros(4), sinks=torch.zeros(4))
    assert not layer.state_dict()
    layer.load_state_dict({}, strict=True)


def test_slopes_and_sinks_follow_the_layer_to_its_device() -> None:
    layer = PagedAttention(4, 8, sinks=torch.zeros(4), alibi_slopes=torch.zeros(4), device="meta")
    assert {buffer.device.type for buffer in layer.buffers()} == {"meta"}


def test_a_layer_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(PagedAttention(4, 8))


def test_the_repr_names_the_sizes_and_the_options() -> None:
    text = repr(PagedAttention(4, 8, num_kv_heads=2, softcap=3.0))
    for part in ("num_heads=4", "num_kv_heads=2", "softcap=3.0", "num_blocks=1024"):
        assert part in text


# ------------------------------------------------------------------ check, then change


def everything(layer: PagedAttention) -> Any:
    """Return all that a refused call must leave as it is."""
    with layer.manager.lock, layer.manager.ledger as ledger:
        books = {
            request: (held.table.copy(), held.num_tokens)
            for request, held in ledger.requests.items()
        }
    return books, {request: layer.num_tokens(request) for request in books}, layer.kv_blocks.clone()


def with_tangent(rows: Tensor) -> Tensor:
    return forward_ad.make_dual(rows, torch.ones_like(rows))


SPOILT: dict[str, Callable[[PagedAttention, Tensor], Tensor]] = {
    "part of the pool": lambda layer, rows: layer.kv_blocks[0, 0, : len(rows)],
    "with a tangent": lambda layer, rows: with_tangent(rows),
    "with a gradient": lambda layer, rows: rows.clone().requires_grad_(),
    "not dense": lambda layer, rows: rows.mT.contiguous().mT,
    "of another shape": lambda layer, rows: rows[:, :1],
    "of another dtype": lambda layer, rows: rows.double(),
    "on another device": lambda layer, rows: rows.to("meta"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # by torch, for dual tensors
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("query_lens", [None, [3, 2]])
def test_a_call_that_is_refused_has_changed_nothing(
    query_lens: list[int] | None, kind: str, which: int
) -> None:
    layer = PagedAttention(HEADS, HEAD_DIM, 4, 16, KV_HEADS)
    for request in "ab":
        layer.allocate(request, 4)
    layer(*random_tokens(8), ["a", "b"], [4, 4])  # and whatever follows needs new blocks
    layer.fork("a", "c")
    before = everything(layer)
    tokens = list(random_tokens(2 if query_lens is None else 5))
    if kind == "part of the pool" and not which:
        return  # other heads
    with forward_ad.dual_level():
        tokens[which] = SPOILT[kind](layer, tokens[which])
        with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)):
            layer(*tokens, ["a", "b"], query_lens)
    after = everything(layer)
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("option", [{"scale": 1j}, {"scale": "x"}, {"softcap": 1j}])
def test_what_is_no_number_is_refused_when_the_layer_is_made(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(option))} is .*, expected a finite float32"):
        PagedAttention(HEADS, HEAD_DIM, **option)


def test_steps_in_different_modes_give_the_same_outputs() -> None:
    tokens = [random_tokens(2) for _ in range(12)]
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    outputs = []
    for shift in range(4):
        layer = PagedAttention(HEADS, HEAD_DIM, 2, 16, KV_HEADS)
        for request in "ab":
            layer.allocate(request, 0)
        steps = []
        for i, step in enumerate(tokens):
            with modes[0 if shift == 3 else (i + shift) % 3]():
                steps.append(layer(*step, ["a", "b"]).clone())
        outputs.append(torch.stack(steps))
    assert all(torch.equal(outputs[0], each) for each in outputs)


# ------------------------------------------------------------------ broken off


def break_off(call: Callable[[], Any], point: int) -> bool:
    """Raise KeyboardInterrupt at one line of the layer, the batches or the ledger, if so many run.

    tests/blocks breaks off the books, and there at every instruction.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("attention.py", "decode.py", "ledger.py")):
            return None
        lines += event == "line"
        if event == "line" and lines > point:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def script(layer: PagedAttention, tokens: list[tuple[Tensor, ...]]) -> list[Callable[[], Any]]:
    """Return calls that allocate, share, copy on write, leave a window, and free."""
    return [
        lambda: layer.allocate("a", 9),
        lambda: layer(*tokens[0], ["a"], [6]),
        lambda: layer.fork("a", "b"),
        lambda: layer(*tokens[1], ["b", "a"]),
        lambda: layer(*tokens[2], ["b", "a"]),
        lambda: layer(*tokens[3], ["a", "b"], [1, 5]),
        lambda: layer.allocate("b", 30),
        lambda: layer.free("a"),
        lambda: layer(*tokens[4], ["b"]),
    ]


@pytest.mark.parametrize("broken", range(9))
@pytest.mark.parametrize("window", [None, 3])
def test_a_call_that_is_broken_off_anywhere_has_happened_or_can_be_repeated(
    window: int | None, broken: int
) -> None:
    tokens = [random_tokens(count) for count in (6, 2, 2, 6, 1)]

    def new_layer() -> PagedAttention:
        return PagedAttention(HEADS, HEAD_DIM, 4, 16, KV_HEADS, sliding_window=window)

    def lengths(layer: PagedAttention) -> dict[str, int]:
        with layer.manager.lock, layer.manager.ledger as ledger:
            known = [str(name) for name in ledger.requests]
        return {name: layer.num_tokens(name) for name in sorted(known)}

    whole = new_layer()
    states, outputs = [], []
    for call in script(whole, tokens):
        outputs.append(call())
        states.append(lengths(whole))
    before = states[broken - 1] if broken else {}
    point = 0
    while True:
        layer = new_layer()
        calls = script(layer, tokens)
        for call in calls[:broken]:
            call()
        if not break_off(calls[broken], point):
            break
        layer.manager.check()
        assert lengths(layer) in (before, states[broken])
        again = lengths(layer) == before
        for step in range(broken if again else broken + 1, len(calls)):
            output = calls[step]()
            assert lengths(layer) == states[step]
            if outputs[step] is not None:
                assert torch.equal(output, outputs[step])
        layer.free("b")
        layer.manager.check()
        assert layer.manager.num_used == 0
        point += 1
    assert point > 10


def test_a_layer_goes_on_where_it_is_moved_to() -> None:
    layer = PagedAttention(HEADS, HEAD_DIM, 4, 8, KV_HEADS)
    layer.allocate("a", 1)
    layer(*random_tokens(1), ["a"])
    layer.to("meta")
    output = layer(*(tensor.to("meta") for tensor in random_tokens(1)), ["a"])
    assert output.device.type == "meta"
    assert layer.num_tokens("a") == 2


def test_numbers_per_head_are_the_layers_own_and_ordinary_whatever_mode_it_is_made_in() -> None:
    with torch.inference_mode():
        given = torch.tensor([0.3, 0.1])
        layer = PagedAttention(2, 16, num_blocks=4, sinks=given)
        given.zero_()
    assert not layer.sinks.is_inference()
    assert layer.sinks.tolist() == torch.tensor([0.3, 0.1]).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_leaves_the_numbers_per_head_exact(dtype: torch.dtype) -> None:
    per_head = {"alibi_slopes": torch.tensor([0.3, 0.1]), "sinks": torch.tensor([0.7, -1.3])}
    model = torch.nn.Sequential(PagedAttention(2, 16, num_blocks=4, **per_head)).to(dtype)
    layer, (query, key, value) = model[0], torch.randn(3, 6, 2, 16).to(dtype).unbind()
    for name, tensor in per_head.items():
        assert getattr(layer, name).dtype == torch.float32
        assert torch.equal(getattr(layer, name), tensor)
    layer.allocate("a", 6)
    output = layer(query, key, value, ["a"], [6])
    cache = torch.stack([key, value])[:, None]
    table, start = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32)
    index = table, torch.tensor([6], dtype=torch.int32), start
    want = reference.attention(query.double(), *cache.double(), *index, **per_head)
    torch.testing.assert_close(output.double(), want, atol=0.02, rtol=0.02)
    model.to("meta")
    assert layer.sinks.device.type == "meta"
