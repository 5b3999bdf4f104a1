// Token shift and interpolation: each tensor is read or written once, 16 or 8 bytes at a time. How calls are launched.
#include "cuda_launch.cuh"
#include "lerp_cuda_backward.cuh"
#include "lerp_cuda_forward.cuh"
#include "lerp_cuda_plain.cuh"

namespace lerp {
namespace {

int divide_up(int a, int b) { return (a + b - 1) / b; }

uint32_t magic_of(int divisor) {
    return static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / static_cast<uint32_t>(divisor));
}

LerpJob make_job(const LerpParams& params, int rows_per_part) {
    return {params, rows_per_part, divide_up(params.rows, rows_per_part), magic_of(params.layout.tokens),
            magic_of(params.layout.width)};
}

// Threads of a block that covers all channels of as many rows as it can.
struct RowBlock {
    int vectors, lanes, threads;
    explicit RowBlock(const LerpParams& params)
        : vectors(params.channels / 8), lanes(vectors < 256 ? 256 / vectors : 1), threads(vectors * lanes) {}
};

// Into how many parts kernels divide the rows: such that all their thread blocks run at once on 132 multiprocessors,
// for 640 channels.
constexpr int kLerpParts = 660, kForwardParts = 52, kWeightsParts = 26;
constexpr int kBackwardRows = 48;  // of a block of lerp_backward_kernel: of these there are enough to even out

int warps_of_a_block(int slabs) {
    for (int warps = 4; warps > 1; --warps) {
        if (slabs % warps == 0) return warps;
    }
    return 1;
}

int rows_of_a_part(const LerpParams& params, int parts) { return 16 * divide_up(divide_up(params.rows, 16), parts); }

bool is_valid(const LerpParams& params) {
    const LerpLayout& layout = params.layout;
    return params.rows > 0 && params.channels % 32 == 0 && params.channels / 8 <= 512 &&
           layout.head_size % (4 * layout.directions) == 0 &&
           static_cast<int64_t>(params.rows) * layout.tokens < INT64_C(0xffffffff);
}

constexpr int kInvalid = 1;  // cudaErrorInvalidValue

}  // namespace
}  // namespace lerp

extern "C" {

int lerp_parts(const LerpParams* params) {
    using namespace lerp;
    return divide_up(params->rows, kBackwardRows) * RowBlock(*params).lanes;
}

int ddlerp_parts(const LerpParams* params) {
    using namespace lerp;
    return divide_up(params->rows, rows_of_a_part(*params, kWeightsParts));
}

int lerp_forward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kLerpParts));
    const int threads = RowBlock(*params).threads;
    if (params->count == 1) return launch(lerp_kernel<1>, job.parts, 1, threads, 0, job);
    return launch(lerp_kernel<2>, job.parts, 1, threads, 0, job);
}

int lerp_backward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    const LerpJob job = make_job(*params, kBackwardRows);
    const int threads = RowBlock(*params).threads;
    if (params->base) return launch(lerp_backward_kernel<1, true>, job.parts, 1, threads, 0, job);
    if (params->count == 1) return launch(lerp_backward_kernel<1, false>, job.parts, 1, threads, 0, job);
    return launch(lerp_backward_kernel<2, false>, job.parts, 1, threads, 0, job);
}

int ddlerp_forward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    const int slabs = params->channels / 32, warps = warps_of_a_block(slabs);
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kForwardParts));
    const int error = launch(transpose_kernel, slabs, LERP_SHARES, 256, 0, job);
    if (error) return error;
    return launch(ddlerp_kernel, slabs / warps, job.parts, 32 * warps, 0, job);
}

int ddlerp_backward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    const int slabs = params->channels / 32;
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kWeightsParts));
    int error = launch(transpose_kernel, slabs, LERP_SHARES, 256, 0, job);
    if (!error) error = launch(ddlerp_tokens_kernel, divide_up(params->rows, 16), 1, 32 * kTokenWarps,
                                kTokensSharedBytes, job);
    if (!error) error = launch(ddlerp_weights_kernel, slabs, job.parts, 32 * LERP_SHARES, 0, job);
    if (error) return error;
    const int sums = LERP_SHARES * (LERP_RANK + 1) * params->channels;
    return launch(sum_parts_kernel, divide_up(sums, 4 * 256), 1, 256, 0, job);
}

const char* lerp_error_string(int code) { return wkv6::error_string(code); }

}  // extern "C"
