// A weight matrix in the forms that a step multiplies with: groups for few rows, dense for many.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <vector>

#include "kernels.h"

namespace blockhouse {

const Kernels& kernels_named(const std::string& id);

// y = x W^T without bias. Packed once, on the thread that will run it; read only afterwards.
class Linear : public torch::CustomClassHolder {
 public:
  Linear(const std::string& kernels_id, int64_t num_columns, int64_t depth);

  // weight: [num_columns, depth], any float type. Packed by the kernels where they can without loss
  // (kernels with bf16 activations round), else by oneDNN in the activations' type.
  void set_dense(const at::Tensor& weight);

  // Each call adds the next columns; a stack of matrices may be quantised in different ways. False,
  // and no groups at all, where the packed form does not cover this shape or these values.
  // quants uint8, scales and mins float16 as in QuantSource.
  bool add_groups(const at::Tensor& quants, const at::Tensor& scales,
                  const std::optional<at::Tensor>& mins);

  // The same for GGUF's K formats. blocks: [columns, bytes of a row's blocks] uint8; bits 4, 5, 6.
  bool add_super_blocks(const at::Tensor& blocks, int64_t bits);

  // x: [rows, depth] activations -> [rows, num_columns], float where `out_float`.
  at::Tensor run(const at::Tensor& x, bool out_float) const;

  // The same into `out` [rows, num_columns], float or activations; returns `out`, or another tensor
  // where oneDNN made one. `as_many`: round as with many rows, however few there are.
  at::Tensor run_into(const at::Tensor& x, const at::Tensor& out, bool as_many = false) const;

  bool has_groups() const { return grouped_columns_ == num_columns_; }

  // Whether groups alone serve any number of rows, so that the dense weights need not be kept.
  bool groups_suffice() const;

  // Whether some steps multiply in torch, on its threads.
  bool calls_torch() const { return dense_.defined(); }

  int64_t num_columns() const { return num_columns_; }
  int64_t depth() const { return depth_; }

 private:
  // Packed columns from `first_column` on.
  struct Pack {
    const QuantKernels* kernels = nullptr;
    QuantWeights weights{};
    int64_t first_column = 0;
    at::Tensor values, scales;
  };

  Pack new_pack(const QuantKernels& kernels, int64_t columns, int bits, bool has_min) const;
  bool add_pack(const QuantSource& source, Pack pack);
  void run_packs(const std::vector<Pack>& packs, const at::Tensor& x, const at::Tensor& out,
                 bool as_many) const;
  at::Tensor run_dense(const at::Tensor& x, bool out_float) const;

  const Kernels& kernels_;
  int64_t num_columns_, depth_;
  std::vector<Pack> groups_, tiles_;  // tiles_: the dense weights in the kernels' own form
  int64_t grouped_columns_ = 0;
  bool declined_ = false;             // a part of the groups is not covered
  at::Tensor dense_;                  // else: in oneDNN's form, or as they are
  bool dense_is_packed_ = false;
};

}  // namespace blockhouse
