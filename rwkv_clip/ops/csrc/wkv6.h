// C interface between the PyTorch bindings (wkv6_*_binding.cpp) and the kernels (wkv6_cuda.cu, wkv6_cpu.cpp).
//
// The kernels include no PyTorch header, so that nvcc or a C++ compiler alone compiles them.
//
// The operator, for each batch entry b and head h, with d_t = exp(-exp(w_t)) a vector over the N channels of the key:
//
//   A[t, s] = sum_i r[t, i] * k[s, i] * D[t, s, i]
//   D[t, s] = product of d over s < m < t   when s < t    (forward direction, 1 when s = t - 1)
//           = product of d over t < m < s   when s > t    (backward direction, 1 when s = t + 1)
//           = u                             when s = t
//   y[t, j] = sum_s A[t, s] * v[s, j]
//
// w is the raw value. No pair straddles the first or the last token: w[0] and w[T - 1] have no effect, gw = 0 there.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum WKV6Dtype {
    WKV6_FLOAT32 = 0,
    WKV6_BFLOAT16 = 1,
    WKV6_FLOAT16 = 2,
} WKV6Dtype;

// A tensor [B, T, H, N] whose last dimension has unit stride. Strides are in elements, may be 0 (an expanded input) and
// never negative. The binding guarantees that each row of N elements starts at a multiple of 4 elements
// (16 bytes in float32, 8 bytes in bfloat16 and float16); wider loads need a check of data and strides.
typedef struct WKV6Tensor {
    void* data;
    int64_t stride_b;
    int64_t stride_t;
    int64_t stride_h;
} WKV6Tensor;

typedef struct WKV6Params {
    // Sizes: B, T, H >= 1 (the binding answers empty tensors itself); N a multiple of 4, 4 <= N <= 128.
    int32_t B, T, H, N;

    WKV6Dtype dtype;    // of r, k, v, y, gy, gr, gk, gv
    WKV6Dtype w_dtype;  // of w and gw: dtype or float32
    WKV6Dtype u_dtype;  // of u and gu: dtype or float32

    // Inputs; never written. u is [H, N] contiguous.
    WKV6Tensor r, k, v, w;
    const void* u;

    // Forward: output.
    WKV6Tensor y;

    // Backward: gradient of y (input) and the gradients (outputs, every element is to be written).
    // gu is [H, N] contiguous, in u_dtype.
    WKV6Tensor gy;
    WKV6Tensor gr, gk, gv, gw;
    void* gu;

    // Scratch memory of wkv6_cuda_*_workspace_bytes() bytes, 256-byte aligned, not initialised; null when 0 bytes.
    // gu is deterministic: one partial sum per (b, h) here, then a reduction over b in a fixed order; no atomics.
    void* workspace;

    // cudaStream_t; the binding has made the tensors' device current. Unused on the CPU.
    void* stream;
} WKV6Params;

// Bytes of scratch memory for a call with these sizes and dtypes (pointers and strides are not read).
size_t wkv6_cuda_forward_workspace_bytes(const WKV6Params* params);
size_t wkv6_cuda_backward_workspace_bytes(const WKV6Params* params);

// Launch on params->stream and return at once. 0 (cudaSuccess), or the cudaError_t of the launch.
// No device-wide synchronisation and no allocation, so that CUDA graphs capture them.
int wkv6_cuda_forward(const WKV6Params* params);
int wkv6_cuda_backward(const WKV6Params* params);

// Text for a code returned by the functions above; static storage.
const char* wkv6_cuda_error_string(int code);

// The same on the CPU, on up to num_threads threads. One head is one task: the result does not depend on their number.
size_t wkv6_cpu_backward_workspace_bytes(const WKV6Params* params);
void wkv6_cpu_forward(const WKV6Params* params, int num_threads);
void wkv6_cpu_backward(const WKV6Params* params, int num_threads);

// Instruction set that the CPU kernels use on this machine: "avx512", "avx2" or "baseline"; static storage.
const char* wkv6_cpu_instruction_set(void);

#ifdef __cplusplus
}  // extern "C"
#endif
