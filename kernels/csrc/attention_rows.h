// Paged attention of single query rows (arXiv:2309.06180) with an online softmax in base 2
// (arXiv:1805.02867). The cache is walked once, block by block over all kv heads of the item, so
// that memory is read in the order it lies in.
#pragma once

#include "attention_run.h"

namespace blockhouse {
namespace {

int64_t attention_scratch_rows(const AttentionArgs& args) {
  return args.num_heads * (args.head_dim + 2);
}

void start_heads(int64_t heads, int64_t dim, float* acc, float* maximum, float* sum) {
  for (int64_t i = 0; i < heads * dim; i++) acc[i] = 0.0f;
  for (int64_t h = 0; h < heads; h++) {
    maximum[h] = -__builtin_inff();
    sum[h] = 0.0f;
  }
}

// Where the next tokens of a context will be read: the run after `position`, or null at the end.
BH_INLINE int64_t block_offset(const AttentionArgs& args, const int32_t* table, int64_t position) {
  const int64_t slot = (int64_t)table[position / args.block_size] * args.block_size +
                       position % args.block_size;
  return slot * args.num_kv_heads * args.head_dim;
}

template <class Kv>
BH_INLINE Run<Kv> run_at(const AttentionArgs& args, int64_t offset, int64_t next_offset,
                         int64_t kv) {
  const int64_t dim = args.head_dim, place = offset + kv * dim, next = next_offset + kv * dim;
  Run<Kv> run;
  run.keys = (const Kv*)args.key_cache + place;
  run.values = (const Kv*)args.value_cache + place;
  run.next_keys = (const Kv*)args.key_cache + next;
  run.next_values = (const Kv*)args.value_cache + next;
  run.key_scales = sizeof(Kv) == 1 ? args.key_scales + place / dim : nullptr;
  run.value_scales = sizeof(Kv) == 1 ? args.value_scales + place / dim : nullptr;
  run.token_stride = args.num_kv_heads * dim;
  run.scale_stride = args.num_kv_heads;
  run.group = args.num_heads / args.num_kv_heads;
  run.head_dim = dim;
  run.scale = args.scale * kLog2E;
  return run;
}

BH_INLINE int64_t run_length(const AttentionArgs& args, int64_t position, int64_t end) {
  int64_t tokens = args.block_size - position % args.block_size;
  if (tokens > kMaxRunTokens) tokens = kMaxRunTokens;
  return tokens < end - position ? tokens : end - position;
}

template <class Kv>
void attend_row(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  const int64_t row = item.first_row, context_end = item.context_end;
  const int64_t dim = args.head_dim, group = args.num_heads / args.num_kv_heads;
  const int64_t first_head = item.kv_head_begin * group;
  const int64_t heads = (item.kv_head_end - item.kv_head_begin) * group;
  const int32_t* table = args.block_tables + item.request * args.table_stride;
  const Act* query = (const Act*)args.query + row * args.query_stride;
  float* acc = scratch;
  float* maximum = acc + heads * dim;
  float* sum = maximum + heads;
  start_heads(heads, dim, acc, maximum, sum);

  int64_t position = item.context_begin;
  while (position < context_end) {
    const int64_t tokens = run_length(args, position, context_end);
    const int64_t offset = block_offset(args, table, position);
    const int64_t next = position + tokens;
    const int64_t next_offset = next < context_end ? block_offset(args, table, next) : offset;
    for (int64_t kv = item.kv_head_begin; kv < item.kv_head_end; kv++) {
      const int64_t head = (kv - item.kv_head_begin) * group;
      Run<Kv> run = run_at<Kv>(args, offset, next_offset, kv);
      run.query = query + kv * group * dim;
      run.tokens = tokens;
      attend_run_any(run, acc + head * dim, maximum + head, sum + head);
    }
    position = next;
  }

  for (int64_t h = 0; h < heads; h++) {
    if (item.partial) {
      float* part = item.partial + (first_head + h) * (dim + 2);
      store_sum_any(acc + h * dim, dim, 1.0f, part);
      part[dim] = maximum[h];
      part[dim + 1] = sum[h];
    } else {
      Act* out = (Act*)args.out + (row * args.num_heads + first_head + h) * dim;
      store_sum_any(acc + h * dim, dim, 1.0f / sum[h], out);
    }
  }
}

// A single row; the including file's own.
void attend_one_row(const AttentionArgs& args, const AttentionItem& item, float* scratch);

}  // namespace
}  // namespace blockhouse
