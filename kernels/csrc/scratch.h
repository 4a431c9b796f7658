// Memory of a thread that is kept from call to call.
#pragma once

#include <cstdint>
#include <vector>

namespace blockhouse {

// A thread has one such memory for each use. Aligned for tiles and vectors; what it held before is
// lost, and what it holds now is anything.
enum class ScratchUse { kKernel, kPrepared };

template <ScratchUse use>
float* thread_scratch(int64_t floats) {
  constexpr size_t kAlign = 64;
  thread_local std::vector<float> kept;
  if (kept.size() < (size_t)floats + kAlign) kept.resize((size_t)floats + kAlign);
  const auto address = (uintptr_t)kept.data();
  return (float*)((address + kAlign - 1) / kAlign * kAlign);
}

}  // namespace blockhouse
