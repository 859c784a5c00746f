"""A pytest plugin with which the tests of the ops run on the NPU.

::

    python -m tests.npu_environment -m pytest -p tests.npu_plugin tests/ops/test_attention.py

Every call of an op on CPU tensors is then made on ``npu:0``: the tensors go there with their
strides and with whatever shares their memory, and results and written tensors come back, with the
versions that were counted. So one
suite serves both devices. ``PAGED_CHECK`` is set to 1, for the refusals of bad values that the
tests expect.

A test that calls an op with what no NPU kernel serves is skipped, an example of a property is
rejected. The op has to refuse it by name, docs/ascend.md must not say that it is served, and the
test has to be listed here with its number of such parametrisations; else the test fails.
Tensors of more than a GiB aren't sent.

Parametrisations for float8 caches, which a 910B doesn't have, are left out; that every op refuses
them by name is a test in tests/sim/test_acl.py.

A run of all op tests (``make test-npu``) is started with ``--whole``: it fails if fewer
parametrisations were skipped than are listed, another number left out than `FLOAT8`, or fewer than
`LEAST_LAUNCHES` kernels launched. What was skipped is printed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import reject
from hypothesis.control import currently_in_test_context
from torch import Tensor
from torch.autograd.graph import increment_version

from tests import npu_environment as environment

WRITTEN = {
    "attention": (),
    "attention.out": ("out",),
    "attention_with_lse": (),
    "write_kv": ("key_cache", "value_cache", "key_scale", "value_scale"),
    "copy_blocks": ("key_cache", "value_cache", "key_scale", "value_scale"),
    "gather_kv": (),
    "merge_states": (),
}
MOST_BYTES = 2**30
LEAST_LAUNCHES = 6_200  # of more than 6,600, since hypothesis may draw other examples one day
FLOAT8 = 1_370  # parametrisations for it
# How many parametrisations of a test are skipped, by what is said of them.
SKIPPED = {
    "expected a multiple of 16": {
        "test_a_table_without_columns_works_for_empty_sequences_and_a_pool_without_blocks": 1,
        "test_a_window_across_blocks_is_exact_and_changes_no_metadata": 1,
        "test_a_window_of_w_sees_exactly_w_keys": 24,
        "test_any_head_dim_works_in_decode_and_prefill": 33,
        "test_grouped_heads_with_rows_before_the_first_key_and_a_window": 3,
        "test_more_sequences_than_16_bits_can_count_are_all_computed": 1,
        "test_the_strides_of_dimensions_of_size_one_do_not_matter": 1,
        "test_two_causal_queries_over_five_keys_are_aligned_at_the_end": 1,
        "test_values_may_have_another_head_dim_than_keys": 12,
        "test_windows_are_exact_on_both_sides_of_a_split_of_the_keys": 42,
        "test_without_causal_keys_past_the_length_get_no_weight": 6,
        "test_without_causal_the_window_limits_only_the_past": 6,
        "test_entries_past_the_needed_blocks_are_not_checked": 1,
        "test_the_good_call_that_the_table_changes_is_good": 4,
        "test_a_state_that_saw_nothing_adds_nothing_whatever_it_holds": 12,
        "test_empty_states_merge_into_empty_results": 1,
        "test_weights_are_natural_exponentials_of_the_logs": 3,
        "test_what_no_digits_can_hold_goes_through_the_arithmetic_as_usual": 40,
        "test_queries_of_any_magnitude_lose_no_more_than_float32_does": 4,
    },
    "unified buffer of a vector core": {
        "test_any_head_dim_works_in_decode_and_prefill": 7,
        "test_latent_attention_reads_values_from_the_front_of_the_keys": 1,
        "test_values_may_have_another_head_dim_than_keys": 2,
    },
    "no float8": {
        "test_what_a_fixed_scale_cannot_hold_becomes_the_largest_element": 2,
        "test_randomly_corrupted_calls_return_or_raise_and_refused_ones_write_nothing": 2,
    },
    "more bytes than are sent": {
        "test_block_offsets_beyond_32_bits_are_followed": 2,
        "test_keys_and_values_in_one_buffer_beyond_32_bits_are_followed": 2,
        "test_query_strides_of_more_than_2_to_the_31_bytes_are_followed": 1,
        "test_strides_of_more_than_2_to_the_31_bytes_are_followed": 3,
        "test_blocks_beyond_2_to_the_31_elements_are_copied": 1,
        "test_slots_beyond_2_to_the_31_elements_are_written": 1,
        "test_blocks_beyond_2_to_the_31_elements_are_gathered": 1,
    },
}
# Tests of what the mixed kernel's matrix unit doesn't give, and why. PAGED_NPU_KERNEL=vector runs
# them.
NOT_ON_THE_CUBE = {
    "test_equal_values_come_out_as_they_are_though_all_weights_round_the_same_way": (
        "the cube takes weights of 16 bits, and they are divided by their sum before rounding"
    ),
    "test_the_triangle_is_the_causal_mask": "a call with a tree mask takes the vector kernel",
}
for _dtype in ("float16", "bfloat16"):
    NOT_ON_THE_CUBE[
        "test_each_option_is_honoured_or_refused_over_each_cache_in_each_phase"
        f"[torch.{_dtype}-tree-decode-None]"
    ] = NOT_ON_THE_CUBE["test_the_triangle_is_the_causal_mask"]
# Tests of what torch_npu does by an operator of CANN that the simulated device doesn't have.
NOT_SIMULATED = {
    "test_numbers_per_head_of_the_query_s_dtype_are_converted_exactly": "a cast on the device",
}

_library: torch.library.Library | None = None
_launches_before = 0
_test = ""  # that runs
_skipped: Counter[tuple[str, str]] = Counter()  # by what is said and the test
_left_out = 0


class _Storages:
    """CPU storages of one call and their copies on the device."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}

    def on_npu(self, tensor: Tensor) -> Tensor:
        """Return a tensor that lies in the copy as the given one lies in its storage."""
        storage = tensor.untyped_storage()
        if storage.nbytes() > MOST_BYTES:
            _skip(pytest.fail.Exception("more bytes than are sent to the NPU"))
        if storage._cdata not in self.copies:
            self.copies[storage._cdata] = torch.tensor(storage, dtype=torch.uint8).npu()
        copy = self.copies[storage._cdata].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device="npu")
        return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    def bring_back(self, tensor: Tensor) -> None:
        """Copy the whole storage of a tensor back from the device."""
        storage = tensor.untyped_storage()
        here = torch.empty(0, dtype=torch.uint8).set_(storage)
        here.copy_(self.copies[storage._cdata].cpu())


def _serves(op: str, given: dict[str, Any]) -> bool:
    """Whether docs/ascend.md says that the NPU serves the dtypes and head_dims of a call."""
    dtypes = {tensor.dtype for tensor in given.values() if isinstance(tensor, Tensor)}
    if any("float8" in str(dtype) for dtype in dtypes):
        return False
    if op == "merge_states":
        return given["out_a"].shape[-1] in range(16, 465, 16)
    if not op.startswith("attention"):
        return True
    head_dims = (given["query"].shape[-1], given["value_cache"].shape[-1])
    most = 512
    if given["query"].dtype == torch.float32:
        most = 256
    elif given.get("tree_mask") is not None and given["key_cache"].dtype != torch.int8:
        most = 384
    return (most == 512 and head_dims == (576, 512)) or all(
        head_dim in range(16, most + 1, 16) for head_dim in head_dims
    )


def _skip(error: Exception, served: Callable[[], bool] = bool) -> NoReturn:
    """Skip a listed test, reject an example; anything else is the test's."""
    reason = next((reason for reason in SKIPPED if reason in str(error)), None)
    if reason is None:
        raise error
    usual = not os.environ.get("PAGED_NPU_KERNEL")
    if usual and served():
        raise error
    if currently_in_test_context():
        reject()
    _skipped[reason, _test] += 1
    if usual and _skipped[reason, _test] > SKIPPED[reason].get(_test, 0):
        raise error
    pytest.skip(str(error))


def _call_on_npu(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.paged, base), overload or "default")
    schema = op._schema.arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        storages = _Storages()
        with torch.inference_mode(False):  # so that what is sent counts its versions
            sent = {
                key: storages.on_npu(value)
                if isinstance(value, Tensor) and value.device.type == "cpu"
                else value
                for key, value in given.items()
            }
        copies = {key: sent[key] for key in WRITTEN[name] if sent.get(key) is not None}
        versions = {key: copy._version for key, copy in copies.items()}
        positional = [sent.pop(a.name) for a in schema if not a.kwarg_only and a.name in sent]
        try:
            result = op(*positional, **sent)
        except RuntimeError as error:
            _skip(error, lambda: _serves(base, given))
        for key, copy in copies.items():
            storages.bring_back(given[key])
            if copy._version > versions[key]:
                increment_version(given[key])
        if overload == "out":
            return given["out"]
        if isinstance(result, tuple):
            return tuple(tensor.cpu() for tensor in result)
        return result if result is None else result.cpu()

    return call


def pytest_configure(config: pytest.Config) -> None:
    """Put the NPU in the CPU's place."""
    global _library, _launches_before
    reason = environment.why_not()
    if reason is not None:
        raise pytest.UsageError(reason)
    environment.load()
    import paged_ops  # noqa: F401  (defines the ops)
    from tests.support import strategies

    strategies.drawn_quantisations = tuple(
        each for each in strategies.drawn_quantisations if each.dtype == torch.int8
    )
    os.environ["PAGED_CHECK"] = "1"
    # torch_npu warns about itself, and torch about the kernels that are replaced here.
    config.addinivalue_line("filterwarnings", "ignore::UserWarning")
    _library = torch.library.Library("paged", "IMPL")
    for name in WRITTEN:
        _library.impl(name, _call_on_npu(name), "CPU", allow_override=True)
    if environment.is_simulated():
        _launches_before = environment.report()["launches"]["count"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of a run of all op tests."""
    parser.addoption("--whole", action="store_true", help="the run is of all op tests")


def _is_for_float8(item: pytest.Item) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    dtypes = (getattr(parameter, "dtype", parameter) for parameter in parameters)
    return any(isinstance(each, torch.dtype) and "float8" in str(each) for each in dtypes)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what isn't simulated, and tests of 16-bit dtypes that only hold on vector cores."""
    global _left_out
    float8 = [item for item in items if _is_for_float8(item)]
    _left_out = len(float8)
    config.hook.pytest_deselected(items=float8)
    items[:] = [item for item in items if not _is_for_float8(item)]
    for item in items if environment.is_simulated() else ():
        reason = NOT_SIMULATED.get(getattr(item, "originalname", ""))
        if reason is not None and "float32" not in item.name:
            item.add_marker(pytest.mark.skip(reason))
    if os.environ.get("PAGED_NPU_KERNEL") == "vector":
        return
    for item in items:
        test = getattr(item, "originalname", "")
        reason = NOT_ON_THE_CUBE.get(test) or NOT_ON_THE_CUBE.get(item.name)
        if reason is not None and "float32" not in item.name:
            item.add_marker(pytest.mark.skip(reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which test runs."""
    global _test
    _test = getattr(item, "originalname", item.name)


def _launches() -> int:
    return environment.report()["launches"]["count"] - _launches_before


def _lacks() -> Iterator[str]:
    """Say what a run of all op tests lacks."""
    for reason, tests in SKIPPED.items():
        for test, count in tests.items():
            if (skipped := _skipped[reason, test]) < count:
                yield f"{test}: {skipped} skipped with '{reason}', {count} are listed"
    if _left_out != FLOAT8:
        yield f"{_left_out} parametrisations for float8 were left out, {FLOAT8} are expected"
    if environment.is_simulated() and _launches() < LEAST_LAUNCHES:
        yield f"expected at least {LEAST_LAUNCHES} launches"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of all op tests that lacks something."""
    if session.config.getoption("whole") and any(_lacks()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many kernels ran, so that nobody mistakes a run on the CPU for one on the NPU."""
    if environment.is_simulated():
        terminalreporter.write_line(f"{_launches()} kernels were launched on the simulated NPU")
    for (reason, test), count in sorted(_skipped.items()):
        terminalreporter.write_line(f"skipped {count} of {test}: {reason}")
    if config.getoption("whole"):
        for lack in _lacks():
            terminalreporter.write_line(lack, red=True)
