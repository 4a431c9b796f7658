#include "linear.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include <limits>

#include "parallel.h"
#include "scratch.h"

namespace blockhouse {
namespace {

using PackOp = at::Tensor(const at::Tensor&, std::optional<c10::SymInt>);
using LinearOp = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            std::string_view, c10::List<std::optional<at::Scalar>>,
                            std::optional<std::string_view>);

template <class Op>
const c10::TypedOperatorHandle<Op>* find_op(const char* name) {
  static const auto found = [name]() -> std::optional<c10::TypedOperatorHandle<Op>> {
    auto handle = c10::Dispatcher::singleton().findSchema({name, ""});
    if (!handle) return std::nullopt;
    return handle->template typed<Op>();
  }();
  return found ? &*found : nullptr;
}

// Rows that the dense pack is laid out for.
constexpr int64_t kPackRows = 16;

// Tiles of columns that are worth a thread's while; even, as kernels may take two at a time.
constexpr int64_t kLeastTiles = 4;

}  // namespace

const Kernels& kernels_named(const std::string& id) {
  const Kernels* kernels = find_kernels(id.c_str());
  TORCH_CHECK(kernels, "no kernels named ", id, " on this processor");
  return *kernels;
}

Linear::Linear(const std::string& kernels_id, int64_t num_columns, int64_t depth)
    : kernels_(kernels_named(kernels_id)), num_columns_(num_columns), depth_(depth) {}

void Linear::set_dense(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.size(0) == num_columns_ && weight.size(1) == depth_,
              "weight is ", weight.sizes(), ", expected [", num_columns_, ", ", depth_, "]");
  const auto dtype = kernels_.bf16_activations ? at::kBFloat16 : at::kFloat;
  at::Tensor plain = weight.to(dtype).contiguous();
  if (kernels_.packs_dense && depth_ % 32 == 0 && num_columns_ % kernels_.tile_columns == 0) {
    tiles_ = new_pack(16, false);
    kernels_.quant_pack({(const uint8_t*)plain.const_data_ptr(), nullptr, nullptr},
                        tiles_.weights);
    return;
  }
  const auto* pack = find_op<PackOp>("mkldnn::_reorder_linear_weight");
  const bool can_run = find_op<LinearOp>("mkldnn::_linear_pointwise") != nullptr;
  dense_is_packed_ = pack && can_run;
  dense_ = dense_is_packed_ ? pack->call(plain, c10::SymInt(kPackRows)) : plain;
}

bool Linear::set_groups(const at::Tensor& quants, const at::Tensor& scales,
                        const std::optional<at::Tensor>& mins) {
  const bool four = quants.size(1) * 2 == depth_;
  const bool covered = depth_ % 32 == 0 && num_columns_ % kernels_.tile_columns == 0 &&
                       (four || quants.size(1) == depth_) && !(mins && !four);
  if (!covered) return false;
  const at::Tensor plain_quants = quants.contiguous(), plain_scales = scales.contiguous();
  const at::Tensor plain_mins = mins ? mins->contiguous() : at::Tensor();
  TORCH_CHECK(plain_quants.scalar_type() == at::kByte && plain_scales.scalar_type() == at::kHalf &&
                  (!mins || plain_mins.scalar_type() == at::kHalf),
              "groups are uint8 values with float16 scales and mins");
  TORCH_CHECK(plain_quants.size(0) == num_columns_ &&
                  plain_scales.numel() == num_columns_ * depth_ / 32 &&
                  (!mins || plain_mins.numel() == plain_scales.numel()),
              "groups do not match a weight of [", num_columns_, ", ", depth_, "]");

  QuantSource source{plain_quants.const_data_ptr<uint8_t>(),
                     (const uint16_t*)plain_scales.const_data_ptr(),
                     mins ? (const uint16_t*)plain_mins.const_data_ptr() : nullptr};
  Pack pack = new_pack(four ? 4 : 8, mins.has_value());
  if (!kernels_.quant_pack(source, pack.weights)) return false;
  groups_ = pack;
  return true;
}

bool Linear::groups_suffice() const {
  return groups_ && kernels_.quant_row_limit == std::numeric_limits<int64_t>::max();
}

Linear::Pack Linear::new_pack(int bits, bool has_min) const {
  Pack pack;
  pack.weights.num_columns = num_columns_;
  pack.weights.depth = depth_;
  pack.weights.bits = bits;
  pack.weights.has_min = has_min;
  int64_t value_bytes = 0, num_scales = 0;
  kernels_.quant_sizes(pack.weights, &value_bytes, &num_scales);
  pack.values = at::empty({value_bytes}, at::kByte);
  pack.scales = at::empty({num_scales}, at::kHalf);
  pack.weights.values = pack.values.data_ptr<uint8_t>();
  pack.weights.scales = (uint16_t*)pack.scales.data_ptr();
  return pack;
}

at::Tensor Linear::run(const at::Tensor& x, bool out_float) const {
  const auto dtype = out_float || !kernels_.bf16_activations ? at::kFloat : at::kBFloat16;
  return run_into(x, at::empty({x.size(0), num_columns_}, dtype));
}

at::Tensor Linear::run_into(const at::Tensor& x, const at::Tensor& out, bool as_many) const {
  const bool has_dense = tiles_ || dense_.defined();
  TORCH_CHECK(has_dense || groups_, "a linear without weights");
  const bool is_few = x.size(0) <= kernels_.quant_row_limit && !as_many;
  const bool by_groups = groups_ && (is_few || !has_dense);
  if (!by_groups && !tiles_) return run_dense(x, out.scalar_type() == at::kFloat);
  run_pack(by_groups ? groups_ : tiles_, x, out, as_many);
  return out;
}

void Linear::run_pack(const Pack& pack, const at::Tensor& x, const at::Tensor& out,
                      bool as_many) const {
  const int64_t rows = x.size(0);
  QuantLinearArgs args{};
  args.weights = pack.weights;
  args.input = x.const_data_ptr();
  args.out = out.data_ptr();
  args.out_float = out.scalar_type() == at::kFloat;
  args.num_rows = rows;
  args.as_many = as_many;
  args.prepared = thread_scratch<ScratchUse::kPrepared>(kernels_.quant_prepared_size(args));
  share_range((rows + 15) / 16, 4, [&](int64_t begin, int64_t end) {
    kernels_.quant_prepare(args, begin, end);
  });
  const int64_t scratch = kernels_.quant_scratch_size(args);
  share_range(num_columns_ / kernels_.tile_columns, kLeastTiles, [&](int64_t begin, int64_t end) {
    kernels_.quant_linear(args, thread_scratch<ScratchUse::kKernel>(scratch), begin, end);
  });
}

at::Tensor Linear::run_dense(const at::Tensor& x, bool out_float) const {
  at::Tensor out;
  if (dense_is_packed_) {
    static const c10::List<std::optional<at::Scalar>> none;
    out = find_op<LinearOp>("mkldnn::_linear_pointwise")
              ->call(x, dense_, std::nullopt, "none", none, "");
  } else {
    out = at::linear(x, dense_);
  }
  return out_float ? out.to(at::kFloat) : out;
}

}  // namespace blockhouse
