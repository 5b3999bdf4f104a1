// Data-dependent interpolation, backwards: one kernel for what does not sum over tokens, one for what does.
//
// Both are to read memory as fast as it goes, which takes some 40 KB under way on every multiprocessor. Registers are
// full of sums, which leaves room for few warps; what comes next therefore is on its way into shared memory.
#pragma once

#include "lerp_cuda_forward.cuh"

namespace lerp {

constexpr int kTokenWarps = 4;
constexpr int kTile = 16 * 32 * 2;  // bytes of 16 rows of 32 channels, or ranks
// Of a warp: x, its neighbours, five gradients and hidden values.
constexpr int kTokensWarpBytes = (2 + 2 * LERP_SHARES) * kTile;
constexpr size_t kTokensSharedBytes = 2 * kSlabBytes + kTokenWarps * kTokensWarpBytes;

// What does not sum over tokens. Each warp has 16 rows and goes through the channels, 32 at a time, in step with the
// block's others, as they share the weights. Its shared memory holds what one step reads; as soon as a part of it is in
// registers, the same part of the next step is asked for, by the lane that will read it.
__global__ void __launch_bounds__(32 * kTokenWarps, 3) ddlerp_tokens_kernel(const LerpJob job) {
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
    const Address weights = shared_memory(), hidden = weights + 2 * kSlabBytes + lane.warp * kTokensWarpBytes;
    const Address x = hidden + LERP_SHARES * kTile + 16 * lane.id, neighbours = x + kTile;
    const Address gradients = neighbours + kTile;
    const int slabs = params.channels / 32;
    const Tile tile(params, 16 * (kTokenWarps * blockIdx.x + lane.warp), 8 * lane.q, lane);
    const Place places[2] = {Place(job, tile.rows[0]), Place(job, tile.rows[1])};
    int64_t offsets[2] = {2 * tile.elements[0], 2 * tile.elements[1]};  // of the step asked for, in bytes
    const auto copy_weights_and_x = [&](int slab) {
#pragma unroll
        for (int first = 0; first < kSlabBytes; first += 16 * 32 * kTokenWarps) {
            const int at = first + 16 * (32 * lane.warp + lane.id);
            if (at >= kSlabBytes) break;
            copy_16(weights + slab % 2 * kSlabBytes + at, params.w2_packed, slab * kSlabBytes + at);
        }
        const Directions directions(job, 32 * slab + 8 * lane.q);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            copy_16(x + 512 * half, params.x, offsets[half]);
            copy_neighbours(neighbours + 512 * half, params.x, offsets[half], params.layout, places[half], directions);
        }
    };
    const auto copy_gradient = [&](int i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) copy_16(gradients + i * kTile + 512 * half, params.gy[i], offsets[half]);
    };
#pragma unroll
    for (int i = 0; i < LERP_SHARES; ++i) {  // 8x8 matrices [block of ranks][half], read as left operands
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            copy_16(hidden + i * kTile + 256 * lane.q + 128 * half + 16 * lane.g, params.hidden,
                    2 * (static_cast<int64_t>(tile.rows[half]) * kHidden + i * LERP_RANK + 8 * lane.q));
        }
    }
    copy_weights_and_x(0);
    end_group_of_copies();
#pragma unroll
    for (int i = 0; i < LERP_SHARES; ++i) {
        copy_gradient(i);
        end_group_of_copies();
    }
    for (int slab = 0; slab < slabs; ++slab) {
        const bool more = slab + 1 < slabs;
        wait_for_groups<LERP_SHARES>();
        __syncthreads();  // the weights are there, and those of the step before are no longer read
        float base[2][8], extra[2][8];
        uint32_t difference[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four =
                difference_of(load_shared<uint4>(neighbours + 512 * half), load_shared<uint4>(x + 512 * half));
            difference[half][0] = four.x;
            difference[half][1] = four.y;
            difference[half][2] = four.z;
            difference[half][3] = four.w;
            offsets[half] += kTile / 16;
#pragma unroll
            for (int k = 0; k < 8; ++k) base[half][k] = extra[half][k] = 0.f;
        }
        if (more) copy_weights_and_x(slab + 1);
        end_group_of_copies();
#pragma unroll
        for (int i = 0; i < LERP_SHARES; ++i) {
            wait_for_groups<LERP_SHARES>();
            const Address matrices = weights + slab % 2 * kSlabBytes + i * kPackedBytes;
            uint32_t a[2][4];
            load_matrices<false>(a[0], hidden + i * kTile, lane);
            load_matrices<false>(a[1], hidden + i * kTile + 512, lane);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {  // of blocks of 8 channels
                uint32_t right[2][4], left[4];  // left: gy * difference, as left operand with 16 channels to sum over
                load_matrices<false>(right[0], matrices + 1024 * pair, lane);
                load_matrices<false>(right[1], matrices + 1024 * pair + 512, lane);
                const uint2 gradient[2] = {load_shared<uint2>(gradients + i * kTile + 8 * pair),
                                           load_shared<uint2>(gradients + i * kTile + 512 + 8 * pair)};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int block = 2 * pair + j;
                    const float4 c = load_shared<float4>(matrices + kWeightsBytes + 64 * block + 16 * lane.q);
                    float shares[4] = {c.x, c.y, c.z, c.w};
                    multiply_matrices<16>(shares, a[0], right[0][2 * j], right[0][2 * j + 1], shares, lane);
                    multiply_matrices<16>(shares, a[1], right[1][2 * j], right[1][2 * j + 1], shares, lane);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t gy = j ? gradient[half].y : gradient[half].x;
                        const float first = bf16_low(gy), second = bf16_high(gy);
                        base[half][2 * block] += first;
                        base[half][2 * block + 1] += second;
                        extra[half][2 * block] += first * shares[2 * half];
                        extra[half][2 * block + 1] += second * shares[2 * half + 1];
                        left[half + 2 * j] = mul_bf16(gy, difference[half][block]);
                    }
                }
#pragma unroll
                for (int ranks = 0; ranks < 2; ++ranks) {  // pairs of blocks of 8
                    load_transposed_matrices<true>(right[ranks], matrices + 1024 * pair + 512 * ranks, lane);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float* sums = g_hidden[i][2 * ranks + j];
                        multiply_matrices<16>(sums, left, right[ranks][2 * j], right[ranks][2 * j + 1], sums, lane);
                    }
                }
            }
            if (more) copy_gradient(i);
            end_group_of_copies();
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (tile.real[half]) {
                store_8(params.base, tile.elements[half] + 32 * slab, base[half]);
                store_8(params.extra, tile.elements[half] + 32 * slab, extra[half]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t* to = static_cast<uint32_t*>(params.g_hidden) + (tile.rows[half] * int64_t{kHidden} + 2 * lane.q) / 2;
        if (!tile.real[half]) continue;
#pragma unroll
        for (int i = 0; i < LERP_SHARES; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                to[16 * i + 4 * j] = pack_bf16(g_hidden[i][j][2 * half], g_hidden[i][j][2 * half + 1]);
            }
        }
    }
}

// The low (high) halves of two registers.
template <bool kHigh>
__device__ __forceinline__ uint32_t halves(uint32_t first, uint32_t second) {
#ifdef WKV6_EMULATE
    return kHigh ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
#else
    return __byte_perm(first, second, kHigh ? 0x7632 : 0x5410);
#endif
}

// Of ddlerp_weights_kernel: 16 rows of 64 channels are a tile, as many tiles as there are warps a step.
constexpr int kWideTile = 16 * 64 * 2, kRanksTile = 16 * LERP_RANK * 2, kTilesAhead = 3;
constexpr int kRingBytes = kTilesAhead * (kWideTile + kRanksTile);
constexpr size_t kWeightsSharedBytes = LERP_SHARES * (2 * kWideTile + 2 * kWideTile + kRingBytes);

// Sums over tokens. A block has 64 channels of some rows, each of its five warps one share. Lane 4 g + q holds rows
// 4 q ... 4 q + 3 of a tile, in the order in which the matrix instruction counts a lane's rows, and channels 8 g ...
// 8 g + 7. Each warp makes (neighbour - x) of one tile for all.
__global__ void __launch_bounds__(32 * LERP_SHARES, 2) ddlerp_weights_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const Lane lane;
    const int share = lane.warp, channel = 64 * blockIdx.x + 8 * lane.g;
    const bool real_channel = channel < params.channels;
    const int read_channel = real_channel ? channel : 0;
    const Directions directions(job, read_channel);
    const void* gradient = params.gy[0];
#pragma unroll
    for (int i = 1; i < LERP_SHARES; ++i) gradient = share == i ? params.gy[i] : gradient;
    const int first = blockIdx.y * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    const int tiles = (end - first + 15) / 16;

    const Address differences = shared_memory() + 16 * lane.id;  // [step % 2][tile]
    const Address x = differences + (LERP_SHARES + share) * 2 * kWideTile;
    const Address neighbours = x + kWideTile;
    const Address ring = shared_memory() + LERP_SHARES * 4 * kWideTile + share * kRingBytes;
    const auto copy_x = [&](int tile) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = min(first + 16 * tile + 4 * lane.q + r, end - 1);
            const int64_t offset = 2 * (static_cast<int64_t>(row) * params.channels + read_channel);
            copy_16(x + 512 * r, params.x, offset);
            copy_neighbours(neighbours + 512 * r, params.x, offset, params.layout, Place(job, row), directions);
        }
    };
    const auto copy_gradient = [&](int tile, int slot) {
        const Address to = ring + slot * (kWideTile + kRanksTile);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = min(first + 16 * tile + 4 * lane.q + r, end - 1);
            copy_16(to + 512 * r + 16 * lane.id, gradient,
                    2 * (static_cast<int64_t>(row) * params.channels + read_channel));
        }
        // Row 4 q + r is row 2 q + r % 2 of the 8x8 matrix [block of 8 ranks][r / 2].
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = lane.g + 8 * half, row = min(first + 16 * tile + at, end - 1);
            copy_16(to + kWideTile + 256 * lane.q + 128 * (at / 2 % 2) + 16 * (2 * (at / 4) + at % 2), params.hidden,
                    2 * (static_cast<int64_t>(row) * kHidden + share * LERP_RANK + 8 * lane.q));
        }
    };

    float sums[4][5][4];  // [pair of channels][block of 8 ranks, and one whose right operand is 1: of c]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 5; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[i][j][k] = 0.f;
        }
    }
    copy_x(share);
#pragma unroll
    for (int tile = 0; tile < kTilesAhead; ++tile) {
        if (tile < tiles) copy_gradient(tile, tile);
        end_group_of_copies();
    }
    int slot = 0;
    for (int first_tile = 0, step = 0; first_tile < tiles; first_tile += LERP_SHARES, step ^= 1) {
        wait_for_groups<kTilesAhead - 1>();
        const Address made = differences + step * LERP_SHARES * kWideTile;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const bool real = first + 16 * (first_tile + share) + 4 * lane.q + r < end;
            const uint4 difference =
                difference_of(load_shared<uint4>(neighbours + 512 * r), load_shared<uint4>(x + 512 * r));
            store_shared(made + share * kWideTile + 512 * r, real ? difference : uint4{0u, 0u, 0u, 0u});
        }
        if (first_tile + LERP_SHARES < tiles) copy_x(first_tile + LERP_SHARES + share);  // in the next tile's group
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < LERP_SHARES && first_tile + i < tiles; ++i) {
            wait_for_groups<kTilesAhead - 1>();
            __syncwarp();  // other lanes copied hidden values
            const Address from = ring + slot * (kWideTile + kRanksTile);
            uint32_t products[4][4];  // [row][pair of channels]
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const uint4 gy = load_shared<uint4>(from + 512 * r + 16 * lane.id);
                const uint4 difference = load_shared<uint4>(made + i * kWideTile + 512 * r);
                products[r][0] = mul_bf16(gy.x, difference.x);
                products[r][1] = mul_bf16(gy.y, difference.y);
                products[r][2] = mul_bf16(gy.z, difference.z);
                products[r][3] = mul_bf16(gy.w, difference.w);
            }
            uint32_t hidden[2][4];
            load_transposed_matrices<false>(hidden[0], from + kWideTile, lane);
            load_transposed_matrices<false>(hidden[1], from + kWideTile + 512, lane);
            __syncwarp();
            if (first_tile + i + kTilesAhead < tiles) copy_gradient(first_tile + i + kTilesAhead, slot);
            end_group_of_copies();
            slot = slot == kTilesAhead - 1 ? 0 : slot + 1;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const uint32_t left[4] = {halves<false>(products[0][pair], products[1][pair]),
                                          halves<true>(products[0][pair], products[1][pair]),
                                          halves<false>(products[2][pair], products[3][pair]),
                                          halves<true>(products[2][pair], products[3][pair])};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    multiply_matrices<16>(sums[pair][j], left, hidden[j / 2][2 * (j % 2)],
                                          hidden[j / 2][2 * (j % 2) + 1], sums[pair][j], lane);
                }
                multiply_matrices<16>(sums[pair][4], left, 0x3f803f80u, 0x3f803f80u, sums[pair][4], lane);
            }
        }
    }
    if (!real_channel) return;
    // A lane has channels 2 pair (values 0 and 1) and 2 pair + 1 of its eight, and two ranks of each block.
    const int64_t part = static_cast<int64_t>(blockIdx.y) * LERP_SHARES + share;
    const auto store_sums = [&](float* to, int j, int k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float4*>(to + channel + 4 * half) =
                float4{sums[2 * half][j][k], sums[2 * half][j][k + 2], sums[2 * half + 1][j][k],
                       sums[2 * half + 1][j][k + 2]};
        }
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int rank = 8 * j + 2 * lane.q + k;
            store_sums(params.w2_parts + (part * LERP_RANK + rank) * params.channels, j, k);
        }
    }
    if (lane.q == 0) store_sums(params.c_parts + part * params.channels, 4, 0);
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
