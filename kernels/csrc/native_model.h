// A decoder-only model of the Llama shape whose whole step is one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <string>
#include <vector>

#include "kernels.h"
#include "linear.h"

namespace blockhouse {

using LinearPtr = c10::intrusive_ptr<Linear>;

struct Layer {
  at::Tensor input_norm, post_norm;                    // [hidden] float
  at::Tensor qkv_bias, query_norm, key_norm;           // float, or undefined
  LinearPtr qkv, output, gate_up, down;
};

// The tensors of one step; see inference.runner.input_batch for shapes.
struct StepTensors {
  at::Tensor input_ids, positions, slot_mapping, block_tables, seq_lens, query_start_loc;
  at::Tensor logits_indices;
};

// Memory of a step's intermediate tensors, kept from step to step and grown when a step is larger.
class Workspace {
 public:
  enum Slot { kResidual, kNormed, kQkv, kAttended, kDelta, kGateUp, kGated, kLogits, kNumSlots };

  // [rows, columns]; what the slot gave before is overwritten.
  at::Tensor take(Slot slot, int64_t rows, int64_t columns, at::ScalarType dtype);

 private:
  at::Tensor memory_[kNumSlots];
};

class NativeModel : public torch::CustomClassHolder {
 public:
  // embedding: [vocab, hidden] bf16; cos_sin: [max_position, head_dim] float; caches:
  // [layers, blocks, block_size, kv_heads, head_dim] bf16, contiguous, written by forward; or int8
  // with scales [layers, blocks, block_size, kv_heads] float.
  NativeModel(const std::string& kernels_id, int64_t num_heads, double eps, double scale,
              at::Tensor embedding, at::Tensor final_norm, at::Tensor cos_sin, LinearPtr lm_head,
              at::Tensor key_cache, at::Tensor value_cache, std::optional<at::Tensor> key_scales,
              std::optional<at::Tensor> value_scales);

  void add_layer(at::Tensor input_norm, at::Tensor post_norm, LinearPtr qkv, LinearPtr output,
                 LinearPtr gate_up, LinearPtr down, std::optional<at::Tensor> qkv_bias,
                 std::optional<at::Tensor> query_norm, std::optional<at::Tensor> key_norm);

  // [samples, vocab] float.
  at::Tensor forward(at::Tensor input_ids, at::Tensor positions, at::Tensor slot_mapping,
                     at::Tensor block_tables, at::Tensor seq_lens, at::Tensor query_start_loc,
                     at::Tensor logits_indices);

 private:
  struct Scales {
    float* key;
    float* value;
  };

  // One layer's, or nulls.
  Scales scales_of(int64_t layer) const;
  void check_step(const StepTensors& step) const;
  at::Tensor embed(const at::Tensor& input_ids);
  // `rows` of residual + delta, or all where it is undefined.
  at::Tensor norm(const at::Tensor& residual, const at::Tensor& delta, const at::Tensor& weight,
                  const at::Tensor& rows);
  void rope_and_write(const at::Tensor& qkv, const StepTensors& step, int64_t layer) const;
  at::Tensor attend(const at::Tensor& qkv, const StepTensors& step, int64_t layer);
  at::Tensor silu_and_mul(const at::Tensor& gate_up);
  at::Tensor activations(Workspace::Slot slot, int64_t rows, int64_t columns);
  at::Tensor linear(const Linear& weights, const at::Tensor& x, Workspace::Slot slot, int64_t few);
  static int64_t num_few_rows(const StepTensors& step);

  const Kernels& kernels_;
  int64_t num_heads_, num_kv_heads_, head_dim_, hidden_, block_size_;
  float eps_, scale_;
  at::Tensor embedding_, final_norm_, cos_sin_, key_cache_, value_cache_;
  at::Tensor key_scales_, value_scales_;  // undefined: the caches are bf16
  LinearPtr lm_head_;
  std::vector<Layer> layers_;
  Workspace workspace_;
};

}  // namespace blockhouse
