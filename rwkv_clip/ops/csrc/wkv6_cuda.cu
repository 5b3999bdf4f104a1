// The C interface of wkv6.h on CUDA: plans, workspace, order of launches.
#include "wkv6_cuda_backward.cuh"
#include "wkv6_cuda_forward.cuh"
#include "wkv6_cuda_plan.h"

namespace wkv6 {

// gu[h, c] = sum of its parts in a fixed order. A block has 8 channels of [H, N], a thread every 32nd of a channel's
// parts.
__global__ void __launch_bounds__(256) sum_gu_kernel(const __grid_constant__ Job job) {
    float* partial = shared_pointer<float>(shared_memory());  // [32][8]
    const int H = job.params.H, N = job.params.N, i = blockIdx.x * 8 + (threadIdx.x & 7), h = i / N;
    const int parts = job.params.B * job.chunks;
    float sum = 0.f;
    if (h < H) {
        const float* from = job.gu_parts + static_cast<int64_t>(h) * job.chunks * N + i % N;
#pragma unroll 8
        for (int part = threadIdx.x >> 3; part < parts; part += 32) {
            const int b = part / job.chunks, chunk = part % job.chunks;
            sum += from[(static_cast<int64_t>(b) * H * job.chunks + chunk) * N];
        }
    }
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 8 || h >= H) return;
    sum = 0.f;
    for (int row = 0; row < 32; ++row) sum += partial[8 * row + threadIdx.x];
    if (job.params.u_dtype == WKV6_FLOAT32) {
        static_cast<float*>(job.params.gu)[i] = sum;
    } else if (job.params.u_dtype == WKV6_BFLOAT16) {
        static_cast<uint16_t*>(job.params.gu)[i] = Bfloat16::from_float(sum);
    } else {
        static_cast<uint16_t*>(job.params.gu)[i] = Float16::from_float(sum);
    }
}

template <bool kSplit>
static void set_shared_bytes(Plan& plan, bool backward) {
    with_size<kSplit>(plan.blocks, plan.chunked(), [&](auto blocks, auto chunked) {
        constexpr int kBlocks = decltype(blocks)::value;
        constexpr bool kChunked = decltype(chunked)::value;
        plan.shared_bytes = backward ? BackwardLayout<kSplit, kBlocks, kChunked>(plan.groups).bytes
                                     : ForwardLayout<kSplit, kBlocks, kChunked>(plan.groups).bytes;
        plan.states_shared_bytes = kChunked ? StatesLayout<kSplit, kBlocks>(plan.groups).bytes : 0;
        return 0;
    });
}

struct Device {
    size_t shared_bytes;  // that a thread block may have
    int multiprocessors;
    int error;
};

static Device current_device() {
#ifdef WKV6_EMULATE
    return Device{emulator::shared_memory_limit(), 1, 0};
#else
    int device = 0, limit = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (!error) error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (!error) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return Device{static_cast<size_t>(limit), multiprocessors, error};
#endif
}

// Whether the byte offsets inside a head fit in 32 bits, and the numbers of heads, thread blocks and channels as well.
static bool is_addressable(const WKV6Params& params) {
    const int64_t heads = static_cast<int64_t>(params.B) * params.H;
    const int64_t channels = static_cast<int64_t>(params.H) * params.N;
    if (heads > INT32_MAX / 4 || channels > INT32_MAX - 8) return false;
    for (const WKV6Tensor* x : {&params.r, &params.k, &params.v, &params.w, &params.y, &params.gy, &params.gr,
                                &params.gk, &params.gv, &params.gw}) {
        if (x->data && x->stride_t > (int64_t{1} << 32) / 4 / (params.T + 16)) return false;
    }
    return true;
}

static Plan make_plan(const WKV6Params& params, bool backward) {
    Plan plan = {};
    const Device device = current_device();
    plan.error = device.error;
    if (plan.error) return plan;
    const bool split = params.dtype != WKV6_BFLOAT16;
    const int total = (params.T + 15) / 16;
    plan.groups = (params.N + 15) / 16;
    const auto fits = [&](int blocks) {
        plan.blocks = blocks;
        plan.chunks = (total + blocks - 1) / blocks;
        if (blocks == 3) plan.chunks = 1;  // and a token
        split ? set_shared_bytes<true>(plan, backward) : set_shared_bytes<false>(plan, backward);
        return plan.shared_bytes <= device.shared_bytes && plan.states_shared_bytes <= device.shared_bytes;
    };
    // One chunk of up to 80 tokens, else chunks of 64, or of 32 or 16 where shared memory is too small for those.
    bool found = (total == 5 && fits(5)) || (params.T == 49 && !split && fits(3));
    for (const int blocks : {4, 2, 1}) found = found || fits(blocks);
    if (!found || plan.chunks > 65535 || !is_addressable(params)) {
        plan.error = 1;  // cudaErrorInvalidValue
        return plan;
    }
    plan.last_blocks = total - (plan.chunks - 1) * plan.blocks;
    if (!plan.chunked() || plan.last_blocks > 2) plan.last_blocks = plan.blocks;
    plan.ahead = device.multiprocessors * forward_occupancy(split, plan.blocks);
    const size_t heads = static_cast<size_t>(params.B) * params.H;
    if (plan.chunks > 1) {
        const size_t tiles = heads * plan.chunks * plan.groups * plan.groups;
        plan.states_bytes = tiles * (backward ? 4 : 2) * kTileBytes * (split ? 2 : 1);
        plan.decays_bytes = heads * plan.chunks * plan.groups * (backward ? 2 : 1) * 64;
    }
    if (backward) plan.gu_bytes = heads * plan.chunks * params.N * 4;
    return plan;
}

static Job make_job(const WKV6Params& params, const Plan& plan) {
    Job job = {};
    job.params = params;
    job.chunks = plan.chunks;
    job.chunk_blocks = plan.blocks;
    job.ahead = plan.ahead;
    char* workspace = static_cast<char*>(params.workspace);
    job.states = workspace;
    job.gu_parts = reinterpret_cast<float*>(workspace + plan.states_bytes);
    job.chunk_decays = reinterpret_cast<float*>(workspace + plan.states_bytes + plan.gu_bytes);
    return job;
}

template <class Element, class W>
static int launch_for(const Job& job, const Plan& plan, bool backward) {
    return backward ? launch_backward<Element, W>(job, plan) : launch_forward<Element, W>(job, plan);
}

static int launch_by_type(const WKV6Params& params, bool backward) {
    const Plan plan = make_plan(params, backward);
    if (plan.error) return plan.error;
    const Job job = make_job(params, plan);
    const bool w32 = params.w_dtype == WKV6_FLOAT32;
    int error;
    if (params.dtype == WKV6_FLOAT32) {
        error = launch_for<Float32, Float32>(job, plan, backward);
    } else if (params.dtype == WKV6_BFLOAT16) {
        error = w32 ? launch_for<Bfloat16, Float32>(job, plan, backward)
                    : launch_for<Bfloat16, Bfloat16>(job, plan, backward);
    } else {
        error =
            w32 ? launch_for<Float16, Float32>(job, plan, backward) : launch_for<Float16, Float16>(job, plan, backward);
    }
    if (error || !backward) return error;
    return launch(sum_gu_kernel, (params.H * params.N + 7) / 8, 1, 256, 256 * sizeof(float), job);
}

}  // namespace wkv6

extern "C" {

size_t wkv6_cuda_forward_workspace_bytes(const WKV6Params* params) {
    return wkv6::make_plan(*params, false).workspace_bytes();
}

size_t wkv6_cuda_backward_workspace_bytes(const WKV6Params* params) {
    return wkv6::make_plan(*params, true).workspace_bytes();
}

int wkv6_cuda_forward(const WKV6Params* params) { return wkv6::launch_by_type(*params, false); }

int wkv6_cuda_backward(const WKV6Params* params) { return wkv6::launch_by_type(*params, true); }

const char* wkv6_cuda_error_string(int code) { return wkv6::error_string(code); }

}  // extern "C"
