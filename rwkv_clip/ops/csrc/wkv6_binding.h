// What the CPU and the CUDA binding share: tensors -> WKV6Params. The operators' contract is in rwkv_clip/ops/wkv6.py,
// which checks the user's arguments; the checks here keep a direct call of the operator from reading outside a tensor.
#pragma once

// clang-format off: Python's header goes first
#include <Python.h>
// clang-format on

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "wkv6.h"

namespace wkv6 {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline WKV6Dtype dtype_of(const at::Tensor& x) {
    switch (x.scalar_type()) {
        case at::kFloat:
            return WKV6_FLOAT32;
        case at::kBFloat16:
            return WKV6_BFLOAT16;
        case at::kHalf:
            return WKV6_FLOAT16;
        default:
            TORCH_CHECK(false, "wkv6: expected float32, bfloat16 or float16, got ", x.scalar_type());
    }
}

inline WKV6Tensor view(const at::Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// x itself where the kernels can read it (wkv6.h: rows of unit stride, starting at a multiple of 4 elements), or a copy.
inline at::Tensor readable(const at::Tensor& x) {
    const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data_ptr()) / x.element_size());
    const bool aligned = (address | x.stride(0) | x.stride(1) | x.stride(2)) % 4 == 0;
    return x.stride(3) == 1 && aligned ? x : x.clone(at::MemoryFormat::Contiguous);
}

// Sizes and dtypes of a call whose tensors are as the kernels read them; raises otherwise. At that point nothing is held
// that raising would have to destroy.
inline WKV6Params checked(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                          const at::Tensor& u) {
    TORCH_CHECK(r.dim() == 4 && r.size(1) > 0 && r.size(3) > 0, "wkv6: r must be [B, T, H, N], got ", r.sizes());
    TORCH_CHECK(r.size(3) % 4 == 0 && r.size(3) <= 128, "wkv6: N must be a multiple of 4 up to 128, got ", r.size(3));
    for (const at::Tensor* x : {&k, &v, &w})
        TORCH_CHECK(x->sizes() == r.sizes() && x->device() == r.device(), "wkv6: k, v and w must be as r ", r.sizes(),
                    " on ", r.device(), ", got ", x->sizes(), " on ", x->device());
    TORCH_CHECK(u.dim() == 2 && u.size(0) == r.size(2) && u.size(1) == r.size(3) && u.device() == r.device(),
                "wkv6: u must be [H, N] on ", r.device(), ", got ", u.sizes(), " on ", u.device());
    TORCH_CHECK(k.dtype() == r.dtype() && v.dtype() == r.dtype(), "wkv6: r, k and v must have one dtype");
    TORCH_CHECK(r.numel() < (int64_t{1} << 31) * r.size(3), "wkv6: too large: ", r.sizes());
    WKV6Params params{};
    params.dtype = dtype_of(r);
    params.w_dtype = dtype_of(w);
    params.u_dtype = dtype_of(u);
    params.B = static_cast<int32_t>(r.size(0));
    params.T = static_cast<int32_t>(r.size(1));
    params.H = static_cast<int32_t>(r.size(2));
    params.N = static_cast<int32_t>(r.size(3));
    return params;
}

// The inputs of one call and the parameters that point into them.
struct Call {
    WKV6Params params;                 // first, so that the checks come before all else
    std::array<at::Tensor, 5> inputs;  // r, k, v, w, u

    Call(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w, const at::Tensor& u)
        : params(checked(r, k, v, w, u)),
          inputs{readable(r), readable(k), readable(v), readable(w), u.contiguous()} {
        params.r = view(inputs[0]);
        params.k = view(inputs[1]);
        params.v = view(inputs[2]);
        params.w = view(inputs[3]);
        params.u = inputs[4].data_ptr();
    }

    bool empty() const { return params.B == 0 || params.H == 0; }

    // Where the kernels write; no element is initialised.
    at::Tensor new_like(int input) const { return at::empty(inputs[input].sizes(), inputs[input].options()); }

    at::Tensor set_output() {
        at::Tensor y = new_like(0);
        params.y = view(y);
        return y;
    }

    Gradients set_gradients(at::Tensor& gy) {
        TORCH_CHECK(
            gy.sizes() == inputs[0].sizes() && gy.dtype() == inputs[0].dtype() && gy.device() == inputs[0].device(),
            "wkv6: the gradient of y must be as r, got ", gy.sizes(), " ", gy.dtype(), " on ", gy.device());
        gy = readable(gy);
        Gradients g{new_like(0), new_like(1), new_like(2), new_like(3), new_like(4)};
        params.gy = view(gy);
        params.gr = view(std::get<0>(g));
        params.gk = view(std::get<1>(g));
        params.gv = view(std::get<2>(g));
        params.gw = view(std::get<3>(g));
        params.gu = std::get<4>(g).data_ptr();
        return g;
    }

    // Scratch memory; the tensor owns it. Freed memory of a CUDA stream is reused on that stream only.
    at::Tensor set_workspace(size_t bytes) {
        at::Tensor workspace = at::empty({static_cast<int64_t>(bytes)}, inputs[0].options().dtype(at::kByte));
        params.workspace = bytes ? workspace.data_ptr() : nullptr;
        return workspace;
    }

    // The gradients of an empty batch: nothing reaches u.
    Gradients empty_gradients() const {
        return {new_like(0), new_like(1), new_like(2), new_like(3), at::zeros_like(inputs[4])};
    }
};

}  // namespace wkv6

// A Python module with nothing in it: importing it registers the operators.
#define WKV6_JOIN_(a, b) a##b
#define WKV6_JOIN(a, b) WKV6_JOIN_(a, b)
#define WKV6_STRING_(x) #x
#define WKV6_STRING(x) WKV6_STRING_(x)
#define WKV6_EMPTY_MODULE                                                   \
    extern "C" PyMODINIT_FUNC WKV6_JOIN(PyInit_, TORCH_EXTENSION_NAME)() {  \
        static PyModuleDef definition = {PyModuleDef_HEAD_INIT,             \
                                         WKV6_STRING(TORCH_EXTENSION_NAME), \
                                         nullptr,                           \
                                         -1,                                \
                                         nullptr,                           \
                                         nullptr,                           \
                                         nullptr,                           \
                                         nullptr,                           \
                                         nullptr};                          \
        return PyModule_Create(&definition);                                \
    }
