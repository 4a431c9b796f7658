// What Python sees: torch.classes.blockhouse and torch.ops.blockhouse. Calls release the GIL.
#include <torch/library.h>

#include <ATen/ops/empty.h>

#include "attention_plan.h"
#include "native_model.h"
#include "parallel.h"

namespace blockhouse {
namespace {

std::vector<std::string> usable_kernels() {
  std::vector<std::string> found;
  for (const char* const* id = kernel_ids(); *id; id++)
    if (find_kernels(*id)) found.emplace_back(*id);
  return found;
}

std::string kernels_title(const std::string& id) { return kernels_named(id).title; }

at::Tensor paged_attention(const std::string& kernels_id, const at::Tensor& query,
                           const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_tables, const at::Tensor& seq_lens,
                           const at::Tensor& query_start_loc, double scale,
                           const std::optional<at::Tensor>& key_scales,
                           const std::optional<at::Tensor>& value_scales) {
  const Kernels& kernels = kernels_named(kernels_id);
  const auto dtype = kernels.bf16_activations ? at::kBFloat16 : at::kFloat;
  TORCH_CHECK(query.dim() == 3 && query.is_contiguous() && query.scalar_type() == dtype,
              "query is a contiguous [tokens, heads, head_dim] tensor of the kernels' type");
  for (const at::Tensor* cache : {&key_cache, &value_cache})
    TORCH_CHECK(cache->dim() == 4 && cache->size(3) == query.size(2) &&
                    query.size(1) % cache->size(2) == 0,
                "a cache is a [blocks, block_size, kv_heads, head_dim] tensor");
  check_cache(key_cache, key_scales.value_or(at::Tensor()));
  check_cache(value_cache, value_scales.value_or(at::Tensor()));
  TORCH_CHECK(key_scales.has_value() == value_scales.has_value(),
              "both caches have scales, or none");
  for (const at::Tensor* tensor : {&block_tables, &seq_lens, &query_start_loc})
    TORCH_CHECK(tensor->scalar_type() == at::kInt && tensor->is_contiguous(),
                "block tables, lengths and starts are contiguous int32");
  TORCH_CHECK(query.size(2) % 8 == 0 && query.size(2) <= 256,
              "head sizes are multiples of 8 up to 256");
  at::Tensor out = at::empty(query.sizes(), dtype);
  AttentionArgs args{};
  args.query = query.const_data_ptr();
  args.query_stride = query.size(1) * query.size(2);
  args.key_cache = key_cache.const_data_ptr();
  args.value_cache = value_cache.const_data_ptr();
  args.key_scales = key_scales ? key_scales->const_data_ptr<float>() : nullptr;
  args.value_scales = value_scales ? value_scales->const_data_ptr<float>() : nullptr;
  args.block_tables = block_tables.const_data_ptr<int32_t>();
  args.table_stride = block_tables.size(1);
  args.block_size = key_cache.size(1);
  args.num_heads = query.size(1);
  args.num_kv_heads = key_cache.size(2);
  args.head_dim = query.size(2);
  args.scale = (float)scale;
  args.out = out.data_ptr();
  run_attention(kernels, args, seq_lens.const_data_ptr<int32_t>(),
                query_start_loc.const_data_ptr<int32_t>(), seq_lens.size(0));
  return out;
}

// How many rows read each piece of the decodes' contexts, in the order of reading.
std::vector<int64_t> context_readers(const at::Tensor& block_tables, const at::Tensor& seq_lens,
                                     const at::Tensor& query_start_loc, int64_t block_size) {
  std::vector<int64_t> counts;
  for (const ContextPiece& piece :
       context_pieces(block_tables.const_data_ptr<int32_t>(), block_tables.size(1), block_size,
                      seq_lens.const_data_ptr<int32_t>(),
                      query_start_loc.const_data_ptr<int32_t>(), seq_lens.size(0)))
    counts.push_back((int64_t)piece.requests.size());
  return counts;
}

TORCH_LIBRARY(blockhouse, library) {
  library.class_<Linear>("Linear")
      .def(torch::init<const std::string&, int64_t, int64_t>())
      .def("set_dense", &Linear::set_dense)
      .def("add_groups", &Linear::add_groups)
      .def("add_super_blocks", &Linear::add_super_blocks)
      .def("calls_torch", &Linear::calls_torch)
      .def("groups_suffice", &Linear::groups_suffice)
      .def("run", [](const c10::intrusive_ptr<Linear>& self, const at::Tensor& x,
                     bool out_float) { return self->run(x, out_float); });
  library.class_<NativeModel>("NativeModel")
      .def(torch::init<const std::string&, int64_t, double, double, at::Tensor, at::Tensor,
                       at::Tensor, LinearPtr, at::Tensor, at::Tensor,
                       std::optional<at::Tensor>, std::optional<at::Tensor>>())
      .def("add_layer", &NativeModel::add_layer)
      .def("forward", &NativeModel::forward);
  library.def("usable_kernels() -> str[]", usable_kernels);
  library.def("set_num_threads(int count) -> ()", set_num_threads);
  library.def("kernels_title(str id) -> str", kernels_title);
  library.def(
      "context_readers(Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, int "
      "block_size) -> int[]",
      context_readers);
  library.def(
      "paged_attention(str kernels, Tensor query, Tensor key_cache, Tensor value_cache, Tensor "
      "block_tables, Tensor seq_lens, Tensor query_start_loc, float scale, Tensor? key_scales=None, "
      "Tensor? value_scales=None) -> Tensor",
      paged_attention);
}

}  // namespace
}  // namespace blockhouse
