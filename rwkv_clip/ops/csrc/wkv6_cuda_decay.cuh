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
constexpr float kLargestRate = 109.94717f;  // exp(4.7); exp(-exp(4.7)) = 1.8e-48 is 0 in fp32
constexpr float kNoDecay = -1e30f;  // raw w of a token or channel that does not exist

// w of a channel tile: channels permuted(g) and permuted(8 + g), tokens 4q ... 4q+3.
template <class W>
__device__ __forceinline__ void load_w(float (&w)[8], const Head<W>& head, const Place& place) {
    const int channel = place.first_channel + permuted(lane_id() >> 2);
    const int token = place.first_token + 4 * (lane_id() & 3);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = token + 2 * (i >> 2) + (i & 1), c = channel + 2 * (i >> 1 & 1);
        w[i] = kNoDecay;
        if (t < place.T && c < place.N) w[i] = W::to_float(*head.at(t, c));
    }
}

// exp(w), in place.
__device__ __forceinline__ void to_rates(float (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = exp2_fast(w[i] * kLog2e);
}

// Products of the decays of a whole block for this lane's two channels; the same in the four lanes of a channel.
__device__ __forceinline__ void block_decay(float (&total)[2], const float (&rates)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = (rates[2 * half] + rates[2 * half + 1]) + (rates[2 * half + 4] + rates[2 * half + 5]);
        sum += from_lane_xor<1>(sum);
        sum += from_lane_xor<2>(sum);
        total[half] = exp2_fast(-sum * kLog2e);
    }
}

struct BlockDecay {
    float inner[2][2];   // decays of the lane's tokens 1 and 2, per channel
    float before[2][3];  // products from the lane's token 0 to before tokens 1, 2, 3
    float after[2][3];   // products after the lane's tokens 0, 1, 2 to its token 3
    float eight[2];      // to the border of level 8
    float later[2];      // product of the block's decays before the lane's four tokens
    float earlier[2];    // product of the block's decays after the lane's four tokens

    __device__ __forceinline__ explicit BlockDecay(const float (&rates)[8]) {
        const int q = lane_id() & 3;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float d[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) d[t] = exp2_fast(-rates[2 * half + 4 * (t >> 1) + (t & 1)] * kLog2e);
            inner[half][0] = d[1];
            inner[half][1] = d[2];
            before[half][0] = d[0];
            before[half][1] = d[0] * d[1];
            before[half][2] = before[half][1] * d[2];
            after[half][2] = d[3];
            after[half][1] = d[2] * d[3];
            after[half][0] = d[1] * after[half][1];
            const float four = before[half][1] * after[half][1];
            const float beside = from_lane_xor<1>(four);
            const float other = from_lane_xor<2>(four * beside);
            eight[half] = q == 0 || q == 3 ? beside : 1.f;
            later[half] = (q & 1 ? beside : 1.f) * (q & 2 ? other : 1.f);
            earlier[half] = (q & 1 ? 1.f : beside) * (q & 2 ? 1.f : other);
        }
    }

    __device__ __forceinline__ void level2(float (&x)[8]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x[2 * half] = inner[half][0];
            x[2 * half + 1] = 1.f;
            x[2 * half + 4] = 1.f;
            x[2 * half + 5] = inner[half][1];
        }
    }

    __device__ __forceinline__ void level4(float (&x)[8]) const {
        const float one[2] = {1.f, 1.f};
        quads(x, lane_id() & 1, one);
    }

    __device__ __forceinline__ void level8(float (&x)[8]) const { quads(x, lane_id() >> 1 & 1, eight); }

    // Level 16 and up. is_later: this block is in the later half; between: product of the decays of the blocks between
    // this one and the border, per channel.
    __device__ __forceinline__ void blocks(float (&x)[8], bool is_later, const float (&between)[2]) const {
        float outer[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) outer[half] = (is_later ? later[half] : earlier[half]) * between[half];
        quads(x, is_later, outer);
    }

private:
    __device__ __forceinline__ void quads(float (&x)[8], bool is_later, const float (&outer)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x[2 * half] = outer[half] * (is_later ? 1.f : after[half][0]);
            x[2 * half + 1] = outer[half] * (is_later ? before[half][0] : after[half][1]);
            x[2 * half + 4] = outer[half] * (is_later ? before[half][1] : after[half][2]);
            x[2 * half + 5] = outer[half] * (is_later ? before[half][2] : 1.f);
        }
    }
};

// How the blocks of a sequence meet -----------------------------------------------------------------------------------

// The m of level 16 * 2^m at which two different blocks meet.
__device__ __forceinline__ int meeting_level(int block, int other) {
#ifdef WKV6_EMULATE
    return 31 - __builtin_clz(block ^ other);
#else
    return 31 - __clz(block ^ other);
#endif
}

// Of the other blocks, number i: 0 ... blocks - 2.
__device__ __forceinline__ int other_block(int block, int i) { return i + (i >= block); }

}  // namespace wkv6
