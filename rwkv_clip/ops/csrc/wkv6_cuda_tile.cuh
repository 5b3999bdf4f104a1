// Tiles of 16 tokens x 16 channels: how one warp holds them, keeps them in shared memory and moves them to and from the
// tensors.
//
// Lane 4g+q. A tile is four 8x8 matrices; register a of a lane holds two neighbours of a row of matrix a:
//
//   token tile    rows are tokens, row halves a & 1, channel halves a >> 1: two channels of one token in a register
//   channel tile  rows are channels, row halves a & 1, token halves a >> 1: two tokens of one channel in a register
//
// Tokens and channels are in the order `permuted`: position 8 half + n is token 4 (n / 2) + 2 half + n % 2. So lane 4g+q
// meets in a token tile the tokens permuted(g), permuted(8 + g) and the four channels 4q ... 4q+3, and in a channel tile
// the four tokens 4q ... 4q+3: rows of a tensor are read and written 8 or 16 bytes per lane, and products over tokens or
// channels do not mind the order. The channels of keys (r, k, w and their gradients) have another one, position
// 8 half + n is channel 2 n + half: in a channel tile lane 4g+q has the neighbours 2g and 2g+1, so that w, read in this
// form from memory, and what is kept per channel come two at a time.
//
// Eight values of a lane are numbered 2 a + (0 or 1); in a channel tile that is 2 half + 4 (token / 2) + token % 2 for
// the lane's channel number `half` and token 0 ... 3. The accumulators of a product have the same numbering.
#pragma once

#include <type_traits>

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
    using Row = uint2;     // four channels
    using Two = uint32_t;  // two channels
    static constexpr bool kSplit = false;
    static __device__ __forceinline__ float to_float(Storage x) {
        return bits_to_float(static_cast<uint32_t>(x) << 16);
    }
    static __device__ __forceinline__ Storage from_float(float x) {
        return static_cast<Storage>(pack_bf16(x, 0.f) & 0xffffu);
    }
    static __device__ __forceinline__ Row pack(float a, float b, float c, float d) {
        return Row{pack_bf16(a, b), pack_bf16(c, d)};
    }
    static __device__ __forceinline__ float2 unpack(Two two) { return float2{bf16_low(two), bf16_high(two)}; }
    static __device__ __forceinline__ Two pack(float a, float b) { return pack_bf16(a, b); }
};

struct Float16 {
    using Storage = uint16_t;
    using Row = uint2;
    using Two = uint32_t;
    static constexpr bool kSplit = true;
    static __device__ __forceinline__ float to_float(Storage x) { return half_to_float(x); }
    static __device__ __forceinline__ Storage from_float(float x) { return static_cast<Storage>(float_to_half(x)); }
    static __device__ __forceinline__ float element(Row row, int i) {
        const uint32_t word = i & 2 ? row.y : row.x;
        return half_to_float(i & 1 ? word >> 16 : word & 0xffffu);
    }
    static __device__ __forceinline__ Row pack(float a, float b, float c, float d) {
        return Row{pack(a, b), pack(c, d)};
    }
    static __device__ __forceinline__ float2 unpack(Two two) {
        return float2{half_to_float(two & 0xffffu), half_to_float(two >> 16)};
    }
    static __device__ __forceinline__ Two pack(float a, float b) { return float_to_half(a) | float_to_half(b) << 16; }
};

struct Float32 {
    using Storage = float;
    using Row = float4;
    using Two = float2;
    static constexpr bool kSplit = true;
    static __device__ __forceinline__ float to_float(Storage x) { return x; }
    static __device__ __forceinline__ Storage from_float(float x) { return x; }
    static __device__ __forceinline__ float element(Row row, int i) {
        return i & 2 ? (i & 1 ? row.w : row.z) : (i & 1 ? row.y : row.x);
    }
    static __device__ __forceinline__ Row pack(float a, float b, float c, float d) { return Row{a, b, c, d}; }
    static __device__ __forceinline__ float2 unpack(Two two) { return two; }
    static __device__ __forceinline__ Two pack(float a, float b) { return Two{a, b}; }
};

// Operands of products -----------------------------------------------------------------------------------------------

constexpr int kTileBytes = 512;  // of a tile in shared memory; the low parts of a split one follow the high parts

template <bool kSplit>
struct Operand {
    static constexpr int kBytes = kTileBytes;
    uint32_t high[4];
};

template <>
struct Operand<true> {
    static constexpr int kBytes = 2 * kTileBytes;
    uint32_t high[4];
    uint32_t low[4];
};

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

// A tile of an input before it is scaled: not rounded to two parts yet where operands are split.
struct Exact {
    float values[8];
};

template <bool kSplit>
using Unscaled = std::conditional_t<kSplit, Exact, Operand<false>>;

__device__ __forceinline__ void get_values(float (&values)[8], const Exact& tile) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = tile.values[i];
}

__device__ __forceinline__ const Operand<false>& as_operand(const Operand<false>& tile) { return tile; }

__device__ __forceinline__ Operand<true> as_operand(const Exact& tile) {
    Operand<true> operand;
    set_values(operand, tile.values);
    return operand;
}

// Of a right factor the pairs with equal halves of n and k: one element of each, by a mask.
__device__ __forceinline__ void keep_half_pairs(Operand<false>& right, uint32_t mask) {
    right.high[0] &= mask;
    right.high[3] &= mask;
}

__device__ __forceinline__ void keep_half_pairs(Operand<true>& right, uint32_t mask) {
    right.high[0] &= mask;
    right.high[3] &= mask;
    right.low[0] &= mask;
    right.low[3] &= mask;
}

// A token tile in registers as a right factor, its tokens as n.
__device__ __forceinline__ Operand<false> right_rows(const Operand<false>& tile) {
    return Operand<false>{{tile.high[0], tile.high[2], tile.high[1], tile.high[3]}};
}

// Multiplies a token tile of keys by a factor per channel, of which the lane has channels 4q ... 4q+3.
__device__ __forceinline__ Operand<false> multiply_channels(const Operand<false>& tile, const float4& by) {
    const uint32_t even = pack_bf16(by.x, by.z), odd = pack_bf16(by.y, by.w);
    return Operand<false>{{mul_bf16(tile.high[0], even), mul_bf16(tile.high[1], even), mul_bf16(tile.high[2], odd),
                           mul_bf16(tile.high[3], odd)}};
}

// The factors by which a level scales a channel tile: rounded where the operands are.
template <bool kSplit>
struct Scale {
    uint32_t pair[4];
    __device__ __forceinline__ float value(int i) const {
        return i & 1 ? bf16_high(pair[i >> 1]) : bf16_low(pair[i >> 1]);
    }
};

template <>
struct Scale<true> {
    float values[8];
    __device__ __forceinline__ float value(int i) const { return values[i]; }
};

__device__ __forceinline__ Operand<false> multiply(const Operand<false>& in, const Scale<false>& scale) {
    Operand<false> out;
#pragma unroll
    for (int a = 0; a < 4; ++a) out.high[a] = mul_bf16(in.high[a], scale.pair[a]);
    return out;
}

__device__ __forceinline__ Operand<true> multiply(const Exact& in, const Scale<true>& scale) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = in.values[i] * scale.values[i];
    Operand<true> out;
    set_values(out, values);
    return out;
}

// Products: out[16x16] = left[16x16] right[16x16] + sums[16x16]. A left factor's registers are the matrices in the
// order (m, k) = 00 10 01 11, a right factor's in the order (n, k) = 00 01 10 11.
__device__ __forceinline__ void product(float (&out)[8], const Operand<false>& left, const Operand<false>& right,
                                        const float (&sums)[8], const Lane& lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        multiply_matrices<16>(out + 4 * half, left.high, right.high[2 * half], right.high[2 * half + 1],
                              sums + 4 * half, lane);
    }
}

__device__ __forceinline__ void product(float (&out)[8], const Operand<true>& left, const Operand<true>& right,
                                        const float (&sums)[8], const Lane& lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* to = out + 4 * half;
        const int i = 2 * half;
        multiply_matrices<16>(to, left.low, right.high[i], right.high[i + 1], sums + 4 * half, lane);
        multiply_matrices<16>(to, left.high, right.low[i], right.low[i + 1], to, lane);
        multiply_matrices<16>(to, left.high, right.high[i], right.high[i + 1], to, lane);
    }
}

template <bool kSplit>
__device__ __forceinline__ void add_product(float (&sums)[8], const Operand<kSplit>& left, const Operand<kSplit>& right,
                                            const Lane& lane) {
    product(sums, left, right, sums, lane);
}

template <bool kSplit>
__device__ __forceinline__ void new_product(float (&out)[8], const Operand<kSplit>& left, const Operand<kSplit>& right,
                                            const Lane& lane) {
    const float zero[8] = {};
    product(out, left, right, zero, lane);
}

// The same where only one half of k counts for each half of n: the same half or the other one.
template <bool kOther>
__device__ __forceinline__ void half_product(float (&out)[8], const Operand<false>& left, const Operand<false>& right,
                                             const float (&sums)[8], const Lane& lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int k = kOther ? 1 - half : half;
        multiply_matrices<8>(out + 4 * half, left.high + 2 * k, right.high[2 * half + k], 0u, sums + 4 * half, lane);
    }
}

template <bool kOther>
__device__ __forceinline__ void half_product(float (&out)[8], const Operand<true>& left, const Operand<true>& right,
                                             const float (&sums)[8], const Lane& lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int k = kOther ? 1 - half : half, i = 2 * half + k;
        float* to = out + 4 * half;
        multiply_matrices<8>(to, left.low + 2 * k, right.high[i], 0u, sums + 4 * half, lane);
        multiply_matrices<8>(to, left.high + 2 * k, right.low[i], 0u, to, lane);
        multiply_matrices<8>(to, left.high + 2 * k, right.high[i], 0u, to, lane);
    }
}

// Tiles in shared memory ---------------------------------------------------------------------------------------------

template <bool kSplit>
__device__ __forceinline__ void store(Address tile, const Operand<kSplit>& operand, const Lane& lane) {
    store_matrices(tile, operand.high, lane);
    if constexpr (kSplit) store_matrices(tile + kTileBytes, operand.low, lane);
}

template <bool kSplit, bool kCrossed>
__device__ __forceinline__ Operand<kSplit> load_tile(Address tile, const Lane& lane) {
    Operand<kSplit> operand;
    load_matrices<kCrossed>(operand.high, tile, lane);
    if constexpr (kSplit) load_matrices<kCrossed>(operand.low, tile + kTileBytes, lane);
    return operand;
}

template <bool kSplit, bool kCrossed>
__device__ __forceinline__ Operand<kSplit> load_transposed_tile(Address tile, const Lane& lane) {
    Operand<kSplit> operand;
    load_transposed_matrices<kCrossed>(operand.high, tile, lane);
    if constexpr (kSplit) load_transposed_matrices<kCrossed>(operand.low, tile + kTileBytes, lane);
    return operand;
}

// As a factor of a product: the tile's rows as m of a left factor, as n of a right one; or its columns.
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> left_rows(Address tile, const Lane& lane) {
    return load_tile<kSplit, false>(tile, lane);
}
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> right_rows(Address tile, const Lane& lane) {
    return load_tile<kSplit, true>(tile, lane);
}
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> left_columns(Address tile, const Lane& lane) {
    return load_transposed_tile<kSplit, true>(tile, lane);
}
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> right_columns(Address tile, const Lane& lane) {
    return load_transposed_tile<kSplit, false>(tile, lane);
}

// The values of the lane's two channels in a row [channel] of floats, for the 16 channels from `row` on.
__device__ __forceinline__ float2 of_channels(const float* row, const Lane& lane) {
    return *reinterpret_cast<const float2*>(row + 2 * lane.g);
}
__device__ __forceinline__ void set_channels(float* row, float first, float second, const Lane& lane) {
    *reinterpret_cast<float2*>(row + 2 * lane.g) = float2{first, second};
}

// The same of a tile in registers.
template <bool kSplit, bool kCrossed>
__device__ __forceinline__ Operand<kSplit> transposed_tile(const Operand<kSplit>& tile, const Lane& lane) {
    Operand<kSplit> out;
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        const int from = kCrossed ? a >> 1 | (a & 1) << 1 : a;
        out.high[a] = transposed(tile.high[from], lane);
        if constexpr (kSplit) out.low[a] = transposed(tile.low[from], lane);
    }
    return out;
}
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> left_columns(const Operand<kSplit>& tile, const Lane& lane) {
    return transposed_tile<kSplit, true>(tile, lane);
}
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> right_columns(const Operand<kSplit>& tile, const Lane& lane) {
    return transposed_tile<kSplit, false>(tile, lane);
}

// A tile in which each lane's registers lie together, so that a lane can read elsewhere instead.
template <bool kSplit>
__device__ __forceinline__ void store_fragment(Address fragment, const Operand<kSplit>& operand) {
    store_shared(fragment, uint4{operand.high[0], operand.high[1], operand.high[2], operand.high[3]});
    if constexpr (kSplit) {
        store_shared(fragment + kTileBytes, uint4{operand.low[0], operand.low[1], operand.low[2], operand.low[3]});
    }
}

template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> load_fragment(Address fragment) {
    Operand<kSplit> operand;
    const uint4 high = load_shared<uint4>(fragment);
    operand.high[0] = high.x, operand.high[1] = high.y, operand.high[2] = high.z, operand.high[3] = high.w;
    if constexpr (kSplit) {
        const uint4 low = load_shared<uint4>(fragment + kTileBytes);
        operand.low[0] = low.x, operand.low[1] = low.y, operand.low[2] = low.z, operand.low[3] = low.w;
    }
    return operand;
}

// Rows of the tensors ------------------------------------------------------------------------------------------------

// One head of a tensor [B, T, H, N]. Byte offsets inside it fit in 32 bits: the plan refuses larger ones.
template <class Element>
struct Head {
    char* data;
    uint32_t stride;  // bytes from token to token

    __device__ __forceinline__ Head(const WKV6Tensor& tensor, int b, int h)
        : data(static_cast<char*>(tensor.data) + (b * tensor.stride_b + h * tensor.stride_h) * kSize),
          stride(static_cast<uint32_t>(tensor.stride_t) * kSize) {}

    __device__ __forceinline__ char* at(int token, int channel) const {
        return data + (static_cast<uint32_t>(token) * stride + static_cast<uint32_t>(channel) * kSize);
    }

    static constexpr uint32_t kSize = sizeof(typename Element::Storage);
};

template <class T>
__device__ __forceinline__ T* as(char* address) {
#ifdef WKV6_EMULATE
    return emulator::checked<T>(address);
#else
    return reinterpret_cast<T*>(address);
#endif
}

// The lower or the upper halves of two registers.
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }

// Where a warp's tile lies: tokens first_token + 0 ... 15, channels first_channel + 0 ... 15, zero outside T and N.
struct Place {
    int first_token, T, first_channel, N;
};

// A token tile as it comes from memory: two tokens, four channels each.
template <class Element>
struct Rows {
    typename Element::Row row[2];

    __device__ __forceinline__ void load(const Head<Element>& head, const Place& place, const Lane& lane) {
        const int channel = place.first_channel + 4 * lane.q, token = place.first_token + permuted(lane.g);
        char* from = head.at(token, channel);
        row[0] = typename Element::Row{};
        row[1] = typename Element::Row{};
        if (channel < place.N && token < place.T) row[0] = *as<typename Element::Row>(from);
        if (channel < place.N && token + 2 < place.T) row[1] = *as<typename Element::Row>(from + 2 * head.stride);
    }

    // As a left factor, tokens in the rows; store() makes it a token tile.
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

    // The same of bf16 with the channels in the order of keys.
    __device__ __forceinline__ Operand<false> keys() const {
        return Operand<false>{{lower_halves(row[0].x, row[0].y), lower_halves(row[1].x, row[1].y),
                               upper_halves(row[0].x, row[0].y), upper_halves(row[1].x, row[1].y)}};
    }
};

// Asks for all channels of the block's tokens of two tensors.
template <class A, class B>
__device__ __forceinline__ void prefetch_rows(const Head<A>& a, const Head<B>& b, const Place& place,
                                              const Lane& lane) {
    const int token = place.first_token + (lane.id & 15);
    if (token >= place.T) return;
    prefetch(lane.id < 16 ? a.at(token, 0) : b.at(token, 0),
             place.N * (lane.id < 16 ? Head<A>::kSize : Head<B>::kSize));
}

// Address of a value in a tile of 16 x 16 fp32 values: a row per token, rotated to spread the banks.
__device__ __forceinline__ Address exact_value(Address tile, int token, int channel) {
    return tile + 64 * token + 4 * ((channel + 4 * (token >> 1)) & 15);
}

// From rows of tokens to a channel tile in the order of keys, through a tile of the warp's own.
template <class Element>
__device__ __forceinline__ Unscaled<Element::kSplit> to_channels(const Rows<Element>& rows, Address tile,
                                                                 const Lane& lane) {
    if constexpr (!Element::kSplit) {
        return left_columns(rows.keys(), lane);
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto& row = rows.row[half];
            store_shared(exact_value(tile, permuted(8 * half + lane.g), 4 * lane.q),
                         float4{Element::element(row, 0), Element::element(row, 1), Element::element(row, 2),
                                Element::element(row, 3)});
        }
        __syncwarp();
        Exact out;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int token = 4 * lane.q + 2 * (i >> 2) + (i & 1), channel = 2 * lane.g + (i >> 1 & 1);
            out.values[i] = load_shared<float>(exact_value(tile, token, channel));
        }
        return out;
    }
}

// Writes four channels of tokens permuted(g) and permuted(8 + g).
template <class Element>
__device__ __forceinline__ void write_row_pair(const Head<Element>& head, const Place& place, const Lane& lane,
                                               const typename Element::Row& first,
                                               const typename Element::Row& second) {
    const int channel = place.first_channel + 4 * lane.q, token = place.first_token + permuted(lane.g);
    char* to = head.at(token, channel);
    if (channel < place.N && token < place.T) *as<typename Element::Row>(to) = first;
    if (channel < place.N && token + 2 < place.T) *as<typename Element::Row>(to + 2 * head.stride) = second;
}

// Writes values[8] of a token tile (accumulators of a product whose rows are tokens).
template <class Element>
__device__ __forceinline__ void write_rows(const Head<Element>& head, const Place& place, const float (&values)[8],
                                           const Lane& lane) {
    write_row_pair(head, place, lane, Element::pack(values[0], values[1], values[4], values[5]),
                   Element::pack(values[2], values[3], values[6], values[7]));
}

// Writes values[8] of a channel tile in the order of keys. scratch: a tile of the warp's own; free for others only after
// the next barrier.
template <class Element>
__device__ __forceinline__ void write_columns(const Head<Element>& head, const Place& place, Address scratch,
                                              const float (&values)[8], const Lane& lane) {
    if constexpr (!Element::kSplit) {
        Operand<false> operand;
        set_values(operand, values);
        const Operand<false> out = transposed_tile<false, false>(operand, lane);
        const auto row = [](uint32_t even, uint32_t odd) {
            return uint2{lower_halves(even, odd), upper_halves(even, odd)};
        };
        write_row_pair(head, place, lane, row(out.high[0], out.high[1]), row(out.high[2], out.high[3]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int token = 4 * lane.q + 2 * (i >> 2) + (i & 1), channel = 2 * lane.g + (i >> 1 & 1);
            store_shared(exact_value(scratch, token, channel), values[i]);
        }
        __syncwarp();
        typename Element::Row out[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 from = load_shared<float4>(exact_value(scratch, permuted(8 * half + lane.g), 4 * lane.q));
            out[half] = Element::pack(from.x, from.y, from.z, from.w);
        }
        write_row_pair(head, place, lane, out[0], out[1]);
    }
}

}  // namespace wkv6
