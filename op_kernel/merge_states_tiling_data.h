// What op_host decides for merge_states: plain data, the same bytes on host and device.
#pragma once

#include <cstdint>

#include "layout.h"

struct MergeStatesTilingData {
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  RowLayout out_a;
  RowLayout out_b;
  RowLayout out;
  RowLayout lse_a;  // strides of lse_a and lse_b in floats
  RowLayout lse_b;
};
