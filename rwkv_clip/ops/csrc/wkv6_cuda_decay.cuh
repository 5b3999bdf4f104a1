// The decays of a channel tile and the factors that split a product of decays between its two ends.
//
// Tokens s and t meet at the level l = 2^n at which they lie in neighbouring halves of the same aligned 2 l tokens. The
// product of the decays strictly between them is then X[s] X[t] with
//
//   X[i] = product of the decays after i to the end of its half      (i in the first half: "earlier")
//   X[i] = product of the decays from the half's start to before i   (i in the second half: "later")
//
// Both are at most 1, so nothing overflows and no logarithms are summed over long stretches; a product that underflows
// is one that does not matter. For level l the pairs' weights are one matrix product of r X and k X, both triangles at
// once. Levels 1, 2, 4, 8 are inside a block of 16 tokens, level 16 * 2^m joins blocks.
#pragma once

#include "wkv6_cuda_tile.cuh"

namespace wkv6 {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2Log2e = 0.5287663729448977f;
constexpr float kLargestW = 10.f;   // decays are 0 in fp32 from w = 4.7 on, and so are the sums that gw is made of
constexpr float kNoDecay = -1e30f;  // raw w of a token or channel that does not exist

// w of a channel tile: channels 2g and 2g + 1, tokens 4q ... 4q+3.
template <class W>
__device__ __forceinline__ void load_w(float (&w)[8], const Head<W>& head, const Place& place, const Lane& lane) {
    const int channel = place.first_channel + 2 * lane.g, token = place.first_token + 4 * lane.q;
    char* from = head.at(token, channel);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const int i = 4 * (t >> 1) + (t & 1);
        w[i] = w[i + 2] = kNoDecay;  // N is a multiple of 4: both channels exist, or none
        if (token + t < place.T && channel < place.N) {
            const float2 two = W::unpack(*as<typename W::Two>(from));
            w[i] = two.x;
            w[i + 2] = two.y;
        }
        from += head.stride;
    }
}

// From w to -log2 of the decay, exp(w) log2(e), in place.
__device__ __forceinline__ void to_rates(float (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = exp2_fast(min_or_nan(w[i], kLargestW) * kLog2e + kLog2Log2e);
}

// Products of the decays of a whole block for this lane's two channels; the same in the four lanes of a channel.
__device__ __forceinline__ void block_decay(float (&total)[2], const float (&rates)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = (rates[2 * half] + rates[2 * half + 1]) + (rates[2 * half + 4] + rates[2 * half + 5]);
        sum += from_lane_xor<1>(sum);
        sum += from_lane_xor<2>(sum);
        total[half] = exp2_fast(-sum);
    }
}

// Two values that are multiplied as one where operands are bf16.
template <bool kSplit>
struct Pair {
    uint32_t bits;
    __device__ __forceinline__ Pair() {}
    __device__ __forceinline__ Pair(float a, float b) : bits(pack_bf16(a, b)) {}
    __device__ __forceinline__ Pair operator*(const Pair& other) const {
        Pair out;
        out.bits = mul_bf16(bits, other.bits);
        return out;
    }
    __device__ __forceinline__ void keep() { wkv6::keep(bits); }
    // By value: a choice between references would put the arrays they lie in into memory.
    static __device__ __forceinline__ Pair choose(bool condition, const Pair& yes, const Pair& no) {
        Pair out;
        out.bits = condition ? yes.bits : no.bits;
        return out;
    }
    __device__ __forceinline__ void put(Scale<false>& scale, int a) const { scale.pair[a] = bits; }
};

template <>
struct Pair<true> {
    float first, second;
    __device__ __forceinline__ Pair() {}
    __device__ __forceinline__ Pair(float a, float b) : first(a), second(b) {}
    __device__ __forceinline__ Pair operator*(const Pair& other) const {
        return Pair(first * other.first, second * other.second);
    }
    __device__ __forceinline__ void keep() {
        wkv6::keep(first);
        wkv6::keep(second);
    }
    static __device__ __forceinline__ Pair choose(bool condition, const Pair& yes, const Pair& no) {
        return Pair(condition ? yes.first : no.first, condition ? yes.second : no.second);
    }
    __device__ __forceinline__ void put(Scale<true>& scale, int a) const {
        scale.values[2 * a] = first;
        scale.values[2 * a + 1] = second;
    }
};

template <bool kSplit>
struct BlockDecay {
    using Two = Pair<kSplit>;
    Two two[2][2];     // to the border of level 2, of the lane's tokens 0, 1 and 2, 3, per channel
    Two before[2][2];  // from the lane's token 0 to before each token
    Two after[2][2];   // after each token to the lane's token 3
    float eight[2];    // from the lane's four tokens to the border of level 8
    float later[2];    // product of the block's decays before the lane's four tokens
    float earlier[2];  // product of the block's decays after the lane's four tokens

    __device__ __forceinline__ BlockDecay(const float (&rates)[8], const Lane& lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float d[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) d[t] = exp2_fast(-rates[2 * half + 4 * (t >> 1) + (t & 1)]);
            two[half][0] = Two(d[1], 1.f);
            two[half][1] = Two(1.f, d[2]);
            const float first = d[0] * d[1], last = d[2] * d[3];
            before[half][0] = Two(1.f, d[0]);
            before[half][1] = Two(first, first * d[2]);
            after[half][0] = Two(d[1] * last, last);
            after[half][1] = Two(d[3], 1.f);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                two[half][i].keep();
                before[half][i].keep();
                after[half][i].keep();
            }
            const float four = first * last;
            const float beside = from_lane_xor<1>(four);
            const float other = from_lane_xor<2>(four * beside);
            eight[half] = lane.q == 0 || lane.q == 3 ? beside : 1.f;
            later[half] = (lane.q & 1 ? beside : 1.f) * (lane.q & 2 ? other : 1.f);
            earlier[half] = (lane.q & 1 ? 1.f : beside) * (lane.q & 2 ? 1.f : other);
        }
    }

    // Levels 2, 4 and 8.
    template <int kLevel>
    __device__ __forceinline__ Scale<kSplit> inside(const Lane& lane) const {
        Scale<kSplit> scale;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (kLevel == 2) {
                    two[half][i].put(scale, half + 2 * i);
                } else {
                    const bool is_later = kLevel == 4 ? lane.q & 1 : lane.q >> 1;
                    const Two here = Two::choose(is_later, before[half][i], after[half][i]);
                    if (kLevel == 4) here.put(scale, half + 2 * i);
                    if (kLevel == 8) (here * Two(eight[half], eight[half])).put(scale, half + 2 * i);
                }
            }
        }
        return scale;
    }

    // Level 16 and up. is_later: this block is in the later half; between: product of the decays of the blocks between
    // this one and the border, per channel.
    __device__ __forceinline__ Scale<kSplit> across(bool is_later, const float (&between)[2]) const {
        Scale<kSplit> scale;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float outer = (is_later ? later[half] : earlier[half]) * between[half];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Two here = Two::choose(is_later, before[half][i], after[half][i]);
                (here * Two(outer, outer)).put(scale, half + 2 * i);
            }
        }
        return scale;
    }
};

}  // namespace wkv6
