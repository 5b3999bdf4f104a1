// The CUDA kernels of WKV6 on odd shapes, for compute-sanitizer: each tensor is an allocation of its own, outputs start
// as NaN, and every element of every output has to be finite afterwards. Exit code 0 when they are.
//
//   nvcc -std=c++17 -O3 -arch=native -I rwkv_clip/ops/csrc tests/ops/wkv6_odd_shapes.cu
//   rwkv_clip/ops/csrc/wkv6_cuda*.cu \
//       -o wkv6_odd_shapes
//   compute-sanitizer --tool memcheck --error-exitcode 1 ./wkv6_odd_shapes
//   compute-sanitizer --tool racecheck --error-exitcode 1 ./wkv6_odd_shapes
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "wkv6.h"

namespace {

void check(int error, const char* what) {
    if (error == 0) return;
    std::fprintf(stderr, "%s: %s\n", what, wkv6_cuda_error_string(error));
    std::exit(2);
}

float random_value(float low, float high) {
    static uint32_t state = 7;
    state = state * 1664525u + 1013904223u;
    return low + (high - low) * static_cast<float>(state >> 8) / 16777216.f;
}

size_t size_of(WKV6Dtype dtype) { return dtype == WKV6_FLOAT32 ? 4 : 2; }

// Normal values between 2^-14 and 2^16, truncated.
uint16_t to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | (exponent > 0 ? exponent << 10 | (bits >> 13 & 1023) : 0));
}

struct Buffer {
    void* data = nullptr;
    size_t count;
    WKV6Dtype dtype;

    Buffer(size_t count, WKV6Dtype dtype) : count(count), dtype(dtype) {
        check(cudaMalloc(&data, count * size_of(dtype)), "cudaMalloc");
        check(cudaMemset(data, 0xff, count * size_of(dtype)), "cudaMemset");  // NaN in each of the types
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }

    void fill(float low, float high) {
        std::vector<char> host(count * size_of(dtype));
        for (size_t i = 0; i < count; ++i) {
            const float x = random_value(low, high);
            uint32_t bits;
            std::memcpy(&bits, &x, 4);
            const uint16_t half = dtype == WKV6_BFLOAT16 ? static_cast<uint16_t>(bits >> 16) : to_half(x);
            std::memcpy(&host[i * size_of(dtype)], dtype == WKV6_FLOAT32 ? static_cast<const void*>(&x) : &half,
                        size_of(dtype));
        }
        check(cudaMemcpy(data, host.data(), host.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }

    bool all_finite() const {
        std::vector<char> host(count * size_of(dtype));
        check(cudaMemcpy(host.data(), data, host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
        const uint32_t exponent = dtype == WKV6_FLOAT32 ? 0x7f800000u : dtype == WKV6_BFLOAT16 ? 0x7f80u : 0x7c00u;
        for (size_t i = 0; i < count; ++i) {
            uint32_t bits = 0;
            std::memcpy(&bits, &host[i * size_of(dtype)], size_of(dtype));
            if ((bits & exponent) == exponent) return false;
        }
        return true;
    }
};

bool run(int B, int T, int H, int N, WKV6Dtype dtype, WKV6Dtype w_dtype) {
    const size_t count = static_cast<size_t>(B) * T * H * N;
    Buffer r(count, dtype), k(count, dtype), v(count, dtype), w(count, w_dtype), gy(count, dtype),
        u(H * N, WKV6_FLOAT32);
    Buffer y(count, dtype), gr(count, dtype), gk(count, dtype), gv(count, dtype), gw(count, w_dtype),
        gu(H * N, WKV6_FLOAT32);
    for (Buffer* x : {&r, &k, &v, &gy, &u}) x->fill(-1.5f, 1.5f);
    w.fill(-8.f, 6.f);
    const auto strided = [&](const Buffer& x) {
        return WKV6Tensor{x.data, static_cast<int64_t>(T) * H * N, static_cast<int64_t>(H) * N, N};
    };
    WKV6Params params = {};
    params.B = B, params.T = T, params.H = H, params.N = N;
    params.dtype = dtype, params.w_dtype = w_dtype, params.u_dtype = WKV6_FLOAT32;
    params.r = strided(r), params.k = strided(k), params.v = strided(v), params.w = strided(w);
    params.y = strided(y), params.gy = strided(gy);
    params.gr = strided(gr), params.gk = strided(gk), params.gv = strided(gv), params.gw = strided(gw);
    params.u = u.data;
    params.gu = gu.data;
    for (const bool backward : {false, true}) {
        const size_t bytes =
            backward ? wkv6_cuda_backward_workspace_bytes(&params) : wkv6_cuda_forward_workspace_bytes(&params);
        params.workspace = nullptr;
        if (bytes) check(cudaMalloc(&params.workspace, bytes), "cudaMalloc");
        check(backward ? wkv6_cuda_backward(&params) : wkv6_cuda_forward(&params), backward ? "backward" : "forward");
        check(cudaDeviceSynchronize(), "kernels");
        if (bytes) check(cudaFree(params.workspace), "cudaFree");
    }
    for (const Buffer* x : {&y, &gr, &gk, &gv, &gw, &gu}) {
        if (!x->all_finite()) return false;
    }
    return true;
}

}  // namespace

int main() {
    const int shapes[][4] = {{2, 1, 2, 8},    {1, 2, 1, 16},   {2, 3, 2, 4},   {1, 17, 1, 20},
                             {1, 33, 2, 36},  {1, 49, 2, 80},  {1, 77, 2, 64}, {1, 100, 1, 128},
                             {1, 196, 1, 80}, {1, 300, 1, 20}, {1, 49, 1, 128}};
    const WKV6Dtype dtypes[][2] = {{WKV6_BFLOAT16, WKV6_FLOAT32},
                                   {WKV6_BFLOAT16, WKV6_BFLOAT16},
                                   {WKV6_FLOAT32, WKV6_FLOAT32},
                                   {WKV6_FLOAT16, WKV6_FLOAT32},
                                   {WKV6_FLOAT16, WKV6_FLOAT16}};
    int failed = 0;
    for (const auto& shape : shapes) {
        for (const auto& dtype : dtypes) {
            if (run(shape[0], shape[1], shape[2], shape[3], dtype[0], dtype[1])) continue;
            std::fprintf(stderr, "not finite: B %d T %d H %d N %d dtype %d w %d\n", shape[0], shape[1], shape[2],
                         shape[3], dtype[0], dtype[1]);
            failed = 1;
        }
    }
    std::printf("%zu shapes, %zu pairs of types: %s\n", sizeof(shapes) / sizeof(shapes[0]),
                sizeof(dtypes) / sizeof(dtypes[0]), failed ? "FAILED" : "all values written and finite");
    return failed;
}
