// A weight matrix in the forms that a step multiplies with: groups for few rows, dense for many.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "kernels.h"

namespace blockhouse {

const Kernels& kernels_named(const std::string& id);

// y = x W^T without bias. Packed once, on the thread that will run it; read only afterwards.
class Linear : public torch::CustomClassHolder {
 public:
  Linear(const std::string& kernels_id, int64_t num_columns, int64_t depth);

  // weight: [num_columns, depth], any float type; packed for oneDNN in the activations' type.
  void set_dense(const at::Tensor& weight);

  // quants uint8, scales and mins float16 as in QuantSource. False, and no groups, where the packed
  // form does not cover this shape or these values.
  bool set_groups(const at::Tensor& quants, const at::Tensor& scales,
                  const std::optional<at::Tensor>& mins);

  // x: [rows, depth] activations -> [rows, num_columns], float where `out_float`.
  at::Tensor run(const at::Tensor& x, bool out_float) const;

  int64_t num_columns() const { return num_columns_; }
  int64_t depth() const { return depth_; }

 private:
  at::Tensor run_groups(const at::Tensor& x, bool out_float) const;
  at::Tensor run_dense(const at::Tensor& x, bool out_float) const;

  const Kernels& kernels_;
  int64_t num_columns_, depth_;
  at::Tensor dense_;
  bool dense_is_packed_ = false;
  QuantWeights groups_{};
  at::Tensor group_values_, group_scales_;
};

}  // namespace blockhouse
