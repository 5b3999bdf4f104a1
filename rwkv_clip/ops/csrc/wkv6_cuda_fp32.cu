// The kernels for float32 tensors.
#include "wkv6_cuda_launch.cuh"

namespace wkv6 {
WKV6_COMPILE(Float32, Float32)
}
