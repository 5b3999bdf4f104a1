// rwkv_clip::lerp_cuda and the like for PyTorch. What they compute is in rwkv_clip/ops/lerp.py, which the model calls;
// the checks here keep a direct call from reading outside a tensor.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include "lerp.h"
#include "lerp_binding.h"
#include "wkv6_binding.h"

namespace {

using at::Tensor;

void check_rows(const Tensor& tensor, const Tensor& x, const char* name) {
    TORCH_CHECK(tensor.sizes() == x.sizes() && tensor.scalar_type() == at::kBFloat16 && tensor.device() == x.device(),
                "lerp: ", name, " must be bfloat16 ", x.sizes(), " on ", x.device(), ", got ", tensor.scalar_type(),
                " ", tensor.sizes(), " on ", tensor.device());
}

// The kernels read whole vectors.
Tensor readable(const Tensor& tensor) {
    const Tensor dense = tensor.contiguous();
    return reinterpret_cast<uintptr_t>(dense.data_ptr()) % 16 ? dense.clone() : dense;
}

LerpParams params_of(const Tensor& x, const Tensor& c, int64_t width, int64_t head_size, int64_t directions,
                     bool with_cls_token) {
    TORCH_CHECK(x.dim() == 3 && x.scalar_type() == at::kBFloat16, "lerp: x must be bfloat16 [B, T, C], got ",
                x.scalar_type(), " ", x.sizes());
    TORCH_CHECK(c.dim() == 2 && c.size(1) == x.size(2) && c.scalar_type() == at::kFloat && c.device() == x.device(),
                "lerp: c must be float32 [n, C] on ", x.device(), ", got ", c.scalar_type(), " ", c.sizes());
    const int64_t grid = x.size(1) - with_cls_token;
    TORCH_CHECK(grid > 0 && width > 0 && grid % width == 0, "lerp: ", grid, " tokens are not rows of ", width);
    TORCH_CHECK((directions == 2 || directions == 4) && x.size(2) % 32 == 0 && x.size(2) <= 4096 && head_size > 0 &&
                    head_size % (4 * directions) == 0 && x.size(2) % head_size == 0,
                "lerp: ", x.size(2), " channels in heads of ", head_size, " do not fit ", directions, " directions");
    TORCH_CHECK(x.size(0) * x.size(1) * x.size(1) < INT64_C(0xffffffff), "lerp: too large: ", x.sizes());
    LerpParams params{};
    params.rows = static_cast<int32_t>(x.size(0) * x.size(1));
    params.channels = static_cast<int32_t>(x.size(2));
    params.layout = {static_cast<int32_t>(x.size(1)), static_cast<int32_t>(grid), static_cast<int32_t>(width),
                     static_cast<int32_t>(head_size), static_cast<int32_t>(directions)};
    params.count = static_cast<int32_t>(c.size(0));
    params.stream = c10::cuda::getCurrentCUDAStream().stream();
    return params;
}

void check(int code, const Tensor& x) {
    TORCH_CHECK(code == 0, "lerp: CUDA error: ", lerp_error_string(code), " for x of shape ", x.sizes(), " on ",
                x.device());
}

std::vector<Tensor> results_like(const Tensor& x, LerpParams& params) {
    std::vector<Tensor> results;
    for (int i = 0; i < params.count; ++i) {
        results.push_back(at::empty_like(x, at::MemoryFormat::Contiguous));
        params.y[i] = results.back().data_ptr();
    }
    return results;
}

std::vector<Tensor> set_gradients(const at::TensorList& gradients, const Tensor& x, LerpParams& params) {
    TORCH_CHECK(static_cast<int64_t>(gradients.size()) == params.count, "lerp: expected ", params.count,
                " gradients, got ", gradients.size());
    std::vector<Tensor> kept;
    for (int i = 0; i < params.count; ++i) {
        check_rows(gradients[i], x, "each gradient");
        kept.push_back(readable(gradients[i]));
        params.gy[i] = kept.back().data_ptr();
    }
    return kept;
}

std::vector<Tensor> interpolate(const Tensor& x, const Tensor& c, int64_t width, int64_t head_size, int64_t directions,
                         bool with_cls_token) {
    const c10::cuda::CUDAGuard guard(x.device());
    LerpParams params = params_of(x, c, width, head_size, directions, with_cls_token);
    TORCH_CHECK(params.count == 1 || params.count == 2, "lerp: one or two results, got ", params.count);
    const Tensor x_read = readable(x), c_read = readable(c);
    params.x = x_read.data_ptr();
    params.c = c_read.data_ptr<float>();
    std::vector<Tensor> results = results_like(x, params);
    if (params.rows > 0) check(lerp_forward(&params), x);
    return results;
}

std::tuple<Tensor, Tensor> interpolate_backward(const Tensor& x, const Tensor& c, at::TensorList gradients,
                                         const std::optional<Tensor>& base, const std::optional<Tensor>& extra,
                                         int64_t width, int64_t head_size, int64_t directions, bool with_cls_token) {
    const c10::cuda::CUDAGuard guard(x.device());
    LerpParams params = params_of(x, c, width, head_size, directions, with_cls_token);
    TORCH_CHECK(params.count == 1 || (params.count == 2 && !base), "lerp: one or two results, got ", params.count);
    TORCH_CHECK(base.has_value() == extra.has_value(), "lerp: base and extra go together");
    const Tensor x_read = readable(x), c_read = readable(c);
    params.x = x_read.data_ptr();
    params.c = c_read.data_ptr<float>();
    const std::vector<Tensor> kept = set_gradients(gradients, x, params);
    Tensor base_read, extra_read;
    if (base) {
        check_rows(*base, x, "base");
        check_rows(*extra, x, "extra");
        base_read = readable(*base);
        extra_read = readable(*extra);
        params.base = base_read.data_ptr();
        params.extra = extra_read.data_ptr();
    }
    Tensor gx = at::empty_like(x, at::MemoryFormat::Contiguous);
    if (params.rows == 0) return {gx, at::zeros_like(c)};
    params.gx = gx.data_ptr();
    const Tensor parts = at::empty({lerp_parts(&params), c.size(0), c.size(1)}, c.options());
    params.c_parts = parts.data_ptr<float>();
    check(lerp_backward(&params), x);
    return {gx, at::sum(parts, 0)};
}

// Sets what both directions of the data-dependent interpolation read; returns the tensors that must live as long.
std::vector<Tensor> set_inputs(const Tensor& x, const Tensor& hidden, const Tensor& w2, const Tensor& c,
                               LerpParams& params) {
    TORCH_CHECK(params.count == LERP_SHARES, "lerp: c must hold ", LERP_SHARES, " shares, got ", params.count);
    TORCH_CHECK(hidden.dim() == 2 && hidden.size(0) == params.rows && hidden.size(1) == LERP_SHARES * LERP_RANK &&
                    hidden.scalar_type() == at::kBFloat16 && hidden.device() == x.device(),
                "lerp: hidden must be bfloat16 [", params.rows, ", ", LERP_SHARES * LERP_RANK, "], got ",
                hidden.scalar_type(), " ", hidden.sizes());
    TORCH_CHECK(w2.dim() == 3 && w2.size(0) == LERP_SHARES && w2.size(1) == LERP_RANK && w2.size(2) == x.size(2) &&
                    w2.scalar_type() == at::kBFloat16 && w2.device() == x.device(),
                "lerp: w2 must be bfloat16 [", LERP_SHARES, ", ", LERP_RANK, ", ", x.size(2), "], got ",
                w2.scalar_type(), " ", w2.sizes());
    std::vector<Tensor> kept{readable(x), readable(hidden), readable(w2),
                             at::empty({lerp_packed_bytes(&params)}, w2.options().dtype(at::kByte)), readable(c)};
    params.x = kept[0].data_ptr();
    params.hidden = kept[1].data_ptr();
    params.w2 = kept[2].data_ptr();
    params.w2_packed = kept[3].data_ptr();
    params.c = kept[4].data_ptr<float>();
    return kept;
}

std::vector<Tensor> mix(const Tensor& x, const Tensor& hidden, const Tensor& w2, const Tensor& c, int64_t width,
                           int64_t head_size, int64_t directions, bool with_cls_token) {
    const c10::cuda::CUDAGuard guard(x.device());
    LerpParams params = params_of(x, c, width, head_size, directions, with_cls_token);
    const std::vector<Tensor> kept = set_inputs(x, hidden, w2, c, params);
    std::vector<Tensor> results = results_like(x, params);
    if (params.rows > 0) check(ddlerp_forward(&params), x);
    return results;
}

wkv6::Gradients mix_backward(const Tensor& x, const Tensor& hidden, const Tensor& w2, const Tensor& c,
                                at::TensorList gradients, int64_t width, int64_t head_size, int64_t directions,
                                bool with_cls_token) {
    const c10::cuda::CUDAGuard guard(x.device());
    LerpParams params = params_of(x, c, width, head_size, directions, with_cls_token);
    const std::vector<Tensor> kept = set_inputs(x, hidden, w2, c, params);
    const std::vector<Tensor> kept_gradients = set_gradients(gradients, x, params);
    Tensor base = at::empty_like(x, at::MemoryFormat::Contiguous), extra = at::empty_like(base);
    Tensor g_hidden = at::empty_like(hidden, at::MemoryFormat::Contiguous);
    if (params.rows == 0) return {base, extra, g_hidden, at::zeros_like(w2), at::zeros_like(c)};
    params.base = base.data_ptr();
    params.extra = extra.data_ptr();
    params.g_hidden = g_hidden.data_ptr();
    const int64_t count = ddlerp_parts(&params);
    Tensor g_w2 = at::empty_like(w2, at::MemoryFormat::Contiguous);
    Tensor g_c = at::empty_like(c, at::MemoryFormat::Contiguous);
    const Tensor parts = at::empty({count, w2.size(0), w2.size(1) + 1, w2.size(2)}, c.options());
    params.g_w2 = g_w2.data_ptr();
    params.g_c = g_c.data_ptr<float>();
    params.w2_parts = parts.data_ptr<float>();
    params.c_parts = params.w2_parts + count * w2.numel();
    check(ddlerp_backward(&params), x);
    return {base, extra, g_hidden, g_w2, g_c};
}

}  // namespace

LERP_OPERATORS("cuda", CUDA)

WKV6_EMPTY_MODULE
