// Data-dependent interpolation, and what its two directions share.
//
// The low-rank shares are made on the tensor cores where they are used and never stored. Columns and ranks are given to
// the matrix instructions in another order than they lie in memory, the same for both operands, so that every lane
// holds neighbouring channels of a token and moves them as one vector: element n of 8x8 block j is 8 (n / 2) + 2 j +
// n % 2.
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

__device__ __forceinline__ int in_order(int j, const Lane& lane) { return 8 * (lane.g / 2) + 2 * j + lane.g % 2; }

// c + hidden w2 for channels 2 j and 2 j + 1 of a lane's eight: of row g (0, 1) and of row g + 8 (2, 3).
__device__ __forceinline__ void shares_of(float (&shares)[4], float c0, float c1, const uint32_t (&a)[2][4],
                                          const uint4& right, const Lane& lane) {
    shares[0] = shares[2] = c0;
    shares[1] = shares[3] = c1;
    multiply_matrices<16>(shares, a[0], right.x, right.y, shares, lane);
    multiply_matrices<16>(shares, a[1], right.z, right.w, shares, lane);
}

// A warp keeps 32 channels, and the weights for them in its registers.
__global__ void __launch_bounds__(128, 2) ddlerp_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const Lane lane;
    const int first_channel = 32 * (blockIdx.x * (blockDim.x / 32) + lane.warp), channel = first_channel + 8 * lane.q;
    const Directions directions(params, channel);
    uint4 weights[LERP_SHARES][4];
#pragma unroll
    for (int i = 0; i < LERP_SHARES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = i * params.channels + first_channel + in_order(j, lane);
            weights[i][j] = load_8(params.w2t, static_cast<int64_t>(column) * LERP_RANK + 8 * lane.q);
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
                float shares[4];
                shares_of(shares, c[2 * j], c[2 * j + 1], a[i], weights[i][j], lane);
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
