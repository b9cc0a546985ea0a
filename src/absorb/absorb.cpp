// The verbs of <winnow/absorb.h>: check the call, express it as products and copies, choose the
// kernel.
#include "winnow/absorb.h"

#include <atomic>
#include <vector>

#include "absorb/kernel.h"
#include "core/arithmetic.h"
#include "core/check.h"
#include "core/made_once.h"
#include "cpu/isa.h"

namespace winnow {

namespace internal::absorb {

#if defined(__x86_64__)
namespace {

std::string lacks_avx512bf16() {
  const internal::cpu::Isa& cpu = internal::cpu::isa();
  return cpu.avx512_bf16 && cpu.avx512_vbmi ? "" : "this CPU has no AVX-512 BF16 and VBMI";
}

const char* needs_contiguous(const Params& p) {
  for (int i = 0; i < p.product_count; ++i)
    if (p.products[i].b_col != 1 && p.products[i].b_k != 1)
      return "a head's weights are contiguous in neither dimension";
  return nullptr;
}

}  // namespace
#endif

std::span<const AbsorbKernel> kernels() {
#if defined(__x86_64__)
  // Asked for here and not while the table is made, whose lock a child of fork() may find closed.
  const bool on_request = internal::cpu::isa().intel;
#endif
  static std::atomic<const std::vector<AbsorbKernel>*> table{nullptr};
  return made_once(table, [&] {
    std::vector<AbsorbKernel> rows;
#ifdef WINNOW_WITH_CUDA
    for (const AbsorbKernel& row : sm90::kernels()) rows.push_back(row);
#endif
#if defined(__x86_64__)
    // Intel's AMX generations run VDPBF16PS slower than FMA: there it serves on request only.
    rows.push_back({{"avx512bf16", DeviceKind::kCpu, on_request, lacks_avx512bf16},
                    needs_contiguous,
                    avx512bf16});
#endif
    rows.push_back({{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd::absorb});
    rows.push_back(
        {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference::absorb});
    return rows;
  });
}

std::span<const DequantizeKernel> dequantize_kernels() {
  static constexpr DequantizeKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90::dequantize},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd::dequantize},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference::dequantize},
  };
  return table;
}

namespace {

constexpr int64_t kAny = Check::kAny;

const bf16* bf16s(const Tensor& t) { return static_cast<const bf16*>(t.data); }

// An output with a contiguous innermost dimension.
void output(const Check& check, const Tensor& t, const char* argument,
            std::initializer_list<int64_t> shape) {
  check.output_rows(t, argument, DType::kBf16, shape);
}

// out = a x b per head. b's dimensions, [L, H, P or V] in memory, arrive as (k, head, col).
Product product(const Tensor& a, const Tensor& b, const Tensor& out, bool b_transposed) {
  const int k = b_transposed ? 2 : 0, col = b_transposed ? 0 : 2;
  Product p;
  p.a = bf16s(a);
  p.a_row = a.stride[0];
  p.a_head = a.stride[1];
  p.b = bf16s(b);
  p.b_k = b.stride[k];
  p.b_head = b.stride[1];
  p.b_col = b.stride[col];
  p.out = static_cast<bf16*>(out.data);
  p.out_row = out.stride[0];
  p.out_head = out.stride[1];
  p.rows = out.shape[0];
  p.heads = b.shape[1];
  p.depth = b.shape[k];
  p.cols = b.shape[col];
  return p;
}

// Elements [skip, skip + the width of `to`) of from's last dimension.
Copy copy(const Tensor& from, int64_t skip, const Tensor& to) {
  Copy c;
  c.from = from.data ? bf16s(from) + skip * from.stride[2] : nullptr;
  c.to = static_cast<bf16*>(to.data);
  for (int i = 0; i < 3; ++i) {
    c.from_stride[i] = from.stride[i];
    c.to_stride[i] = to.stride[i];
    c.shape[i] = to.shape[i];
  }
  return c;
}

void start(Params params, const Target& target) {
  params.device = target.device;
  run("absorb", choose("absorb", kernels(), params, target), params);
}

}  // namespace
}  // namespace internal::absorb

void dequantize_weight(const DequantizeWeightArgs& args) try {
  using namespace internal::absorb;
  const Check check("dequantize_weight");
  check.tensor(args.weight, "weight", DType::kE4m3, {kAny, kAny});
  const int64_t rows = args.weight.shape[0], cols = args.weight.shape[1];
  DequantizeParams p;
  if (args.scale.rank == 1) {
    check.tensor(args.scale, "scale", DType::kF32, {1});
  } else {
    check.strided(args.scale, "scale", DType::kF32,
                  {ceil_div(rows, kBlock), ceil_div(cols, kBlock)});
    p.scale_row = args.scale.stride[0];
    p.scale_col = args.scale.stride[1];
  }
  output(check, args.out, "out", {rows, cols});
  check.apart({{args.out, "out"}}, {{args.weight, "weight"}, {args.scale, "scale"}});
  p.weight = static_cast<const e4m3*>(args.weight.data);
  p.weight_row = args.weight.stride[0];
  p.scale = static_cast<const float*>(args.scale.data);
  p.out = static_cast<bf16*>(args.out.data);
  p.out_row = args.out.stride[0];
  p.rows = rows;
  p.cols = cols;
  p.device = args.target.device;
  run("dequantize_weight", choose("dequantize_weight", dequantize_kernels(), p, args.target), p);
} catch (const std::bad_alloc&) {
  out_of_memory("dequantize_weight");
}

void split_kv_b(const SplitKvBArgs& args) try {
  using namespace internal::absorb;
  const Check check("split_kv_b");
  check.strided(args.weight, "weight", DType::kBf16, {kAny, kAny, kAny});
  const int64_t latent = args.weight.shape[0], heads = args.weight.shape[1];
  check.output(args.w_uk, "w_uk", DType::kBf16, {latent, heads, kAny});
  const int64_t nope = args.w_uk.shape[2];
  check.that(nope <= args.weight.shape[2], "w_uk", "at most as many columns per head as weight has",
             cat(nope));
  check.output(args.w_uv, "w_uv", DType::kBf16, {latent, heads, args.weight.shape[2] - nope});
  check.apart({{args.w_uk, "w_uk"}, {args.w_uv, "w_uv"}}, {{args.weight, "weight"}});
  Params p;
  p.copies = {copy(args.weight, 0, args.w_uk), copy(args.weight, nope, args.w_uv)};
  p.copy_count = 2;
  start(p, args.target);
} catch (const std::bad_alloc&) {
  out_of_memory("split_kv_b");
}

void absorb_query(const AbsorbQueryArgs& args) try {
  using namespace internal::absorb;
  const Check check("absorb_query");
  check.strided(args.w_uk, "w_uk", DType::kBf16, {kAny, kAny, kAny});
  const auto& w = args.w_uk.shape;
  check.tensor(args.q_nope, "q_nope", DType::kBf16, {kAny, w[1], w[2]});
  output(check, args.out, "out", {args.q_nope.shape[0], w[1], w[0]});
  check.apart({{args.out, "out"}}, {{args.q_nope, "q_nope"}, {args.w_uk, "w_uk"}});
  Params p;
  p.products[0] = product(args.q_nope, args.w_uk, args.out, true);
  p.product_count = 1;
  start(p, args.target);
} catch (const std::bad_alloc&) {
  out_of_memory("absorb_query");
}

void project_output(const ProjectOutputArgs& args) try {
  using namespace internal::absorb;
  const Check check("project_output");
  check.strided(args.w_uv, "w_uv", DType::kBf16, {kAny, kAny, kAny});
  const auto& w = args.w_uv.shape;
  check.tensor(args.attn, "attn", DType::kBf16, {kAny, w[1], w[0]});
  output(check, args.out, "out", {args.attn.shape[0], w[1], w[2]});
  check.apart({{args.out, "out"}}, {{args.attn, "attn"}, {args.w_uv, "w_uv"}});
  Params p;
  p.products[0] = product(args.attn, args.w_uv, args.out, false);
  p.product_count = 1;
  start(p, args.target);
} catch (const std::bad_alloc&) {
  out_of_memory("project_output");
}

void decompress(const DecompressArgs& args) try {
  using namespace internal::absorb;
  const Check check("decompress");
  check.strided(args.w_uk, "w_uk", DType::kBf16, {kAny, kAny, kAny});
  const auto& w = args.w_uk.shape;
  check.strided(args.w_uv, "w_uv", DType::kBf16, {w[0], w[1], kAny});
  check.tensor(args.latent, "latent", DType::kBf16, {kAny, kAny});
  const int64_t rows = args.latent.shape[0], rope = args.latent.shape[1] - w[0];
  if (rope < 0)
    check.fail("latent", cat("at least ", w[0], " columns, as w_uk has rows"),
               shape_of(args.latent));
  output(check, args.k, "k", {rows, w[1], w[2] + rope});
  output(check, args.v, "v", {rows, w[1], args.w_uv.shape[2]});
  check.apart({{args.k, "k"}, {args.v, "v"}},
              {{args.latent, "latent"}, {args.w_uk, "w_uk"}, {args.w_uv, "w_uv"}});

  // Latent rows as [N, H, L + R] and keys as [N, H, P] || [N, H, R]: every head reads the same row.
  Tensor latent = args.latent;
  latent.rank = 3;
  latent.shape = {rows, w[1], args.latent.shape[1]};
  latent.stride = {args.latent.stride[0], 0, 1};
  Tensor k_pe = args.k;
  k_pe.data = k_pe.data ? static_cast<bf16*>(k_pe.data) + w[2] : nullptr;
  k_pe.shape[2] = rope;
  Params p;
  p.products = {product(latent, args.w_uk, args.k, false),
                product(latent, args.w_uv, args.v, false)};
  p.copies[0] = copy(latent, w[0], k_pe);
  p.product_count = 2;
  p.copy_count = 1;
  start(p, args.target);
} catch (const std::bad_alloc&) {
  out_of_memory("decompress");
}

}  // namespace winnow
