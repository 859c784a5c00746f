"""Every rule of the simulated cores: a kernel that breaks it is named, its twin is not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.sim.harness import (
    HERE,
    CompileError,
    Kernel,
    Result,
    check_source,
    configured,
    launch,
    read,
    update,
    write,
)

KERNELS = HERE / "kernels"

# Kernel, the rule that its broken twin breaks, and what the text must say.
QUEUES = [
    ("tensor_is_freed", "queue-left", "DeQue has no FreeTensor by the end"),
    ("tensor_is_dequeued", "queue-left", "EnQue has no DeQue by the end"),
    ("no_use_after_free", "queue-use", "src was freed by FreeTensor at line"),
    ("no_use_before_deque", "queue-use", "src is in its queue (EnQue) at line"),
    ("queue_depth", "queue-depth", "EnQue of tensor 2 into a queue of depth 1"),
    ("buffers_suffice", "queue-order", "AllocTensor: all 1 buffers of the queue are in use"),
    ("deque_follows_enque", "queue-order", "DeQue from an empty queue"),
    ("tensor_returns_to_its_queue", "queue-order", "EnQue of a tensor that isn't from this queue"),
    ("tensor_is_freed_once", "queue-order", "FreeTensor of a tensor that was freed"),
    ("queue_has_buffers", "queue-order", "AllocTensor on a queue without InitBuffer"),
    ("eight_buffers_a_position", "pipe-buffers", "9 queue buffers at one position"),
    ("sixty_four_buffers", "pipe-buffers", "more than 64 buffers"),
    ("ub_capacity", "ub-capacity", "UB has 188160 for kernels"),
    ("one_pipe_at_a_time", "pipe", "a second TPipe while the first one lives"),
    ("reset_ends_buffers", "queue-use", "dst belongs to a TPipe that is gone"),
    ("event_ids_suffice", "event-id", "no V_S id is free"),
    (
        "released_ids_were_allocated",
        "event-id",
        "ReleaseEventID<V_S>(0), which AllocEventID didn't",
    ),
]
MEMORY = [
    ("gm_is_read_inside", "gm-bounds", "reads bytes [3104, 4128) of in, which has [0, 4096)"),
    ("gm_is_written_inside", "gm-bounds", "writes bytes [3076, 4100) of out, which has [0, 4096)"),
    ("gm_is_read_by_scalar_inside", "gm-bounds", "GetValue reads bytes [4096, 4100) of in"),
    ("gm_tensor_has_its_size", "gm-bounds", "whose SetGlobalBuffer gave it [0, 1020)"),
    ("gm_belongs_to_a_tensor", "gm-bounds", "the address given to SetGlobalBuffer is in no tensor"),
    ("gm_tensor_has_an_address", "tensor", "SetGlobalBuffer was never called"),
    ("inputs_are_only_read", "gm-access", "writes in, which the kernel may not write"),
    ("outputs_are_garbage", "gm-garbage", "reads out[0], which nobody has written"),
    ("ub_is_used_inside", "ub-bounds", "src uses bytes [0, 1056) of a tensor that has [0, 1024)"),
    ("ub_parts_are_used_inside", "ub-bounds", "dst uses bytes [544, 1056)"),
    (
        "buffers_are_rounded_to_blocks",
        "ub-bounds",
        "dst uses bytes [0, 96) of a tensor that has [0, 64)",
    ),
    ("ub_is_aligned", "ub-alignment", "Abs: src starts at UB 16, expected a multiple of 32"),
    ("copies_are_aligned_in_ub", "ub-alignment", "DataCopy: dst starts at UB 4"),
    ("copies_are_aligned_to_the_type", "gm-alignment", "the GM address is no multiple of 4 bytes"),
    (
        "ub_is_written_before_it_is_read",
        "ub-garbage",
        "Abs reads src at UB 0, which nobody has written",
    ),
    (
        "fresh_tensors_are_garbage",
        "ub-garbage",
        "Abs reads src at UB 3072, which nobody has written",
    ),
    (
        "unpadded_tails_are_garbage",
        "ub-garbage",
        "Abs reads src at UB 20, which nobody has written",
    ),
    ("copies_are_whole_blocks", "copy-length", "DataCopy of 48 bytes, expected a multiple of 32"),
    ("copies_have_a_length", "copy-length", "DataCopy of nothing"),
    (
        "padded_copies_are_whole_elements",
        "copy-length",
        "blockLen is 18 bytes, expected a multiple of 4",
    ),
    ("copies_have_4095_pieces", "copy-limits", "blockCount is 4096, expected 0 to 4095"),
    ("gaps_have_16_bits", "copy-limits", "the local gap is 65536, expected 0 to 65535"),
    ("paddings_have_32_bytes", "copy-limits", "leftPadding in bytes is 36, expected 0 to 32"),
]
ORDER = [
    ("v_waits_for_mte2", "ub-order", "SetFlag and WaitFlag<MTE2_V> are missing"),
    ("mte2_waits_for_v", "ub-order", "SetFlag and WaitFlag<V_MTE2> are missing"),
    ("mte3_waits_for_v", "ub-order", "SetFlag and WaitFlag<V_MTE3> are missing"),
    ("v_waits_for_mte3", "ub-order", "SetFlag and WaitFlag<MTE3_V> are missing"),
    ("mte3_waits_for_mte2", "ub-order", "SetFlag and WaitFlag<MTE2_MTE3> are missing"),
    ("order_is_transitive", "ub-order", "SetFlag and WaitFlag<MTE2_MTE3> are missing"),
    ("v_reads_what_v_wrote", "ub-order", "Abs reads src at UB 0, which V wrote at order.cpp:"),
    ("v_writes_what_v_wrote", "ub-order", "PipeBarrier<PIPE_V> is missing"),
    (
        "v_writes_what_v_read",
        "ub-order",
        "Duplicate writes dst at UB 0, which V read at order.cpp:",
    ),
    ("v_writes_neighbours", "ub-order", "WholeReduceSum writes dst at UB 2048, which V wrote"),
    ("mte2_writes_what_mte2_wrote", "ub-order", "PipeBarrier<PIPE_MTE2> is missing"),
    ("mte3_writes_what_mte3_wrote", "gm-order", "PipeBarrier<PIPE_MTE3> is missing"),
    ("mte2_reads_what_mte3_wrote", "gm-order", "SetFlag and WaitFlag<MTE3_MTE2> are missing"),
    ("scalar_waits_for_v", "ub-order", "SetFlag and WaitFlag<V_S> are missing"),
    ("scalar_waits_for_mte2", "ub-order", "SetFlag and WaitFlag<MTE2_S> are missing"),
    ("v_waits_for_scalar", "ub-order", "SetFlag and WaitFlag<S_V> are missing"),
    ("barrier_all_orders_everything", "ub-order", "SetFlag and WaitFlag<MTE2_V> are missing"),
    (
        "wait_follows_set",
        "event-wait",
        "WaitFlag<MTE2_V>(1) with no SetFlag before it waits for ever",
    ),
    ("set_is_waited_for", "event-left", "SetFlag has no WaitFlag by the end of the kernel"),
    (
        "set_once_before_wait",
        "event-twice",
        "SetFlag<MTE2_V>(1) again, with no WaitFlag since line",
    ),
    ("events_have_eight_ids", "event-id", "SetFlag<MTE2_V>(8), expected an id from 0 to 7"),
    ("two_event_ids_are_reserved", "event-id", "ids 6 and 7 are reserved"),
    ("queues_hold_event_ids", "event-id", "SetFlag<MTE2_V>(0), which a queue holds"),
]
VECTOR = [
    ("repeats_end_at_255", "vector-repeat", "Copy: repeatTime is 256, expected 0 to 255"),
    ("repeat_strides_end_at_255", "vector-stride", "src has block stride 1 and repeat stride 256"),
    ("masks_end_with_the_repeat", "mask", "mask is 65 lanes, expected at most 64"),
    ("mask_bits_end_with_the_repeat", "mask", "mask has bits beyond lane 63"),
    ("set_masks_end_with_the_repeat", "mask", "SetVectorMask of 65 lanes, expected at most 64"),
    ("counter_mode_ends", "mask", "SetMaskNorm is missing"),
    ("destination_blocks_differ", "vector-stride", "its blocks overwrite each other"),
    ("overlap_is_whole", "overlap", "dst and src overlap in part in repeat 0 (7 of 8 blocks)"),
    ("widening_is_not_in_place", "overlap", "Cast: dst and src overlap in part"),
    ("results_do_not_feed_later_repeats", "overlap", "dst of an earlier repeat is src of repeat 1"),
    ("accumulation_goes_through_src1", "overlap", "dst of an earlier repeat is src0 of repeat 1"),
    ("cast_has_the_mode", "cast-mode", "Cast from float to bfloat16_t has no mode CAST_NONE"),
    ("comparisons_are_whole_repeats", "vector-count", "of 60 elements, expected a multiple of 64"),
    ("integers_compare_for_equality", "types", "CompareScalar of int32_t has only CMPMODE::EQ"),
    ("select_mode_fits_its_source", "types", "VSEL_TENSOR_SCALAR_MODE takes a scalar"),
    ("reductions_have_room_to_work", "ub-bounds", "sharedTmpBuffer uses bytes [0, 32) of a tensor"),
    ("reduced_pairs_are_aligned", "ub-alignment", "expected a multiple of 8 bytes"),
    ("block_results_are_aligned", "ub-alignment", "expected a multiple of 32 bytes"),
    ("broadcasts_leave_their_source", "overlap", "Brcb: dst and src overlap"),
    ("gathers_stay_inside", "ub-bounds", "src uses bytes [1024, 1028)"),
    ("gathered_elements_are_aligned", "gather", "byte offset 6 of lane 0 is no multiple of 4"),
    ("shifts_fit_the_type", "vector-shift", "ShiftLeft by 33"),
    ("counts_are_not_negative", "vector-count", "Abs of -1 elements"),
]
CORES = [
    ("readers_wait_for_writers", "gm-race", "reads out[0], which core 0 wrote at bench.h:"),
    ("writers_wait_for_writers", "gm-race", "writes out[992], which core 0 wrote at bench.h:"),
    ("flags_order_cores", "gm-race", "with no SyncAll or cross-core flag between"),
    ("neighbours_share_a_block", "gm-race", "writes out[12], which core"),
    ("scalars_own_their_cache_line", "gm-line", "in a 64-byte line that S of core"),
    ("set_values_are_written_back", "gm-cache", "still in the data cache when the kernel ends"),
    ("set_values_are_cleaned_before_use", "gm-cache", "left in the data cache of core 0"),
    ("cached_values_are_dropped", "gm-cache", "may find an old copy of out[8] in the data cache"),
    (
        "every_core_reaches_sync_all",
        "deadlock",
        "SyncAll waits for ever: not every core gets there",
    ),
    ("sync_all_of_vector_cores", "deadlock", "SyncAll<false> waits for cube cores"),
    ("sync_all_owns_its_flags", "cross-core", "SyncAll uses 11 to 14"),
    ("flags_have_sixteen_ids", "cross-core", "CrossCoreSetFlag(16), expected an id from 0 to 15"),
    ("flags_count_to_fifteen", "cross-core", "is up to 16 ahead of CrossCoreWaitFlag on core 0"),
    (
        "flags_are_waited_for",
        "cross-core",
        "CrossCoreSetFlag(1) has no CrossCoreWaitFlag by the end",
    ),
    (
        "cores_without_cubes_have_mode_0",
        "cross-core",
        "CrossCoreSetFlag of mode 2 needs cube cores",
    ),
    ("sync_workspace_is_large_enough", "gm-bounds", "the workspace has less than 64 bytes"),
    ("sync_workspace_is_zero", "sync-all", "the workspace must be zero before the launch"),
    ("sync_all_needs_a_mixed_kernel", "kernel-type", "KERNEL_TASK_TYPE_DEFAULT"),
    ("kernels_state_their_type", "kernel-type", "the kernel states no type"),
]
CUBE = [
    ("cubes_have_no_vector_unit", "core-kind", "Duplicate works on the pipe V, which a cube core"),
    (
        "cubes_have_no_unified_buffer",
        "core-kind",
        "InitBuffer in UB, which a cube core doesn't have",
    ),
    (
        "tensors_are_placed_in_memories_of_the_core",
        "core-kind",
        "a tensor in UB, which a cube core",
    ),
    (
        "events_are_between_pipes_of_the_core",
        "core-kind",
        "SetFlag<MTE2_V>, but a cube core doesn't",
    ),
    ("pipes_have_set_their_own_flags", "event-twice", "the TPipe of a cube core sets 0, 1 and 2"),
    ("pipes_find_their_flags_set", "event-wait", "the TPipe ends with WaitFlag<M_MTE1>(1)"),
    ("pipes_hold_their_own_ids", "event-id", "no M_MTE1 id is free"),
    ("barriers_are_on_pipes_of_the_core", "core-kind", "PipeBarrier<PIPE_MTE3>, which a cube core"),
    ("loads_come_from_l1", "position", "LoadData: src lies in L0B, expected L1"),
    ("left_matrices_lie_in_l0a", "position", "Mmad: fm lies in L0B, expected L0A"),
    ("matrices_become_fractals_in_l1", "position", "DataCopy: dst lies in L0A, expected L1"),
    ("l1_capacity", "cube-capacity", "makes 524288 in all, but L1 has 524032 for kernels"),
    ("l0_capacity", "cube-capacity", "makes 66560 in all, but L0B has 65536 for kernels"),
    ("l0c_capacity", "cube-capacity", "a tensor at L0C 99328 with 32768 bytes, but L0C has 131072"),
    ("fractals_fit_into_l1", "cube-bounds", "DataCopy: dst uses bytes [2048, 2080) of a tensor"),
    ("loads_stay_inside_l1", "cube-bounds", "LoadData: src uses bytes [2048, 2560) of a tensor"),
    ("loads_stay_inside_l0", "cube-bounds", "LoadData: dst uses bytes [2048, 2560) of a tensor"),
    ("products_stay_inside_l0c", "cube-bounds", "Mmad: dst uses bytes [0, 8192) of a tensor"),
    ("operands_stay_inside_l0", "cube-bounds", "Mmad: fm uses bytes [2048, 2560) of a tensor"),
    ("results_come_from_inside_l0c", "cube-bounds", "Fixpipe: src uses bytes [4096, 4160)"),
    ("l1_is_used_in_blocks", "cube-alignment", "dst starts at L1 16, expected a multiple of 32"),
    ("l0_is_used_in_fractals", "cube-alignment", "at L0A 256, expected a multiple of 512 bytes"),
    ("products_start_at_fractals", "cube-alignment", "at L0C 512, expected a multiple of 1024"),
    ("results_start_at_rows", "cube-alignment", "at L0C 32, expected a multiple of 64 bytes"),
    ("rows_of_gm_have_16_bit_strides", "copy-limits", "srcDValue is 65536, expected 1 to 65535"),
    ("columns_of_blocks_have_a_stride", "copy-limits", "dstNzC0Stride is 0, expected 1 to 16384"),
    ("columns_of_blocks_lie_apart", "overlap", "DataCopy writes dst at L1 512 twice"),
    ("matrices_have_rows", "copy-length", "DataCopy of nothing"),
    ("loads_repeat_255_times", "copy-limits", "repeatTimes is 256, expected 0 to 255"),
    ("loads_transpose_16_bit_types", "types", "LoadData transposes 16-bit types"),
    ("images_have_strides_to_63", "image", "strideH is 64, expected 1 to 63"),
    (
        "images_are_read_inside_their_matrix",
        "image",
        "rows to 32 and columns to 32 of a matrix of 16 x 32",
    ),
    ("images_are_cut_at_fractals", "image", "kStartPt is 8, expected a multiple of 16"),
    ("images_are_described_first", "image", "SetFmatrix was never called"),
    ("images_stay_inside_l1", "cube-bounds", "LoadData: src uses bytes [2048, 2080)"),
    ("images_are_read_when_they_are_there", "cube-order", "WaitFlag<MTE2_MTE1> are missing"),
    (
        "squares_do_not_overwrite_each_other",
        "overlap",
        "LoadDataWithTranspose writes dst at L0A 512",
    ),
    ("products_have_4095_rows", "mmad", "Mmad: m is 4096, expected 1 to 4095"),
    ("products_have_a_depth", "mmad", "Mmad: k is 0, expected 1 to 4095"),
    ("products_have_no_bias", "mmad", "cmatrixSource must be false"),
    ("results_have_whole_fractals_of_columns", "fixpipe", "nSize must be a multiple of 16"),
    ("results_are_converted_to_the_output", "fixpipe", "NoQuant for float"),
    ("rows_of_results_lie_apart", "fixpipe", "dstStride is less than nSize, so rows overwrite"),
    ("columns_of_results_lie_apart", "fixpipe", "dstStride is less than the rows of a column"),
    ("channels_are_split_in_nz", "fixpipe", "isChannelSplit is for float and NZ"),
    ("l1_is_written_before_its_use", "cube-garbage", "Mmad reads fm at L0A 992, which nobody has"),
    ("padding_may_be_garbage", "cube-garbage", "Mmad reads fm at L0A 544, which nobody has"),
    ("garbage_is_garbage_when_transposed", "cube-garbage", "Mmad reads filter at L0B 1026"),
    ("sums_start_with_something", "cube-garbage", "Mmad reads dst at L0C 0, which nobody has"),
    ("results_were_computed", "cube-garbage", "Fixpipe reads src at L0C 1984, which nobody has"),
    ("constants_fill_what_is_missing", "cube-garbage", "Mmad reads fm at L0A 512, which nobody"),
    ("mte1_waits_for_mte2", "cube-order", "SetFlag and WaitFlag<MTE2_MTE1> are missing"),
    ("mte2_waits_for_mte1", "cube-order", "SetFlag and WaitFlag<MTE1_MTE2> are missing"),
    ("m_waits_for_mte1", "cube-order", "SetFlag and WaitFlag<MTE1_M> are missing"),
    ("mte1_waits_for_the_product", "cube-order", "SetFlag and WaitFlag<M_MTE1> are missing"),
    ("fix_waits_for_m", "cube-order", "SetFlag and WaitFlag<M_FIX> are missing"),
    ("m_waits_for_fix", "cube-order", "SetFlag and WaitFlag<FIX_M> are missing"),
    ("small_products_add_up_in_order", "cube-order", "PipeBarrier<PIPE_M> is missing"),
    ("large_products_add_up_in_order", "cube-order", "PipeBarrier<PIPE_M> is missing"),
    ("mte2_writes_l1_in_order", "cube-order", "PipeBarrier<PIPE_MTE2> is missing"),
    ("mte1_writes_l0_in_order", "cube-order", "PipeBarrier<PIPE_MTE1> is missing"),
    ("fix_writes_gm_in_order", "gm-order", "PipeBarrier<PIPE_FIX> is missing"),
    ("mte2_reads_what_fix_wrote", "gm-order", "SetFlag and WaitFlag<FIX_MTE2> are missing"),
    ("l1_queues_take_tensors_back", "queue-use", "src was freed by FreeTensor at line"),
    (
        "matrices_are_read_inside",
        "gm-bounds",
        "reads bytes [4064, 4128) of in, which has [0, 4096)",
    ),
    ("results_are_written_inside", "gm-bounds", "writes bytes [4096, 4160) of out"),
    ("results_go_to_outputs", "gm-access", "Fixpipe writes in, which the kernel may not write"),
    ("workspaces_are_garbage", "gm-garbage", "DataCopy reads out[0], which nobody has written"),
]
GROUPS = [
    ("vectors_wait_for_their_cube", "gm-race", "which core AIC 0 wrote at groups.cpp:"),
    ("flags_follow_the_pipe_that_writes", "gm-race", "which core AIC 0 wrote at groups.cpp:"),
    ("cubes_wait_for_their_vectors", "gm-race", "which core AIV 0 wrote at groups.cpp:"),
    ("tiles_are_read_before_the_next", "gm-race", "which core AIV 0 read at groups.cpp:"),
    ("order_goes_through_the_cube", "gm-race", "which core AIV 0 wrote at groups.cpp:"),
    ("groups_do_not_wait_for_each_other", "gm-race", "which core AIC 0 wrote at groups.cpp:"),
    ("vectors_of_a_group_meet", "gm-race", "which core AIV 2 wrote at groups.cpp:"),
    ("cubes_meet", "gm-race", "which core AIC 0 wrote at groups.cpp:"),
    ("all_cores_meet", "gm-race", "which core AIC 0 wrote at groups.cpp:"),
    ("answers_tell_of_the_own_past", "ub-order", "SetFlag and WaitFlag<MTE3_V> are missing"),
    (
        "workspaces_are_written_by_someone",
        "gm-garbage",
        "reads out[2048], which nobody has written",
    ),
    ("cubes_wait_for_both_vectors", "deadlock", "CrossCoreWaitFlag(3) waits for ever: core AIV"),
    ("flags_have_an_id", "deadlock", "CrossCoreWaitFlag(2) waits for ever: core AIC 1 has ended"),
    ("someone_sets_first", "deadlock", "CrossCoreWaitFlag(1) waits for ever: core AIC 1 waits at"),
    ("vectors_wait_for_every_flag", "cross-core", "CrossCoreSetFlag(1) has no CrossCoreWaitFlag"),
    ("counters_of_a_group_end_at_fifteen", "cross-core", "CrossCoreSetFlag(1) is up to 16 ahead"),
    ("answers_hold_the_setter_back", "cross-core", "ahead of CrossCoreWaitFlag on core AIV 0"),
    (
        "flags_have_one_mode_at_a_time",
        "cross-core",
        "CrossCoreSetFlag(1) of mode 1, while core AIV",
    ),
    ("mode_1_is_for_vectors", "core-kind", "CrossCoreSetFlag of mode 1 on a cube core"),
    ("sync_all_by_default_is_for_vectors", "core-kind", "SyncAll<true> on a cube core"),
    ("cubes_set_flags_on_their_pipes", "core-kind", "CrossCoreSetFlag on the pipe MTE3"),
    ("types_are_the_same_on_all_cores", "kernel-type", "differs from that of another core"),
    ("types_are_stated_first", "kernel-type", "KERNEL_TASK_TYPE_DEFAULT must come before"),
    ("vectors_have_no_l1", "core-kind", "InitBuffer in L1, which a vector core doesn't have"),
    ("vectors_have_no_matrix_unit", "core-kind", "Mmad works on the pipe M, which a vector core"),
]
RULES = [
    (source, *row)
    for source, rows in (
        ("queues", QUEUES),
        ("memory", MEMORY),
        ("order", ORDER),
        ("vector", VECTOR),
        ("cores", CORES),
        ("cube", CUBE),
        ("groups", GROUPS),
    )
    for row in rows
]
TWINS = [(source, kernel) for source, kernel, _, _ in RULES]


# A statement in a kernel, and what the compiler must say of it.
TYPES = [
    (
        "Add(b, b, b, 16)",
        "Add: the 910B vector core has this instruction for int16_t, half, int32_t",
    ),
    ("Exp(i, i, 16)", "Exp: the 910B vector core has this instruction for half, float only"),
    ("Muls(u, u, uint8_t{2}, 16)", "Muls: the 910B vector core has this instruction for int16_t"),
    (
        "And(i, i, i, 16)",
        "And: the 910B vector core has this instruction for int16_t, uint16_t only",
    ),
    ("Div(i, i, i, 16)", "Div: the 910B vector core has this instruction for half, float only"),
    ("Duplicate(u, uint8_t{0}, 16)", "Duplicate: the 910B vector core has this instruction for"),
    ("Cast(h, b, RoundMode::CAST_NONE, 16)", "can't cast between these types"),
    ("Cast(b, h, RoundMode::CAST_RINT, 16)", "can't cast between these types"),
    ("Cast(u, f, RoundMode::CAST_RINT, 16)", "can't cast between these types"),
    ("Axpy(h, f, 2.0f, 16)", "half to half, float to float and half to float only"),
    ("WholeReduceSum(i, i, 64, 1, 1, 1, 8)", "WholeReduceSum: the 910B vector core has this"),
    ("CompareScalar(u, b, bfloat16_t(0), CMPMODE::EQ, 128)", "CompareScalar: the 910B vector core"),
    ("Select(i, u, i, i, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64)", "Select: the 910B vector core"),
    ("Adds(f, f, 1, 16)", "deduced conflicting types for parameter"),
    ("Add(f, f, h, 16)", "deduced conflicting types for parameter"),
    ("Abs(f, f, 64, 1, {1, 1, runtime, 8})", "narrowing conversion of 'runtime'"),
    ("PipeBarrier<PIPE_S>()", "PIPE_S is ordered by the hardware"),
    ("TQue<TPosition::C2, 1> queue", "a vector core has queues at VECIN and VECOUT"),
    (
        "TBuf<TPosition::C2> buffer; buffer.Get<float>()",
        "a cube core at A1, B1, C1, A2, B2 and CO1",
    ),
    ("Mmad(f, h, b, MmadParams())", "Mmad: here it has half, bfloat16_t and float"),
    ("Mmad(h, h, h, MmadParams())", "with sums in float"),
    ("CrossCoreSetFlag<4, PIPE_MTE3>(0)", "a 910B has the modes 0, 1 and 2"),
    ("CrossCoreSetFlag<2, PIPE_S>(0)", "a flag is set by one of the pipes V, M, MTE1, MTE2, MTE3"),
    ("SetFlag<HardEvent::M_V>(0)", "'M_V' is not a member of 'AscendC::HardEvent'"),
    ("(void)(bfloat16_t(1) + bfloat16_t(2))", "no match for 'operator+'"),
]
ALLOWED = [
    "Add(i, i, i, 16)",
    "Cast(f, b, RoundMode::CAST_NONE, 16)",
    "Cast(b, f, RoundMode::CAST_RINT, 16)",
    "Axpy(f, h, half(2.0f), 16)",
    "Duplicate(b, bfloat16_t(0), 16)",
    "Abs(f, f, 64, 1, {1, 1, static_cast<uint8_t>(runtime), 8})",
]


@cache
def kernel(source: str, name: str) -> Kernel:
    return Kernel(KERNELS / f"{source}.cpp", name)


def run(source: str, name: str, seed: int = 0) -> Result:
    """Run one kernel of a rule on two cores or groups, or on one core where one is enough."""
    values = np.zeros(1024, dtype=np.float32)
    values[32:] = np.arange(1, 993)
    cores = 2 if source in ("cores", "groups") else 1
    out = np.zeros(1024, dtype=np.float32)
    return launch(kernel(source, name), cores, read(values, "in"), write(out, "out"), seed=seed)


def line_that_breaks(source: str, name: str) -> int:
    """Return the line marked "breaks here" in the function of a kernel."""
    lines = (KERNELS / f"{source}.cpp").read_text().splitlines()
    function = next(i for i, line in enumerate(lines) if f"void {name}" in line)
    return next(i for i, line in enumerate(lines, 1) if i > function and "// breaks here" in line)


@pytest.mark.parametrize(("source", "name", "rule", "text"), RULES, ids=[row[1] for row in RULES])
def test_a_broken_rule_is_reported_where_it_is_broken(
    source: str, name: str, rule: str, text: str
) -> None:
    violations = run(source, f"{name}_broken").violations

    where = f"{source}.cpp:{line_that_breaks(source, name)} core "
    matching = [v for v in violations if v.startswith(where) and f" {rule}: " in v and text in v]
    assert matching, "\n".join(violations) or "nothing was reported"


@pytest.mark.parametrize(("source", "name"), TWINS, ids=[row[1] for row in TWINS])
def test_a_kept_rule_is_not_reported(source: str, name: str) -> None:
    assert run(source, f"{name}_kept").violations == ()


RACES = [
    (source, name)
    for source, name, rule, _ in RULES
    if source in ("cores", "groups") and rule in ("gm-race", "gm-line", "gm-cache", "cross-core")
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("source", "name"), RACES, ids=[row[1] for row in RACES])
def test_a_race_is_reported_in_whatever_order_the_cores_run(
    source: str, name: str, seed: int
) -> None:
    broken = run(source, f"{name}_broken", seed=seed).violations

    assert any(v.startswith((f"{source}.cpp:", "bench.h:")) for v in broken)
    assert run(source, f"{name}_kept", seed=seed).violations == ()


def compile_statement(statement: str, folder: Path) -> None:
    source = folder / "statement.cpp"
    source.write_text(
        f"""
        #include "kernel_operator.h"
        using namespace AscendC;
        extern "C" __global__ __aicore__ void kernel(int64_t runtime) {{
          LocalTensor<float> f; LocalTensor<half> h; LocalTensor<bfloat16_t> b;
          LocalTensor<int32_t> i; LocalTensor<uint8_t> u;
          (void)f; (void)h; (void)b; (void)i; (void)u; (void)runtime;
          {statement};
        }}
        """
    )
    check_source(source)


@pytest.mark.parametrize(("statement", "text"), TYPES, ids=[row[0] for row in TYPES])
def test_what_the_core_does_not_have_does_not_compile(
    statement: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    with pytest.raises(CompileError) as refused:
        compile_statement(statement, tmp_path)

    assert text in str(refused.value)


@pytest.mark.parametrize("statement", ALLOWED)
def test_what_the_core_has_compiles(statement: str, tmp_path: Path) -> None:
    compile_statement(statement, tmp_path)


def test_more_blocks_than_cores_are_refused() -> None:
    with configured(cores=40):
        result = launch(kernel("correct", "softmax_rows"), 41, np.zeros(64, np.float32), 0, 0)

    (violation,) = result.violations
    assert "block_dim is 41, expected 1 to 40: all blocks must be resident at once" in violation


def test_more_groups_than_cube_cores_are_refused() -> None:
    with configured(cores=6):
        result = launch(kernel("matmul", "half_straight"), 4, np.zeros(4, np.half), 0, 0, 1, 1, 1)

    (violation,) = result.violations
    assert "block_dim is 4, expected 1 to 3 cube cores: all blocks must be resident" in violation


def test_the_cores_of_a_deadlock_say_who_waits_where() -> None:
    first, second = sorted(run("groups", "someone_sets_first_broken").violations)
    assert "CrossCoreWaitFlag(0) waits for ever: core AIV 2 waits at groups.cpp:" in first
    assert "CrossCoreWaitFlag(1) waits for ever: core AIC 1 waits at groups.cpp:" in second


def test_select_needs_the_reserved_part_of_the_buffer() -> None:
    kept = kernel("vector", "select_mode_fits_its_source_kept")
    arguments = np.ones(1024, np.float32), update(np.zeros(1024, np.float32))
    with configured(ub_reserved=0):
        (violation,) = launch(kept, 1, *arguments).violations

    assert "ub-reserved: Select with a mask for each repeat needs the reserved 8 KB" in violation
    assert launch(kept, 1, *arguments).violations == ()


def test_a_turned_off_reserve_leaves_more_room() -> None:
    with configured(ub_reserved=0):
        assert run("queues", "ub_capacity_broken").violations == ()


def test_a_violation_is_counted_and_named_once() -> None:
    broken = kernel("order", "v_waits_for_mte2_broken")
    result = launch(broken, 3, np.ones(1024, np.float32), update(np.zeros(1024, np.float32)))

    (violation,) = result.violations
    assert violation.endswith("(96 times on 3 cores)")


def test_writing_next_to_a_tensor_is_reported_even_through_a_bare_pointer(tmp_path: Path) -> None:
    source = tmp_path / "bare.cpp"
    source.write_text(
        """
        #include "kernel_operator.h"
        extern "C" __global__ __aicore__ void bare(GM_ADDR out) {
          KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
          out[8] = 1;
        }
        """
    )
    result = launch(Kernel(source, "bare"), 1, write(np.zeros(2, np.float32), "out"))

    assert result.violations == ("launch core 0 red-zone: memory next to out was written",)


def test_a_core_that_gives_up_does_not_hang_the_others(tmp_path: Path) -> None:
    source = tmp_path / "gives_up.cpp"
    source.write_text(
        """
        #include "kernel_operator.h"
        extern "C" __global__ __aicore__ void gives_up() {
          KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
          AscendC::TPipe pipe;
          AscendC::TBuf<> buffer;
          if (AscendC::GetBlockIdx() == 1) pipe.InitBuffer(buffer, 1 << 20);
          AscendC::SyncAll();
        }
        """
    )
    (violation,) = launch(Kernel(source, "gives_up"), 4).violations

    assert "core 1 ub-capacity" in violation
