// States: how the chunks of a long sequence meet.
//
// For a chunk, side 0 (left) of k and v: state[c, j] = sum over the tokens s of all earlier chunks of k[s, c] v[s, j]
// times the decays after s up to the chunk's start. Side 1 (right): all later chunks, down to the chunk's end. The
// backward pass also needs the same of r and gy. A state lies in memory as tiles of 16 key channels (rows) and 16 value
// channels, each as in shared memory.
#pragma once

#include "wkv6_cuda_job.cuh"

namespace wkv6 {

enum StateKind { kKeysAndValues, kQueriesAndGradients };

constexpr int kMaxGroups = 8;  // N <= 128

// The tiles of a key group lie one after another: [head][chunk][key group][side][kind][value group]. The forward pass
// has one kind.
template <bool kSplit, int kKinds>
__device__ __forceinline__ char* state_row(const Job& job, const Work& work, int key_group, int side, int kind) {
    const int64_t row = (static_cast<int64_t>(work.head) * job.chunks + work.chunk) * work.groups + key_group;
    return job.states + ((row * 2 + side) * kKinds + kind) * work.groups * Operand<kSplit>::kBytes;
}

__device__ __forceinline__ bool has_state(const Job& job, const Work& work, int side) {
    return side ? work.chunk + 1 < job.chunks : work.chunk > 0;
}

// A lane's values of a tile; `at` is its place in the tile.
template <bool kSplit>
__device__ __forceinline__ void write_state(char* at, const float (&values)[8]) {
    Operand<kSplit> operand;
    set_values(operand, values);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        *as<uint32_t>(at + 128 * a) = operand.high[a];
        if constexpr (kSplit) *as<uint32_t>(at + kTileBytes + 128 * a) = operand.low[a];
    }
}

template <bool kSplit>
__device__ __forceinline__ void read_state(float (&values)[8], char* at) {
    Operand<kSplit> operand;
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        operand.high[a] = *as<uint32_t>(at + 128 * a);
        if constexpr (kSplit) operand.low[a] = *as<uint32_t>(at + kTileBytes + 128 * a);
    }
    get_values(values, operand);
}

// Asks for a piece of the states, by the whole thread block.
template <int kBlocks>
__device__ __forceinline__ void copy_to_shared(Address to, const char* from, int bytes) {
    for (int at = 16 * threadIdx.x; at < bytes; at += 512 * kBlocks) copy_async(to + at, from + at);
}

// Asks for the chunk's states of a key group, to [side][kind][value group] in shared memory.
template <bool kSplit, int kBlocks, int kKinds>
__device__ __forceinline__ void copy_states(Address to, const Job& job, const Work& work, int key_group) {
    const int first = has_state(job, work, 0) ? 0 : 1, last = has_state(job, work, 1) ? 2 : 1;
    const int bytes = kKinds * work.groups * Operand<kSplit>::kBytes;  // of a side
    copy_to_shared<kBlocks>(to + first * bytes, state_row<kSplit, kKinds>(job, work, key_group, first, 0),
                            (last - first) * bytes);
}

// The same of one kind, to [side][value group].
template <bool kSplit, int kBlocks, int kKinds>
__device__ __forceinline__ void copy_states_of(StateKind kind, Address to, const Job& job, const Work& work,
                                               int key_group) {
    if constexpr (kKinds == 1) {
        copy_states<kSplit, kBlocks, 1>(to, job, work, key_group);
    } else {
        const int bytes = work.groups * Operand<kSplit>::kBytes;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (!has_state(job, work, side)) continue;
            copy_to_shared<kBlocks>(to + side * bytes, state_row<kSplit, kKinds>(job, work, key_group, side, kind),
                                    bytes);
        }
    }
}

// What a warp multiplies states with, of both sides and all key groups: too much for registers while there are others.
// In shared memory, or in local memory where that lets more thread blocks run at a time.
template <bool kSplit, bool kShared>
struct Sides {
    Operand<kSplit> tiles[2][kMaxGroups];

    __device__ __forceinline__ Sides(Address, const Work&, const Lane&) {}
    __device__ __forceinline__ void put(int side, int group, const Operand<kSplit>& tile) { tiles[side][group] = tile; }
    __device__ __forceinline__ Operand<kSplit> get(int side, int group) const { return tiles[side][group]; }
    static __host__ __device__ constexpr int bytes(int, int) { return 0; }
};

template <bool kSplit>
struct Sides<kSplit, true> {
    Address tiles;  // [side][group], the lane's place in the first one
    int groups;

    __device__ __forceinline__ Sides(Address memory, const Work& work, const Lane& lane)
        : tiles(memory + work.block * bytes(1, work.groups) + lane.straight), groups(work.groups) {}
    __device__ __forceinline__ Address at(int side, int group) const {
        return tiles + (side * groups + group) * Operand<kSplit>::kBytes;
    }
    __device__ __forceinline__ void put(int side, int group, const Operand<kSplit>& tile) {
        store_fragment(at(side, group), tile);
    }
    __device__ __forceinline__ Operand<kSplit> get(int side, int group) const {
        return load_fragment<kSplit>(at(side, group));
    }
    static __host__ __device__ constexpr int bytes(int blocks, int groups) {
        return 2 * blocks * groups * Operand<kSplit>::kBytes;
    }
};

// sums[value group] += the sides' tiles times the states of one kind, over all key groups. `copies` is
// [parity][side][value group] in shared memory; those of key group 0 have been asked for.
template <bool kSplit, int kBlocks, int kKinds, bool kShared>
__device__ __forceinline__ void add_states(float (&sums)[kMaxGroups][8], const Sides<kSplit, kShared>& sides,
                                           Address copies, const Job& job, const Work& work, StateKind kind,
                                           const Lane& lane) {
    const int bytes = work.groups * Operand<kSplit>::kBytes;
#pragma unroll 1
    for (int key_group = 0; key_group < work.groups; ++key_group) {
        wait_for_copies();
        __syncthreads();
        const Address here = copies + (key_group & 1) * 2 * bytes, other = copies + (~key_group & 1) * 2 * bytes;
        if (key_group + 1 < work.groups) copy_states_of<kSplit, kBlocks, kKinds>(kind, other, job, work, key_group + 1);
        if (work.empty) continue;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (!has_state(job, work, side)) continue;
            const Operand<kSplit> left = sides.get(side, key_group);
            for_each<kMaxGroups>([&](auto value_group) {
                constexpr int kGroup = decltype(value_group)::value;
                if (kGroup >= work.groups) return;
                const Address tile = here + side * bytes + kGroup * Operand<kSplit>::kBytes;
                add_product(sums[kGroup], left, right_columns<kSplit>(tile, lane), lane);
            });
        }
    }
}

template <bool kSplit, int kBlocks>
struct StatesLayout {
    static constexpr int kTile = Operand<kSplit>::kBytes;
    int scaled, values, totals, outer, decays, bytes;

    __host__ __device__ explicit StatesLayout(int groups) {
        scaled = 0;                                      // [side][group][block]
        values = scaled + 2 * kBlocks * groups * kTile;  // [group][block]
        totals = values + kBlocks * groups * kTile;      // [block][channel], float
        outer = totals + kBlocks * groups * 64;          // [side][block][channel]: from the block to the chunk's border
        decays = outer + 2 * kBlocks * groups * 64;      // [channel], float: of the whole chunk
        bytes = decays + groups * 64;
    }
};

// The states of all chunks of one head, of k and v or of r and gy: blockIdx.x = kKinds * head + kind. From the first
// chunk to the last one, a chunk's sums over its tokens join the state on the left, which stays in registers. Its sums
// for the other direction are written where the previous chunk's state on the right belongs; then, from the last chunk
// to the first one, these are added up. Each lane reads what it has written itself.
// A warp works on block `warp` of each chunk and holds 8 tiles of the state; a state of more tiles takes several
// passes. kGroups: the number of channel groups where it is known, else 0.
template <class Element, class W, int kBlocks, bool kBackward, int kGroups>
__global__ void __launch_bounds__(32 * kBlocks, kBlocks == 4 ? 3 : 1) states_kernel(const __grid_constant__ Job job) {
    constexpr bool kSplit = Element::kSplit;
    constexpr int kTiles = 8, kKinds = kBackward ? 2 : 1;
    constexpr int kBatch = kSplit ? 2 : 5;  // of groups whose loads wait together
    using Layout = StatesLayout<kSplit, kBlocks>;
    const Address shared = shared_memory();
    const Lane lane;
    Work work(job, kBlocks, blockIdx.x / kKinds, 0);
    if (kGroups > 0) work.groups = kGroups, work.channels = 16 * kGroups;
    const int kind = blockIdx.x % kKinds;
    const int inverse = 65536 / work.groups + 1;  // tile * inverse >> 16 is tile / groups for all tiles
    const WKV6Params& params = job.params;
    const Layout layout(work.groups);
    const Head<Element> keys(kind ? params.r : params.k, work.b, work.h);
    const Head<Element> values(kind ? params.gy : params.v, work.b, work.h);
    const Head<W> w(params.w, work.b, work.h);
    float* totals = shared_pointer<float>(shared + layout.totals);
    float* outer = shared_pointer<float>(shared + layout.outer);
    float* decays = shared_pointer<float>(shared + layout.decays);
    float* all_decays = job.chunk_decays + static_cast<int64_t>(blockIdx.x) * job.chunks * work.channels;
    const auto scaled_tile = [&](int side, int block, int group) {
        return shared + layout.scaled + ((side * work.groups + group) * kBlocks + block) * Layout::kTile;
    };
    const auto value_tile = [&](int block, int group) {
        return shared + layout.values + (group * kBlocks + block) * Layout::kTile;
    };
    const auto outer_row = [&](int side) { return outer + (side * kBlocks + work.block) * work.channels; };
    // The state of a chunk, at the lane's place in its first tile.
    const auto state_of = [&](int chunk, int side) {
        work.chunk = chunk;
        return state_row<kSplit, kKinds>(job, work, 0, side, kind) + 4 * lane.id;
    };
    const auto multiply_rows = [&](float(&state)[8], const float* decay_of_channels, int key_group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float decay = decay_of_channels[16 * key_group + 2 * lane.g + half];
            state[2 * half] *= decay;
            state[2 * half + 1] *= decay;
            state[2 * half + 4] *= decay;
            state[2 * half + 5] *= decay;
        }
    };
    // function(i, key group, value group, offset in a state) for the warp's tiles.
    const auto for_each_tile = [&](int first_tile, auto&& function) {
        for_each<kTiles>([&](auto index) {
            const int tile = first_tile + decltype(index)::value * kBlocks + work.block;
            const int key_group = tile * inverse >> 16, value_group = tile - key_group * work.groups;
            if (key_group >= work.groups) return;
            function(index, key_group, value_group,
                     (2 * kKinds * work.groups * key_group + value_group) * Layout::kTile);
        });
    };

#pragma unroll 1
    for (int first_tile = 0; first_tile < work.groups * work.groups; first_tile += kTiles * kBlocks) {
        float state[kTiles][8] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < job.chunks; ++chunk) {
            const auto place_in = [&](int of_chunk, int group) {
                work.first_token = 16 * (of_chunk * kBlocks + work.block);
                return work.place(job, group);
            };
            const int blocks = min((params.T + 15) / 16 - chunk * kBlocks, kBlocks);  // with tokens
            const bool is_empty = work.block >= blocks;
            const bool has_previous = chunk > 0, has_next = chunk + 1 < job.chunks;
            if (!kBackward && has_next) {
                prefetch_rows(keys, values, place_in(chunk + 1, 0), lane);
                prefetch_rows(w, w, place_in(chunk + 1, 0), lane);
            }
#pragma unroll 1
            for (int first = 0; first < work.groups; first += kBatch) {
                if (is_empty) {
                    if (first == 0) {
                        for (int c = lane.id; c < work.channels; c += 32) totals[work.block * work.channels + c] = 1.f;
                    }
                    __syncthreads();
                    continue;
                }
                Rows<Element> key_rows[kBatch], value_rows[kBatch];
                float rates[kBatch][8];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const Place place = place_in(chunk, first + i);  // past the last group: no channel, no load
                    load_w(rates[i], w, place, lane);
                    key_rows[i].load(keys, place, lane);
                    value_rows[i].load(values, place, lane);
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (first + i >= work.groups) break;
                    store(value_tile(work.block, first + i), value_rows[i].operand(), lane);
                    write_block_decay(totals, rates[i], work, first + i, lane);
                }
                __syncthreads();
                for (int c = 16 * first + lane.id; c < min(16 * (first + kBatch), work.channels); c += 32) {
                    float before = 1.f, after = 1.f;
#pragma unroll
                    for (int other = 0; other < kBlocks; ++other) {
                        const float total = totals[other * work.channels + c];
                        if (other < work.block) before *= total;
                        if (other > work.block) after *= total;
                    }
                    outer_row(0)[c] = before;
                    outer_row(1)[c] = after;
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (first + i >= work.groups) break;
                    const BlockDecay<kSplit> decay(rates[i], lane);
                    const Address scratch = scaled_tile(0, work.block, first + i);
                    const Unscaled<kSplit> channels = to_channels(key_rows[i], scratch, lane);
                    __syncwarp();
#pragma unroll
                    for (int side = 0; side < 2; ++side) {
                        if (!(side ? has_next : has_previous)) continue;  // no chunk to take it
                        const float2 two = of_channels(outer_row(side) + 16 * (first + i), lane);
                        const float to_border[2] = {two.x, two.y};
                        store(scaled_tile(side, work.block, first + i),
                              multiply(channels, decay.across(side == 0, to_border)), lane);
                    }
                }
            }
            for (int c = threadIdx.x; c < work.channels; c += blockDim.x) {
                decays[c] = decay_of_blocks(totals, work.channels, c, 0, kBlocks);
                if (first_tile == 0) all_decays[chunk * work.channels + c] = decays[c];
            }
            __syncthreads();
            char* const left_of_next = state_of(chunk + 1, 0);
            char* const right_of_previous = state_of(chunk - 1, 1);
            for_each_tile(first_tile, [&](auto index, int key_group, int value_group, int offset) {
                constexpr int i = decltype(index)::value;
                float sums[8] = {};
                multiply_rows(state[i], decays, key_group);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    if (block >= blocks) break;
                    const Operand<kSplit> right = right_columns<kSplit>(value_tile(block, value_group), lane);
                    // The state on the left grows towards the chunk's end, the one on the right towards its start.
                    add_product(state[i], left_rows<kSplit>(scaled_tile(1, block, key_group), lane), right, lane);
                    add_product(sums, left_rows<kSplit>(scaled_tile(0, block, key_group), lane), right, lane);
                }
                if (has_next) write_state<kSplit>(left_of_next + offset, state[i]);
                if (has_previous) write_state<kSplit>(right_of_previous + offset, sums);
            });
            __syncthreads();
        }

        for_each<kTiles>([&](auto index) {
            for (float& value : state[decltype(index)::value]) value = 0.f;
        });
#pragma unroll 1
        for (int chunk = job.chunks - 1; chunk > 0; --chunk) {
            char* const right_of_previous = state_of(chunk - 1, 1);
            for_each_tile(first_tile, [&](auto index, int key_group, int, int offset) {
                constexpr int i = decltype(index)::value;
                float sums[8];
                read_state<kSplit>(sums, right_of_previous + offset);
                multiply_rows(state[i], all_decays + chunk * work.channels, key_group);
#pragma unroll
                for (int value = 0; value < 8; ++value) state[i][value] += sums[value];
                if (chunk + 1 < job.chunks) write_state<kSplit>(right_of_previous + offset, state[i]);
            });
        }
    }
}

}  // namespace wkv6
