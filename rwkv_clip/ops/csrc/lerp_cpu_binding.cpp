// rwkv_clip::lerp_cpu and the like for PyTorch. What they compute is in rwkv_clip/ops/lerp.py, which the model calls;
// the checks here keep a direct call from reading outside a tensor.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "lerp_binding.h"
#include "lerp_cpu.h"
#include "wkv6_binding.h"

namespace {

using at::Tensor;

// Rows whose part of the gradient of c is added up by itself, so that the sum does not depend on the threads.
constexpr int64_t kRows = 256;

// A call's parameters and the tensors that they point into.
struct Call {
    LerpCPUParams params{};
    Tensor x, c;
    std::vector<Tensor> kept;

    Call(const Tensor& x_given, const Tensor& c_given, int64_t width, int64_t head_size, int64_t directions,
         bool with_cls_token)
        : x(x_given.contiguous()), c(c_given.contiguous()) {
        TORCH_CHECK(x.dim() == 3 && x.scalar_type() == at::kFloat, "lerp: x must be float32 [B, T, C], got ",
                    x.scalar_type(), " ", x.sizes());
        TORCH_CHECK(c.dim() == 2 && c.size(1) == x.size(2) && c.scalar_type() == at::kFloat,
                    "lerp: c must be float32 [n, C], got ", c.scalar_type(), " ", c.sizes());
        TORCH_CHECK(c.size(0) >= 1 && c.size(0) <= LERP_SHARES, "lerp: one to five results, got ", c.size(0));
        const int64_t grid = x.size(1) - with_cls_token;
        TORCH_CHECK(grid > 0 && width > 0 && grid % width == 0, "lerp: ", grid, " tokens are not rows of ", width);
        TORCH_CHECK((directions == 2 || directions == 4) && x.size(2) <= LERP_CPU_CHANNELS && head_size > 0 &&
                        head_size % (4 * directions) == 0 && x.size(2) % head_size == 0,
                    "lerp: ", x.size(2), " channels in heads of ", head_size, " do not fit ", directions,
                    " directions");
        params.layout = {static_cast<int32_t>(x.size(1)), static_cast<int32_t>(grid), static_cast<int32_t>(width),
                         static_cast<int32_t>(head_size), static_cast<int32_t>(directions)};
        params.channels = static_cast<int32_t>(x.size(2));
        params.count = static_cast<int32_t>(c.size(0));
        params.x = x.data_ptr<float>();
        params.c = c.data_ptr<float>();
    }

    int64_t rows() const { return x.size(0) * x.size(1); }
    int64_t parts() const { return (rows() + kRows - 1) / kRows; }

    // The elements of a tensor like x.
    const float* read(const Tensor& tensor, const char* name) {
        TORCH_CHECK(tensor.sizes() == x.sizes() && tensor.scalar_type() == at::kFloat && tensor.is_cpu(), "lerp: ",
                    name, " must be float32 ", x.sizes(), ", got ", tensor.scalar_type(), " ", tensor.sizes());
        kept.push_back(tensor.contiguous());
        return kept.back().data_ptr<float>();
    }

    std::vector<Tensor> set_results() {
        std::vector<Tensor> results;
        for (int i = 0; i < params.count; ++i) {
            results.push_back(at::empty_like(x));
            params.y[i] = results.back().data_ptr<float>();
        }
        return results;
    }

    void set_gradients(const at::TensorList& gradients) {
        TORCH_CHECK(static_cast<int64_t>(gradients.size()) == params.count, "lerp: expected ", params.count,
                    " gradients, got ", gradients.size());
        for (int i = 0; i < params.count; ++i) params.gy[i] = read(gradients[i], "each gradient");
    }

    template <class Kernel>
    void for_rows(const Kernel& kernel) const {
        at::parallel_for(0, parts(), 1, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                LerpCPUParams range = params;
                range.begin = part * kRows;
                range.end = std::min(rows(), range.begin + kRows);
                kernel(range, part);
            }
        });
    }

    // Fills new_base and new_extra; the gradient of c.
    Tensor backward() {
        const Tensor sums = at::zeros({parts(), c.size(0), c.size(1)}, c.options());
        for_rows([&](LerpCPUParams& range, int64_t part) {
            range.sums = sums.data_ptr<float>() + part * c.numel();
            lerp_cpu_backward(&range);
        });
        return at::sum(sums, 0);
    }
};

std::vector<Tensor> interpolate(const Tensor& x, const Tensor& c, int64_t width, int64_t head_size, int64_t directions,
                                bool with_cls_token) {
    Call call(x, c, width, head_size, directions, with_cls_token);
    std::vector<Tensor> results = call.set_results();
    call.for_rows([](LerpCPUParams& range, int64_t) { lerp_cpu_forward(&range, 0); });
    return results;
}

std::tuple<Tensor, Tensor> interpolate_backward(const Tensor& x, const Tensor& c, at::TensorList gradients,
                                                const std::optional<Tensor>& base, const std::optional<Tensor>& extra,
                                                int64_t width, int64_t head_size, int64_t directions,
                                                bool with_cls_token) {
    Call call(x, c, width, head_size, directions, with_cls_token);
    TORCH_CHECK(base.has_value() == extra.has_value(), "lerp: base and extra go together");
    call.set_gradients(gradients);
    if (base) {
        call.params.base = call.read(*base, "base");
        call.params.extra = call.read(*extra, "extra");
    }
    const Tensor gx = at::empty_like(call.x), given = at::empty_like(call.x);
    call.params.new_base = gx.data_ptr<float>();
    call.params.new_extra = given.data_ptr<float>();
    const Tensor gc = call.backward();
    call.for_rows([&](LerpCPUParams& range, int64_t) { lerp_cpu_gather(&range, gx.data_ptr<float>()); });
    return {gx, gc};
}

void check_products(const Call& call, const Tensor& hidden, const Tensor& w2) {
    TORCH_CHECK(call.params.count == LERP_SHARES, "lerp: c must hold ", LERP_SHARES, " shares, got ",
                call.params.count);
    TORCH_CHECK(hidden.dim() == 2 && hidden.size(0) == call.rows() && hidden.size(1) == LERP_SHARES * LERP_RANK &&
                    hidden.scalar_type() == at::kFloat,
                "lerp: hidden must be float32 [", call.rows(), ", ", LERP_SHARES * LERP_RANK, "], got ",
                hidden.scalar_type(), " ", hidden.sizes());
    TORCH_CHECK(w2.dim() == 3 && w2.size(0) == LERP_SHARES && w2.size(1) == LERP_RANK &&
                    w2.size(2) == call.params.channels && w2.scalar_type() == at::kFloat,
                "lerp: w2 must be float32 [", LERP_SHARES, ", ", LERP_RANK, ", ", call.params.channels, "], got ",
                w2.scalar_type(), " ", w2.sizes());
}

Tensor columns(const Tensor& hidden, int share) { return hidden.narrow(1, share * LERP_RANK, LERP_RANK); }

std::vector<Tensor> mix(const Tensor& x, const Tensor& hidden, const Tensor& w2, const Tensor& c, int64_t width,
                        int64_t head_size, int64_t directions, bool with_cls_token) {
    Call call(x, c, width, head_size, directions, with_cls_token);
    check_products(call, hidden, w2);
    std::vector<Tensor> results = call.set_results();
    for (int i = 0; i < LERP_SHARES; ++i) {
        Tensor share = results[i].view({call.rows(), call.params.channels});
        at::mm_out(share, columns(hidden, i), w2[i]);
    }
    call.for_rows([](LerpCPUParams& range, int64_t) { lerp_cpu_forward(&range, 1); });
    return results;
}

wkv6::Gradients mix_backward(const Tensor& x, const Tensor& hidden, const Tensor& w2, const Tensor& c,
                             at::TensorList gradients, int64_t width, int64_t head_size, int64_t directions,
                             bool with_cls_token) {
    Call call(x, c, width, head_size, directions, with_cls_token);
    check_products(call, hidden, w2);
    call.set_gradients(gradients);
    const Tensor shares = at::empty({LERP_SHARES, call.rows(), call.params.channels}, call.x.options());
    for (int i = 0; i < LERP_SHARES; ++i) {
        Tensor share = shares[i];
        at::mm_out(share, columns(hidden, i), w2[i]);
        call.params.shares[i] = share.data_ptr<float>();
    }
    const Tensor base = at::empty_like(call.x), extra = at::empty_like(call.x);
    call.params.new_base = base.data_ptr<float>();
    call.params.new_extra = extra.data_ptr<float>();
    const Tensor g_c = call.backward();
    const Tensor g_hidden = at::empty(hidden.sizes(), hidden.options()), g_w2 = at::empty(w2.sizes(), w2.options());
    for (int i = 0; i < LERP_SHARES; ++i) {
        Tensor g_columns = columns(g_hidden, i), g_product = g_w2[i];
        at::mm_out(g_columns, shares[i], w2[i].t());
        at::mm_out(g_product, columns(hidden, i).t(), shares[i]);
    }
    return {base, extra, g_hidden, g_w2, g_c};
}

}  // namespace

LERP_OPERATORS("cpu", CPU)
