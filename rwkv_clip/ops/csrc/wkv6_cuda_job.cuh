// What all WKV6 kernels are given, and the part of a block's work that they share.
#pragma once

#include <type_traits>
#include <utility>

#include "wkv6_cuda_decay.cuh"

namespace wkv6 {

// A sequence is cut into chunks of blocks of 16 tokens; one thread block computes a chunk of a head, one warp a block.
// Chunks meet through states, of which there are none when there is one chunk.
struct Job {
    WKV6Params params;
    int chunks;           // in the sequence
    int chunk_blocks;     // in a chunk; a thread block of the last one may have fewer
    int first_chunk;      // of the launch
    int ahead;            // forward thread blocks on the device at a time, about: which head's data a block asks for
    char* states;         // see wkv6_cuda_states.cuh
    float* gu_parts;      // [head, chunk, N]
    float* chunk_decays;  // [head, kind of state, chunk, channel]
};

// Sizes and indices that follow from a Job, for the warp that asks.
struct Work {
    int head, b, h, chunk, block;
    int groups, channels;  // of 16 channels; 16 groups
    int first_token;       // of the warp's block
    bool alone, empty;     // the block has one token at most, or none

    // chunk_blocks: of a chunk of the sequence; a thread block of the last one may have fewer.
    __device__ __forceinline__ Work(const Job& job, int chunk_blocks, int head_index, int chunk_index) {
        head = head_index;
        b = head / job.params.H;
        h = head % job.params.H;
        chunk = chunk_index;
        block = warp_id();
        groups = (job.params.N + 15) / 16;
        channels = 16 * groups;
        first_token = 16 * (chunk * chunk_blocks + block);
        alone = first_token + 1 >= job.params.T;
        empty = first_token >= job.params.T;
    }

    __device__ __forceinline__ Place place(const Job& job, int group) const {
        return Place{first_token, job.params.T, 16 * group, job.params.N};
    }
};

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// function(Constant<0>), ... function(Constant<kCount - 1>): indices that are constants also where a loop is not
// unrolled.
template <class Function, int... kIndices>
__device__ __forceinline__ void for_each_index(Function&& function, std::integer_sequence<int, kIndices...>) {
    (function(Constant<kIndices>{}), ...);
}

template <int kCount, class Function>
__device__ __forceinline__ void for_each(Function&& function) {
    for_each_index(function, std::make_integer_sequence<int, kCount>{});
}

// How many thread blocks of a kernel a multiprocessor is to hold, by which the compiler limits registers.
constexpr int forward_occupancy(bool split, int blocks) {
    return blocks > 4 ? (split ? 2 : 3) : (split ? 12 : 16) / blocks;
}

constexpr int backward_occupancy(bool split, int blocks, bool chunked) {
    return blocks > 4 ? 2 : (split || chunked ? 8 : 12) / blocks;
}

// How the kBlocks blocks of a chunk meet. At level 16 * 2^m a block meets the blocks of the neighbouring half of 2^m
// blocks: for i < 2^m block other(block, m, i), or none (-1). What a warp keeps for each of the other blocks has
// number slot(m, i), so that it stays in registers. Blocks past the sequence's end are empty, not absent. Three blocks
// are full, and one token follows them (wkv6_cuda_lone.cuh).
template <int kBlocks>
struct Meeting {
    static_assert(kBlocks >= 1 && kBlocks <= 5, "");
    static constexpr bool kLone = kBlocks == 3;
    static constexpr int kLevels = kBlocks == 1 ? 0 : kBlocks == 2 ? 1 : kBlocks == 5 ? 3 : 2;
    static constexpr int kSlots = kBlocks == 1 ? 1 : kBlocks - 1;

    // Of five blocks the last one meets all others at level 64, in the slots of levels that it does not have; of three
    // the last one meets both others at level 32.
    static __host__ __device__ constexpr int slot(int m, int i) {
        if (kBlocks == 3) return m == 1 && i == 0;
        return kBlocks == 5 && m == 2 ? (i == 0 ? 3 : i - 1) : (1 << m) + i - 1;
    }

    static constexpr bool kMayBeNone = kBlocks == 5 || kBlocks == 3;
    static __device__ __forceinline__ int other(int block, int m, int i) {
        if constexpr (kBlocks == 3) {
            if (block == 2) return m == 1 ? i : -1;
            return m == 0 ? block ^ 1 : i == 0 ? 2 : -1;
        }
        if constexpr (kBlocks == 5) {
            if (m == 2) return block == 4 ? i : i == 0 ? 4 : -1;
            if (block == 4) return -1;
        }
        return block ^ ((1 << m) + i);
    }

    // function(slot, other block) for the blocks that a block meets at a level.
    template <int kLevel, class Function>
    static __device__ __forceinline__ void for_each_other(int block, Function&& function) {
        for_each<1 << kLevel>([&](auto index) {
            constexpr int i = decltype(index)::value;
            constexpr int kSlot = slot(kLevel, i);
            const int there = other(block, kLevel, i);
            if (!kMayBeNone || there >= 0) function(Constant<kSlot>{}, there);
        });
    }

    static __device__ __forceinline__ bool has_level(int block, int m) { return kBlocks != 5 || m == 2 || block < 4; }

    static __device__ __forceinline__ bool is_later(int block, int m) { return block >> m & 1; }

    // Whether a block meets the token that follows three blocks.
    static __device__ __forceinline__ bool meets_lone(int block, int m) { return kLone && (block == 2) == (m == 0); }
};

// Turns w of the warp's block, one group's, into rates, and writes its decay to totals[block * channels + c].
__device__ __forceinline__ void write_block_decay(float* totals, float (&rates)[8], const Work& work, int group,
                                                  const Lane& lane) {
    float total[2];
    to_rates(rates);
    block_decay(total, rates);
    if (lane.q == 0) set_channels(totals + work.block * work.channels + 16 * group, total[0], total[1], lane);
}

// Rates in shared memory, from one use to the next: each lane reads its own.
constexpr int kRatesBytes = 1024;  // of a tile

__device__ __forceinline__ void store_rates(Address at, const float (&rates)[8], const Lane& lane) {
    store_shared(at + lane.straight, float4{rates[0], rates[1], rates[2], rates[3]});
    store_shared(at + kRatesBytes / 2 + lane.straight, float4{rates[4], rates[5], rates[6], rates[7]});
}

__device__ __forceinline__ void load_rates(float (&rates)[8], Address at, const Lane& lane) {
    const float4 first = load_shared<float4>(at + lane.straight);
    const float4 second = load_shared<float4>(at + kRatesBytes / 2 + lane.straight);
    rates[0] = first.x, rates[1] = first.y, rates[2] = first.z, rates[3] = first.w;
    rates[4] = second.x, rates[5] = second.y, rates[6] = second.z, rates[7] = second.w;
}

// The work before the loop over channel groups, several groups at a time so that their loads wait together: writes the
// decay of the warp's block to totals[block * channels + c], and calls use(group, a tile's Rows of each tensor, rates).
template <class Element, class W, int kTensors, class Use>
__device__ __forceinline__ void load_block(float* totals, const Head<W>& w, const Head<Element> (&tensors)[kTensors],
                                           const Job& job, const Work& work, const Lane& lane, Use&& use) {
    constexpr int kBatch = 5;
#pragma unroll 1
    for (int first = 0; first < work.groups; first += kBatch) {
        float rates[kBatch][8];
        Rows<Element> rows[kBatch][kTensors];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const Place place = work.place(job, first + i);  // past the last group: no channel, no load
#pragma unroll
            for (int tensor = 0; tensor < kTensors; ++tensor) rows[i][tensor].load(tensors[tensor], place, lane);
            load_w(rates[i], w, place, lane);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i >= work.groups) break;
            write_block_decay(totals, rates[i], work, first + i, lane);
            use(first + i, rows[i], rates[i]);
        }
    }
}

// Asks for the forward pass's inputs of the head whose thread block will start when this one ends, about. The backward
// pass gains nothing by it: it is not DRAM that it waits for.
template <class Element, class W, int kBlocks>
__device__ __forceinline__ void prefetch_other_head(const Job& job, const Work& work, const Lane& lane) {
    const WKV6Params& params = job.params;
    const int head = work.head + job.ahead;
    if (head >= params.B * params.H) return;
    const int b = head / params.H, h = head % params.H;
    const Head<Element> v(params.v, b, h);
    const Head<W> w(params.w, b, h);
    // The token that follows three blocks is asked for by the first one's warp.
    const int step = 16 * kBlocks, end = Meeting<kBlocks>::kLone && work.block == 0 ? params.T : work.first_token + 1;
#pragma unroll 1
    for (int token = work.first_token; token < end; token += step) {
        const Place place{token, params.T, 0, params.N};
        prefetch_rows(v, w, place, lane);
        prefetch_rows(Head<Element>(params.r, b, h), Head<Element>(params.k, b, h), place, lane);
    }
}

// Product of the decays of blocks first ... last - 1.
__device__ __forceinline__ float decay_of_blocks(const float* totals, int channels, int c, int first, int last) {
    float product = 1.f;
    for (int other = first; other < last; ++other) product *= totals[other * channels + c];
    return product;
}

// Tables [row][block][channel] of the decay between a block and a border of each level 16 * 2^m, m >= 1, at which it
// meets the other half; in chunks of a longer sequence also to the chunk's start (side 0) and end (side 1).
template <int kBlocks, bool kChunked>
struct Between {
    static constexpr int kLevelRows = Meeting<kBlocks>::kLevels > 1 ? Meeting<kBlocks>::kLevels - 1 : 0;
    static constexpr int kRows = kLevelRows + (kChunked ? 2 : 0);

    static __device__ __forceinline__ int row(int row, const Work& work) {
        return (row * kBlocks + work.block) * work.channels;
    }
    static __device__ __forceinline__ int row_of_level(int m, const Work& work) { return row(m - 1, work); }
    static __device__ __forceinline__ int row_of_side(int side, const Work& work) {
        return row(kLevelRows + side, work);
    }

    // Writes the rows of the warp's block; read by the same warp only.
    static __device__ __forceinline__ void write(float* between, const float* totals, const Work& work,
                                                 const Lane& lane) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int m = i + 1, start = i < kLevelRows ? work.block >> m << m : 0;
            const int end = i < kLevelRows ? min(start + (1 << m), kBlocks) : kBlocks;
            const bool is_before = i < kLevelRows ? Meeting<kBlocks>::is_later(work.block, m) : i == kLevelRows;
            const int first = is_before ? start : work.block + 1, last = is_before ? work.block : end;
            float* to = between + row(i, work);
            for (int c = lane.id; c < work.channels; c += 32) {
                to[c] = decay_of_blocks(totals, work.channels, c, first, last);
            }
        }
        __syncwarp();
    }
};

// Scale of level 16 * 2^m.
template <bool kSplit, int kBlocks>
__device__ __forceinline__ Scale<kSplit> scale_across(const BlockDecay<kSplit>& decay, const float* between,
                                                      const Work& work, int group, int m, const Lane& lane) {
    float outer[2] = {1.f, 1.f};
    if (m > 0) {
        const float2 two =
            of_channels(between + Between<kBlocks, false>::row_of_level(m, work) + 16 * group, lane);
        outer[0] = two.x;
        outer[1] = two.y;
    }
    return decay.across(Meeting<kBlocks>::is_later(lane.warp, m), outer);
}

// Scale of a block towards the chunk's start (side 0) or end (side 1).
template <bool kSplit, int kBlocks>
__device__ __forceinline__ Scale<kSplit> scale_to_chunk(const BlockDecay<kSplit>& decay, const float* between,
                                                        const Work& work, int group, int side, const Lane& lane) {
    const float2 two = of_channels(between + Between<kBlocks, true>::row_of_side(side, work) + 16 * group, lane);
    const float outer[2] = {two.x, two.y};
    return decay.across(side == 0, outer);
}

// u[channels] in fp32, 0 outside N, by the whole thread block.
__device__ __forceinline__ void load_u(float* to, const Job& job, const Work& work) {
    for (int c = threadIdx.x; c < work.channels; c += blockDim.x) {
        const int i = work.h * job.params.N + c;
        float u = 0.f;
        if (c < job.params.N) {
            if (job.params.u_dtype == WKV6_FLOAT32) {
                u = static_cast<const float*>(job.params.u)[i];
            } else if (job.params.u_dtype == WKV6_BFLOAT16) {
                u = Bfloat16::to_float(static_cast<const uint16_t*>(job.params.u)[i]);
            } else {
                u = Float16::to_float(static_cast<const uint16_t*>(job.params.u)[i]);
            }
        }
        to[c] = u;
    }
}

// The weights of the pairs of one block [16 rows, 16 columns], summed channel group by channel group. Each pair counts
// at the level at which its tokens meet. Rows 8 half + g and columns 8 half + 2q, + 1 of a lane are tokens of the quads
// g / 2 and q of the block: those in other quads meet at level 8 or 4, those in the same one at level 2 or 1.
struct PairsInside {
    float weights[8] = {};
    // What products of split operands would not give exactly enough, of float32 and float16:
    float diagonal[4] = {};   // the lane's four tokens with themselves
    float neighbour[4] = {};  // the lane's four tokens (rows) with their partners in level 1 (columns)

    // A product over the channels for one level, of which the level's own pairs are kept.
    template <int kLevel, bool kSplit>
    __device__ __forceinline__ void add_level(const Operand<kSplit>& left, const Operand<kSplit>& right,
                                              const Lane& lane) {
        const int apart = (lane.g >> 1) ^ lane.q;
        float sums[8];
        product(sums, left, right, weights, lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (kLevel == 2 && (i >> 1 & 1) == i >> 2) continue;
            const bool mine = kLevel == 8 ? apart >= 2 : kLevel == 4 ? apart == 1 : apart == 0;
            weights[i] = mine ? sums[i] : weights[i];
        }
    }

    // Level 1 and the tokens with themselves, of tiles as they were loaded and as channel tiles; u of the group's channels.
    template <class Element>
    __device__ __forceinline__ void add_near(const Rows<Element>& rows, const Rows<Element>& columns,
                                             const Unscaled<Element::kSplit>& row_channels,
                                             const Unscaled<Element::kSplit>& column_channels, const float* u,
                                             const Lane& lane) {
        if constexpr (Element::kSplit) {
            add_near_exactly(row_channels, column_channels, u, lane);
        } else {
            add_near_products(rows.keys(), columns.keys(), u, lane);
        }
    }

    // Of token tiles.
    __device__ __forceinline__ void add_near_products(const Operand<false>& rows, const Operand<false>& columns,
                                                      const float* u, const Lane& lane) {
        const float4 u_channels = *reinterpret_cast<const float4*>(u + 4 * lane.q);
        add_near_product(rows, right_rows(columns), false, lane);
        add_near_product(rows, right_rows(multiply_channels(columns, u_channels)), true, lane);
    }

    __device__ __forceinline__ void add_near_product(const Operand<false>& left, const Operand<false>& right,
                                                     bool diagonal, const Lane& lane) {
        float sums[8];
        product(sums, left, right, weights, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // row half and column half the same
#pragma unroll
            for (int i = 6 * half; i < 6 * half + 2; ++i) {
                const bool mine = (lane.g >> 1) == lane.q && ((lane.g & 1) == (i & 1)) == diagonal;
                weights[i] = mine ? sums[i] : weights[i];
            }
        }
    }

    // Of channel tiles.
    __device__ __forceinline__ void add_near_exactly(const Exact& rows, const Exact& columns, const float* u,
                                                     const Lane& lane) {
        const float2 two = of_channels(u, lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = 2 * (i >> 2) + (i & 1);
            diagonal[t] += rows.values[i] * columns.values[i] * (i >> 1 & 1 ? two.y : two.x);
            neighbour[t] += rows.values[i] * columns.values[i ^ 1];
        }
    }

    template <bool kSplit>
    __device__ __forceinline__ Operand<kSplit> result(const Lane& lane) {
        if constexpr (kSplit) {
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                diagonal[t] += from_lane_xor<4>(diagonal[t]);
                diagonal[t] += from_lane_xor<8>(diagonal[t]);
                diagonal[t] += from_lane_xor<16>(diagonal[t]);
                neighbour[t] += from_lane_xor<4>(neighbour[t]);
                neighbour[t] += from_lane_xor<8>(neighbour[t]);
                neighbour[t] += from_lane_xor<16>(neighbour[t]);
            }
            // Row 8 half + g is the lane's token 2 half + g % 2 where g / 2 = q.
            if ((lane.g >> 1) == lane.q) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = 6 * half;  // row half and column half the same
                    weights[i] = lane.g & 1 ? neighbour[2 * half + 1] : diagonal[2 * half];
                    weights[i + 1] = lane.g & 1 ? diagonal[2 * half + 1] : neighbour[2 * half];
                }
            }
        }
        Operand<kSplit> out;
        set_values(out, weights);
        return out;
    }
};

}  // namespace wkv6
