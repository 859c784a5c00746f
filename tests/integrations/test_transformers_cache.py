"""PagedCache by itself: its blocks, its refusals, and that a refused call loses nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, PreTrainedModel, Qwen3NextConfig, masking_utils

from paged_ops.blocks.errors import OutOfBlocks
from paged_ops.integrations.transformers import PagedCache, register
from paged_ops.integrations.transformers.attention import (
    masked_window,
    padding_mask,
    paged_attention,
    refuse_options,
)
from paged_ops.integrations.transformers.layers import layer_windows
from paged_ops.integrations.transformers.padding import Columns
from tests.integrations.models import make_model, make_prompts
from tests.support.broken_off import break_off
from tests.support.checks import relative_error


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    register()
    model = make_model("llama")
    model.set_attn_implementation("paged_ops")
    return model


@torch.no_grad()
def feed(model: PreTrainedModel, cache: Any, tokens: Any, mask: Any = None) -> torch.Tensor:
    """Run tokens through the model and return the last column's logits."""
    if mask is not None:
        mask = torch.as_tensor(mask)
    return model(torch.as_tensor(tokens), attention_mask=mask, cache=cache).logits[:, -1]


def test_padding_takes_no_block(model: PreTrainedModel) -> None:
    cache, prompts = PagedCache(model, num_blocks=20, block_size=8), make_prompts("left")
    feed(model, cache, prompts["input_ids"], prompts["attention_mask"])
    assert cache.get_seq_length() == 20
    assert cache.groups["full"].num_used == 3 + 2 + 3 + 2  # 20, 13, 17 and 9 tokens


def test_a_full_pool_refuses_the_step_and_keeps_the_rest(model: PreTrainedModel) -> None:
    prompts = make_prompts("none")["input_ids"]
    cache = PagedCache(model, num_blocks=11, block_size=8)
    with pytest.raises(OutOfBlocks):
        feed(model, cache, prompts)
    assert cache.groups["full"].num_used == 0
    cache.groups.check()
    assert cache.get_seq_length() == 0
    feed(model, cache, prompts[:3])
    cache = PagedCache(model, num_blocks=12, block_size=8)
    feed(model, cache, prompts)
    for _ in range(4):  # the last blocks are full then
        feed(model, cache, prompts[:, :1])
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 0 free"):
        feed(model, cache, prompts[:, :1])
    assert cache.get_seq_length() == 24
    cache.crop(-1)
    again = feed(model, cache, prompts[:, :1])
    cache.reset()
    assert cache.groups["full"].num_free == 12
    whole = torch.cat([prompts, *[prompts[:, :1]] * 4], dim=1)
    torch.testing.assert_close(feed(model, cache, whole), again)


def test_a_full_pool_gives_back_what_other_rows_and_layers_had_taken() -> None:
    """The window's pool is as large, so it is the full one that runs out, after row 0 has grown."""
    model = make_model("gpt-oss")
    register()
    model.set_attn_implementation("paged_ops")
    prompts = make_prompts("none")["input_ids"]
    cache = PagedCache(model, num_blocks=9, block_size=8)
    feed(model, cache, prompts[:2])
    cache.batch_repeat_interleave(2)
    used = {name: cache.groups[name].num_used for name in cache.groups}
    assert used["full"] == 6
    with pytest.raises(OutOfBlocks):
        feed(model, cache, prompts[:, :8])  # 3 of the 4 rows would fit
    cache.groups.check()
    assert [cache.groups.num_tokens(request) for request in cache._rows.requests] == [20] * 4
    expected = feed(model, roomy_cache(model), torch.cat([prompts[:2], prompts[:2, :1]], 1))
    tokens = prompts[:2, :1].repeat_interleave(2, 0)
    cache.batch_select_indices(torch.tensor([0, 2]))
    torch.testing.assert_close(feed(model, cache, tokens[::2]), expected)


def roomy_cache(model: PreTrainedModel) -> PagedCache:
    return PagedCache(model, num_blocks=50, block_size=8)


def test_reordered_rows_share_blocks_until_they_write(model: PreTrainedModel) -> None:
    cache, prompts = PagedCache(model, 20, 8), make_prompts("none")["input_ids"]
    feed(model, cache, prompts)
    cache.reorder_cache(torch.tensor([2, 2, 0, 2]))
    assert cache.groups["full"].num_used == 6  # rows 1 and 3 are gone
    new = torch.tensor([[5], [6], [7], [8]])
    logits = feed(model, cache, new)
    assert cache.groups["full"].num_used == 6 + 2  # two of three got a copy of the last block
    cache.groups.check()
    alone = torch.cat([prompts[[2, 2, 0, 2]], new], 1)
    torch.testing.assert_close(logits, feed(model, PagedCache(model, 20, 8), alone))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_cache_is_near_the_models_own_after_beams_have_parted(
    model: PreTrainedModel, dtype: torch.dtype
) -> None:
    prompts = make_prompts("none")["input_ids"]
    logits = []
    for cache in (PagedCache(model, 20, 8, cache_dtype=dtype), PagedCache(model, 20, 8)):
        feed(model, cache, prompts)
        cache.reorder_cache(torch.tensor([2, 2, 0, 2]))
        logits.append(feed(model, cache, torch.tensor([[5], [6], [7], [8]])))
    cache = PagedCache(model, 20, 8, cache_dtype=dtype)
    alone = torch.cat([prompts[[2, 2, 0, 2]], torch.tensor([[5], [6], [7], [8]])], 1)
    assert cache.pools["full"].cache_dtype == dtype
    assert 0 < relative_error(*logits) < 0.05
    assert relative_error(logits[0], feed(model, cache, alone)) < 0.01


def test_generate_takes_a_quantised_cache(model: PreTrainedModel) -> None:
    prompts, tokens = make_prompts("left"), []
    for dtype in (torch.int8, None):
        cache = PagedCache(model, 40, 8, cache_dtype=dtype)
        tokens.append(model.generate(**prompts, cache=cache, max_new_tokens=8, do_sample=False))
    assert tokens[0].shape == tokens[1].shape
    with pytest.raises(ValueError, match=r"cache_dtype is torch\.int16"):
        PagedCache(model, 40, 8, cache_dtype=torch.int16)


def test_batch_calls_repeat_and_keep_rows(model: PreTrainedModel) -> None:
    cache, prompts = PagedCache(model, 20, 8), make_prompts("none")["input_ids"]
    feed(model, cache, prompts)
    assert cache.batch_size == 4
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 8
    assert cache.groups["full"].num_used == 12
    cache.batch_select_indices(torch.tensor([False, True] * 4))
    cache.batch_select_indices(torch.tensor([3, 1]))
    new = torch.tensor([[5], [6]])
    expected = feed(model, PagedCache(model, 20, 8), torch.cat([prompts[[3, 1]], new], 1))
    torch.testing.assert_close(feed(model, cache, new), expected)
    with pytest.raises(ValueError, match=r"rows\[0\] is 2, expected 0 to 1"):
        cache.reorder_cache(torch.tensor([2, 0]))


def test_holes_anywhere_in_the_mask_are_honoured() -> None:
    """Padding amid the tokens, against eager, with a window that reaches over it."""
    model = make_model("mistral", sliding_window=6)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 256, (4, 24), generator=generator)
    mask = (torch.rand(4, 24, generator=generator) < 0.6).long()
    mask[:, -1] = 1
    model.set_attn_implementation("eager")
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, position_ids=positions).logits[:, -1]
        register()
        model.set_attn_implementation("paged_ops")
        cache = PagedCache(model, 40, 4)
        for start, stop in [(0, 9), (9, 10), (10, 20), (20, 24)]:
            logits = model(
                tokens[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                cache=cache,
            ).logits[:, -1]
    torch.testing.assert_close(logits, expected)


def test_visible_runs_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 17, generator=generator) < 0.7
    for window in (None, 1, 5, 40):
        ends, lengths = Columns(mask, 4).visible_runs(window)
        for row in range(3):
            for new in range(4):
                column = 13 + new
                first = 0 if window is None else max(0, column - window + 1)
                before = int(mask[row, :first].sum())
                seen = int(mask[row, first : column + 1].sum())
                assert (int(ends[row, new]), int(lengths[row, new])) == (before + seen, seen)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1, 1]], r"shape \[1, 4\], expected \[1, 5\]"),
        ([[1, 0, 1, 1, 1]], r"attention_mask\[0, 1\] is 0, expected 1"),
        (torch.ones(1, 1, 1, 5), r"shape \[1, 1, 1, 5\], expected \[1, 5\]"),
    ],
)
def test_a_mask_that_does_not_fit_the_past_is_refused(
    model: PreTrainedModel, mask: Any, message: str
) -> None:
    cache = PagedCache(model, 4)
    before = feed(model, cache, [[5, 6, 7, 8]])
    with pytest.raises(ValueError, match=message):
        feed(model, cache, [[9]], mask)
    cache.crop(-1)
    torch.testing.assert_close(feed(model, cache, [[8]]), before)


def test_another_batch_needs_a_reset(model: PreTrainedModel) -> None:
    cache = PagedCache(model, 4)
    feed(model, cache, [[5, 6]])
    with pytest.raises(ValueError, match="the batch has 2 rows, but the cache holds 1"):
        feed(model, cache, [[5, 6], [7, 8]])
    cache.reset()
    feed(model, cache, [[5, 6], [7, 8]])


def test_other_attention_and_other_caches_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="needs a PagedCache"):
        feed(model, DynamicCache(config=model.config), [[5, 6]])
    other = make_model("llama")
    with pytest.raises(ValueError, match='attn_implementation is "sdpa", expected "paged_ops"'):
        feed(other, PagedCache(other, 4), [[5, 6]])


def test_gradients_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(NotImplementedError, match="write_kv has no gradient"):
        model(torch.tensor([[5, 6]]), cache=PagedCache(model, 4))


def test_a_call_that_raises_is_taken_back(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, whole = PagedCache(model, 4), PagedCache(model, 4)
    for tokens in ([[5, 6]], [[7]]):
        expected = feed(model, whole, tokens)
        before = cache.get_seq_length()
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[2], "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                feed(model, cache, tokens)
        assert cache.get_seq_length() == before
        assert torch.equal(feed(model, cache, tokens), expected)


STEPS = (
    lambda model, cache: feed(model, cache, [[5, 6, 7], [1, 8, 9]], [[1, 1, 1], [0, 1, 1]]),
    lambda model, cache: feed(model, cache, [[3], [4]]),
    lambda model, cache: cache.reorder_cache(torch.tensor([1, 1])),
    lambda model, cache: feed(model, cache, [[2], [6]]),
    lambda model, cache: cache.crop(-1),
    lambda model, cache: feed(model, cache, [[8, 1], [9, 2]]),
)


@pytest.mark.parametrize("broken", range(len(STEPS)))
def test_a_step_that_is_broken_off_anywhere_has_happened_or_can_be_repeated(
    model: PreTrainedModel, broken: int
) -> None:
    whole, outputs, lengths = PagedCache(model, 16, 2, probe=False), [], [0]
    for step in STEPS:
        outputs.append(step(model, whole))
        lengths.append(whole.get_seq_length())
    point = 0
    while True:
        cache = PagedCache(model, 16, 2, probe=False)
        for step in STEPS[:broken]:
            step(model, cache)
        if not break_off(partial(STEPS[broken], model, cache), point):
            break
        now = cache.get_seq_length()
        assert now in (lengths[broken], lengths[broken + 1])
        has_happened = now != lengths[broken]  # these rows may be reordered twice
        for i in range(broken + has_happened, len(STEPS)):
            output = STEPS[i](model, cache)
            assert output is None or torch.equal(output, outputs[i])
        cache.groups.check()
        cache.reset()
        assert cache.groups["full"].num_used == 0
        point += 1 + point // 40
    assert point > 20


def test_cropping_needs_a_number_within_the_length(model: PreTrainedModel) -> None:
    cache = PagedCache(model, 4)
    feed(model, cache, [[5, 6]])
    for removed in (1, -3):
        with pytest.raises(ValueError, match="-tokens_to_remove is"):
            cache.crop(removed)
    assert cache.get_seq_length() == 2


def test_cropping_behind_a_window_needs_the_past_and_is_refused_as_a_whole() -> None:
    """Row 1 is short and could be cropped; row 0 has given up the blocks that its end would see."""
    register()
    model = make_model("mistral", sliding_window=4)
    model.set_attn_implementation("paged_ops")
    tokens, mask = torch.arange(2, 34).view(2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[1, :14] = 0
    cache = PagedCache(model, 20, 2)
    feed(model, cache, tokens, mask)
    feed(model, cache, tokens[:, :1])
    with pytest.raises(ValueError, match="num_tokens is 14, expected 15 to 17"):
        cache.crop(-3)
    cache.groups.check()
    assert [cache.groups.num_tokens(request) for request in cache._rows.requests] == [17, 3]
    assert cache.get_seq_length() == 17
    cache.reset()
    cache.activate_past_recording()
    feed(model, cache, tokens, mask)
    feed(model, cache, tokens[:, :1])
    cache.crop(-3)
    assert [cache.groups.num_tokens(request) for request in cache._rows.requests] == [14, 0]


def test_layers_of_other_kinds_are_refused() -> None:
    config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="layer 0 of the model is linear_attention, expected full"):
        layer_windows(config)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dropout", 0.1),
        ("output_attentions", True),
        ("position_bias", torch.zeros(1)),
        ("is_causal", False),
        ("indices", torch.zeros(1)),
        ("block_indices", torch.zeros(1)),
        ("sinks", torch.zeros(1)),
    ],
)
def test_options_without_a_place_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{option} is"):
        refuse_options(torch.nn.Linear(1, 1), {option: value})


def test_masks_laid_over_the_causal_one_are_refused() -> None:
    with pytest.raises(ValueError, match="a mask of its own"):
        padding_mask(mask_function=lambda *_: True, use_vmap=True)


def test_a_mask_says_which_keys_a_query_sees() -> None:
    """A rule that isn't served is refused by the layer that attends with it: some use none."""
    padding = torch.ones(1, 9, dtype=torch.bool)
    rules = {
        masking_utils.causal_mask_function: None,
        masking_utils.sliding_window_causal_mask_function(3): 3,
        masking_utils.sliding_window_causal_mask_function(1): 1,
    }
    for rule, window in rules.items():
        mask = padding_mask(mask_function=rule, attention_mask=padding, local_size=window)
        assert mask is not None
        assert mask.shape == (1, 1, 1, 9)
        assert masked_window(mask, None) == masked_window(mask, window) == window
        with pytest.raises(ValueError, match="attends with sliding_window 2, but its mask"):
            masked_window(mask, 2)
    for size, left in ((3, 0), (4, 1), (8, 3)):
        rule = masking_utils.chunked_causal_mask_function(size, torch.tensor([left]))
        mask = padding_mask(mask_function=rule, attention_mask=padding, local_size=size)
        with pytest.raises(ValueError, match="neither causal nor a sliding window"):
            masked_window(mask, None)


def test_an_encoder_attends_to_all_or_is_refused() -> None:
    encoder = torch.nn.Linear(1, 1)
    encoder.is_causal = False
    rows = torch.randn(1, 2, 4, 8)
    padding = torch.tensor([[True, True, True, False]])
    whole = masking_utils.bidirectional_mask_function
    mask = padding_mask(mask_function=whole, attention_mask=padding)
    output, _ = paged_attention(encoder, rows, rows, rows, mask, scaling=0.3)
    seen = rows[:, :, :3]
    expected = torch.nn.functional.scaled_dot_product_attention(rows, seen, seen, scale=0.3)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    window = masking_utils.sliding_window_bidirectional_mask_function(2)
    with pytest.raises(ValueError, match="an encoder's sliding window is not served"):
        padding_mask(mask_function=window, local_size=2)
    mask = padding_mask(mask_function=window, attention_mask=padding, local_size=2)
    with pytest.raises(ValueError, match="only where all see all"):
        paged_attention(encoder, rows, rows, rows, mask)
