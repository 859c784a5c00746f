// Checked access to the unified buffer and to global memory.
#pragma once

#include "core.h"

namespace sim {

// The core's own memories. Usable reports a tensor that lies elsewhere than expected, or whose
// buffer may not be touched now. Inside reports an access outside the tensor. Touch records an
// access to bytes that are inside, reports missing order and uninitialised bytes, and never fails.
bool Usable(const Instruction& instruction, const LocalView& view, const char* role,
            Space expected = Space::kUb);
bool Inside(const Instruction& instruction, const LocalView& view, int64_t offset, int64_t bytes,
            const char* role);
bool Aligned(const Instruction& instruction, const LocalView& view, int64_t alignment,
             const char* role);
void TouchBlock(const Instruction& instruction, Space space, uint32_t block, uint32_t mask,
                bool write, const char* role);
void Touch(const Instruction& instruction, Space space, uint32_t addr, uint32_t bytes, bool write,
           const char* role);
// Records a write of one instruction that may not write any byte twice.
void TouchOnce(const Instruction& instruction, Space space, uint32_t addr, uint32_t bytes,
               const char* role);
void Poison(Core& core, Space space, uint32_t addr, uint32_t bytes);
// As Touch for reading, but garbage may be read: it stays garbage where it is copied to.
void TouchUnread(const Instruction& instruction, Space space, uint32_t addr, uint32_t bytes,
                 const char* role);
// Reports garbage among the bytes of a block that `mask` has.
void CheckInitialised(const Instruction& instruction, Space space, uint32_t block, uint32_t mask,
                      const char* role);

// Global memory. Reports accesses outside the tensor, of the wrong kind, without order or of bytes
// that hold garbage. Returns false where the memory may not be touched.
bool TouchGm(const Instruction& instruction, const GmView& view, int64_t offset, int64_t bytes,
             bool write);
void CleanLines(const Instruction& instruction, uint64_t address, bool whole_cache);
void ReportUncleaned(Core& core);
// The polled form of SyncAll needs a workspace of zeros.
void CheckSyncWorkspace(const Instruction& instruction, const GmView& view, int64_t bytes);
void StartGm();
void FinishGm();

}  // namespace sim
