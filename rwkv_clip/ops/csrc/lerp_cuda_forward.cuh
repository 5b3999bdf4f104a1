// Data-dependent interpolation, and what its two directions share.
//
// The low-rank shares are made on the tensor cores where they are used and never stored. Channels (forwards, ranks too)
// are given to the matrix instructions in another order than they lie in memory, the same for both operands, so that
// every lane holds neighbouring channels of a token and moves them as one vector: element n of 8x8 block j is
// 8 (n / 2) + 2 j + n % 2.
#pragma once

#include "lerp_cuda_job.cuh"

namespace lerp {

// Lane 4 g + q has rows g and g + 8 of a block of 16 and channels 8 q ... 8 q + 7 of a block of 32.
struct Tile {
    int rows[2];
    int64_t elements[2];
    bool real[2];

    __device__ __forceinline__ Tile(const LerpParams& params, int first_row, int channel, const Lane& lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane.g + 8 * half;
            real[half] = row < params.rows;
            rows[half] = real[half] ? row : 0;
            elements[half] = static_cast<int64_t>(rows[half]) * params.channels + channel;
        }
    }
};

// The left operand of 16 rows x 32 ranks of one share.
__device__ __forceinline__ void load_hidden(uint32_t (&a)[2][4], const LerpParams& params, const Tile& tile, int share,
                                            const Lane& lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 ranks =
            load_8(params.hidden, static_cast<int64_t>(tile.rows[half]) * kHidden + share * LERP_RANK + 8 * lane.q);
        a[0][half] = ranks.x;
        a[0][half + 2] = ranks.y;
        a[1][half] = ranks.z;
        a[1][half + 2] = ranks.w;
    }
}

// w2 and c for the tensor cores. Of each 32 channels (a slab) and share: 8x8 matrices [pair of blocks of channels][pair
// of blocks of ranks][2][2], their rows channels in the order said above; then for each block and q the constants c of
// channels 2 j and 2 j + 1 of a lane's eight, twice, as the matrix instruction adds them to rows g and g + 8.
constexpr int kWeightsBytes = 32 * LERP_RANK * 2, kConstantsBytes = 4 * 4 * 16;
constexpr int kPackedBytes = kWeightsBytes + kConstantsBytes, kSlabBytes = LERP_SHARES * kPackedBytes;

__device__ __forceinline__ int64_t place_in_weights(int j, int m, int n) {
    return 512 * (2 * (j / 2) + m / 2) + 128 * (2 * (j % 2) + m % 2) + 16 * n;
}

// A block has 32 channels of one share, each thread a row of a matrix.
__global__ void __launch_bounds__(128) pack_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const int slab = blockIdx.x, share = blockIdx.y;
    const int j = threadIdx.x / 32, m = threadIdx.x / 8 % 4, n = threadIdx.x % 8;
    char* to = static_cast<char*>(params.w2_packed) + slab * kSlabBytes + share * kPackedBytes;
    const uint16_t* from = static_cast<const uint16_t*>(params.w2) + (share * LERP_RANK + 8 * m) * params.channels +
                           32 * slab + 8 * (n / 2) + 2 * j + n % 2;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = from[2 * i * params.channels] | static_cast<uint32_t>(from[(2 * i + 1) * params.channels]) << 16;
    }
    *reinterpret_cast<uint4*>(to + place_in_weights(j, m, n)) = uint4{words[0], words[1], words[2], words[3]};
    if (threadIdx.x < 16) {  // 4 j + q
        const float* c = params.c + share * params.channels + 32 * slab + 8 * (threadIdx.x % 4) + 2 * (threadIdx.x / 4);
        *reinterpret_cast<float4*>(to + kWeightsBytes + 16 * threadIdx.x) = float4{c[0], c[1], c[0], c[1]};
    }
}

// A warp keeps 32 channels, and the weights for them in its registers.
__global__ void __launch_bounds__(128, 2) ddlerp_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const Lane lane;
    const int first_channel = 32 * (blockIdx.x * (blockDim.x / 32) + lane.warp), channel = first_channel + 8 * lane.q;
    const Directions directions(job, channel);
    uint4 weights[LERP_SHARES][4];  // ranks 8 q ... 8 q + 7, of which `load_hidden` takes two for each block of ranks
#pragma unroll
    for (int i = 0; i < LERP_SHARES; ++i) {
        const char* packed = static_cast<const char*>(params.w2_packed) + first_channel / 32 * kSlabBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            weights[i][j] = load<uint4>(packed + i * kPackedBytes + place_in_weights(j, lane.q, lane.g));
        }
    }
    const int first = blockIdx.y * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    for (int row = first; row < end; row += 16) {
        const Tile tile(params, row, channel, lane);
        if (row + 16 < end) {
            const Tile following(params, row + 16, channel, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) prefetch_8(params.x, following.elements[half]);
        }
        uint32_t a[LERP_SHARES][2][4];
#pragma unroll
        for (int i = 0; i < LERP_SHARES; ++i) load_hidden(a[i], params, tile, i, lane);
        float x[2][8], difference[2][8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            load_difference(x[half], difference[half], params, tile.elements[half], Place(job, tile.rows[half]),
                            directions);
        }
#pragma unroll
        for (int i = 0; i < LERP_SHARES; ++i) {
            float c[8], y[2][8];
            load_floats(c, params.c + i * params.channels + channel);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float shares[4] = {c[2 * j], c[2 * j + 1], c[2 * j], c[2 * j + 1]};
                multiply_matrices<16>(shares, a[i][0], weights[i][j].x, weights[i][j].y, shares, lane);
                multiply_matrices<16>(shares, a[i][1], weights[i][j].z, weights[i][j].w, shares, lane);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int half = k / 2, at = 2 * j + k % 2;
                    y[half][at] = x[half][at] + difference[half][at] * shares[k];
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (tile.real[half]) store_8(params.y[i], tile.elements[half], y[half]);
            }
        }
    }
}

}  // namespace lerp
