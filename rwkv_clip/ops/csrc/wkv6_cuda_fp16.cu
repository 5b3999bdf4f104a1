// The kernels for float16 tensors.
#include "wkv6_cuda_launch.cuh"

namespace wkv6 {
WKV6_COMPILE(Float16, Float16)
}
