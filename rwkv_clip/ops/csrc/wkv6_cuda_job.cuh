// What all WKV6 kernels are given, and the part of a block's work that they share.
#pragma once

#include "wkv6_cuda_decay.cuh"

namespace wkv6 {

// A sequence is cut into chunks of `blocks` blocks of 16 tokens; one thread block computes a chunk of a head, one warp
// a block. Chunks meet through states, of which there are none when there is one chunk.
struct Job {
    WKV6Params params;
    int blocks;
    int chunks;
    float* states;        // see wkv6_cuda_states.cuh
    float* chunk_decays;  // [head, chunk, channels]: product of a chunk's decays
    float* gu_parts;      // [head, chunk, N]
};

constexpr int max_levels(int max_blocks) { return max_blocks <= 2 ? max_blocks - 1 : max_blocks <= 4 ? 2 : 3; }

// How many thread blocks of a kernel a multiprocessor is to hold, by which the compiler limits registers.
constexpr int min_thread_blocks(bool backward, bool split, int max_blocks) {
    return split || max_blocks > 5 ? 1 : backward ? (max_blocks > 4 ? 2 : 3) : (max_blocks > 4 ? 3 : 4);
}

// Sizes and indices that follow from a Job, for the warp that asks.
struct Work {
    int head, b, h, chunk;
    int block, blocks;      // the warp's block within the chunk, and their number
    int groups, channels;   // of 16 channels; 16 groups
    int levels;             // 16 * 2^m, m < levels, join the blocks
    int first_token, tokens;  // of the warp's block; tokens <= 16, may be 0 in the last chunk

    __device__ __forceinline__ explicit Work(const Job& job) {
        head = blockIdx.x;
        b = head / job.params.H;
        h = head % job.params.H;
        chunk = blockIdx.y;
        block = warp_id();
        blocks = job.blocks;
        groups = (job.params.N + 15) / 16;
        channels = 16 * groups;
        levels = blocks > 1 ? meeting_level(blocks - 1, 0) + 1 : 0;
        first_token = 16 * (chunk * blocks + block);
        tokens = min(16, max(0, job.params.T - first_token));
    }

    __device__ __forceinline__ Place place(const Job& job, int group) const {
        return Place{first_token, job.params.T, 16 * group, job.params.N};
    }
};

// Writes the decay of the warp's block to totals[block * channels + c].
template <class W>
__device__ __forceinline__ void write_block_decays(float* totals, const Head<W>& w, const Job& job, const Work& work) {
#pragma unroll 2
    for (int group = 0; group < work.groups; ++group) {
        float rates[8], total[2];
        load_w(rates, w, work.place(job, group));
        to_rates(rates);
        block_decay(total, rates);
        if ((lane_id() & 3) == 0) {
            const int c = 16 * group + permuted(lane_id() >> 2);
            totals[work.block * work.channels + c] = total[0];
            totals[work.block * work.channels + c + 2] = total[1];
        }
    }
}

// Product of the decays of blocks first ... last - 1.
__device__ __forceinline__ float decay_of_blocks(const float* totals, int channels, int c, int first, int last) {
    float product = 1.f;
    for (int other = first; other < last; ++other) product *= totals[other * channels + c];
    return product;
}

// The decay between the warp's block and the border at which it meets the other half of level 16 * 2^m, for m >= 1, to
// between[((m - 1) * blocks + block) * channels + c]. Read by the same warp only.
__device__ __forceinline__ void write_decays_between(float* between, const float* totals, const Work& work) {
    for (int m = 1; m < work.levels; ++m) {
        const int start = work.block >> m << m;
        const bool is_later = work.block >> m & 1;
        const int first = is_later ? start : work.block + 1;
        const int last = is_later ? work.block : min(start + (1 << m), work.blocks);
        float* row = between + ((m - 1) * work.blocks + work.block) * work.channels;
        for (int c = lane_id(); c < work.channels; c += 32) {
            row[c] = decay_of_blocks(totals, work.channels, c, first, last);
        }
    }
    __syncwarp();
}

// A row of [.., channels] for the lane's two channels of a group.
__device__ __forceinline__ void get_channels(float (&out)[2], const float* row, int group) {
    const int c = 16 * group + permuted(lane_id() >> 2);
    out[0] = row[c];
    out[1] = row[c + 2];
}

template <bool kSplit>
__device__ __forceinline__ void block_scale(Scale<kSplit>& scale, const BlockDecay& decay, const float* between,
                                            const Work& work, int group, int m) {
    float outer[2] = {1.f, 1.f};
    if (m > 0) get_channels(outer, between + ((m - 1) * work.blocks + work.block) * work.channels, group);
    decay.blocks(scale.value, work.block >> m & 1, outer);
    scale.round();
}

// u of the lane's two channels of a group; 0 outside N.
__device__ __forceinline__ void load_u(float (&u)[2], const Job& job, const Work& work, int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int c = 16 * group + permuted(8 * half + (lane_id() >> 2));
        const int i = work.h * job.params.N + c;
        u[half] = 0.f;
        if (c >= job.params.N) continue;
        if (job.params.u_dtype == WKV6_FLOAT32) {
            u[half] = static_cast<const float*>(job.params.u)[i];
        } else if (job.params.u_dtype == WKV6_BFLOAT16) {
            u[half] = Bfloat16::to_float(static_cast<const uint16_t*>(job.params.u)[i]);
        } else {
            u[half] = Float16::to_float(static_cast<const uint16_t*>(job.params.u)[i]);
        }
    }
}

// Pairs inside a block ------------------------------------------------------------------------------------------------

// The weights of the pairs of one block [16 rows, 16 columns], summed channel group by channel group. Each pair counts
// at the level at which its tokens meet.
struct PairsInside {
    float weights[8] = {};    // levels 2, 4, 8
    float diagonal[4] = {};   // the lane's four tokens with themselves
    float neighbour[4] = {};  // the lane's four tokens (rows) with their partners in level 1 (columns)

    // A product over the channels for one level (1 ... 3: levels 2, 4, 8), of which the level's own pairs are kept.
    template <bool kSplit>
    __device__ __forceinline__ void add_level(int level, const Operand<kSplit>& left, const Operand<kSplit>& right) {
        const int g = lane_id() >> 2, apart = (g >> 1) ^ (lane_id() & 3);
        float sums[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = weights[i];
        product(sums, left, right);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (level == 1 && (i >> 1 & 1) == i >> 2) continue;
            if (level == 3 ? apart >= 2 : level == 2 ? apart == 1 : apart == 0) weights[i] = sums[i];
        }
    }

    // Channel tiles of rows and columns; u of the lane's two channels.
    __device__ __forceinline__ void add_near(const float (&rows)[8], const float (&columns)[8], const float (&u)[2]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = 2 * (i >> 2) + (i & 1);
            diagonal[t] += rows[i] * columns[i] * u[i >> 1 & 1];
            neighbour[t] += rows[i] * columns[i ^ 1];
        }
    }

    template <bool kSplit>
    __device__ __forceinline__ Operand<kSplit> result() {
        const int g = lane_id() >> 2;
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
        if ((g >> 1) == (lane_id() & 3)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 6 * half;  // row half and column half the same
                weights[i] = g & 1 ? neighbour[2 * half + 1] : diagonal[2 * half];
                weights[i + 1] = g & 1 ? diagonal[2 * half + 1] : neighbour[2 * half];
            }
        }
        Operand<kSplit> out;
        set_values(out, weights);
        return out;
    }
};

// The pairs of a block that meet at a level (0 ... 3: levels 1, 2, 4, 8); all others 0.
template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> pairs_of_level(Operand<kSplit> all, int level) {
    const int g = lane_id() >> 2, apart = (g >> 1) ^ (lane_id() & 3);
    const bool mine = level == 3 ? apart >= 2 : level == 2 ? apart == 1 : apart == 0;
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        const bool same_half = (a & 1) == (a >> 1);
        uint32_t mask = mine ? 0xffffffffu : 0u;
        if (level == 1 && same_half) mask = 0u;
        if (level == 0) mask &= same_half ? (g & 1 ? 0x0000ffffu : 0xffff0000u) : 0u;
        mask_pair(all, a, mask);
    }
    return all;
}

}  // namespace wkv6
