// What op_host hands to echo_arguments: plain data, the same bytes on host and device.
#pragma once

#include <cstdint>

// Its pointers are buffers of their own, each with room for the record of each core. There is more
// room than cores, since it's here that a wrong number of them is noticed.
constexpr int64_t kEchoBuffers = 4;
constexpr int64_t kEchoMostCores = 128;
constexpr int64_t kEchoWords = 16;  // of a record: two cache lines, which no other core writes

// The first word of a record.
constexpr int64_t kEchoMark = 0x5041474544303031;

struct EchoArgumentsTilingData {
  int64_t words[3];  // whatever the host likes
};
