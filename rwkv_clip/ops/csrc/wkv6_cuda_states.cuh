// States: how the chunks of a long sequence meet.
//
// For a chunk, side 0 (left) of k and v: state[c, j] = sum over the tokens s of all earlier chunks of k[s, c] v[s, j]
// times the decays after s up to the chunk's start. Side 1 (right): all later chunks, down to the chunk's end. The
// backward pass also needs the same of r and gy. Tiles of 16 key channels and 16 value channels lie in memory as the
// factors that products read, a lane's registers together.
#pragma once

#include "wkv6_cuda_job.cuh"

namespace wkv6 {

// What is kept of every chunk, for both sides.
enum StateKind {
    kKeysAndValues,  // of k, v: a right factor with n = j, k = c (forward); a left one with m = c, k = j (backward)
    kQueriesAndGradients,  // of r, gy: a left factor with m = c, k = j
    kGradientsByKeys,      // of r, gy: a right factor with n = j, k = c
};

template <bool kSplit>
__device__ __forceinline__ uint32_t* state_tile(const Job& job, const Work& work, int kind, int side, int key_group,
                                                int value_group) {
    constexpr int kWords = (kSplit ? 2 : 1) * kTileBytes / 4;
    const int64_t chunk =
        (static_cast<int64_t>(kind * 2 + side) * job.params.B * job.params.H + work.head) * job.chunks + work.chunk;
    return job.states + ((chunk * work.groups + key_group) * work.groups + value_group) * kWords;
}

__device__ __forceinline__ bool has_state(const Job& job, const Work& work, int side) {
    return side ? work.chunk + 1 < job.chunks : work.chunk > 0;
}

template <bool kSplit>
__device__ __forceinline__ Operand<kSplit> load_state(const Job& job, const Work& work, StateKind kind, int side,
                                                      int key_group, int value_group, const Lane& lane) {
    const uint4* from =
        reinterpret_cast<const uint4*>(state_tile<kSplit>(job, work, kind, side, key_group, value_group));
    Operand<kSplit> operand;
    const uint4 high = from[lane.id];
    operand.high[0] = high.x, operand.high[1] = high.y, operand.high[2] = high.z, operand.high[3] = high.w;
    if constexpr (kSplit) {
        const uint4 low = from[32 + lane.id];
        operand.low[0] = low.x, operand.low[1] = low.y, operand.low[2] = low.z, operand.low[3] = low.w;
    }
    return operand;
}

template <bool kSplit>
__device__ __forceinline__ void write_state(const Job& job, const Work& work, StateKind kind, int side, int key_group,
                                            int value_group, const Operand<kSplit>& operand, const Lane& lane) {
    uint4* to = reinterpret_cast<uint4*>(state_tile<kSplit>(job, work, kind, side, key_group, value_group));
    to[lane.id] = uint4{operand.high[0], operand.high[1], operand.high[2], operand.high[3]};
    if constexpr (kSplit) to[32 + lane.id] = uint4{operand.low[0], operand.low[1], operand.low[2], operand.low[3]};
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
    int scaled, values, scratch, totals, bytes;

    __host__ __device__ explicit StatesLayout(int groups) {
        scaled = 0;                                   // [block][group]
        values = scaled + kBlocks * groups * kTile;   // [block][group]
        scratch = values + kBlocks * groups * kTile;  // [warp]
        totals = scratch + kBlocks * kTile;           // [block][channel], float
        bytes = totals + kBlocks * groups * 64;
    }
};

// The states of all chunks of one head on one side, chunk after chunk. blockIdx.x = kSides * head + side, and
// of r and gy where side > 1: thread blocks that read the same tokens run side by side.
// A warp works on block `warp` of each chunk and holds 8 tiles of the state; a state of more tiles takes several
// passes.
template <class Element, class W, int kBlocks, bool kBackward>
__global__ void __launch_bounds__(32 * kBlocks, kBlocks == 4 ? 3 : 1) states_kernel(const __grid_constant__ Job job) {
    constexpr bool kSplit = Element::kSplit;
    constexpr int kTiles = 8;
    using Layout = StatesLayout<kSplit, kBlocks>;
    const Address shared = shared_memory();
    const Lane lane;
    constexpr int kSides = kBackward ? 4 : 2;
    Work work(job, kBlocks, blockIdx.x / kSides, 0);
    const int side = blockIdx.x % 2, of_gradients = blockIdx.x % kSides / 2;
    const WKV6Params& params = job.params;
    const Layout layout(work.groups);
    const Head<Element> keys(of_gradients ? params.r : params.k, work.b, work.h);
    const Head<Element> values[1] = {Head<Element>(of_gradients ? params.gy : params.v, work.b, work.h)};
    const Head<W> w(params.w, work.b, work.h);
    float* totals = shared_pointer<float>(shared + layout.totals);
    const auto scaled_tile = [&](int block, int group) {
        return shared + layout.scaled + (block * work.groups + group) * Layout::kTile;
    };
    const auto value_tile = [&](int block, int group) {
        return shared + layout.values + (block * work.groups + group) * Layout::kTile;
    };
    const Address scratch = shared + layout.scratch + work.block * Layout::kTile;

#pragma unroll 1
    for (int first_tile = 0; first_tile < work.groups * work.groups; first_tile += kTiles * kBlocks) {
        float state[kTiles][8] = {};
        for (int step = 0; step < job.chunks - 1; ++step) {
            const int chunk = side ? job.chunks - 1 - step : step;  // whose tokens join the state of the next chunk
            work.first_token = 16 * (chunk * kBlocks + work.block);
            load_block(totals, w, values, job, work, lane, [&](int group, const Rows<Element>(&rows)[1]) {
                store(value_tile(work.block, group), rows[0].operand(), lane);
            });
            __syncthreads();
            for (int group = 0; group < work.groups; ++group) {
                Rows<Element> rows;
                float rates[8];
                rows.load(keys, work.place(job, group), lane);
                load_w(rates, w, work.place(job, group), lane);
                to_rates(rates);
                const BlockDecay<kSplit> decay(rates, lane);
                const Address tile = scaled_tile(work.block, group);
                const Unscaled<kSplit> channels = to_channels(rows, tile, lane);
                __syncwarp();
                // The state on the left grows towards the right.
                store(tile,
                      multiply(channels, scale_to_chunk<kSplit, kBlocks>(decay, totals, work, group, 1 - side, lane)),
                      lane);
            }
            __syncthreads();
            work.chunk = side ? chunk - 1 : chunk + 1;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const int tile = first_tile + i * kBlocks + work.block;
                const int key_group = tile / work.groups, value_group = tile % work.groups;
                if (key_group >= work.groups) break;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int c = 16 * key_group + permuted(8 * half + lane.g);
                    const float decay = decay_of_blocks(totals, work.channels, c, 0, kBlocks);
                    state[i][2 * half] *= decay;
                    state[i][2 * half + 1] *= decay;
                    state[i][2 * half + 4] *= decay;
                    state[i][2 * half + 5] *= decay;
                }
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    add_product(state[i], left_rows<kSplit>(scaled_tile(block, key_group), lane),
                                right_columns<kSplit>(value_tile(block, value_group), lane), lane);
                }
                Operand<kSplit> operand;
                set_values(operand, state[i]);
                if (kBackward) {
                    write_state(job, work, of_gradients ? kQueriesAndGradients : kKeysAndValues, side, key_group,
                                value_group, operand, lane);
                }
                if (!kBackward || of_gradients) {
                    store(scratch, operand, lane);
                    __syncwarp();
                    write_state(job, work, kBackward ? kGradientsByKeys : kKeysAndValues, side, key_group, value_group,
                                right_columns<kSplit>(scratch, lane), lane);
                    __syncwarp();
                }
            }
            __syncthreads();
        }
    }
}

}  // namespace wkv6
