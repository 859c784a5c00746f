// What the entry points of attention take, in the order of their parameters.
#pragma once

#include "kernel_operator.h"

struct AttentionTensors {
  GM_ADDR query;
  GM_ADDR key_cache;
  GM_ADDR value_cache;
  GM_ADDR block_tables;
  GM_ADDR seq_lens;
  GM_ADDR query_start_loc;
  GM_ADDR alibi_slopes;
  GM_ADDR sinks;
  GM_ADDR key_scale;
  GM_ADDR value_scale;
  GM_ADDR tree_mask;
  GM_ADDR output;
  GM_ADDR lse;
  GM_ADDR workspace;
};
