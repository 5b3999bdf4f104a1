// The kernels for bfloat16 tensors.
#include "wkv6_cuda_launch.cuh"

namespace wkv6 {
WKV6_COMPILE(Bfloat16, Bfloat16)
}
