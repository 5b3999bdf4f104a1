// Token shift and interpolation: each tensor is read or written once, 16 or 8 bytes at a time.
//
// The low-rank shares are made on the tensor cores where they are used and never stored. Columns and ranks are given to
// the matrix instructions in another order than they lie in memory, the same for both operands, so that every lane holds
// neighbouring channels of a token and moves them as one vector: element n of 8x8 block j is 8 (n / 2) + 2 j + n % 2.
#include "lerp.h"
#include "wkv6_cuda_warp.cuh"

namespace wkv6 {
namespace {

constexpr int kHidden = LERP_SHARES * LERP_RANK;

struct LerpJob {
    LerpParams params;
    int rows_per_part, parts;
    uint32_t tokens_magic, width_magic;  // for `divide`
};

// n / divisor with magic = ceil(2^32 / divisor), right while n * divisor < 2^32; 0 stands for a divisor of 1.
__device__ __forceinline__ int divide(int n, uint32_t magic) {
    return magic ? static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * magic) >> 32) : n;
}

// Where the neighbours of four channels are, or (`opposite`) the tokens whose neighbour one is.
struct Direction {
    bool vertical;
    int low, high;  // there is one for low <= place < high, the place counted in tokens if vertical, else in columns
    int offset;     // elements to it

    __device__ __forceinline__ Direction(const LerpParams& params, int channel, bool opposite) {
        const LerpLayout& layout = params.layout;
        const int group = channel % layout.head_size / (layout.head_size / layout.directions);
        const bool backwards = !(group & 1) != opposite;
        vertical = group & 2;
        const int step = vertical ? layout.width : 1, end = vertical ? layout.grid : layout.width;
        low = backwards ? step : 0;
        high = backwards ? end : end - step;
        offset = (backwards ? -step : step) * params.channels;
    }
};

// A row's place among its sample's tokens.
struct Place {
    int token, column;
    __device__ __forceinline__ Place(const LerpJob& job, int row) {
        token = row - divide(row, job.tokens_magic) * job.params.layout.tokens;
        column = token - divide(token, job.width_magic) * job.params.layout.width;
    }
};

struct Neighbour {
    int offset;
    bool none;

    // Without branches, at which the loads of several tokens would wait for each other.
    __device__ __forceinline__ Neighbour(const LerpLayout& layout, const Direction& direction, const Place& place) {
        const int at = direction.vertical ? place.token : place.column;
        const bool inside = (at >= direction.low) & (at < direction.high), own = place.token >= layout.grid;
        offset = inside & !own ? direction.offset : 0;
        none = !(inside | own);
    }
};

// No kernel writes what it reads: told so, the compiler moves loads ahead of earlier stores, and they wait together.
template <class Vector>
__device__ __forceinline__ Vector load(const void* address) {
#ifdef WKV6_EMULATE
    return *static_cast<const Vector*>(address);
#else
    return __ldg(static_cast<const Vector*>(address));
#endif
}

__device__ __forceinline__ uint4 load_8(const void* tensor, int64_t element) {
    return load<uint4>(static_cast<const uint16_t*>(tensor) + element);
}

__device__ __forceinline__ uint2 load_4(const void* tensor, int64_t element) {
    return load<uint2>(static_cast<const uint16_t*>(tensor) + element);
}

__device__ __forceinline__ void prefetch_8(const void* tensor, int64_t element) {
    prefetch(reinterpret_cast<const char*>(static_cast<const uint16_t*>(tensor) + element), 16);
}

__device__ __forceinline__ void unpack(float (&out)[8], const uint4& packed) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = bf16_low(words[i]);
        out[2 * i + 1] = bf16_high(words[i]);
    }
}

__device__ __forceinline__ void unpack(float* out, const uint2& packed) {
    out[0] = bf16_low(packed.x);
    out[1] = bf16_high(packed.x);
    out[2] = bf16_low(packed.y);
    out[3] = bf16_high(packed.y);
}

__device__ __forceinline__ void store_8(void* tensor, int64_t element, const float (&values)[8]) {
    uint4 packed;
    packed.x = pack_bf16(values[0], values[1]);
    packed.y = pack_bf16(values[2], values[3]);
    packed.z = pack_bf16(values[4], values[5]);
    packed.w = pack_bf16(values[6], values[7]);
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(tensor) + element) = packed;
}

__device__ __forceinline__ void load_floats(float (&out)[8], const float* from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 four = load<float4>(from + 4 * half);
        out[4 * half] = four.x;
        out[4 * half + 1] = four.y;
        out[4 * half + 2] = four.z;
        out[4 * half + 3] = four.w;
    }
}

// Four channels of the neighbour; 0 where there is none, whose load is of the own row and dropped.
__device__ __forceinline__ uint2 load_neighbour(const void* tensor, int64_t element, const Neighbour& neighbour) {
    uint2 packed = load_4(tensor, element + neighbour.offset);
    packed.x = neighbour.none ? 0u : packed.x;
    packed.y = neighbour.none ? 0u : packed.y;
    return packed;
}

// Directions of eight channels in a row: of the first four and of the others.
struct Directions {
    Direction first, second;
    __device__ __forceinline__ Directions(const LerpParams& params, int channel, bool opposite = false)
        : first(params, channel, opposite), second(params, channel + 4, opposite) {}
};

__device__ __forceinline__ void load_neighbours(float (&out)[8], const void* tensor, int64_t element,
                                                const LerpLayout& layout, const Place& place,
                                                const Directions& directions) {
    unpack(out, load_neighbour(tensor, element, Neighbour(layout, directions.first, place)));
    unpack(out + 4, load_neighbour(tensor, element + 4, Neighbour(layout, directions.second, place)));
}

// x and (neighbour - x) of eight channels.
__device__ __forceinline__ void load_difference(float (&x)[8], float (&difference)[8], const LerpParams& params,
                                                int64_t element, const Place& place, const Directions& directions) {
    unpack(x, load_8(params.x, element));
    load_neighbours(difference, params.x, element, params.layout, place, directions);
#pragma unroll
    for (int i = 0; i < 8; ++i) difference[i] -= x[i];
}

// Plain interpolation. A thread keeps its eight channels; a block's threads cover all channels of some rows. --------

template <int kCount>
__global__ void __launch_bounds__(512) lerp_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const int vectors = params.channels / 8, channel = 8 * (threadIdx.x % vectors);
    const Directions directions(params, channel);
    const int first = blockIdx.x * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    float c[kCount][8];
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_floats(c[i], params.c + i * params.channels + channel);
    for (int row = first + threadIdx.x / vectors; row < end; row += blockDim.x / vectors) {
        const int64_t element = static_cast<int64_t>(row) * params.channels + channel;
        float x[8], difference[8];
        load_difference(x, difference, params, element, Place(job, row), directions);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float y[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) y[k] = x[k] + difference[k] * c[i][k];
            store_8(params.y[i], element, y);
        }
    }
}

// gx[t] = sum_i gy_i[t] + base[t] - s[t] + s of those whose neighbour t is, with s = sum_i gy_i c_i + extra.
template <int kCount, bool kExtra>
__global__ void __launch_bounds__(512) lerp_backward_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const int vectors = params.channels / 8, channel = 8 * (threadIdx.x % vectors), lanes = blockDim.x / vectors;
    const Directions directions(params, channel), back(params, channel, true);
    const int first = blockIdx.x * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    float c[kCount][8], sums[kCount][8];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        load_floats(c[i], params.c + i * params.channels + channel);
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[i][k] = 0.f;
    }
    for (int row = first + threadIdx.x / vectors; row < end; row += lanes) {
        const int64_t element = static_cast<int64_t>(row) * params.channels + channel;
        const Place place(job, row);
        float x[8], difference[8], gx[8], s[8];
        load_difference(x, difference, params, element, place, directions);
#pragma unroll
        for (int k = 0; k < 8; ++k) gx[k] = 0.f;
        if constexpr (kExtra) {
            float own[8], others[8];
            unpack(gx, load_8(params.base, element));
            unpack(own, load_8(params.extra, element));
            load_neighbours(others, params.extra, element, params.layout, place, back);
#pragma unroll
            for (int k = 0; k < 8; ++k) gx[k] += others[k] - own[k];
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float gy[8];
            unpack(gy, load_8(params.gy[i], element));
            load_neighbours(s, params.gy[i], element, params.layout, place, back);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                sums[i][k] += gy[k] * difference[k];
                gx[k] += gy[k] + (s[k] - gy[k]) * c[i][k];
            }
        }
        store_8(params.gx, element, gx);
    }
    const int part = blockIdx.x * lanes + threadIdx.x / vectors;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        float* to = params.c_parts + (static_cast<int64_t>(part) * kCount + i) * params.channels + channel;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float4*>(to + 4 * half) = float4{sums[i][4 * half], sums[i][4 * half + 1],
                                                               sums[i][4 * half + 2], sums[i][4 * half + 3]};
        }
    }
}

// Data-dependent interpolation ----------------------------------------------------------------------------------------

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

constexpr int kTokenWarps = 4;
constexpr int kShareFloats = 16 * 32;  // 16 rows of one share's hidden values, as a warp holds them
constexpr size_t kTokensSharedBytes = kTokenWarps * LERP_SHARES * kShareFloats * sizeof(float);

// What does not sum over tokens. A block has 16 rows; its warps go through the channels in turn, 32 at a time, and add up
// their parts of the hidden values' gradients in the end.
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
    const uint16_t* from = static_cast<const uint16_t*>(params.w2) + static_cast<int64_t>(share) * LERP_RANK * params.channels;
    uint16_t* to = static_cast<uint16_t*>(params.w2t) + static_cast<int64_t>(share) * LERP_RANK * params.channels;
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

// Launches -----------------------------------------------------------------------------------------------------------

int divide_up(int a, int b) { return (a + b - 1) / b; }

uint32_t magic_of(int divisor) {
    return static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / static_cast<uint32_t>(divisor));
}

LerpJob make_job(const LerpParams& params, int rows_per_part) {
    return {params, rows_per_part, divide_up(params.rows, rows_per_part), magic_of(params.layout.tokens),
            magic_of(params.layout.width)};
}

template <class Kernel>
int launch_lerp(Kernel kernel, int grid_x, int grid_y, int threads, const LerpJob& job, size_t shared_bytes = 0) {
#ifdef WKV6_EMULATE
    return emulator::launch(kernel, grid_x, grid_y, threads, shared_bytes, job);
#else
    kernel<<<dim3(grid_x, grid_y), threads, shared_bytes, static_cast<cudaStream_t>(job.params.stream)>>>(job);
    return cudaGetLastError();
#endif
}

// Threads of a block that covers all channels of as many rows as it can.
struct RowBlock {
    int vectors, lanes, threads;
    explicit RowBlock(const LerpParams& params)
        : vectors(params.channels / 8), lanes(vectors < 256 ? 256 / vectors : 1), threads(vectors * lanes) {}
};

// Into how many parts kernels divide the rows: such that all their thread blocks run at once on 132 multiprocessors, for
// 640 channels.
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
}  // namespace wkv6

extern "C" {

int lerp_parts(const LerpParams* params) {
    using namespace wkv6;
    return divide_up(params->rows, kBackwardRows) * RowBlock(*params).lanes;
}

int ddlerp_parts(const LerpParams* params) {
    using namespace wkv6;
    return divide_up(params->rows, rows_of_a_part(*params, kWeightsParts));
}

int lerp_forward(const LerpParams* params) {
    using namespace wkv6;
    if (!is_valid(*params)) return kInvalid;
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kLerpParts));
    const int threads = RowBlock(*params).threads;
    if (params->count == 1) return launch_lerp(lerp_kernel<1>, job.parts, 1, threads, job);
    return launch_lerp(lerp_kernel<2>, job.parts, 1, threads, job);
}

int lerp_backward(const LerpParams* params) {
    using namespace wkv6;
    if (!is_valid(*params)) return kInvalid;
    const LerpJob job = make_job(*params, kBackwardRows);
    const int threads = RowBlock(*params).threads;
    if (params->base) return launch_lerp(lerp_backward_kernel<1, true>, job.parts, 1, threads, job);
    if (params->count == 1) return launch_lerp(lerp_backward_kernel<1, false>, job.parts, 1, threads, job);
    return launch_lerp(lerp_backward_kernel<2, false>, job.parts, 1, threads, job);
}

int ddlerp_forward(const LerpParams* params) {
    using namespace wkv6;
    if (!is_valid(*params)) return kInvalid;
    const int slabs = params->channels / 32, warps = warps_of_a_block(slabs);
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kForwardParts));
    const int error = launch_lerp(transpose_kernel, slabs, LERP_SHARES, 256, job);
    if (error) return error;
    return launch_lerp(ddlerp_kernel, slabs / warps, job.parts, 32 * warps, job);
}

int ddlerp_backward(const LerpParams* params) {
    using namespace wkv6;
    if (!is_valid(*params)) return kInvalid;
    const int slabs = params->channels / 32;
    const LerpJob job = make_job(*params, rows_of_a_part(*params, kWeightsParts));
    int error = launch_lerp(transpose_kernel, slabs, LERP_SHARES, 256, job);
    if (!error) error = launch_lerp(ddlerp_tokens_kernel, divide_up(params->rows, 16), 1, 32 * kTokenWarps, job,
                                     kTokensSharedBytes);
    if (!error) error = launch_lerp(ddlerp_weights_kernel, slabs, job.parts, 32 * LERP_SHARES, job);
    if (error) return error;
    const int sums = LERP_SHARES * (LERP_RANK + 1) * params->channels;
    return launch_lerp(sum_parts_kernel, divide_up(sums, 4 * 256), 1, 256, job);
}

const char* lerp_error_string(int code) {
#ifdef WKV6_EMULATE
    return code == emulator::kFailed ? emulator::message : code ? "sizes that the kernels do not take" : "no error";
#else
    return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}

}  // extern "C"
