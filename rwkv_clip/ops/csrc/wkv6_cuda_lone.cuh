// A last token by itself. 49 tokens, the image of B/32 at 224 pixels, are three blocks of 16 and one token: a fourth
// warp would hold a quarter of the registers and mostly wait. Instead the three warps carry the token along.
//
// It is the first token of a later half: at level 16 it meets block 2, with no decay of its own, at level 32 blocks 0
// and 1, with the decay of block 2. What it adds to a block's sums has rank one: a row and a column of A and of gA.
#pragma once

#include "wkv6_cuda_job.cuh"

namespace wkv6 {

// A right factor of 16 x 8 for each of two products: one vector in column 0 of the first, one in column 1 of the second.
// Columns from 2 on do not count, so lanes 4 g + q read what lanes 4 (g & 1) + q would hold.
constexpr int kColumnsBytes = 128;

// Puts lane q's four elements of the vectors, in two words each, into columns at `to`.
__device__ __forceinline__ void write_columns_of(Address to, int q, uint32_t first0, uint32_t first1, uint32_t second0,
                                                 uint32_t second1) {
    store_shared(to + 16 * q, uint4{first0, first1, 0u, 0u});
    store_shared(to + 64 + 16 * q, uint4{0u, 0u, second0, second1});
}

// Weights of the pairs of a warp's tokens with the lone one: columns 0 and 1 of a product of 16 x 8, which are in lanes
// 4 g.
struct LonePairs {
    float sums[4] = {};

    __device__ __forceinline__ void add(const uint32_t (&left0)[4], const uint32_t (&left1)[4], const uint4& columns,
                                        const Lane& lane) {
        multiply_matrices<16>(sums, left0, columns.x, columns.y, sums, lane);
        multiply_matrices<16>(sums, left1, columns.z, columns.w, sums, lane);
    }
};

// One column of LonePairs, for the warp's tokens permuted(g) and permuted(8 + g), and as a left factor of equal rows.
struct LoneWeights {
    float rows[2];
    Operand<false> left;
};

// The token in shared memory: its values in float, [row][channel]; its r and k, scaled for each level, as factors of
// products; for the backward pass also v and gy as such, factors made of gA, and the sums over the blocks' tokens for gr
// and gk.
template <int kBlocks, bool kBackward>
struct Lone {
    static constexpr bool kExists = Meeting<kBlocks>::kLone;
    static constexpr int kTokens = 16 * kBlocks;  // before this one; its own index
    static constexpr int kThreads = 32 * kBlocks;
    enum Row { kR, kK, kV, kGy };
    static constexpr int kTensors = kBackward ? 4 : 3;

    Address columns;  // [level][group], k and r
    Address rows;     // [level][group][8] of k and r, two channels each: left factors with one column that counts
    Address ga;       // [block]: gA as columns, and as [8] rows that `rows` are multiplied with
    float* floats;    // [row][channel]
    float2* sums;     // [block][channel] for gr, gk
    Address values;   // [group], v and gy as columns, until gA is there: in the place of the sums
    int channels, N;

    static __host__ __device__ constexpr int bytes(int groups) {
        if (!kExists) return 0;
        const int factors = kBackward ? (4 * groups + 2 * kBlocks) * kColumnsBytes : 2 * groups * kColumnsBytes;
        return factors + groups * 64 * (kTensors + (kBackward ? 2 * kBlocks : 0));
    }

    __device__ __forceinline__ Lone(Address memory, const Job& job, const Work& work) {
        channels = work.channels;
        N = job.params.N;
        const int bytes = work.groups * kColumnsBytes;
        columns = memory;
        rows = columns + 2 * bytes;
        ga = rows + 2 * bytes;
        const Address after = kBackward ? ga + 2 * kBlocks * kColumnsBytes : rows;
        floats = shared_pointer<float>(after);
        values = after + kTensors * 4 * channels;
        sums = shared_pointer<float2>(values);
    }

    __device__ __forceinline__ float* row(Row i) const { return floats + i * channels; }
    __device__ __forceinline__ float2* sums_of(int block) const { return sums + block * channels; }
    __device__ __forceinline__ Address level(Address of, int m, int group) const {
        return of + (m * (channels >> 4) + group) * kColumnsBytes;
    }
    static __device__ __forceinline__ uint4 load_columns(Address from, const Lane& lane) {
        return load_shared<uint4>(from + 16 * (lane.id & 7));
    }

    // What a thread loads of the token: two channels of each tensor at most, N <= 128.
    struct Token {
        float values[2][4];
    };

    template <class Element>
    __device__ __forceinline__ Token load(const Head<Element>& r, const Head<Element>& k, const Head<Element>& v,
                                          const Head<Element>& gy) const {
        Token token = {};
        if constexpr (kExists) {
            static_assert(!Element::kSplit, "");
            using Storage = typename Element::Storage;
            const Head<Element>* tensors[4] = {&r, &k, &v, &gy};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int c = threadIdx.x + i * kThreads;
                if (c >= N) break;
#pragma unroll
                for (int t = 0; t < kTensors; ++t) {
                    token.values[i][t] = Element::to_float(*as<Storage>(tensors[t]->at(kTokens, c)));
                }
            }
        }
        return token;
    }

    __device__ __forceinline__ void write(const Token& token) const {
        if constexpr (kExists) {
            constexpr Row kTo[4] = {kR, kK, kV, kGy};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int c = threadIdx.x + i * kThreads;
                if (c >= channels) break;
#pragma unroll
                for (int t = 0; t < kTensors; ++t) row(kTo[t])[c] = token.values[i][t];
            }
        }
    }

    // The factors of products, behind a barrier: the blocks' decays and the token's values are known. A thread has four
    // channels.
    __device__ __forceinline__ void write_factors(const float* totals) const {
        if constexpr (kExists) {
            const int c = 4 * threadIdx.x, group = c >> 4, q = threadIdx.x & 3;
            if (c >= channels) return;
            const auto four = [&](const float* from) { return *reinterpret_cast<const float4*>(from + c); };
            const float4 r = four(row(kR)), k = four(row(kK)), decay = four(totals + 2 * channels);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float4 outer = m ? decay : float4{1.f, 1.f, 1.f, 1.f};
                const uint32_t k0 = pack_bf16(k.x * outer.x, k.z * outer.z), k1 = pack_bf16(k.y * outer.y, k.w * outer.w);
                const uint32_t r0 = pack_bf16(r.x * outer.x, r.z * outer.z), r1 = pack_bf16(r.y * outer.y, r.w * outer.w);
                write_columns_of(level(columns, m, group), q, k0, k1, r0, r1);
                if constexpr (kBackward) {
                    const Address to = level(rows, m, group) + 32 * q;
                    store_shared(to, uint4{k0 & 0xffffu, k1 & 0xffffu, r0 & 0xffffu, r1 & 0xffffu});
                    store_shared(to + 16, uint4{k0 >> 16, k1 >> 16, r0 >> 16, r1 >> 16});
                }
            }
            if constexpr (kBackward) {
                const float4 v = four(row(kV)), gy = four(row(kGy));
                write_columns_of(level(values, 0, group), q, pack_bf16(v.x, v.y), pack_bf16(v.z, v.w),
                                 pack_bf16(gy.x, gy.y), pack_bf16(gy.z, gy.w));
            }
        }
    }

    // pairs += what a group of channels adds to the weights with the lone token as key and as query; factors at a level
    // of the own tokens as queries and as keys.
    template <bool kSplit>
    __device__ __forceinline__ void add_pairs(LonePairs& pairs, const Operand<kSplit>& queries,
                                              const Operand<kSplit>& keys, int m, int group, const Lane& lane) const {
        if constexpr (kExists) pairs.add(queries.high, keys.high, load_columns(level(columns, m, group), lane), lane);
    }

    // The same of gA, from gy and v of the own tokens.
    template <bool kSplit>
    __device__ __forceinline__ void add_ga(LonePairs& pairs, const Operand<kSplit>& gy, const Operand<kSplit>& v,
                                           int group, const Lane& lane) const {
        if constexpr (kExists) pairs.add(gy.high, v.high, load_columns(level(values, 0, group), lane), lane);
    }

    // One column of `pairs`.
    __device__ __forceinline__ LoneWeights weights(const LonePairs& pairs, int column, const Lane& lane) const {
        LoneWeights out = {};
        if constexpr (kExists) {
            const float top = pairs.sums[column], bottom = pairs.sums[2 + column];
            out.rows[0] = from_lane(top, lane.id & ~3);
            out.rows[1] = from_lane(bottom, lane.id & ~3);
            const int first = 8 * lane.q;  // the lane with row 2q
            out.left.high[0] = out.left.high[1] = pack_bf16(from_lane(top, first), from_lane(top, first + 4));
            out.left.high[2] = out.left.high[3] = pack_bf16(from_lane(bottom, first), from_lane(bottom, first + 4));
        }
        return out;
    }

    // sums[own tokens, channels] += the tokens' weights times the lone token's values.
    __device__ __forceinline__ void add_to_rows(float (&sums)[8], const LoneWeights& weights, Row values, int group,
                                                const Lane& lane) const {
        if constexpr (kExists) {
            const float4 x = *reinterpret_cast<const float4*>(row(values) + 16 * group + 4 * lane.q);
            const float channel[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += weights.rows[i >> 1 & 1] * channel[2 * (i >> 2) + (i & 1)];
        }
    }

    // The block's part of the lone token's sums, to parts[block][channel].
    template <bool kSplit>
    __device__ __forceinline__ void write_part(float* parts, const LoneWeights& weights, const Operand<kSplit>& right,
                                               int group, int block, const Lane& lane) const {
        if constexpr (kExists) {
            float part[8];
            new_product(part, weights.left, right, lane);
            float* to = parts + block * channels + 16 * group + 4 * lane.q;
            if (lane.g == 0) *reinterpret_cast<float4*>(to) = float4{part[0], part[1], part[4], part[5]};
        }
    }

    // gA with the warp's tokens.
    __device__ __forceinline__ void write_ga(const LonePairs& pairs, int block, const Lane& lane) const {
        if constexpr (kExists) {
            const LoneWeights key = weights(pairs, 0, lane), query = weights(pairs, 1, lane);
            const Address to = ga + 2 * block * kColumnsBytes;
            if (lane.g == 0) {
                write_columns_of(to, lane.q, query.left.high[0], query.left.high[2], key.left.high[0],
                                 key.left.high[2]);
            }
            if (lane.q == 0) {
                store_shared(to + kColumnsBytes + 16 * lane.g,
                             uint4{pack_bf16(pairs.sums[0], 0.f), pack_bf16(pairs.sums[2], 0.f),
                                   pack_bf16(pairs.sums[1], 0.f), pack_bf16(pairs.sums[3], 0.f)});
            }
        }
    }

    // At the level at which the block meets the token: what the token adds to the sums for gr and gk of the block's
    // channel tile, and the block's part of the token's own sums. zero: 16 bytes of zeros.
    template <bool kSplit>
    __device__ __forceinline__ void add_level(float (&level_r)[8], float (&level_k)[8],
                                              const Operand<kSplit>& scaled_r, const Operand<kSplit>& scaled_k, int m,
                                              int group, int block, Address zero, const Lane& lane) const {
        if constexpr (kExists) {
            const Address own = ga + 2 * block * kColumnsBytes;
            const uint4 left = load_shared<uint4>(level(rows, m, group) + 16 * lane.g);
            const uint4 right = load_shared<uint4>(lane.q == 0 ? own + kColumnsBytes + 16 * lane.g : zero);
            const uint32_t k[2] = {left.x, left.y}, r[2] = {left.z, left.w};
            multiply_matrices<8>(level_r, k, right.x, 0u, level_r, lane);
            multiply_matrices<8>(level_r + 4, k, right.y, 0u, level_r + 4, lane);
            multiply_matrices<8>(level_k, r, right.z, 0u, level_k, lane);
            multiply_matrices<8>(level_k + 4, r, right.w, 0u, level_k + 4, lane);
            LonePairs out;
            out.add(scaled_k.high, scaled_r.high, load_columns(own, lane), lane);
            if (lane.q == 0) {
                float2* to = sums_of(block) + 16 * group + 2 * lane.g;
                *reinterpret_cast<float4*>(to) = float4{out.sums[0], out.sums[1], out.sums[2], out.sums[3]};
            }
        }
    }

    // The token's sums for gr and gk at level 32.
    __device__ __forceinline__ float2 outer_sums(int c) const {
        const float2 first = sums_of(0)[c], second = sums_of(1)[c];
        return float2{first.x + second.x, first.y + second.y};
    }

    // Of the pairs that meet at level 32, those of the lone token: they lie around all tokens of block 2.
    __device__ __forceinline__ void add_beyond(float (&beyond)[2], const float* totals, int group,
                                               const Lane& lane) const {
        if constexpr (kExists) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int c = 16 * group + 2 * lane.g + half;
                const float2 both = outer_sums(c);
                beyond[half] += totals[2 * channels + c] * (row(kR)[c] * both.x + row(kK)[c] * both.y);
            }
        }
    }

    // gA[lone, lone]
    __device__ __forceinline__ float own_ga(const Lane& lane) const {
        if constexpr (!kExists) return 0.f;
        return sum_of([&](int c) { return row(kGy)[c] * row(kV)[c]; }, lane);
    }

    // gr, gk and gw of the token at a channel; returns its part of gu.
    template <class Element, class W>
    __device__ __forceinline__ float write_gradients(const Head<Element>& gr, const Head<Element>& gk,
                                                     const Head<W>& gw, const float* totals, const float* u,
                                                     float own_ga, int c) const {
        const float decay = totals[2 * channels + c], own = u[c] * own_ga, r = row(kR)[c], k = row(kK)[c];
        const float2 inner = sums_of(2)[c], outer = outer_sums(c);
        using Storage = typename Element::Storage;
        *as<Storage>(gr.at(kTokens, c)) = Element::from_float(inner.x + decay * outer.x + own * k);
        *as<Storage>(gk.at(kTokens, c)) = Element::from_float(inner.y + decay * outer.y + own * r);
        *as<typename W::Storage>(gw.at(kTokens, c)) = W::from_float(0.f);  // no pair lies around the last token
        return r * k * own_ga;
    }

    // sum over the channels c of a function of c, the same in all lanes.
    template <class Function>
    __device__ __forceinline__ float sum_of(Function&& function, const Lane& lane) const {
        float sum = 0.f;
#pragma unroll 1
        for (int c = lane.id; c < channels; c += 32) sum += function(c);
        sum += from_lane_xor<1>(sum);
        sum += from_lane_xor<2>(sum);
        sum += from_lane_xor<4>(sum);
        sum += from_lane_xor<8>(sum);
        return sum + from_lane_xor<16>(sum);
    }

    // The token's row of y or gv, behind a barrier: parts of all blocks, and its own weight times its own values.
    template <class Element>
    __device__ __forceinline__ void finish_row(const Head<Element>& to, const float* parts, Row values, const float* u,
                                               const Lane& lane) const {
        if constexpr (kExists) {
            const float own = sum_of([&](int c) { return row(kR)[c] * u[c] * row(kK)[c]; }, lane);
#pragma unroll 1
            for (int c = threadIdx.x; c < N; c += kThreads) {
                float sum = own * row(values)[c];
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) sum += parts[block * channels + c];
                *as<typename Element::Storage>(to.at(kTokens, c)) = Element::from_float(sum);
            }
        }
    }
};

}  // namespace wkv6
