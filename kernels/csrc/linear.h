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

  // weight: [num_columns, depth], any float type; packed in the activations' type, by the kernels
  // where they can, else by oneDNN.
  void set_dense(const at::Tensor& weight);

  // quants uint8, scales and mins float16 as in QuantSource. False, and no groups, where the packed
  // form does not cover this shape or these values.
  bool set_groups(const at::Tensor& quants, const at::Tensor& scales,
                  const std::optional<at::Tensor>& mins);

  // x: [rows, depth] activations -> [rows, num_columns], float where `out_float`.
  at::Tensor run(const at::Tensor& x, bool out_float) const;

  // The same into `out` [rows, num_columns], float or activations; returns `out`, or another tensor
  // where oneDNN made one. `as_many`: round as with many rows, however few there are.
  at::Tensor run_into(const at::Tensor& x, const at::Tensor& out, bool as_many = false) const;

  // Whether groups alone serve any number of rows, so that the dense weights need not be kept.
  bool groups_suffice() const;

  int64_t num_columns() const { return num_columns_; }
  int64_t depth() const { return depth_; }

 private:
  struct Pack {
    QuantWeights weights{};
    at::Tensor values, scales;
    explicit operator bool() const { return weights.values != nullptr; }
  };

  Pack new_pack(int bits, bool has_min) const;
  void run_pack(const Pack& pack, const at::Tensor& x, const at::Tensor& out, bool as_many) const;
  at::Tensor run_dense(const at::Tensor& x, bool out_float) const;

  const Kernels& kernels_;
  int64_t num_columns_, depth_;
  Pack groups_, tiles_;           // tiles_: the dense weights in the kernels' own form
  at::Tensor dense_;              // else: in oneDNN's form, or as they are
  bool dense_is_packed_ = false;
};

}  // namespace blockhouse
