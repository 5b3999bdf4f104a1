// Data-dependent interpolation, backwards: one kernel for what does not sum over tokens, one for what does.
#pragma once

#include "lerp_cuda_forward.cuh"

namespace lerp {

constexpr int kTokenWarps = 4;
constexpr int kShareFloats = 16 * 32;  // 16 rows of one share's hidden values, as a warp holds them
constexpr size_t kTokensSharedBytes = kTokenWarps * LERP_SHARES * kShareFloats * sizeof(float);

// What does not sum over tokens. A block has 16 rows; its warps go through the channels in turn, 32 at a time, and add
// up their parts of the hidden values' gradients in the end.
__global__ void __launch_bounds__(32 * kTokenWarps, 2) ddlerp_tokens_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const Lane lane;
    float g_hidden[LERP_SHARES][4][4];
#pragma unroll
    for (int i = 0; i < LERP_SHARES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) g_hidden[i][j][k] = 0.f;
        }
    }
    Tile tile(params, 16 * blockIdx.x, 32 * lane.warp + 8 * lane.q, lane);
    const Place places[2] = {Place(job, tile.rows[0]), Place(job, tile.rows[1])};
    constexpr int kStep = 32 * kTokenWarps;
    for (int first_channel = 32 * lane.warp; first_channel < params.channels; first_channel += kStep) {
        const int channel = first_channel + 8 * lane.q;
        if (first_channel + kStep < params.channels) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                prefetch_8(params.x, tile.elements[half] + kStep);
#pragma unroll
                for (int i = 0; i < LERP_SHARES; ++i) prefetch_8(params.gy[i], tile.elements[half] + kStep);
            }
        }
        const Directions directions(params, channel);
        float base[2][8], extra[2][8];
        uint32_t difference[2][4];  // rounded to bf16
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[8], d[8];
            load_difference(x, d, params, tile.elements[half], places[half], directions);
#pragma unroll
            for (int j = 0; j < 4; ++j) difference[half][j] = pack_bf16(d[2 * j], d[2 * j + 1]);
#pragma unroll
            for (int k = 0; k < 8; ++k) base[half][k] = extra[half][k] = 0.f;
        }
        uint4 next[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) next[half] = load_8(params.gy[0], tile.elements[half]);
#pragma unroll
        for (int i = 0; i < LERP_SHARES; ++i) {
            const uint32_t gy[2][4] = {{next[0].x, next[0].y, next[0].z, next[0].w},
                                       {next[1].x, next[1].y, next[1].z, next[1].w}};
            if (i + 1 < LERP_SHARES) {  // while this share is worked on
#pragma unroll
                for (int half = 0; half < 2; ++half) next[half] = load_8(params.gy[i + 1], tile.elements[half]);
            }
            uint32_t a[2][4], left[2][4];  // left: gy * difference, as left operand with 32 channels to sum over
            load_hidden(a, params, tile, i, lane);
            float c[8];
            load_floats(c, params.c + i * params.channels + channel);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int column = i * params.channels + first_channel + in_order(j, lane);
                float shares[4];
                shares_of(shares, c[2 * j], c[2 * j + 1], a,
                          load_8(params.w2t, static_cast<int64_t>(column) * LERP_RANK + 8 * lane.q), lane);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float first = bf16_low(gy[half][j]), second = bf16_high(gy[half][j]);
                    base[half][2 * j] += first;
                    base[half][2 * j + 1] += second;
                    extra[half][2 * j] += first * shares[2 * half];
                    extra[half][2 * j + 1] += second * shares[2 * half + 1];
                    left[j / 2][half + 2 * (j % 2)] =
                        pack_bf16(first * bf16_low(difference[half][j]), second * bf16_high(difference[half][j]));
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int rank = i * LERP_RANK + in_order(j, lane);
                const uint4 b = load_8(params.w2, static_cast<int64_t>(rank) * params.channels + channel);
                multiply_matrices<16>(g_hidden[i][j], left[0], b.x, b.y, g_hidden[i][j], lane);
                multiply_matrices<16>(g_hidden[i][j], left[1], b.z, b.w, g_hidden[i][j], lane);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (tile.real[half]) {
                store_8(params.base, tile.elements[half], base[half]);
                store_8(params.extra, tile.elements[half], extra[half]);
            }
            tile.elements[half] += kStep;
        }
    }
    // Value k of block j of a share lies at [k + 4 j][lane], so that lanes are neighbours in memory.
    const Address own = shared_memory() + 4 * (lane.warp * LERP_SHARES * kShareFloats + lane.id);
#pragma unroll
    for (int i = 0; i < LERP_SHARES; ++i) {
#pragma unroll
        for (int n = 0; n < 16; ++n) store_shared(own + 4 * (i * kShareFloats + 32 * n), g_hidden[i][n / 4][n % 4]);
    }
    __syncthreads();
    for (int i = lane.warp; i < LERP_SHARES; i += kTokenWarps) {
        const Address part = shared_memory() + 4 * (i * kShareFloats + lane.id);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float values[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                values[n] = 0.f;
#pragma unroll
                for (int warp = 0; warp < kTokenWarps; ++warp) {
                    const int value = warp * LERP_SHARES * kShareFloats + 32 * (4 * (n / 2) + 2 * half + n % 2);
                    values[n] += load_shared<float>(part + 4 * value);
                }
            }
            const int64_t element = static_cast<int64_t>(tile.rows[half]) * kHidden + i * LERP_RANK + 8 * lane.q;
            if (tile.real[half]) store_8(params.g_hidden, element, values);
        }
    }
}

__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) {
    return (first & 0xffffu) | second << 16;
}

__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) {
    return first >> 16 | (second & 0xffff0000u);
}

// Sums over tokens. A block has 32 channels of some rows, each of its five warps one share. Lane 4 g + q holds rows
// 4 q ... 4 q + 3 of 16, in which pairs of rows are neighbours in a register, and channels (and ranks) 4 g ... 4 g + 3.
__global__ void __launch_bounds__(32 * LERP_SHARES) ddlerp_weights_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const Lane lane;
    const int share = lane.warp, channel = 32 * blockIdx.x + 4 * lane.g;
    const Direction direction(params, channel, false);
    const void* gy = params.gy[0];
#pragma unroll
    for (int i = 1; i < LERP_SHARES; ++i) gy = share == i ? params.gy[i] : gy;
    float w2[2][4][4], c[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        c[j] = 0.f;
#pragma unroll
        for (int k = 0; k < 4; ++k) w2[0][j][k] = w2[1][j][k] = 0.f;
    }
    const int first = blockIdx.y * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    for (int first_row = first; first_row < end; first_row += 16) {
        float products[4][4];  // [row][channel]
        uint2 hidden[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // of the rows after these
            const int row = min(first_row + 16 + 4 * lane.q + r, end - 1);
            prefetch_8(gy, static_cast<int64_t>(row) * params.channels + channel);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = first_row + 4 * lane.q + r;
            const bool real = row < end;
            const int64_t element = static_cast<int64_t>(real ? row : first) * params.channels + channel;
            const Place place(job, real ? row : first);
            float x[4], difference[4];
            unpack(products[r], load_4(gy, element));
            unpack(x, load_4(params.x, element));
            unpack(difference, load_neighbour(params.x, element, Neighbour(params.layout, direction, place)));
            hidden[r] = load_4(params.hidden, static_cast<int64_t>(real ? row : first) * kHidden + share * LERP_RANK +
                                                  4 * lane.g);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                products[r][k] = real ? products[r][k] * (difference[k] - x[k]) : 0.f;
                c[k] += products[r][k];
            }
        }
        // Rows 4 q and 4 q + 1 are the first pair of the matrix instruction's rows, the other two its second pair.
        uint32_t a[2][4];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const uint2 top = hidden[2 * pair], bottom = hidden[2 * pair + 1];
            a[0][2 * pair] = low_halves(top.x, bottom.x);
            a[0][2 * pair + 1] = high_halves(top.x, bottom.x);
            a[1][2 * pair] = low_halves(top.y, bottom.y);
            a[1][2 * pair + 1] = high_halves(top.y, bottom.y);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t b0 = pack_bf16(products[0][j], products[1][j]);
            const uint32_t b1 = pack_bf16(products[2][j], products[3][j]);
            multiply_matrices<16>(w2[0][j], a[0], b0, b1, w2[0][j], lane);
            multiply_matrices<16>(w2[1][j], a[1], b0, b1, w2[1][j], lane);
        }
    }
    // Row g of the product is rank 4 g (a[0]) or 4 g + 2 (a[1]), row g + 8 the next one; its column n of block j is
    // channel 4 n + j.
    float* w2_part = params.w2_parts + (static_cast<int64_t>(blockIdx.y) * LERP_SHARES + share) * LERP_RANK *
                                           params.channels;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const int rank = 4 * lane.g + 2 * m + row, n = 2 * lane.q + column, k = 2 * row + column;
                *reinterpret_cast<float4*>(w2_part + static_cast<int64_t>(rank) * params.channels + 32 * blockIdx.x +
                                           4 * n) = float4{w2[m][0][k], w2[m][1][k], w2[m][2][k], w2[m][3][k]};
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        c[k] += from_lane_xor<1>(c[k]);
        c[k] += from_lane_xor<2>(c[k]);
    }
    if (lane.q == 0) {
        *reinterpret_cast<float4*>(params.c_parts + (static_cast<int64_t>(blockIdx.y) * LERP_SHARES + share) *
                                                        params.channels + channel) = float4{c[0], c[1], c[2], c[3]};
    }
}

// [share][rank][channel] -> [share][channel][rank]. A block has 32 channels of one share, a warp at a time one rank.
__global__ void __launch_bounds__(256) transpose_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const int channel = 32 * blockIdx.x + threadIdx.x % 32, share = blockIdx.y;
    const int64_t first = static_cast<int64_t>(share) * LERP_RANK * params.channels;
    const uint16_t* from = static_cast<const uint16_t*>(params.w2) + first;
    uint16_t* to = static_cast<uint16_t*>(params.w2t) + first;
    for (int rank = threadIdx.x / 32; rank < LERP_RANK; rank += blockDim.x / 32) {
        to[channel * LERP_RANK + rank] = from[rank * params.channels + channel];
    }
}

// Adds up the parts of ddlerp_weights_kernel, in order: first those of w2's gradient, then those of c's.
__global__ void __launch_bounds__(256) sum_parts_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const int w2_size = LERP_SHARES * LERP_RANK * params.channels, c_size = LERP_SHARES * params.channels;
    const int index = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= w2_size + c_size) return;
    const bool is_w2 = index < w2_size;
    const int size = is_w2 ? w2_size : c_size, at = is_w2 ? index : index - w2_size;
    const float* parts = (is_w2 ? params.w2_parts : params.c_parts) + at;
    float4 sum{0.f, 0.f, 0.f, 0.f};
    for (int part = 0; part < job.parts; ++part) {
        const float4 four = load<float4>(parts + static_cast<int64_t>(part) * size);
        sum.x += four.x;
        sum.y += four.y;
        sum.z += four.z;
        sum.w += four.w;
    }
    if (is_w2) {
        uint2 packed;
        packed.x = pack_bf16(sum.x, sum.y);
        packed.y = pack_bf16(sum.z, sum.w);
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.g_w2) + at) = packed;
    } else {
        *reinterpret_cast<float4*>(params.g_c + at) = sum;
    }
}

}  // namespace lerp
