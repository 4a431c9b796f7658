#include "native_model.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "attention_plan.h"
#include "parallel.h"

namespace blockhouse {
namespace {

// Numbers of a cheap row op that are worth handing to another thread.
constexpr int64_t kNumbersPerPiece = 8192;

int64_t rows_per_piece(int64_t row_size) { return kNumbersPerPiece / row_size + 1; }

template <class T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

at::Tensor float_weight(const at::Tensor& weight) { return weight.to(at::kFloat).contiguous(); }

}  // namespace

at::Tensor Workspace::take(Slot slot, int64_t rows, int64_t columns, at::ScalarType dtype) {
  at::Tensor& memory = memory_[slot];
  const int64_t bytes = rows * columns * (int64_t)c10::elementSize(dtype);
  if (!memory.defined() || memory.size(0) < bytes) memory = at::empty({bytes}, at::kByte);
  return at::from_blob(memory.data_ptr(), {rows, columns}, dtype);
}

NativeModel::NativeModel(const std::string& kernels_id, int64_t num_heads, double eps,
                         double scale, at::Tensor embedding, at::Tensor final_norm,
                         at::Tensor cos_sin, LinearPtr lm_head, at::Tensor key_cache,
                         at::Tensor value_cache, std::optional<at::Tensor> key_scales,
                         std::optional<at::Tensor> value_scales)
    : kernels_(kernels_named(kernels_id)),
      num_heads_(num_heads),
      num_kv_heads_(key_cache.size(3)),
      head_dim_(key_cache.size(4)),
      hidden_(embedding.size(1)),
      block_size_(key_cache.size(2)),
      eps_((float)eps),
      scale_((float)scale),
      embedding_(embedding.to(at::kBFloat16).contiguous()),
      final_norm_(float_weight(final_norm)),
      cos_sin_(float_weight(cos_sin)),
      key_cache_(key_cache),
      value_cache_(value_cache),
      key_scales_(key_scales.value_or(at::Tensor())),
      value_scales_(value_scales.value_or(at::Tensor())),
      lm_head_(std::move(lm_head)) {
  for (const at::Tensor* cache : {&key_cache_, &value_cache_})
    TORCH_CHECK(cache->dim() == 5 && cache->device().is_cpu(),
                "a cache is a tensor of five dimensions on the CPU");
  check_cache(key_cache_, key_scales_);
  check_cache(value_cache_, value_scales_);
  TORCH_CHECK(key_scales_.defined() == value_scales_.defined(), "both caches have scales, or none");
  TORCH_CHECK(num_heads_ % num_kv_heads_ == 0 && head_dim_ % 8 == 0 && head_dim_ <= 256,
              "head sizes are multiples of 8 up to 256, and heads share kv heads evenly");
  TORCH_CHECK(cos_sin_.dim() == 2 && cos_sin_.size(1) == head_dim_, "cos_sin is ",
              cos_sin_.sizes());
}

void NativeModel::add_layer(at::Tensor input_norm, at::Tensor post_norm, LinearPtr qkv,
                            LinearPtr output, LinearPtr gate_up, LinearPtr down,
                            std::optional<at::Tensor> qkv_bias,
                            std::optional<at::Tensor> query_norm,
                            std::optional<at::Tensor> key_norm) {
  const int64_t width = (num_heads_ + 2 * num_kv_heads_) * head_dim_;
  TORCH_CHECK(qkv->num_columns() == width && qkv->depth() == hidden_ &&
                  output->num_columns() == hidden_ && output->depth() == num_heads_ * head_dim_ &&
                  gate_up->depth() == hidden_ && down->num_columns() == hidden_ &&
                  gate_up->num_columns() == 2 * down->depth(),
              "a layer's linears do not fit together");
  TORCH_CHECK((int64_t)layers_.size() < key_cache_.size(0), "more layers than the cache has");
  Layer layer;
  layer.input_norm = float_weight(input_norm);
  layer.post_norm = float_weight(post_norm);
  if (qkv_bias) layer.qkv_bias = float_weight(*qkv_bias);
  if (query_norm) layer.query_norm = float_weight(*query_norm);
  if (key_norm) layer.key_norm = float_weight(*key_norm);
  layer.qkv = std::move(qkv);
  layer.output = std::move(output);
  layer.gate_up = std::move(gate_up);
  layer.down = std::move(down);
  layers_.push_back(std::move(layer));
}

at::Tensor NativeModel::forward(at::Tensor input_ids, at::Tensor positions,
                                at::Tensor slot_mapping, at::Tensor block_tables,
                                at::Tensor seq_lens, at::Tensor query_start_loc,
                                at::Tensor logits_indices) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const StepTensors step{input_ids, positions,       slot_mapping,  block_tables,
                         seq_lens,  query_start_loc, logits_indices};
  check_step(step);
  const int64_t few = num_few_rows(step);
  at::Tensor residual = embed(input_ids), delta;
  for (size_t i = 0; i < layers_.size(); i++) {
    const Layer& layer = layers_[i];
    at::Tensor normed = norm(residual, delta, layer.input_norm, {});
    at::Tensor qkv = linear(*layer.qkv, normed, Workspace::kQkv, few);
    rope_and_write(qkv, step, (int64_t)i);
    delta = linear(*layer.output, attend(qkv, step, (int64_t)i), Workspace::kDelta, few);
    normed = norm(residual, delta, layer.post_norm, {});
    at::Tensor gate_up = linear(*layer.gate_up, normed, Workspace::kGateUp, few);
    delta = linear(*layer.down, silu_and_mul(gate_up), Workspace::kDelta, few);
  }
  if (!logits_indices.size(0)) return at::empty({0, lm_head_->num_columns()}, at::kFloat);
  const at::Tensor last = norm(residual, delta, final_norm_, logits_indices);
  // Kept from step to step: fresh memory of this size costs the kernel a page at a time.
  return lm_head_->run_into(last, workspace_.take(Workspace::kLogits, last.size(0),
                                                  lm_head_->num_columns(), at::kFloat));
}

void NativeModel::check_step(const StepTensors& step) const {
  for (const at::Tensor* tensor : {&step.input_ids, &step.positions, &step.slot_mapping,
                                   &step.logits_indices})
    TORCH_CHECK(tensor->scalar_type() == at::kLong && tensor->is_contiguous(),
                "ids, positions, slots and logits indices are contiguous int64");
  for (const at::Tensor* tensor : {&step.block_tables, &step.seq_lens, &step.query_start_loc})
    TORCH_CHECK(tensor->scalar_type() == at::kInt && tensor->is_contiguous(),
                "block tables, lengths and starts are contiguous int32");
  const int64_t tokens = step.input_ids.size(0), requests = step.seq_lens.size(0);
  TORCH_CHECK(tokens > 0 && step.positions.size(0) == tokens &&
                  step.slot_mapping.size(0) == tokens && step.block_tables.size(0) == requests &&
                  step.query_start_loc.size(0) == requests + 1,
              "a step's tensors do not agree in length");
  TORCH_CHECK((int64_t)layers_.size() == key_cache_.size(0), "layers are missing");
  const int64_t* ids = step.input_ids.const_data_ptr<int64_t>();
  const int64_t* positions = step.positions.const_data_ptr<int64_t>();
  const int64_t vocab = embedding_.size(0), limit = cos_sin_.size(0);
  for (int64_t i = 0; i < tokens; i++)
    TORCH_CHECK(ids[i] >= 0 && ids[i] < vocab && positions[i] >= 0 && positions[i] < limit,
                "token ", i, " has id ", ids[i], " at position ", positions[i], "; below ", vocab,
                " at a position below ", limit, " is allowed");
}

at::Tensor NativeModel::activations(Workspace::Slot slot, int64_t rows, int64_t columns) {
  return workspace_.take(slot, rows, columns,
                         kernels_.bf16_activations ? at::kBFloat16 : at::kFloat);
}

// Decodes come first, a row each.
int64_t NativeModel::num_few_rows(const StepTensors& step) {
  const int64_t requests = step.seq_lens.size(0);
  const int32_t* starts = step.query_start_loc.const_data_ptr<int32_t>();
  int64_t decodes = 0;
  while (decodes < requests && starts[decodes + 1] == decodes + 1) decodes++;
  return decodes == requests || decodes <= kFewRows ? decodes : 0;
}

// The first `few` rows are multiplied as decodes alone are, so that an answer is the same whoever
// asks beside it. The others take the form of many rows however few they are, so that the rest of
// a prompt whose beginning was cached rounds as the whole prompt did.
at::Tensor NativeModel::linear(const Linear& weights, const at::Tensor& x, Workspace::Slot slot,
                               int64_t few) {
  const int64_t rows = x.size(0);
  const at::Tensor out = activations(slot, rows, weights.num_columns());
  if (few == rows || few == 0 || !weights.has_groups())
    return weights.run_into(x, out, few != rows);
  const auto multiply = [&](int64_t begin, int64_t count, bool as_many) {
    const at::Tensor part = out.narrow(0, begin, count);
    const at::Tensor got = weights.run_into(x.narrow(0, begin, count), part, as_many);
    if (!got.is_same(part)) part.copy_(got);
  };
  multiply(0, few, false);
  multiply(few, rows - few, true);
  return out;
}

at::Tensor NativeModel::embed(const at::Tensor& input_ids) {
  const int64_t rows = input_ids.size(0);
  at::Tensor out = workspace_.take(Workspace::kResidual, rows, hidden_, at::kFloat);
  const auto* table = (const bf16*)embedding_.const_data_ptr();
  const int64_t* ids = input_ids.const_data_ptr<int64_t>();
  float* to = out.data_ptr<float>();
  share_range(rows, rows_per_piece(hidden_), [&](int64_t begin, int64_t end) {
    kernels_.embed(table, ids, to, hidden_, begin, end);
  });
  return out;
}

at::Tensor NativeModel::norm(const at::Tensor& residual, const at::Tensor& delta,
                             const at::Tensor& weight, const at::Tensor& rows) {
  const int64_t count = rows.defined() ? rows.size(0) : residual.size(0);
  at::Tensor out = activations(Workspace::kNormed, count, hidden_);
  NormArgs args{};
  args.residual = residual.data_ptr<float>();
  args.delta = delta.defined() ? delta.const_data_ptr() : nullptr;
  args.weight = weight.const_data_ptr<float>();
  args.rows = data_or_null<int64_t>(rows);
  args.out = out.data_ptr();
  args.hidden = hidden_;
  args.eps = eps_;
  share_range(count, rows_per_piece(hidden_), [&](int64_t begin, int64_t end) {
    kernels_.add_rms_norm(args, begin, end);
  });
  return out;
}

void NativeModel::rope_and_write(const at::Tensor& qkv, const StepTensors& step,
                                 int64_t layer) const {
  const at::Tensor keys = key_cache_.select(0, layer), values = value_cache_.select(0, layer);
  const Scales scales = scales_of(layer);
  const Layer& weights = layers_[(size_t)layer];
  RopeArgs args{};
  args.qkv = qkv.data_ptr();
  args.bias = data_or_null<float>(weights.qkv_bias);
  args.query_norm = data_or_null<float>(weights.query_norm);
  args.key_norm = data_or_null<float>(weights.key_norm);
  args.cos_sin = cos_sin_.const_data_ptr<float>();
  args.positions = step.positions.const_data_ptr<int64_t>();
  args.slots = step.slot_mapping.const_data_ptr<int64_t>();
  args.key_cache = keys.data_ptr();
  args.value_cache = values.data_ptr();
  args.key_scales = scales.key;
  args.value_scales = scales.value;
  args.num_slots = keys.size(0) * block_size_;
  args.num_heads = num_heads_;
  args.num_kv_heads = num_kv_heads_;
  args.head_dim = head_dim_;
  args.eps = eps_;
  share_range(qkv.size(0), rows_per_piece(qkv.size(1)), [&](int64_t begin, int64_t end) {
    kernels_.rope_and_write(args, begin, end);
  });
}

NativeModel::Scales NativeModel::scales_of(int64_t layer) const {
  if (!key_scales_.defined()) return {nullptr, nullptr};
  return {key_scales_.select(0, layer).data_ptr<float>(),
          value_scales_.select(0, layer).data_ptr<float>()};
}

at::Tensor NativeModel::attend(const at::Tensor& qkv, const StepTensors& step, int64_t layer) {
  at::Tensor out = activations(Workspace::kAttended, qkv.size(0), num_heads_ * head_dim_);
  AttentionArgs args{};
  args.query = qkv.const_data_ptr();
  args.query_stride = qkv.size(1);
  args.key_cache = key_cache_.select(0, layer).const_data_ptr();
  args.value_cache = value_cache_.select(0, layer).const_data_ptr();
  const Scales scales = scales_of(layer);
  args.key_scales = scales.key;
  args.value_scales = scales.value;
  args.block_tables = step.block_tables.const_data_ptr<int32_t>();
  args.table_stride = step.block_tables.size(1);
  args.block_size = block_size_;
  args.num_heads = num_heads_;
  args.num_kv_heads = num_kv_heads_;
  args.head_dim = head_dim_;
  args.scale = scale_;
  args.out = out.data_ptr();
  run_attention(kernels_, args, step.seq_lens.const_data_ptr<int32_t>(),
                step.query_start_loc.const_data_ptr<int32_t>(), step.seq_lens.size(0));
  return out;
}

at::Tensor NativeModel::silu_and_mul(const at::Tensor& gate_up) {
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  at::Tensor out = activations(Workspace::kGated, rows, width);
  const void* from = gate_up.const_data_ptr();
  void* to = out.data_ptr();
  share_range(rows, rows_per_piece(2 * width), [&](int64_t begin, int64_t end) {
    kernels_.silu_and_mul(from, to, width, begin, end);
  });
  return out;
}

}  // namespace blockhouse
