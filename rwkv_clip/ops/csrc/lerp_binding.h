// The operators that rwkv_clip/ops/lerp.py calls, for the binding of one device.
#pragma once

#include <torch/library.h>

#define LERP_LAYOUT "int width, int head_size, int directions, bool with_cls_token)"

// DEVICE: "cpu" or "cuda"; KEY: PyTorch's dispatch key of it. The functions are those of the binding.
#define LERP_OPERATORS(DEVICE, KEY)                                                                                  \
    TORCH_LIBRARY_FRAGMENT(rwkv_clip, m) {                                                                           \
        m.def("lerp_" DEVICE "(Tensor x, Tensor c, " LERP_LAYOUT " -> Tensor[]");                                    \
        m.def("lerp_" DEVICE                                                                                         \
              "_backward(Tensor x, Tensor c, Tensor[] gradients, Tensor? base, Tensor? extra, " LERP_LAYOUT          \
              " -> (Tensor, Tensor)");                                                                               \
        m.def("ddlerp_" DEVICE "(Tensor x, Tensor hidden, Tensor w2, Tensor c, " LERP_LAYOUT " -> Tensor[]");        \
        m.def("ddlerp_" DEVICE                                                                                       \
              "_backward(Tensor x, Tensor hidden, Tensor w2, Tensor c, Tensor[] gradients, " LERP_LAYOUT             \
              " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");                                                       \
    }                                                                                                                \
    TORCH_LIBRARY_IMPL(rwkv_clip, KEY, m) {                                                                          \
        m.impl("lerp_" DEVICE, interpolate);                                                                         \
        m.impl("lerp_" DEVICE "_backward", interpolate_backward);                                                    \
        m.impl("ddlerp_" DEVICE, mix);                                                                               \
        m.impl("ddlerp_" DEVICE "_backward", mix_backward);                                                          \
    }
