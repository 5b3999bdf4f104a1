// Tiles of 16 tokens x 16 channels: how one warp holds them, keeps them in shared memory and moves them to and from the
// tensors.
//
// Lane 4g+q. A tile is four 8x8 matrices; register a of a lane holds two neighbours of a row of matrix a:
//
//   token tile    rows are tokens, row halves a & 1, channel halves a >> 1: two channels of one token in a register
//   channel tile  rows are channels, row halves a & 1, token halves a >> 1: two tokens of one channel in a register
//
// Rows and columns are in the order `permuted`: position 8 half + n is token (or channel) 4 (n / 2) + 2 half + n % 2.
// So lane 4g+q meets in a token tile the tokens permuted(g), permuted(8 + g) and the four channels 4q ... 4q+3, and in a
// channel tile the channels permuted(g), permuted(8 + g) and the four tokens 4q ... 4q+3: rows of a tensor are read and
// written 8 or 16 bytes per lane, and products over tokens or channels do not mind the order.
//
// Eight values of a lane are numbered 2 a + (0 or 1); in a channel tile that is 2 half + 4 (token / 2) + token % 2 for
// the lane's channel number `half` and token 0 ... 3. The accumulators of a product have the same numbering.
#pragma once

#include "wkv6.h"
#include "wkv6_cuda_warp.cuh"

namespace wkv6 {

__device__ __forceinline__ int permuted(int position) {
    const int n = position & 7;
    return 4 * (n >> 1) + 2 * (position >> 3) + (n & 1);
}

// Elements of the tensors. kSplit: kept as a sum of two bf16 numbers (16 to 17 bits), products in three parts.
struct Bfloat16 {
    using Storage = uint16_t;
    using Row = uint2;  // four channels
    static constexpr bool kSplit = false;
    static __device__ __forceinline__ float to_float(Storage x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
    static __device__ __forceinline__ Storage from_float(float x) {
        return static_cast<Storage>(pack_bf16(x, 0.f) & 0xffffu);
    }
    static __device__ __forceinline__ Row pack(float a, float b, float c, float d) {
        return Row{pack_bf16(a, b), pack_bf16(c, d)};
    }
};

struct Float16 {
    using Storage = uint16_t;
    using Row = uint2;
    static constexpr bool kSplit = true;
    static __device__ __forceinline__ float to_float(Storage x) { return half_to_float(x); }
    static __device__ __forceinline__ Storage from_float(float x) { return static_cast<Storage>(float_to_half(x)); }
    static __device__ __forceinline__ float element(Row row, int i) {
        const uint32_t word = i & 2 ? row.y : row.x;
        return half_to_float(i & 1 ? word >> 16 : word & 0xffffu);
    }
    static __device__ __forceinline__ Row pack(float a, float b, float c, float d) {
        return Row{float_to_half(a) | float_to_half(b) << 16, float_to_half(c) | float_to_half(d) << 16};
    }
};

struct Float32 {
    using Storage = float;
    using Row = float4;
    static constexpr bool kSplit = true;
    static __device__ __forceinline__ float to_float(Storage x) { return x; }
    static __device__ __forceinline__ Storage from_float(float x) { return x; }
    static __device__ __forceinline__ float element(Row row, int i) {
        return i & 2 ? (i & 1 ? row.w : row.z) : (i & 1 ? row.y : row.x);
    }
    static __device__ __forceinline__ Row pack(float a, float b, float c, float d) { return Row{a, b, c, d}; }
};

// Operands of products -----------------------------------------------------------------------------------------------

template <bool kSplit>
struct Operand {
    uint32_t high[4];
};

template <>
struct Operand<true> {
    uint32_t high[4];
    uint32_t low[4];
};

constexpr int kTileWords = 128;  // 32-bit words of a tile in shared memory; twice as many when split

__device__ __forceinline__ void set_pair(Operand<false>& operand, int a, float first, float second) {
    operand.high[a] = pack_bf16(first, second);
}

__device__ __forceinline__ void set_pair(Operand<true>& operand, int a, float first, float second) {
    operand.high[a] = pack_bf16(first, second);
    operand.low[a] = pack_bf16(first - bf16_low(operand.high[a]), second - bf16_high(operand.high[a]));
}

template <bool kSplit>
__device__ __forceinline__ void set_values(Operand<kSplit>& operand, const float (&values)[8]) {
#pragma unroll
    for (int a = 0; a < 4; ++a) set_pair(operand, a, values[2 * a], values[2 * a + 1]);
}

__device__ __forceinline__ void get_values(float (&values)[8], const Operand<false>& operand) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        values[2 * a] = bf16_low(operand.high[a]);
        values[2 * a + 1] = bf16_high(operand.high[a]);
    }
}

__device__ __forceinline__ void get_values(float (&values)[8], const Operand<true>& operand) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        values[2 * a] = bf16_low(operand.high[a]) + bf16_low(operand.low[a]);
        values[2 * a + 1] = bf16_high(operand.high[a]) + bf16_high(operand.low[a]);
    }
}

__device__ __forceinline__ void mask_pair(Operand<false>& operand, int a, uint32_t mask) { operand.high[a] &= mask; }

__device__ __forceinline__ void mask_pair(Operand<true>& operand, int a, uint32_t mask) {
    operand.high[a] &= mask;
    operand.low[a] &= mask;
}

// The factor by which a level scales a tile: in fp32, and rounded for the tensor cores where that is enough.
template <bool kSplit>
struct Scale {
    float value[8];
    uint32_t pair[4];

    __device__ __forceinline__ void round() {
#pragma unroll
        for (int a = 0; a < 4; ++a) pair[a] = pack_bf16(value[2 * a], value[2 * a + 1]);
    }
};

template <>
struct Scale<true> {
    float value[8];
    __device__ __forceinline__ void round() {}
};

__device__ __forceinline__ void multiply(Operand<false>& out, const Operand<false>& in, const Scale<false>& scale) {
#pragma unroll
    for (int a = 0; a < 4; ++a) out.high[a] = mul_bf16(in.high[a], scale.pair[a]);
}

__device__ __forceinline__ void multiply(Operand<true>& out, const Operand<true>& in, const Scale<true>& scale) {
    float values[8];
    get_values(values, in);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= scale.value[i];
    set_values(out, values);
}

// Registers 1 and 2 exchanged: from "rows of the left factor" (m, k) to "columns of the right factor" (n, k) or back.
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> exchanged(Operand<kSplit> operand) {
    const uint32_t word = operand.high[1];
    operand.high[1] = operand.high[2];
    operand.high[2] = word;
    if constexpr (kSplit) {
        const uint32_t low = operand.low[1];
        operand.low[1] = operand.low[2];
        operand.low[2] = low;
    }
    return operand;
}

// sums[16x16] += left[16x16] right[16x16]. left: (m, k) order; right: (n, k) order, that is `exchanged`.
__device__ __forceinline__ void product(float (&sums)[8], const Operand<false>& left, const Operand<false>& right) {
    multiply_add(sums, left.high, right.high[0], right.high[1]);
    multiply_add(sums + 4, left.high, right.high[2], right.high[3]);
}

__device__ __forceinline__ void product(float (&sums)[8], const Operand<true>& left, const Operand<true>& right) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        multiply_add(sums + 4 * half, left.low, right.high[2 * half], right.high[2 * half + 1]);
        multiply_add(sums + 4 * half, left.high, right.low[2 * half], right.low[2 * half + 1]);
        multiply_add(sums + 4 * half, left.high, right.high[2 * half], right.high[2 * half + 1]);
    }
}

// Tiles in shared memory ---------------------------------------------------------------------------------------------

template <bool kSplit>
__device__ __forceinline__ void store(uint32_t* tile, const Operand<kSplit>& operand) {
#pragma unroll
    for (int a = 0; a < 4; ++a) tile[32 * a + lane_id()] = operand.high[a];
    if constexpr (kSplit) {
#pragma unroll
        for (int a = 0; a < 4; ++a) tile[kTileWords + 32 * a + lane_id()] = operand.low[a];
    }
}

template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> load(const uint32_t* tile) {
    Operand<kSplit> operand;
    load_matrices(operand.high, tile);
    if constexpr (kSplit) load_matrices(operand.low, tile + kTileWords);
    return operand;
}

// The transposed tile, as a right factor; `exchanged` makes it a left factor.
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> load_transposed(const uint32_t* tile) {
    Operand<kSplit> operand;
    load_matrices_transposed(operand.high, tile);
    if constexpr (kSplit) load_matrices_transposed(operand.low, tile + kTileWords);
    return operand;
}

// Rows of the tensors ------------------------------------------------------------------------------------------------

// One head of a tensor [B, T, H, N]. Offsets inside it fit in 32 bits: the plan refuses larger ones.
template <class Element>
struct Head {
    typename Element::Storage* data;
    uint32_t stride;  // from token to token

    __device__ __forceinline__ Head(const WKV6Tensor& tensor, int b, int h)
        : data(static_cast<typename Element::Storage*>(tensor.data) + b * tensor.stride_b + h * tensor.stride_h),
          stride(static_cast<uint32_t>(tensor.stride_t)) {}

    __device__ __forceinline__ typename Element::Storage* at(int token, int channel) const {
        return data + (static_cast<uint32_t>(token) * stride + static_cast<uint32_t>(channel));
    }

    __device__ __forceinline__ typename Element::Row* row(int token, int channel) const {
        return reinterpret_cast<typename Element::Row*>(at(token, channel));
    }
};

// Where a warp's tile lies: tokens first_token + 0 ... 15, channels first_channel + 0 ... 15, zero outside T and N.
struct Place {
    int first_token, T, first_channel, N;
};

// A token tile as it comes from memory: two tokens, four channels each.
template <class Element>
struct Rows {
    typename Element::Row row[2];

    __device__ __forceinline__ void load(const Head<Element>& head, const Place& place) {
        const int g = lane_id() >> 2, channel = place.first_channel + 4 * (lane_id() & 3);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = place.first_token + permuted(8 * half + g);
            row[half] = typename Element::Row{};
            if (token < place.T && channel < place.N) row[half] = *head.row(token, channel);
        }
    }

    __device__ __forceinline__ Operand<Element::kSplit> operand() const {
        Operand<Element::kSplit> out;
        if constexpr (!Element::kSplit) {
            out.high[0] = row[0].x;
            out.high[1] = row[1].x;
            out.high[2] = row[0].y;
            out.high[3] = row[1].y;
        } else {
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                const int i = 2 * (a >> 1);
                set_pair(out, a, Element::element(row[a & 1], i), Element::element(row[a & 1], i + 1));
            }
        }
        return out;
    }
};

// Asks for the rows of a block's tokens, all channels, ahead of their use.
template <class Element>
__device__ __forceinline__ void prefetch_rows(const Head<Element>& head, const Place& place) {
    constexpr int kChannels = 128 / sizeof(typename Element::Storage);  // of a cache line
    const int lines = (place.N + kChannels - 1) / kChannels;
    for (int i = lane_id(); i < 16 * lines; i += 32) {
        const int token = place.first_token + i / lines;
        if (token < place.T) prefetch(head.at(token, i % lines * kChannels));
    }
}

// Writes values[8] of a token tile (accumulators of a product whose rows are tokens).
template <class Element>
__device__ __forceinline__ void write_rows(const Head<Element>& head, const Place& place, const float (&values)[8]) {
    const int g = lane_id() >> 2, channel = place.first_channel + 4 * (lane_id() & 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = place.first_token + permuted(8 * half + g);
        if (token < place.T && channel < place.N) {
            *head.row(token, channel) = Element::pack(values[2 * half], values[2 * half + 1], values[2 * half + 4],
                                                      values[2 * half + 5]);
        }
    }
}

// Writes values[8] of a channel tile. scratch: one warp's, 256 words when split, else 128.
template <class Element>
__device__ __forceinline__ void write_columns(const Head<Element>& head, const Place& place, uint32_t* scratch,
                                              const float (&values)[8]) {
    const int g = lane_id() >> 2, q = lane_id() & 3, channel = place.first_channel + 4 * q;
    if constexpr (!Element::kSplit) {
        Operand<false> operand;
        set_values(operand, values);
        store(scratch, operand);
        __syncwarp();
        const Operand<false> out = load_transposed<false>(scratch);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = place.first_token + permuted(8 * half + g);
            if (token < place.T && channel < place.N) {
                *head.row(token, channel) = uint2{out.high[2 * half], out.high[2 * half + 1]};
            }
        }
    } else {
        // Row t of the scratch holds 16 channels; rows rotated by 4 (t / 2) to spread the banks.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = 4 * q + 2 * (i >> 2) + (i & 1), c = permuted(8 * (i >> 1 & 1) + g);
            scratch[16 * t + ((c + 4 * (t >> 1)) & 15)] = float_to_bits(values[i]);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = permuted(8 * half + g), token = place.first_token + t;
            const uint32_t* from = scratch + 16 * t + ((4 * q + 4 * (t >> 1)) & 15);
            if (token < place.T && channel < place.N) {
                *head.row(token, channel) = Element::pack(bits_to_float(from[0]), bits_to_float(from[1]),
                                                          bits_to_float(from[2]), bits_to_float(from[3]));
            }
        }
    }
    __syncwarp();
}

}  // namespace wkv6
