#include "linear.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>

#include <algorithm>
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

// Columns that are worth a thread's while; whole pairs of tiles, as kernels may take two at a time.
constexpr int64_t kLeastColumns = 64;

// Whether rounding to bf16 lost nothing.
bool is_same(const at::Tensor& halves, const at::Tensor& weight) {
  return weight.scalar_type() == at::kBFloat16 ||
         at::equal(halves.to(at::kDouble), weight.to(at::kDouble));
}

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
  const QuantKernels& packed = kernels_.groups;
  if (kernels_.packs_dense && depth_ % 32 == 0 && num_columns_ % packed.tile_columns == 0) {
    const at::Tensor halves = weight.to(at::kBFloat16).contiguous();
    if (kernels_.bf16_activations || is_same(halves, weight)) {
      Pack pack = new_pack(packed, num_columns_, 16, false);
      packed.pack({(const uint8_t*)halves.const_data_ptr(), nullptr, nullptr}, pack.weights);
      tiles_.push_back(std::move(pack));
      return;
    }
  }
  const auto dtype = kernels_.bf16_activations ? at::kBFloat16 : at::kFloat;
  const at::Tensor plain = weight.to(dtype).contiguous();
  const auto* pack = find_op<PackOp>("mkldnn::_reorder_linear_weight");
  const bool can_run = find_op<LinearOp>("mkldnn::_linear_pointwise") != nullptr;
  dense_is_packed_ = pack && can_run;
  dense_ = dense_is_packed_ ? pack->call(plain, c10::SymInt(kPackRows)) : plain;
}

bool Linear::add_groups(const at::Tensor& quants, const at::Tensor& scales,
                        const std::optional<at::Tensor>& mins) {
  const int64_t columns = quants.size(0);
  const bool four = quants.size(1) * 2 == depth_;
  const bool covered = depth_ % 32 == 0 && (four || quants.size(1) == depth_) && !(mins && !four);
  if (!covered) declined_ = true;
  if (declined_) return false;
  const at::Tensor plain_quants = quants.contiguous(), plain_scales = scales.contiguous();
  const at::Tensor plain_mins = mins ? mins->contiguous() : at::Tensor();
  TORCH_CHECK(plain_quants.scalar_type() == at::kByte && plain_scales.scalar_type() == at::kHalf &&
                  (!mins || plain_mins.scalar_type() == at::kHalf),
              "groups are uint8 values with float16 scales and mins");
  TORCH_CHECK(grouped_columns_ + columns <= num_columns_ &&
                  plain_scales.numel() == columns * depth_ / 32 &&
                  (!mins || plain_mins.numel() == plain_scales.numel()),
              "groups do not match a weight of [", num_columns_, ", ", depth_, "]");
  const QuantSource source{plain_quants.const_data_ptr<uint8_t>(),
                           (const uint16_t*)plain_scales.const_data_ptr(),
                           mins ? (const uint16_t*)plain_mins.const_data_ptr() : nullptr};
  return add_pack(source, new_pack(kernels_.groups, columns, four ? 4 : 8, mins.has_value()));
}

bool Linear::add_super_blocks(const at::Tensor& blocks, int64_t bits) {
  constexpr int64_t kSuperBlock = 256;
  const int64_t columns = blocks.size(0);
  const int64_t block_bytes = bits == 4 ? 144 : bits == 5 ? 176 : 210;
  TORCH_CHECK(bits >= 4 && bits <= 6, "super-blocks have 4, 5 or 6 bits, not ", bits);
  TORCH_CHECK(blocks.dim() == 2 && blocks.scalar_type() == at::kByte &&
                  depth_ % kSuperBlock == 0 && grouped_columns_ + columns <= num_columns_ &&
                  blocks.size(1) == depth_ / kSuperBlock * block_bytes,
              "blocks do not match a weight of [", num_columns_, ", ", depth_, "]");
  if (declined_) return false;
  const at::Tensor plain = blocks.contiguous();
  Pack pack = new_pack(kernels_.super_blocks, columns, (int)bits, bits != 6);
  return add_pack({plain.const_data_ptr<uint8_t>(), nullptr, nullptr}, std::move(pack));
}

// Allocates and packs, unless the columns are no whole tiles.
bool Linear::add_pack(const QuantSource& source, Pack pack) {
  declined_ = !pack.values.defined() || !pack.kernels->pack(source, pack.weights);
  if (declined_) {
    groups_.clear();
    grouped_columns_ = 0;
    return false;
  }
  pack.first_column = grouped_columns_;
  grouped_columns_ += pack.weights.num_columns;
  groups_.push_back(std::move(pack));
  return true;
}

bool Linear::groups_suffice() const {
  if (!has_groups()) return false;
  return std::all_of(groups_.begin(), groups_.end(), [](const Pack& pack) {
    return pack.kernels->row_limit == std::numeric_limits<int64_t>::max();
  });
}

// Without memory where the columns are no whole tiles.
Linear::Pack Linear::new_pack(const QuantKernels& kernels, int64_t columns, int bits,
                              bool has_min) const {
  Pack pack;
  pack.kernels = &kernels;
  pack.weights.num_columns = columns;
  pack.weights.depth = depth_;
  pack.weights.bits = bits;
  pack.weights.has_min = has_min;
  pack.weights.super_blocks = &kernels == &kernels_.super_blocks;
  if (columns % kernels.tile_columns) return pack;
  int64_t value_bytes = 0, num_scales = 0;
  kernels.sizes(pack.weights, &value_bytes, &num_scales);
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
  const bool has_dense = !tiles_.empty() || dense_.defined();
  TORCH_CHECK(has_dense || has_groups(), "a linear without weights");
  const bool is_few = !as_many && std::all_of(groups_.begin(), groups_.end(), [&](const Pack& p) {
    return x.size(0) <= p.kernels->row_limit;
  });
  const bool by_groups = has_groups() && (is_few || !has_dense);
  if (!by_groups && tiles_.empty()) return run_dense(x, out.scalar_type() == at::kFloat);
  run_packs(by_groups ? groups_ : tiles_, x, out, as_many);
  return out;
}

void Linear::run_packs(const std::vector<Pack>& packs, const at::Tensor& x, const at::Tensor& out,
                       bool as_many) const {
  const int64_t rows = x.size(0);
  for (const Pack& pack : packs) {
    QuantLinearArgs args{};
    args.weights = pack.weights;
    args.input = x.const_data_ptr();
    args.out = (char*)out.data_ptr() + pack.first_column * out.element_size();
    args.out_stride = num_columns_;
    args.out_float = out.scalar_type() == at::kFloat;
    args.num_rows = rows;
    args.as_many = as_many;
    const QuantKernels& kernels = *pack.kernels;
    args.prepared = thread_scratch<ScratchUse::kPrepared>(kernels.prepared_size(args));
    share_range((rows + 15) / 16, 4, [&](int64_t begin, int64_t end) {
      kernels.prepare(args, begin, end);
    });
    const int64_t scratch = kernels.scratch_size(args), tile = kernels.tile_columns;
    const int64_t least = std::max<int64_t>(kLeastColumns / tile, 1);
    share_range(pack.weights.num_columns / tile, least, [&](int64_t begin, int64_t end) {
      kernels.linear(args, thread_scratch<ScratchUse::kKernel>(scratch), begin, end);
    });
  }
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
