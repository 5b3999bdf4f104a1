// rwkv_clip::wkv6_cuda_forward and rwkv_clip::wkv6_cuda_backward for PyTorch: the tensors' device, the current stream.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "wkv6_binding.h"

namespace {

void check(int code, const at::Tensor& r) {
    TORCH_CHECK(code == 0, "wkv6: CUDA error: ", wkv6_cuda_error_string(code), " for r of shape ", r.sizes(),
                ", strides ", r.strides(), ", on ", r.device());
}

void use_current_stream(wkv6::Call& call) { call.params.stream = c10::cuda::getCurrentCUDAStream().stream(); }

at::Tensor forward(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                   const at::Tensor& u) {
    const c10::cuda::CUDAGuard guard(r.device());
    wkv6::Call call(r, k, v, w, u);
    at::Tensor y = call.set_output();
    if (call.empty()) return y;
    use_current_stream(call);
    const at::Tensor workspace = call.set_workspace(wkv6_cuda_forward_workspace_bytes(&call.params));
    check(wkv6_cuda_forward(&call.params), r);
    return y;
}

wkv6::Gradients backward(const at::Tensor& r, const at::Tensor& k, const at::Tensor& v, const at::Tensor& w,
                         const at::Tensor& u, const at::Tensor& grad_y) {
    const c10::cuda::CUDAGuard guard(r.device());
    wkv6::Call call(r, k, v, w, u);
    if (call.empty()) return call.empty_gradients();
    at::Tensor gy = grad_y;
    wkv6::Gradients gradients = call.set_gradients(gy);
    use_current_stream(call);
    const at::Tensor workspace = call.set_workspace(wkv6_cuda_backward_workspace_bytes(&call.params));
    check(wkv6_cuda_backward(&call.params), r);
    return gradients;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rwkv_clip, m) {
    m.def("wkv6_cuda_forward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u) -> Tensor");
    m.def(
        "wkv6_cuda_backward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor grad_y) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rwkv_clip, CUDA, m) {
    m.impl("wkv6_cuda_forward", forward);
    m.impl("wkv6_cuda_backward", backward);
}

WKV6_EMPTY_MODULE
