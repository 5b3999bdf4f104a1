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
    const LerpLayout& layout = params.layout;
    return {params, rows_per_part, divide_up(params.rows, rows_per_part), layout.head_size / layout.directions,
            magic_of(layout.tokens), magic_of(layout.width), magic_of(layout.head_size)};
}

// Into how many parts kernels divide the rows: such that all their thread blocks run at once on 132 multiprocessors,
// for 640 channels.
constexpr int kLerpParts = 660, kLerpBackwardParts = 396, kForwardParts = 52, kWeightsParts = 26;

int warps_of_a_block(int slabs) {
    for (int warps = 4; warps > 1; --warps) {
        if (slabs % warps == 0) return warps;
    }
    return 1;
}

int rows_of_a_part(const LerpParams& params, int parts, int multiple = 16) {
    return multiple * divide_up(params.rows, multiple * parts);
}

int lerp_backward_rows(const LerpParams& params) {
    return rows_of_a_part(params, kLerpBackwardParts, RowBlock(params.channels).lanes);
}

bool is_valid(const LerpParams& params) {
    const LerpLayout& layout = params.layout;
    return params.rows > 0 && params.channels % 32 == 0 && params.channels / 8 <= 512 &&
           layout.head_size % (4 * layout.directions) == 0 &&
           static_cast<int64_t>(params.rows) * layout.tokens < INT64_C(0xffffffff);
}

template <int kCount, bool kExtra>
int launch_lerp_backward(const LerpParams& params) {
    const LerpJob job = make_job(params, lerp_backward_rows(params));
    const RowBlock block(params.channels);
    const size_t shared_bytes = kStages * kReads<kCount, kExtra> * 16 * block.threads;
    return launch(lerp_backward_kernel<kCount, kExtra>, job.parts, block.ranges, block.threads, shared_bytes, job);
}

constexpr int kInvalid = 1;  // cudaErrorInvalidValue

}  // namespace
}  // namespace lerp

extern "C" {

int lerp_parts(const LerpParams* params) {
    using namespace lerp;
    return divide_up(params->rows, lerp_backward_rows(*params)) * RowBlock(params->channels).lanes;
}

int ddlerp_parts(const LerpParams* params) {
    using namespace lerp;
    return divide_up(params->rows, rows_of_a_part(*params, kWeightsParts));
}

int lerp_packed_bytes(const LerpParams* params) { return params->channels / 32 * lerp::kSlabBytes; }

int lerp_forward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kLerpParts));
    const RowBlock block(params->channels);
    if (params->count == 1) return launch(lerp_kernel<1>, job.parts, block.ranges, block.threads, 0, job);
    return launch(lerp_kernel<2>, job.parts, block.ranges, block.threads, 0, job);
}

int lerp_backward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    if (params->base) return launch_lerp_backward<1, true>(*params);
    if (params->count == 1) return launch_lerp_backward<1, false>(*params);
    return launch_lerp_backward<2, false>(*params);
}

int ddlerp_forward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    const int slabs = params->channels / 32, warps = warps_of_a_block(slabs);
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kForwardParts));
    const int error = launch(pack_kernel, slabs, LERP_SHARES, 128, 0, job);
    if (error) return error;
    return launch(ddlerp_kernel, slabs / warps, job.parts, 32 * warps, 0, job);
}

int ddlerp_backward(const LerpParams* params) {
    using namespace lerp;
    if (!is_valid(*params)) return kInvalid;
    const int slabs = params->channels / 32;
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kWeightsParts));
    int error = launch(pack_kernel, slabs, LERP_SHARES, 128, 0, job);
    if (!error) error = launch(ddlerp_tokens_kernel, divide_up(params->rows, 16 * kTokenWarps), 1, 32 * kTokenWarps,
                                kTokensSharedBytes, job);
    if (!error) error = launch(ddlerp_weights_kernel, divide_up(slabs, 2), job.parts, 32 * LERP_SHARES,
                                kWeightsSharedBytes, job);
    if (error) return error;
    const int sums = LERP_SHARES * (LERP_RANK + 1) * params->channels;
    return launch(sum_parts_kernel, divide_up(sums, 4 * 256), 1, 256, 0, job);
}

const char* lerp_error_string(int code) { return wkv6::error_string(code); }

}  // extern "C"
