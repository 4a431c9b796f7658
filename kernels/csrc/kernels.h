// Seam between the step, which knows torch, and the kernels, which are compiled once for each
// instruction set. Kernels are plain single-threaded functions over a range of work; the step
// shares ranges out to threads.
//
// NOTE: files compiled for an instruction set include no torch header and no standard container:
// the linker could keep their copy of a shared inline function and run it on a lesser processor.
#pragma once

#include <cstdint>

namespace blockhouse {

struct bf16 {
  uint16_t bits;
};

// A single row's context is read in pieces of this many tokens, whatever the batch is, so that its
// result does not depend on its neighbours (split-KV, as Flash-Decoding does).
constexpr int64_t kSplitTokens = 256;

// Up to so many rows multiply with quantised numbers themselves, scales coming after: exact, and the
// same whatever stands beside a row. What more rows take is each set's own.
constexpr int64_t kFewRows = 32;

// Activations are bf16 or float, as Kernels::bf16_activations says; `void*` below is one of these.

struct NormArgs {
  float* residual;        // [tokens, hidden], becomes residual + delta
  const void* delta;      // [tokens, hidden] activations, or null
  const float* weight;    // [hidden]
  const int64_t* rows;    // rows of residual and delta to take, or null for row i itself
  void* out;              // [rows, hidden] activations
  int64_t hidden;
  float eps;
};

struct RopeArgs {
  void* qkv;                // [tokens, (heads + 2 kv_heads) * head_dim] activations; q is rotated in place
  const float* bias;        // [(heads + 2 kv_heads) * head_dim] added first, or null
  const float* query_norm;  // [head_dim] RMSNorm weight before the rotation, or null
  const float* key_norm;
  const float* cos_sin;     // [max_position, head_dim]: cosines, then sines
  const int64_t* positions; // [tokens]
  const int64_t* slots;     // [tokens]; a negative slot is padding and is not written
  void* key_cache;          // [slots, kv_heads, head_dim] bf16, or int8 with scales
  void* value_cache;
  float* key_scales;        // [slots, kv_heads]; null: the caches are bf16
  float* value_scales;
  int64_t num_slots;
  int64_t num_heads, num_kv_heads, head_dim;
  float eps;
};

struct AttentionArgs {
  const void* query;      // row t, head h at t * query_stride + h * head_dim
  int64_t query_stride;
  const void* key_cache;  // [blocks, block_size, kv_heads, head_dim] bf16, or int8 with scales
  const void* value_cache;
  const float* key_scales;  // [blocks, block_size, kv_heads]; null: the caches are bf16
  const float* value_scales;
  const int32_t* block_tables;  // [requests, table_stride]
  int64_t table_stride;
  int64_t block_size, num_heads, num_kv_heads, head_dim;
  float scale;
  void* out;  // [tokens, heads * head_dim] activations
};

// One piece of a step's attention: consecutive new tokens of a request, some of its kv heads.
struct AttentionItem {
  int64_t request;
  int64_t first_row, num_rows;
  int64_t first_position;  // of first_row; row r sees keys up to first_position + r
  int64_t kv_head_begin, kv_head_end;
  // For one row: the part of the context to read. Several rows always read their whole context.
  int64_t context_begin, context_end;
  // For one row: [heads, head_dim + 2] weighted sum, maximum (of log2 scores), sum of weights; only
  // this item's heads are written. Null writes the finished row to `out`.
  float* partial;
};

// Weights as tiles of columns. 4 and 8 bits: in groups of 32 along k, w = scale * q + min, or
// scale * (q - centre) without a min, where the centre is 8 for 4 bits and 128 for 8 bits; 8 bits
// have no min. 16 bits: plain bf16. Super-blocks: GGUF's Q4_K, Q5_K and Q6_K, told apart by 4, 5 or 6
// bits; groups of 32 (16 for 6 bits, with centre 32) share an fp16 scale for each 256 numbers. See
// quant_*.h for each packed layout.
struct QuantWeights {
  int64_t num_columns, depth;  // n, k
  int bits;                    // 4, 5, 6, 8 or 16
  bool has_min;
  bool super_blocks;
  uint8_t* values;
  uint16_t* scales;            // fp16; none for 16 bits
};

// Source of a pack: rows of `num_columns`, as in the checkpoint's side file.
struct QuantSource {
  // 4 bits: [n, k/2], even k in the low nibble; 8 bits: [n, k], q + 128; 16 bits: [n, k] bf16;
  // super-blocks: [n, k/256] blocks as GGUF has them, scales included
  const uint8_t* quants;
  const uint16_t* scales;  // [n, k/32] fp16; null for super-blocks
  const uint16_t* mins;    // [n, k/32] fp16, or null
};

struct QuantLinearArgs {
  QuantWeights weights;
  const void* input;   // [rows, depth] activations
  float* prepared;     // what QuantKernels::prepare makes of `input`
  void* out;           // rows out_stride apart: activations, or float where out_float
  int64_t out_stride;
  bool out_float;
  int64_t num_rows;
  bool as_many;  // few rows too take the form that many rows take, and so round as they do
};

// One packed form of weights and what multiplies with it.
struct QuantKernels {
  int64_t tile_columns;  // columns of one unit of work; num_columns is a multiple
  int64_t row_limit;     // with more rows than this dense weights are faster
  // Bytes of packed values and count of packed fp16 scales.
  void (*sizes)(const QuantWeights&, int64_t* value_bytes, int64_t* num_scales);
  // False where the source holds a value that the packed form cannot (8 bits: q = -128).
  bool (*pack)(const QuantSource&, const QuantWeights&);
  // Floats of `prepared`, and of the scratch of one call of `linear`.
  int64_t (*prepared_size)(const QuantLinearArgs&);
  int64_t (*scratch_size)(const QuantLinearArgs&);
  // For rows 16 * begin to 16 * end; before `linear`.
  void (*prepare)(const QuantLinearArgs&, int64_t begin, int64_t end);
  void (*linear)(const QuantLinearArgs&, float* scratch, int64_t tile_begin, int64_t tile_end);
};

struct Kernels {
  const char* id;     // what a caller names: "avx512"
  const char* title;  // for people: "AVX-512 BF16"
  bool bf16_activations;

  void (*embed)(const bf16* table, const int64_t* ids, float* out, int64_t hidden, int64_t begin,
                int64_t end);
  void (*add_rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*rope_and_write)(const RopeArgs&, int64_t begin, int64_t end);
  // gate_up: [rows, 2 * width]; out: [rows, width]
  void (*silu_and_mul)(const void* gate_up, void* out, int64_t width, int64_t begin, int64_t end);

  int64_t (*query_rows)(const AttentionArgs&);         // most rows that an item may have
  int64_t (*attention_scratch)(const AttentionArgs&);  // floats that `attend` needs
  void (*attend)(const AttentionArgs&, const AttentionItem&, float* scratch);
  // Joins the partial results of one row: [splits, heads, head_dim + 2] into out row.
  void (*combine)(const AttentionArgs&, const float* partial, int64_t splits, int64_t row);

  QuantKernels groups;        // groups of 32, and 16 bits where packs_dense
  QuantKernels super_blocks;  // GGUF's K formats
  bool packs_dense;           // whether 16-bit weights can be packed
};

// The named kernels, or null where this build or this processor lacks them.
const Kernels* find_kernels(const char* id);

// Ids from best to worst, null-terminated.
const char* const* kernel_ids();

}  // namespace blockhouse
