// rwkv_clip::wkv6_cpu_forward and rwkv_clip::wkv6_cpu_backward for PyTorch.

#include <ATen/Parallel.h>

#include <string>

#include "wkv6_binding.h"

namespace {

at::Tensor forward(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                   const at::Tensor& u) {
    wkv6::Call call(r, k, v, w, u);
    at::Tensor y = call.set_output();
    if (!call.empty()) wkv6_cpu_forward(&call.params, at::get_num_threads());
    return y;
}

wkv6::Gradients backward(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                         const at::Tensor& u, const at::Tensor& grad_y) {
    wkv6::Call call(r, k, v, w, u);
    if (call.empty()) return call.empty_gradients();
    at::Tensor gy = grad_y;
    wkv6::Gradients gradients = call.set_gradients(gy);
    const at::Tensor workspace = call.set_workspace(wkv6_cpu_backward_workspace_bytes(&call.params));
    wkv6_cpu_backward(&call.params, at::get_num_threads());
    return gradients;
}

std::string instruction_set() { return wkv6_cpu_instruction_set(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(rwkv_clip, m) {
    m.def("wkv6_cpu_forward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u) -> Tensor");
    m.def(
        "wkv6_cpu_backward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor grad_y) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("wkv6_cpu_instruction_set() -> str", instruction_set);
}

TORCH_LIBRARY_IMPL(rwkv_clip, CPU, m) {
    m.impl("wkv6_cpu_forward", forward);
    m.impl("wkv6_cpu_backward", backward);
}

WKV6_EMPTY_MODULE
