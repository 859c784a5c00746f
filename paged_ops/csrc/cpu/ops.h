// The CPU implementation of each op: what backend.cpp calls once the arguments are checked.
#pragma once

#include "cpu/thread_pool.h"
#include "params.h"

namespace paged::cpu {

void attention(const AttentionParams& params, const ThreadPool& pool);
void write_kv(const WriteKvParams& params, const ThreadPool& pool);
void merge_states(const MergeStatesParams& params, const ThreadPool& pool);
void copy_blocks(const CopyBlocksParams& params, const ThreadPool& pool);
void gather_kv(const GatherKvParams& params, const ThreadPool& pool);

}  // namespace paged::cpu
