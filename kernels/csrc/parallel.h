// Shares a range of work out to threads that take pieces as they come.
//
// The caller takes pieces too and waits only for those that a helper has begun: where another
// process has a helper's core, the caller does the work itself instead of standing at a barrier.
// Idle helpers sleep after some tens of microseconds and leave their core to the web server.
#pragma once

#include <cstdint>

namespace blockhouse {

using RangeFunction = void (*)(const void* context, int64_t begin, int64_t end);

// Runs function(context, begin, end) over pieces of `piece` that cover [0, count), on num_threads(). A call from a second thread at the same time runs on that thread alone.
void run_pieces(int64_t count, int64_t piece, RangeFunction function, const void* context);

// The number of threads that take part: as set here, else as torch is set to.
int64_t num_threads();
void set_num_threads(int64_t count);

// As run_pieces, for anything that is called with (begin, end).
template <class Function>
void share_pieces(int64_t count, int64_t piece, const Function& function) {
  run_pieces(
      count, piece,
      [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const Function*>(context))(begin, end);
      },
      &function);
}

// In pieces of a multiple of `least`, some for each thread.
template <class Function>
void share_range(int64_t count, int64_t least, const Function& function) {
  constexpr int64_t kPiecesPerThread = 4;
  const int64_t pieces = num_threads() * kPiecesPerThread * least;
  share_pieces(count, (count + pieces - 1) / pieces * least, function);
}

}  // namespace blockhouse
