#include "parallel.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace blockhouse {
namespace {

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

struct Job {
  RangeFunction function;
  const void* context;
  int64_t count, piece;
  alignas(64) std::atomic<int64_t> next{0};

  void work() {
    for (int64_t begin = next.fetch_add(piece); begin < count; begin = next.fetch_add(piece))
      function(context, begin, std::min(begin + piece, count));
  }
};

class Pool {
 public:
  explicit Pool(int64_t helpers) {
    for (int64_t i = 0; i < helpers; i++) threads_.emplace_back([this] { help(); });
  }

  ~Pool() {
    stopping_ = true;
    wake();
    for (std::thread& thread : threads_) thread.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int64_t helpers() const { return (int64_t)threads_.size(); }

  // A helper counts itself as inside before it looks for the job, and the caller takes the job away
  // before it looks whether anyone is inside: so no helper touches a job that has ended.
  void run(Job& job) {
    job_ = &job;
    wake();
    job.work();
    job_ = nullptr;
    for (int spins = 0; inside_ != 0; spins++) {
      if (spins < kSpins)
        pause();
      else
        std::this_thread::yield();
    }
  }

 private:
  // Some tens of microseconds: longer than the gaps within a step, shorter than those between.
  static constexpr int kSpins = 1500;

  void wake() {
    generation_++;
    if (sleeping_ != 0) generation_.notify_all();
  }

  void help() {
    uint32_t seen = 0;
    while (!stopping_) {
      wait_past(seen);
      seen = generation_;
      inside_++;
      if (Job* job = job_.load()) job->work();
      inside_--;
    }
  }

  void wait_past(uint32_t seen) {
    for (int spins = 0; spins < kSpins; spins++) {
      if (generation_ != seen) return;
      pause();
    }
    sleeping_++;
    generation_.wait(seen);
    sleeping_--;
  }

  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<Job*> job_{nullptr};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int64_t> inside_{0};
  alignas(64) std::atomic<int64_t> sleeping_{0};
  std::vector<std::thread> threads_;
};

// Held while a caller uses the pool.
std::mutex pool_mutex;

// 0: as torch is set to.
std::atomic<int64_t> threads_set{0};

Pool& pool_of(int64_t helpers) {
  static std::unique_ptr<Pool> pool;
  if (!pool || pool->helpers() != helpers) {
    pool.reset();
    pool = std::make_unique<Pool>(helpers);
  }
  return *pool;
}

}  // namespace

int64_t num_threads() {
  const int64_t set = threads_set;
  return set ? set : at::get_num_threads();
}

void set_num_threads(int64_t count) { threads_set = count; }

void run_pieces(int64_t count, int64_t piece, RangeFunction function, const void* context) {
  const int64_t helpers = num_threads() - 1;
  if (count <= 0) return;
  std::unique_lock<std::mutex> lock(pool_mutex, std::defer_lock);
  if (count <= piece || helpers == 0 || !lock.try_lock()) {
    function(context, 0, count);
    return;
  }
  Job job{function, context, count, piece};
  pool_of(helpers).run(job);
}

}  // namespace blockhouse
