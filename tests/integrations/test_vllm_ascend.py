"""vllm-ascend's attention through its own interface, on CPU tensors and on the simulated NPU.

``python -m tests.npu_environment -m pytest tests/integrations/test_vllm_ascend.py`` runs them on
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_ops import reference
from paged_ops.integrations import vllm_ascend
from tests import npu_environment as environment
from tests.integrations import ascend_stand_in as ascend
from tests.integrations.ascend_stand_in import AscendAttentionState as State

NUM_BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_SIZE = 24, 128, 4, 2, 64
MAX_REQS, MAX_TOKENS, TABLE_WIDTH = 6, 320, 4

ON_NPU = pytest.param(
    "npu:0", marks=pytest.mark.skipif(environment.why_not() is not None, reason="no npu tensors")
)
# torch_npu gives some that say nothing about these tests.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(params=["cpu", ON_NPU])
def device(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu":
        environment.load()
    return str(request.param)


@pytest.fixture(autouse=True)
def _ascend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ascend.installed():
        monkeypatch.setattr(ascend, "current", ascend.config())
        ascend.written.clear()
        ascend.started.clear()
        yield


@pytest.fixture
def _registered() -> None:
    vllm_ascend.register()


def new_layer(**given: Any) -> Any:
    """Build a layer's attention as vLLM's layer does."""
    usual = {
        "num_heads": HEADS,
        "head_size": HEAD_SIZE,
        "scale": HEAD_SIZE**-0.5,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    return ascend.AscendAttentionBackend.get_impl_cls()(**{**usual, **given})


LAYER = SimpleNamespace(
    layer_name="model.layers.0.self_attn.attn", _k_scale_float=1.0, _v_scale_float=1.0
)


class Runner:
    """What vllm-ascend's model runner keeps from step to step: its buffers, a cache, the books.

    A step is given as pairs of a request's length and its new tokens. Keys and values that a step
    doesn't write have been there from the beginning.
    """

    def __init__(self, device: str, dtype: torch.dtype = torch.float16) -> None:
        self.device, self.dtype = device, dtype
        ascend.current = ascend.config(dtype, device)
        builder = ascend.AscendAttentionBackend.get_builder_cls()
        self.builder = builder(None, [LAYER.layer_name], ascend.current, torch.device(device))
        cache = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE).to(dtype)
        self.expected = cache.clone()  # what the cache should hold
        self.kv_cache = cache.to(device)
        order = torch.randperm(NUM_BLOCKS).int()
        self.tables_cpu = order[: MAX_REQS * TABLE_WIDTH].view(MAX_REQS, TABLE_WIDTH)
        self.tables = self.tables_cpu.to(device)
        self.seq_lens_cpu = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.starts_cpu = torch.zeros(MAX_REQS + 2, dtype=torch.int32)
        self.slots_cpu = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        buffers = self.seq_lens_cpu, self.starts_cpu, self.slots_cpu
        self.seq_lens, self.starts, self.slots = (buffer.to(device) for buffer in buffers)

    def shuffle(self) -> None:
        """Give every request other blocks; the cache stays as it is."""
        self.tables_cpu.copy_(torch.randperm(NUM_BLOCKS).int().view(MAX_REQS, TABLE_WIDTH))
        self.tables.copy_(self.tables_cpu)

    def prepare(
        self,
        requests: Sequence[tuple[int, int]],
        state: State = State.ChunkedPrefill,
        padded_reqs: int | None = None,
        padded_tokens: int | None = None,
        causal: bool = True,
    ) -> Any:
        """Fill the buffers for a step; return what every builder gets.

        Padding is vllm-ascend's: a request more for the tokens that no request has, requests of
        length 0 whose table says 0, and -1 for a slot.
        """
        lengths, new = zip(*requests, strict=True)
        n, tokens = len(requests), sum(new)
        padded_tokens = padded_tokens or tokens
        self.seq_lens_cpu.zero_()[:n] = torch.tensor(lengths)
        starts = torch.tensor([0, *new]).cumsum(0)
        self.starts_cpu.fill_(-1)[: n + 1] = starts
        if padded_reqs is None:
            padded_reqs = n + (padded_tokens > tokens)
            self.starts_cpu[padded_reqs] = padded_tokens
        else:
            each = (padded_tokens - tokens) // max(padded_reqs - n, 1)
            more = torch.arange(1, padded_reqs - n + 1) * each
            self.starts_cpu[n + 1 : padded_reqs + 1] = tokens + more
        self.slots_cpu.fill_(-1)[:tokens] = torch.cat(
            [self._slots(i, length - m, length) for i, (length, m) in enumerate(requests)]
        )
        tables = self.tables_cpu.clone()
        tables[n:] = 0
        self.tables.copy_(tables)
        for here, there in (
            (self.seq_lens_cpu, self.seq_lens),
            (self.starts_cpu, self.starts),
            (self.slots_cpu, self.slots),
        ):
            there.copy_(here)
        return ascend.AscendCommonAttentionMetadata(
            query_start_loc=self.starts[: padded_reqs + 1],
            query_start_loc_cpu=self.starts_cpu[: padded_reqs + 1],
            seq_lens=self.seq_lens[:padded_reqs],
            _seq_lens_cpu=self.seq_lens_cpu[:padded_reqs],
            num_reqs=padded_reqs,
            num_actual_tokens=tokens,
            num_input_tokens=padded_tokens,
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=self.tables[:padded_reqs],
            slot_mapping=self.slots[:padded_tokens],
            attn_state=state,
            causal=causal,
        )

    def _slots(self, request: int, start: int, end: int) -> Tensor:
        at = torch.arange(start, end)
        return self.tables_cpu[request, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE

    def metadata(self, requests: Sequence[tuple[int, int]], **given: Any) -> Any:
        common = self.prepare(requests, **given)
        return self.builder.build(common_prefix_len=0, common_attn_metadata=common)

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of a step, on the CPU."""
        shapes = (HEADS, KV_HEADS, KV_HEADS)
        query, key, value = (torch.randn(tokens, h, HEAD_SIZE).to(self.dtype) for h in shapes)
        return query, key, value

    def want(
        self,
        requests: Sequence[tuple[int, int]],
        rows: tuple[Tensor, Tensor, Tensor],
        **options: Any,
    ) -> Tensor:
        """Write a step into the expected cache; return the definition's output, in float64."""
        lengths, new = zip(*requests, strict=True)
        query, key, value = (tensor[: sum(new)] for tensor in rows)
        slots = self.slots_cpu[: sum(new)].long()
        self.expected[0].flatten(0, 1)[slots] = key
        self.expected[1].flatten(0, 1)[slots] = value
        return reference.attention(
            query.double(),
            *self.expected.double(),
            self.tables_cpu[: len(new)],
            torch.tensor(lengths).int(),
            torch.tensor([0, *new]).cumsum(0).int(),
            **options,
        )

    def assert_cache(self) -> None:
        assert torch.equal(self.kv_cache.cpu(), self.expected)


def assert_close(output: Tensor, want: Tensor) -> None:
    assert (output.cpu().double() - want).abs().max() < 4e-3


def step_of(
    runner: Runner, layer: Any, requests: Sequence[tuple[int, int]], **given: Any
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Run a step; return its output, and the rows that went into it."""
    metadata = runner.metadata(requests, **given)
    rows = runner.rows(given.get("padded_tokens") or sum(new for _, new in requests))
    query, key, value = (tensor.to(runner.device) for tensor in rows)
    output = torch.full_like(rows[0], float("nan")).to(runner.device)
    answer = layer.forward(LAYER, query, key, value, runner.kv_cache, metadata, output=output)
    assert answer is output
    return output, rows


# ------------------------------------------------------------------ values

PHASES = {
    State.PrefillNoCache: [(130, 130), (5, 5)],
    State.PrefillCacheHit: [(260, 70), (129, 1)],
    State.DecodeOnly: [(300, 1), (1, 1), (128, 1), (129, 1)],
    State.ChunkedPrefill: [(200, 1), (17, 1), (300, 90), (64, 64)],
    State.SpecDecoding: [(200, 3), (131, 3)],
}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("state", State)
def test_each_phase_writes_its_tokens_and_attends_as_defined(device: str, state: State) -> None:
    runner = Runner(device)
    output, rows = step_of(runner, new_layer(), PHASES[state], state=state)
    assert_close(output, runner.want(PHASES[state], rows))
    runner.assert_cache()


@pytest.mark.usefixtures("_registered")
def test_queries_keys_and_values_may_be_parts_of_one_projection(device: str) -> None:
    runner, requests = Runner(device), PHASES[State.ChunkedPrefill]
    metadata = runner.metadata(requests)
    rows = runner.rows(sum(new for _, new in requests))
    projected = torch.cat([part.flatten(1) for part in rows], dim=1).to(device)
    parts = projected.split([part[0].numel() for part in rows], dim=1)
    query, key, value = (part.view(len(part), -1, HEAD_SIZE) for part in parts)
    output = torch.zeros_like(rows[0]).to(device)
    new_layer().forward(LAYER, query, key, value, runner.kv_cache, metadata, output=output)
    assert_close(output, runner.want(requests, rows))
    runner.assert_cache()


@pytest.mark.usefixtures("_registered")
def test_a_prompt_in_chunks_and_then_decode_give_what_one_prefill_gives(device: str) -> None:
    runner, layer = Runner(device), new_layer()
    rows = runner.rows(160)
    outputs, begin = [], 0
    for end in (100, 150, 158, 159, 160):
        metadata = runner.metadata([(end, end - begin)])
        query, key, value = (tensor[begin:end].to(device) for tensor in rows)
        output = torch.empty_like(query)
        layer.forward(LAYER, query, key, value, runner.kv_cache, metadata, output=output)
        outputs.append(output)
        begin = end
    runner.metadata([(160, 160)])
    assert_close(torch.cat([output.cpu() for output in outputs]), runner.want([(160, 160)], rows))
    runner.assert_cache()


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window": ({"sliding_window": 50}, {"sliding_window": 50}),
    "a soft cap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "ALiBi": (
        {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    ),
    "a scale": ({"scale": 0.3}, {"scale": 0.3}),
}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_of_a_layer_is_applied(device: str, option: str) -> None:
    given, defined = OPTIONS[option]
    runner = Runner(device)
    output, rows = step_of(runner, new_layer(**given), PHASES[State.ChunkedPrefill])
    want = runner.want(PHASES[State.ChunkedPrefill], rows, **defined)
    assert_close(output, want)
    assert (want - runner.want(PHASES[State.ChunkedPrefill], rows)).abs().max() > 0.05


@pytest.mark.usefixtures("_registered")
def test_sinks_are_those_that_were_loaded_after_the_layer_was_built(device: str) -> None:
    runner = Runner(device)
    sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=runner.dtype).to(device))
    layer = new_layer(sinks=sinks)
    loaded = torch.tensor([3.0, 1.0, -2.0, 4.0])
    sinks.data.copy_(loaded.to(runner.dtype))
    layer.process_weights_after_loading(runner.dtype)
    output, rows = step_of(runner, layer, PHASES[State.DecodeOnly])
    assert_close(output, runner.want(PHASES[State.DecodeOnly], rows, sinks=loaded))


@pytest.mark.usefixtures("_registered")
def test_metadata_that_are_not_causal_show_what_comes_later(device: str) -> None:
    runner = Runner(device)
    requests = [(40, 40), (150, 7)]
    output, rows = step_of(runner, new_layer(), requests, causal=False)
    assert_close(output, runner.want(requests, rows, causal=False))


@pytest.mark.usefixtures("_registered")
def test_a_layer_that_shares_another_one_s_cache_only_reads_it(device: str) -> None:
    runner = Runner(device)
    layer = new_layer(kv_sharing_target_layer_name="model.layers.1.self_attn.attn")
    requests = PHASES[State.DecodeOnly]
    output, rows = step_of(runner, layer, requests)
    there = runner.expected.clone()
    slots = runner.slots_cpu[: len(requests)].long()
    kept = (rows[0], *(part.flatten(0, 1)[slots] for part in there))
    assert_close(output, runner.want(requests, kept))
    runner.assert_cache()
    assert ascend.written == []


@pytest.mark.usefixtures("_registered")
def test_keys_that_are_written_already_are_not_given(device: str) -> None:
    runner, layer = Runner(device), new_layer()
    requests = PHASES[State.DecodeOnly]
    metadata = runner.metadata(requests)
    query, key, value = rows = runner.rows(len(requests))
    new = key.to(device), value.to(device)
    layer.do_kv_cache_update(LAYER, *new, runner.kv_cache, metadata.slot_mapping)
    output = torch.empty_like(query, device=device)
    layer.forward(
        LAYER, query.to(device), None, None, tuple(runner.kv_cache), metadata, output=output
    )
    assert_close(output, runner.want(requests, rows))
    runner.assert_cache()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("requests", [[(140, 3), (9, 1)], [(140, 3), *[(9, 1)] * (MAX_REQS - 1)]])
def test_rows_of_padding_come_out_as_zeros_and_write_nothing(
    device: str, requests: list[tuple[int, int]]
) -> None:
    runner = Runner(device)
    tokens = sum(new for _, new in requests)
    output, rows = step_of(runner, new_layer(), requests, padded_tokens=16)
    assert_close(output[:tokens], runner.want(requests, rows))
    assert not output[tokens:].cpu().any()
    runner.assert_cache()


@pytest.mark.usefixtures("_registered")
def test_connectors_are_told_after_the_write_and_when_attention_begins() -> None:
    runner, layer = Runner("cpu"), new_layer()
    for count in (1, 2):
        step_of(runner, layer, PHASES[State.DecodeOnly])
        assert (len(ascend.written), len(ascend.started)) == (count, count)


@pytest.mark.usefixtures("_registered")
def test_a_profiling_run_has_no_metadata_and_gives_zeros(device: str) -> None:
    layer = new_layer()
    query = torch.randn(5, HEADS, HEAD_SIZE, dtype=torch.float16)
    output = torch.full_like(query, float("nan")).to(device)
    layer.forward(LAYER, query.to(device), None, None, torch.empty(0), None, output=output)
    assert not output.cpu().any()


# ------------------------------------------------------------------ graphs


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("new", [1, 3])
def test_a_captured_step_follows_lengths_tables_and_slots_that_change(new: int) -> None:
    """It is captured with a full batch; replays have fewer requests, and other blocks."""
    if environment.why_not() is not None:
        pytest.skip("no npu tensors")
    environment.load()
    runner, layer = Runner("npu:0"), new_layer()
    common = runner.prepare([(new, new)] * 4, state=State.DecodeOnly)
    metadata = runner.builder.build_for_cudagraph_capture(common)
    query, key, value = (tensor.to("npu:0") for tensor in runner.rows(4 * new))
    output = torch.zeros_like(query)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        layer.forward(LAYER, query, key, value, runner.kv_cache, metadata, output=output)
    runner.assert_cache()  # a capture runs nothing
    for lengths in ([300, 17, 128, 129], [301, 18, 4, 260], [77, 500], [512, 3, 333]):
        requests = [(length, new) for length in lengths]
        runner.shuffle()
        # The new step's metadata go unseen: what the graph reads are the runner's buffers.
        runner.metadata(requests, padded_reqs=4, padded_tokens=4 * new)
        rows = runner.rows(4 * new)
        for here, there in zip(rows, (query, key, value), strict=True):
            there.copy_(here)
        graph.replay()
        layer.update_graph_params(None, None, 4 * new, None, None, draft_attn_metadatas=None)
        assert_close(output[: len(requests) * new], runner.want(requests, rows))
        assert not output[len(requests) * new :].cpu().any()
        runner.assert_cache()


@pytest.mark.usefixtures("_registered")
def test_a_step_s_lengths_are_the_runner_s_own_memory(device: str) -> None:
    runner = Runner(device)
    metadata = runner.metadata(PHASES[State.DecodeOnly])
    step = metadata.paged_step
    assert step.seq_lens.data_ptr() == runner.seq_lens.data_ptr()
    assert step.query_start_loc.data_ptr() == runner.starts.data_ptr()


@pytest.mark.usefixtures("_registered")
def test_full_graphs_are_offered_for_uniform_batches_alone() -> None:
    builder = ascend.AscendAttentionBackend.get_builder_cls()
    support = builder.get_cudagraph_support(ascend.current, None)
    assert support is ascend.AttentionCGSupport.UNIFORM_BATCH


# ------------------------------------------------------------------ what is refused

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "encoder": ({"attn_type": "encoder"}, {}, "attn_type is 'encoder', expected decoder"),
    "cross": ({"attn_type": "encoder_decoder"}, {}, "attn_type is 'encoder_decoder'"),
    "alibi_sqrt": ({"use_alibi_sqrt": True}, {}, "use_alibi_sqrt is"),
    "fp8": ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype is 'fp8', expected auto or float16"),
    "bfloat16": ({"kv_cache_dtype": "bfloat16"}, {}, "kv_cache_dtype is 'bfloat16'"),
    "head_size": ({"head_size": 100}, {}, "head_size 100 in float16: .* multiple of 16"),
    "c8": ({}, {"quant_config": SimpleNamespace(enable_c8_quant=True)}, "enable_c8_quant is True"),
    "a draft model": (
        {},
        {"speculative_config": SimpleNamespace(method="eagle")},
        "speculative_config.method is 'eagle', expected ngram or suffix",
    ),
}


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_name_when_the_layer_is_built(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, changed, message = REFUSED[case]
    monkeypatch.setattr(ascend, "current", ascend.config(**changed))
    with pytest.raises(NotImplementedError, match=message):
        new_layer(**given)


@pytest.mark.usefixtures("_registered")
def test_what_is_left_at_its_default_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ngram = SimpleNamespace(method="ngram")
    quantised = SimpleNamespace(enable_c8_quant=False)
    changed = {"speculative_config": ngram, "quant_config": quantised}
    monkeypatch.setattr(ascend, "current", ascend.config(**changed))
    new_layer(kv_cache_dtype="float16", use_alibi_sqrt=False, chunk_lookback=None)


@pytest.mark.usefixtures("_registered")
def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "is_context_parallel", True)
    backend = ascend.AscendAttentionBackend
    with pytest.raises(NotImplementedError, match="attend with AscendAttentionDCPImpl"):
        backend.get_impl_cls()
    with pytest.raises(NotImplementedError, match="with AscendAttentionDCPMetadataBuilder"):
        backend.get_builder_cls()


@pytest.mark.usefixtures("_registered")
def test_causal_for_each_request_is_refused() -> None:
    runner = Runner("cpu")
    common = runner.prepare([(3, 1)])
    common.causal = torch.tensor([True])
    with pytest.raises(NotImplementedError, match="causal for each request"):
        runner.builder.build(common_prefix_len=0, common_attn_metadata=common)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_a_quantised_output_is_refused_and_nothing_is_written(name: str) -> None:
    runner = Runner("cpu")
    metadata = runner.metadata([(3, 1)])
    query, key, value = runner.rows(1)
    with pytest.raises(NotImplementedError, match="quantised output"):
        new_layer().forward(
            LAYER,
            query,
            key,
            value,
            runner.kv_cache,
            metadata,
            output=torch.empty_like(query),
            **{name: torch.ones(1)},
        )
    runner.assert_cache()


@pytest.mark.usefixtures("_registered")
def test_scales_of_keys_and_values_are_refused() -> None:
    runner, layer = Runner("cpu"), SimpleNamespace(_k_scale_float=1.0, _v_scale_float=0.5)
    metadata = runner.metadata([(3, 1)])
    query, key, value = runner.rows(1)
    output = torch.empty_like(query)
    with pytest.raises(NotImplementedError, match=r"are 1\.0 and 0\.5, expected 1\.0"):
        new_layer().forward(layer, query, key, value, runner.kv_cache, metadata, output=output)
    runner.assert_cache()


# ------------------------------------------------------------------ switching it on


def test_without_registration_vllm_ascend_keeps_its_own_classes() -> None:
    backend = ascend.AscendAttentionBackend
    assert backend.get_impl_cls() is ascend.AscendAttentionBackendImpl
    assert backend.get_builder_cls() is ascend.AscendAttentionMetadataBuilder


def test_registering_twice_does_no_harm() -> None:
    vllm_ascend.register()
    first = ascend.AscendAttentionBackend.get_impl_cls
    vllm_ascend.register()
    assert ascend.AscendAttentionBackend.get_impl_cls is first
    new_layer()


@pytest.mark.parametrize(("value", "is_ours"), [("1", True), ("0", False), (None, False)])
def test_the_plugin_registers_only_where_it_is_asked_to(
    value: str | None, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGED_VLLM_ASCEND", raising=False)
    if value is not None:
        monkeypatch.setenv("PAGED_VLLM_ASCEND", value)
    vllm_ascend.register_if_asked()
    usual = ascend.AscendAttentionBackendImpl
    assert (ascend.AscendAttentionBackend.get_impl_cls() is not usual) == is_ours
