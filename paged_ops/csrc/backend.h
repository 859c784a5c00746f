// A device is a table of functions.
//
// library.cpp reads the arguments of a call and checks them in the same way for all devices; what
// is left to a device is to run the call.
#pragma once

#include <vector>

#include "arguments/attention.h"
#include "arguments/copy_blocks.h"
#include "arguments/gather_kv.h"
#include "arguments/merge_states.h"
#include "arguments/write_kv.h"

namespace paged {

struct Backend {
  const char* name;  // in messages

  // Limits: a call beyond them is refused.
  bool takes_float8;
  bool takes_key_ranges;

  // Whether the values of lengths, tables, slots and mappings are checked on the host before a call
  // is run. If not, the functions below get empty ones, and nothing waits for the device.
  bool (*reads_values)();

  // Calls an op of torch's that is in place and changes nothing: it counts a version of `written`.
  void (*touch)(const Tensor& written);

  void (*attention)(const Checks& checks, const AttentionInputs& in, const AttentionShape& shape,
                    const AttentionValues& values);
  void (*write_kv)(const Checks& checks, const WriteKvInputs& in, const WriteKvShape& shape,
                   const std::vector<int64_t>& slots);
  void (*copy_blocks)(const Checks& checks, const CopyBlocksInputs& in,
                      const CopyBlocksShape& shape, const std::vector<int64_t>& pairs);
  void (*gather_kv)(const Checks& checks, const GatherKvInputs& in, const GatherKvParams& params);
  void (*merge_states)(const Checks& checks, const MergeStatesInputs& in,
                       const MergeStatesParams& params);
};

namespace cpu {
extern const Backend backend;
}
namespace npu {
extern const Backend backend;
}

}  // namespace paged
