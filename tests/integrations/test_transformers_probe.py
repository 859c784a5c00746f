"""A model is tried before it is believed: what is found, what passes, and that no trace is left."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from paged_ops.engine import Engine
from paged_ops.integrations.transformers import PackedModel, PagedCache, packed, register, steps
from tests.integrations.causal_models import make_causal_model
from tests.integrations.models import FAMILIES, make_model
from tests.integrations.sweep import PROMPTS, own_tokens

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def serve(way: str, model: PreTrainedModel, **options: Any) -> PagedCache | PackedModel:
    if way == "PagedCache":
        return PagedCache(model, num_blocks=32, block_size=4, **options)
    return PackedModel(model, **options)


both_ways = pytest.mark.parametrize("way", ["PagedCache", "PackedModel"])


@both_ways
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("lfm2", "a layer keeps a state of its own"),
        ("jamba", "a layer keeps a state of its own"),
        ("mamba", "a layer keeps a state of its own"),
        ("qwen3_next", "a layer keeps a state of its own"),
        ("recurrent_gemma", "differs from that by its own attention"),
        ("bloom", "attends by code of its own, not through transformers' AttentionInterface"),
        ("xglm", "attends by code of its own, not through transformers' AttentionInterface"),
        ("diffllama", "layer 0 attends twice for one update of its cache"),
        ("llama4_text", "mask is neither causal nor a sliding window"),
        ("moshi", "layer 0 has a sliding window of 6 in transformers' own cache"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(way: str, kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"can't be served: .*{reason}"):
        serve(way, make_causal_model(kind))


def other_scale(tables: Any, options: Any) -> Any:
    return tables, options | {"scale": 1.3 * options["scale"]}


def unmasked(tables: Any, options: Any) -> Any:
    return tables, options | {"causal": False}


def another_rows_keys(tables: Any, options: Any) -> Any:
    return (tables[0].flip(0).clamp(min=0), *tables[1:]), options


def nearest_key_hidden(tables: Any, options: Any) -> Any:
    return (tables[0], tables[1] - (tables[1] > 1).int(), tables[2]), options


def without_softcap(tables: Any, options: Any) -> Any:
    return tables, options | {"softcap": 0.0}


def without_sinks(tables: Any, options: Any) -> Any:
    return tables, options | {"sinks": None}


def without_window(tables: Any, options: Any) -> Any:
    return tables, options | {"sliding_window": None}


@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("llama", other_scale),
        ("llama", unmasked),
        ("llama", another_rows_keys),
        ("llama", nearest_key_hidden),
        ("gemma2", without_softcap),
        ("gpt-oss", without_sinks),
        ("mistral", without_window),
    ],
)
def test_attention_that_is_wrong_is_noticed(
    way: str,
    dtype: torch.dtype,
    family: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(query: Any, key_cache: Any, value_cache: Any, *tables: Any, **options: Any) -> Any:
        tables, options = fault(tables, options)
        return torch.ops.paged.attention(query, key_cache, value_cache, *tables, **options)

    for module in (steps, packed):
        monkeypatch.setattr(module, "attention", wrong)
    changes = {"sliding_window": 3} if family == "mistral" else {}
    with pytest.raises(ValueError, match="differs from that by its own attention"):
        serve(way, make_model(family, **changes).to(dtype))


@both_ways
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_not_taken_for_a_fault(way: str, family: str, dtype: torch.dtype) -> None:
    serve(way, make_model(family).to(dtype))


def everything_in(model: PreTrainedModel) -> list[Any]:
    """Return whatever a trial might change, as it is now."""
    things: list[Any] = [torch.get_rng_state().tolist(), model.generation_config.to_dict()]
    for module in model.modules():
        noted = {name: each for name, each in vars(module).items() if not name.startswith("_")}
        things.append({name: id(each) for name, each in noted.items()})
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        things.append([list(each) for each in hooks])
    for tensor in (*model.parameters(), *model.buffers()):
        things.append((id(tensor), tensor._version, tensor.requires_grad, tensor.dtype))
    things.append([id(each) for each in model.buffers()])
    things.append({name: id(each) for name, each in vars(model.config).items()})
    return things


@both_ways
@pytest.mark.parametrize("kind", ["llama", "recurrent_gemma", "phi3"])
def test_a_trial_leaves_no_trace(way: str, kind: str) -> None:
    """Nor does one that ends in a refusal, or one of a model that notes things in itself."""
    model = make_causal_model(kind).train()
    model.set_attn_implementation("sdpa")
    before = everything_in(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # it is switched off for the trial
        try:
            serve(way, model)
        except ValueError:
            assert kind == "recurrent_gemma"
        else:
            model.set_attn_implementation("sdpa")  # PackedModel sets its own
    assert everything_in(model) == before


@both_ways
def test_a_model_is_tried_once_and_not_at_all_without_probe(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = make_model("llama"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    serve(way, model, probe=False)
    assert not calls
    serve(way, model)
    tried = len(calls)
    assert 0 < tried < 10
    serve(way, model)
    assert len(calls) == tried
    serve(way, copy.deepcopy(model))
    assert len(calls) > tried


def test_without_probe_the_configuration_is_believed() -> None:
    with pytest.raises(ValueError, match="layer 0 of the model is linear_attention, expected full"):
        PagedCache(make_causal_model("qwen3_next"), 8, probe=False)
    cache = PagedCache(make_model("gpt-oss"), 8, probe=False)
    assert list(cache.pools) == ["window 12", "full"]


def test_a_model_that_cannot_be_tried_is_told_so() -> None:
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="its code raised ZeroDivisionError: division by zero"):
        PagedCache(model, 8)
    with pytest.raises(ValueError, match="on the meta device and can't be tried; pass probe=False"):
        PackedModel(make_model("llama").to("meta"))
    with pytest.raises(ValueError, match=r"can't be served: dtype is torch.float64, expected one"):
        PackedModel(make_model("llama").to(torch.float64))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gemma4_text", {"window 6": (4, 8, 8), "full": (4, 16, 16)}),
        ("mimo_v2_flash", {"full": (2, 8, 8), "window 6": (4, 8, 8)}),
        ("deepseek_v3", {"full": (4, 12, 8)}),
        ("jetmoe", {"full": (2, 128, 128)}),
    ],
)
def test_sizes_come_from_the_layers_and_not_from_the_configuration(
    kind: str, sizes: dict[str, Any]
) -> None:
    model = make_causal_model(kind)
    model.set_attn_implementation("eager")
    expected = own_tokens(model, PROMPTS)
    register()
    model.set_attn_implementation("paged_ops")
    cache = PagedCache(model, num_blocks=32, block_size=4)
    assert own_tokens(model, PROMPTS, cache=cache) == expected
    assert sizes == {
        name: (pool.num_kv_heads, pool.head_dim, pool.head_dim_v)
        for name, pool in cache.pools.items()
    }


def test_layers_that_share_keys_share_their_blocks() -> None:
    """Such a model computes its last layers for the last column of a prompt only."""
    model = make_causal_model("gemma4_text", num_kv_shared_layers=2)
    model.set_attn_implementation("eager")
    expected = own_tokens(model, PROMPTS)
    register()
    model.set_attn_implementation("paged_ops")
    cache = PagedCache(model, num_blocks=32, block_size=4)
    assert own_tokens(model, PROMPTS, cache=cache) == expected
    assert {name: pool.num_layers for name, pool in cache.pools.items()} == {
        "window 6": 1,
        "full": 1,
    }
    PackedModel(model)


def test_layers_of_one_window_and_two_sizes_have_a_pool_for_each() -> None:
    model = make_model("llama")
    for layer in model.model.layers[1::2]:  # as models whose layers were pruned
        attention = layer.self_attn
        attention.num_key_value_groups = 8
        for name in ("k_proj", "v_proj"):
            linear = getattr(attention, name)
            linear.weight = torch.nn.Parameter(linear.weight[:16])
    model.set_attn_implementation("eager")
    expected = own_tokens(model, PROMPTS)
    register()
    model.set_attn_implementation("paged_ops")
    cache = PagedCache(model, num_blocks=32, block_size=4)
    assert own_tokens(model, PROMPTS, cache=cache) == expected
    heads = {name: pool.num_kv_heads for name, pool in cache.pools.items()}
    assert heads == {"full": 2, "full, sizes 2": 1}
    served = PackedModel(model)
    assert [layer.num_kv_heads for layer in served.config.layers] == [2, 1, 2, 1]
    with pytest.raises(ValueError, match="layer 1 has num_kv_heads 1, but layer 0 has 2"):
        Engine(served, num_blocks=8, block_size=4, max_batch=2)


def test_positions_that_count_from_the_longest_request_are_refused_for_many_at_once() -> None:
    """Such a model takes other angles for all rows as soon as one is long."""
    config = Phi3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 32,
        },
    )
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config).eval()
    with pytest.raises(ValueError, match="differs from that by its own attention"):
        PackedModel(model)
    PagedCache(model, 8)


def test_a_vision_tower_attends_without_a_cache() -> None:
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    text = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=5,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    options = {
        "input_ids": torch.tensor([[1, 7, 5, 5, 5, 5, 9, 11, 13]]),
        "attention_mask": torch.ones(1, 9, dtype=torch.long),
        "pixel_values": torch.randn(1, 3, 8, 8),
        "max_new_tokens": 12,
        "do_sample": False,
    }
    expected = model.generate(**options)
    register()
    model.set_attn_implementation("paged_ops")
    cache = PagedCache(model, num_blocks=16, block_size=4)
    assert torch.equal(model.generate(cache=cache, **options), expected)
