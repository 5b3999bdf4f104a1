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
                                                  int side, int key_group, int value_group, const Lane& lane) {
    const float4* from = reinterpret_cast<const float4*>(state_tile(job, work, kind, side, key_group, value_group));
    const float4 first = from[lane.id], second = from[32 + lane.id];
    values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
    values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
}

template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> load_state(const Job& job, const Work& work, int kind, int side,
                                                      int key_group, int value_group, const Lane& lane) {
    float values[8];
    load_state_values(values, job, work, kind, side, key_group, value_group, lane);
    Operand<kSplit> operand;
    set_values(operand, values);
    return operand;
}

// Scale of a block towards the chunk's start (side 0) or end (side 1).
template <bool kSplit, int kBlocks>
__device__ __forceinline__ Scale<kSplit> scale_to_chunk(const BlockDecay<kSplit>& decay, const float* totals,
                                                        const Work& work, int group, int side, const Lane& lane) {
    float outer[2];
    const int c = 16 * group + permuted(lane.g);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        outer[half] = decay_of_blocks(totals, work.channels, c + 2 * half, side ? work.block + 1 : 0,
                                      side ? kBlocks : work.block);
    }
    return decay.across(side == 0, outer);
}

template <bool kSplit, int kBlocks>
struct StatesLayout {
    static constexpr int kTile = kSplit ? 2 * kTileBytes : kTileBytes;
    int scaled, values, totals, bytes;

    __host__ __device__ explicit StatesLayout(int groups) {
        scaled = 0;                                         // [side][block][group]
        values = scaled + 2 * kBlocks * groups * kTile;     // [block][group]
        totals = values + kBlocks * groups * kTile;         // [block][channel], float
        bytes = totals + kBlocks * groups * 64;
    }
};

// Each chunk's own sums: where a state of this chunk stands is written what the chunk adds to the next state.
// Side 0: towards the chunk's end, for the chunks after it; side 1: towards its start, for those before.
// blockIdx.y = kind * chunks + chunk.
template <class Element, class W, int kBlocks>
__global__ void __launch_bounds__(32 * kBlocks) chunk_states_kernel(const __grid_constant__ Job job) {
    const Address shared = shared_memory();
    constexpr bool kSplit = Element::kSplit;
    using Layout = StatesLayout<kSplit, kBlocks>;
    const Lane lane;
    Work work(job, kBlocks);
    const int kind = work.chunk / job.chunks;
    work.chunk %= job.chunks;
    work.first_token = 16 * (work.chunk * kBlocks + work.block);
    const WKV6Params& params = job.params;
    const Layout layout(work.groups);
    const Head<Element> keys(kind ? params.r : params.k, work.b, work.h);
    const Head<Element> values(kind ? params.gy : params.v, work.b, work.h);
    const Head<W> w(params.w, work.b, work.h);
    float* totals = shared_pointer<float>(shared + layout.totals);
    const auto scaled_tile = [&](int side, int block, int group) {
        return shared + layout.scaled + ((side * kBlocks + block) * work.groups + group) * Layout::kTile;
    };
    const auto value_tile = [&](int block, int group) {
        return shared + layout.values + (block * work.groups + group) * Layout::kTile;
    };

#pragma unroll 4
    for (int group = 0; group < work.groups; ++group) {
        Rows<Element> rows;
        rows.load(values, work.place(job, group), lane);
        store(value_tile(work.block, group), rows.operand(), lane);
    }
    write_block_decays(totals, w, job, work, lane);
    __syncthreads();
    for (int c = threadIdx.x; c < work.channels && kind == 0; c += blockDim.x) {
        job.chunk_decays[(static_cast<int64_t>(work.head) * job.chunks + work.chunk) * work.channels + c] =
            decay_of_blocks(totals, work.channels, c, 0, kBlocks);
    }
    for (int group = 0; group < work.groups; ++group) {
        Rows<Element> rows;
        float rates[8];
        rows.load(keys, work.place(job, group), lane);
        load_w(rates, w, work.place(job, group), lane);
        to_rates(rates);
        const BlockDecay<kSplit> decay(rates, lane);
        store(scaled_tile(0, work.block, group), rows.operand(), lane);
        __syncwarp();
        const Operand<kSplit> channels = left_columns<kSplit>(scaled_tile(0, work.block, group), lane);
        __syncwarp();
        for (int side = 0; side < 2; ++side) {  // the state on the left grows towards the right
            const Scale<kSplit> scale = scale_to_chunk<kSplit, kBlocks>(decay, totals, work, group, 1 - side, lane);
            store(scaled_tile(side, work.block, group), multiply(channels, scale), lane);
        }
    }
    __syncthreads();
    const int pairs = work.groups * work.groups;
    for (int i = work.block; i < 2 * pairs; i += kBlocks) {
        const int side = i / pairs, key_group = i % pairs / work.groups, value_group = i % work.groups;
        float sums[8] = {};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            add_product(sums, left_rows<kSplit>(scaled_tile(side, block, key_group), lane),
                        right_columns<kSplit>(value_tile(block, value_group), lane), lane);
        }
        float4* to = reinterpret_cast<float4*>(state_tile(job, work, kind, side, key_group, value_group));
        to[lane.id] = float4{sums[0], sums[1], sums[2], sums[3]};
        to[32 + lane.id] = float4{sums[4], sums[5], sums[6], sums[7]};
    }
}

}  // namespace wkv6
