// The C interface of wkv6.h on CUDA: plans, workspace, order of launches.
#include "wkv6_cuda_plan.h"

namespace wkv6 {

// Chunk sums to states, in place. One thread an element of a state; blockIdx.y = 2 kind + side.
__global__ void __launch_bounds__(256) join_states_kernel(const __grid_constant__ Job job) {
    const int groups = (job.params.N + 15) / 16, channels = 16 * groups, tiles = groups * groups;
    const int head = blockIdx.x / tiles, tile = blockIdx.x % tiles, side = blockIdx.y & 1;
    const int64_t heads = gridDim.x / tiles;
    // Of the tile's eight values per lane, number 4 (thread / 128) + thread % 4 of lane thread / 4 % 32.
    const int lane = threadIdx.x >> 2 & 31, row_half = threadIdx.x >> 1 & 1;
    const int c = 16 * (tile / groups) + permuted(8 * row_half + (lane >> 2));
    float* element = job.states + (blockIdx.y * heads + head) * job.chunks * tiles * kStateTileFloats +
                     tile * kStateTileFloats + threadIdx.x;
    const float* decay = job.chunk_decays + static_cast<int64_t>(head) * job.chunks * channels + c;
    float state = 0.f;
    for (int i = 0; i < job.chunks; ++i) {
        const int chunk = side ? job.chunks - 1 - i : i;
        float* here = element + static_cast<int64_t>(chunk) * tiles * kStateTileFloats;
        const float sum = *here;
        *here = state;
        state = state * decay[chunk * channels] + sum;
    }
}

// gu[h, c] = sum of its parts in a fixed order. A block has 32 channels of [H, N] and 8 warps.
__global__ void __launch_bounds__(256) sum_gu_kernel(const __grid_constant__ Job job) {
    float* partial = shared_pointer<float>(shared_memory());  // [8][32]
    const int H = job.params.H, N = job.params.N, channel = blockIdx.x * 32 + (threadIdx.x & 31);
    const int h = channel / N, c = channel % N, parts = job.params.B * job.chunks;
    float sum = 0.f;
    if (h < H) {
#pragma unroll 8
        for (int part = threadIdx.x >> 5; part < parts; part += 8) {
            const int b = part / job.chunks, chunk = part % job.chunks;
            sum += job.gu_parts[((static_cast<int64_t>(b) * H + h) * job.chunks + chunk) * N + c];
        }
    }
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || h >= H) return;
    for (int warp = 1; warp < 8; ++warp) sum += partial[32 * warp + threadIdx.x];
    const int i = h * N + c;
    if (job.params.u_dtype == WKV6_FLOAT32) {
        static_cast<float*>(job.params.gu)[i] = sum;
    } else if (job.params.u_dtype == WKV6_BFLOAT16) {
        static_cast<uint16_t*>(job.params.gu)[i] = Bfloat16::from_float(sum);
    } else {
        static_cast<uint16_t*>(job.params.gu)[i] = Float16::from_float(sum);
    }
}

int states_shared_bytes(const Plan& plan, bool split) {
    const auto bytes = [&](auto is_split) {
        return with_size<is_split()>(plan, [&](auto blocks, auto) {
            return StatesLayout<is_split(), blocks()>(plan.groups).bytes;
        });
    };
    return split ? bytes(std::true_type{}) : bytes(std::false_type{});
}

static int shared_memory_limit(size_t& bytes) {
#ifdef WKV6_EMULATE
    bytes = emulator::shared_memory_limit;
    return 0;
#else
    int device = 0, limit = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    bytes = limit;
    return error;
#endif
}

Plan make_plan(const WKV6Params& params, bool backward) {
    Plan plan = {};
    size_t limit = 0;
    plan.error = shared_memory_limit(limit);
    if (plan.error) return plan;
    const bool split = params.dtype != WKV6_BFLOAT16;
    const int total = (params.T + 15) / 16;
    plan.groups = (params.N + 15) / 16;
    const auto fits = [&](int blocks) {
        plan.blocks = blocks;
        plan.chunks = (total + blocks - 1) / blocks;
        plan.shared_bytes = backward ? backward_shared_bytes(plan, split) : forward_shared_bytes(plan, split);
        plan.states_shared_bytes = plan.chunks > 1 ? states_shared_bytes(plan, split) : 0;
        return plan.shared_bytes <= limit && plan.states_shared_bytes <= limit;
    };
    // One chunk where it fits, two of 8 blocks where those fit, else chunks of 4 blocks or, with little memory, of one.
    bool found = false;
    for (const int blocks : kSizes) found = found || (total <= blocks && blocks <= max_blocks(split) && fits(blocks));
    if (!found && !split && total <= 16) found = fits(8);
    if (!found) found = fits(4);
    if (!found) found = fits(1);
    if (!found || plan.chunks > 32767) {
        plan.error = 1;  // cudaErrorInvalidValue
        return plan;
    }
    const size_t heads = static_cast<size_t>(params.B) * params.H, kinds = backward ? 2 : 1;
    if (plan.chunks > 1) {
        plan.states_bytes = kinds * 2 * heads * plan.chunks * plan.groups * plan.groups * kStateTileFloats * 4;
        plan.decays_bytes = heads * plan.chunks * plan.groups * 16 * 4;
    }
    if (backward) plan.gu_bytes = heads * plan.chunks * params.N * 4;
    return plan;
}

Job make_job(const WKV6Params& params, const Plan& plan) {
    Job job = {};
    job.params = params;
    job.chunks = plan.chunks;
    char* workspace = static_cast<char*>(params.workspace);
    job.states = reinterpret_cast<float*>(workspace);
    job.chunk_decays = reinterpret_cast<float*>(workspace + plan.states_bytes);
    job.gu_parts = reinterpret_cast<float*>(workspace + plan.states_bytes + plan.decays_bytes);
    return job;
}

static int launch_states(const Job& job, const Plan& plan) {
    if (plan.chunks == 1) return 0;
    const int kinds = job.params.gy.data ? 2 : 1;
    const int error = with_types(job.params, [&](auto element, auto w) {
        using Element = decltype(element);
        using W = decltype(w);
        return with_size<Element::kSplit>(plan, [&](auto blocks, auto) {
            return launch(chunk_states_kernel<Element, W, blocks()>, job.params.B * job.params.H, kinds * plan.chunks,
                          32 * plan.blocks, plan.states_shared_bytes, job);
        });
    });
    if (error) return error;
    return launch(join_states_kernel, job.params.B * job.params.H * plan.groups * plan.groups,
                  2 * kinds, 256, 0, job);
}

}  // namespace wkv6

extern "C" {

size_t wkv6_cuda_forward_workspace_bytes(const WKV6Params* params) {
    return wkv6::make_plan(*params, false).workspace_bytes();
}

size_t wkv6_cuda_backward_workspace_bytes(const WKV6Params* params) {
    return wkv6::make_plan(*params, true).workspace_bytes();
}

int wkv6_cuda_forward(const WKV6Params* params) {
    const wkv6::Plan plan = wkv6::make_plan(*params, false);
    if (plan.error) return plan.error;
    wkv6::Job job = wkv6::make_job(*params, plan);
    job.params.gy.data = nullptr;
    if (const int error = wkv6::launch_states(job, plan)) return error;
    return wkv6::launch_forward(job, plan);
}

int wkv6_cuda_backward(const WKV6Params* params) {
    const wkv6::Plan plan = wkv6::make_plan(*params, true);
    if (plan.error) return plan.error;
    const wkv6::Job job = wkv6::make_job(*params, plan);
    if (const int error = wkv6::launch_states(job, plan)) return error;
    if (const int error = wkv6::launch_backward(job, plan)) return error;
    const int channels = params->H * params->N;
    return wkv6::launch(wkv6::sum_gu_kernel, (channels + 31) / 32, 1, 256, 256 * sizeof(float), job);
}

const char* wkv6_cuda_error_string(int code) {
#ifdef WKV6_EMULATE
    return code ? "invalid plan" : "no error";
#else
    return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}

}  // extern "C"
