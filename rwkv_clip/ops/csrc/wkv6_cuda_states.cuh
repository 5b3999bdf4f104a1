// States: how the chunks of a long sequence meet.
//
// For a chunk, side 0 (left) and kind 0: state[c, j] = sum over the tokens s of all earlier chunks of k[s, c] v[s, j]
// times the decays after s up to the chunk's start. Side 1 (right): all later chunks, down to the chunk's end.
// Kind 1 (backward pass only): the same of r and gy. Tiles [key channels, value channels] of eight floats per lane.
#pragma once

#include "wkv6_cuda_job.cuh"

namespace wkv6 {

constexpr int kStateTileFloats = 256;

__device__ __forceinline__ float* state_tile(const Job& job, const Work& work, int kind, int side, int key_group,
                                             int value_group) {
    const int64_t chunk = (static_cast<int64_t>(kind * 2 + side) * gridDim.x + work.head) * job.chunks + work.chunk;
    return job.states + ((chunk * work.groups + key_group) * work.groups + value_group) * kStateTileFloats;
}

__device__ __forceinline__ bool has_state(const Job& job, const Work& work, int side) {
    return side ? work.chunk + 1 < job.chunks : work.chunk > 0;
}

__device__ __forceinline__ void load_state_values(float (&values)[8], const Job& job, const Work& work, int kind,
                                                  int side, int key_group, int value_group) {
    const float4* from = reinterpret_cast<const float4*>(state_tile(job, work, kind, side, key_group, value_group));
    const float4 first = from[lane_id()], second = from[32 + lane_id()];
    values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
    values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
}

template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> load_state(const Job& job, const Work& work, int kind, int side,
                                                      int key_group, int value_group) {
    float values[8];
    load_state_values(values, job, work, kind, side, key_group, value_group);
    Operand<kSplit> operand;
    set_values(operand, values);
    return operand;
}

// Scale of a block towards the chunk's start (side 0) or end (side 1).
template <bool kSplit>
__device__ __forceinline__ void chunk_scale(Scale<kSplit>& scale, const BlockDecay& decay, const float* totals,
                                            const Work& work, int group, int side) {
    float outer[2];
    const int c = 16 * group + permuted(lane_id() >> 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        outer[half] = decay_of_blocks(totals, work.channels, c + 2 * half, side ? work.block + 1 : 0,
                                      side ? work.blocks : work.block);
    }
    decay.blocks(scale.value, side == 0, outer);
    scale.round();
}

struct StatesLayout {
    int tile, scaled, values, totals, words;

    __host__ __device__ StatesLayout(int blocks, int groups, bool split) {
        tile = split ? 2 * kTileWords : kTileWords;
        scaled = 0;                                          // [side][block][group]
        values = scaled + 2 * blocks * groups * tile;        // [block][group]
        totals = values + blocks * groups * tile;            // [block][channel], float
        words = totals + blocks * groups * 16;
    }
};

// Each chunk's own sums: where a state of this chunk stands is written what the chunk adds to the next state.
// Side 0: towards the chunk's end, for the chunks after it; side 1: towards its start, for those before.
template <class Element, class W>
__global__ void __launch_bounds__(256) chunk_states_kernel(const __grid_constant__ Job job) {
    WKV6_SHARED_MEMORY(shared);
    constexpr bool kSplit = Element::kSplit;
    Work work(job);
    const int kind = work.chunk / job.chunks;
    work.chunk %= job.chunks;
    work.first_token = 16 * (work.chunk * work.blocks + work.block);
    const WKV6Params& params = job.params;
    const StatesLayout layout(work.blocks, work.groups, kSplit);
    const Head<Element> keys(kind ? params.r : params.k, work.b, work.h);
    const Head<Element> values(kind ? params.gy : params.v, work.b, work.h);
    const Head<W> w(params.w, work.b, work.h);
    float* totals = reinterpret_cast<float*>(shared + layout.totals);
    const auto scaled_tile = [&](int side, int block, int group) {
        return shared + layout.scaled + ((side * work.blocks + block) * work.groups + group) * layout.tile;
    };
    const auto value_tile = [&](int block, int group) {
        return shared + layout.values + (block * work.groups + group) * layout.tile;
    };

    for (int group = 0; group < work.groups; ++group) {
        Rows<Element> rows;
        rows.load(values, work.place(job, group));
        store(value_tile(work.block, group), rows.operand());
    }
    write_block_decays(totals, w, job, work);
    __syncthreads();
    for (int c = threadIdx.x; c < work.channels && kind == 0; c += blockDim.x) {
        job.chunk_decays[(static_cast<int64_t>(work.head) * job.chunks + work.chunk) * work.channels + c] =
            decay_of_blocks(totals, work.channels, c, 0, work.blocks);
    }
    for (int group = 0; group < work.groups; ++group) {
        Rows<Element> rows;
        float rates[8];
        rows.load(keys, work.place(job, group));
        load_w(rates, w, work.place(job, group));
        to_rates(rates);
        const BlockDecay decay(rates);
        store(scaled_tile(0, work.block, group), rows.operand());
        __syncwarp();
        const Operand<kSplit> channels = exchanged(load_transposed<kSplit>(scaled_tile(0, work.block, group)));
        __syncwarp();
        for (int side = 0; side < 2; ++side) {
            Scale<kSplit> scale;
            Operand<kSplit> scaled;
            chunk_scale(scale, decay, totals, work, group, 1 - side);  // the state on the left grows towards the right
            multiply(scaled, channels, scale);
            store(scaled_tile(side, work.block, group), scaled);
        }
    }
    __syncthreads();
    const int pairs = work.groups * work.groups;
    for (int i = work.block; i < 2 * pairs; i += work.blocks) {
        const int side = i / pairs, key_group = i % pairs / work.groups, value_group = i % work.groups;
        float sums[8] = {};
        for (int block = 0; block < work.blocks; ++block) {
            product(sums, load<kSplit>(scaled_tile(side, block, key_group)),
                    load_transposed<kSplit>(value_tile(block, value_group)));
        }
        float4* to = reinterpret_cast<float4*>(state_tile(job, work, kind, side, key_group, value_group));
        to[lane_id()] = float4{sums[0], sums[1], sums[2], sums[3]};
        to[32 + lane_id()] = float4{sums[4], sums[5], sums[6], sums[7]};
    }
}

}  // namespace wkv6
