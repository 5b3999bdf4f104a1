// How the ops' kernels are launched, on a GPU or in the tests' emulator.
#pragma once

#include "wkv6_cuda_warp.cuh"

namespace wkv6 {

// Launches a kernel of a job, whose `params` hold the stream; the cudaError_t of that.
template <class Kernel, class Job>
int launch(Kernel kernel, int grid_x, int grid_y, int threads, size_t shared_bytes, const Job& job) {
#ifdef WKV6_EMULATE
    return emulator::launch(kernel, grid_x, grid_y, threads, shared_bytes, job);
#else
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (error != cudaSuccess) return error;
    }
    kernel<<<dim3(grid_x, grid_y), threads, shared_bytes, static_cast<cudaStream_t>(job.params.stream)>>>(job);
    return cudaGetLastError();
#endif
}

// Text of what `launch` returned.
inline const char* error_string(int code) {
#ifdef WKV6_EMULATE
    return code == emulator::kFailed ? emulator::message : code ? "invalid plan" : "no error";
#else
    return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}

}  // namespace wkv6
