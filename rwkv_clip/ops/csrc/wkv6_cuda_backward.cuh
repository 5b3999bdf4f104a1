// Backward: gA = gy v^T, then channel group by channel group gr, gk, gw, gu and A, then gv = A^T gy.
//
// gw sums, for every token i, the weights of the pairs that lie around i. With q[s] the weight of all pairs of token s
// that meet at one level, these are the q of the tokens before i in its half, when i is in the earlier half, and of the
// tokens after i in the later half: sums of one sign of direction, without the cancellation of a difference of totals.
#pragma once

#include "wkv6_cuda_states.cuh"

namespace wkv6 {

// Shared memory of the backward kernel, in 32-bit words. What the loop over channel groups uses has constant addresses.
template <bool kSplit, int kMaxBlocks, bool kChunked>
struct BackwardLayout {
    static constexpr int kTile = kSplit ? 2 * kTileWords : kTileWords;
    static constexpr int kMaxLevels = max_levels(kMaxBlocks);
    static constexpr int kGa = 0;                                                // [row block][column block]
    static constexpr int kSharedR = kGa + kMaxBlocks * kMaxBlocks * kTile;       // [level][block]
    static constexpr int kSharedK = kSharedR + kMaxLevels * kMaxBlocks * kTile;  // [level][block]
    static constexpr int kOwn = kSharedK + kMaxLevels * kMaxBlocks * kTile;      // [block][2]
    static constexpr int kTables = kOwn + 2 * kMaxBlocks * kTile;                // [4]
    static constexpr int kSums = kTables + 4 * kTileWords;                       // [level ... side][block][16], float
    static constexpr int kGuSums = kSums + (kMaxLevels + 3) * kMaxBlocks * 16;   // [block][16], float
    static constexpr int kFixed = kGuSums + kMaxBlocks * 16;
    int totals, between, v, gy, sides, words;

    __host__ __device__ BackwardLayout(int blocks, int groups, int levels) {
        totals = kFixed;                                                            // [block][channel], float
        between = totals + blocks * groups * 16;                                    // [level - 1][block][channel], float
        v = between + (levels > 1 ? levels - 1 : 0) * blocks * groups * 16;         // [group][block]
        gy = v + blocks * groups * kTile;                                           // [group][block]
        sides = gy + blocks * groups * kTile;                                       // [side][group][block]
        words = sides + (kChunked ? blocks * 2 * groups * kTile : 0);
    }
};

// Tables of 0 and 1 by which a product over tokens becomes sums over the tokens before or after each token.
enum Table { kInFour, kInEight, kBeforeInBlock, kAfterInBlock };

__device__ __forceinline__ void write_tables(uint32_t* tables) {
    for (int i = threadIdx.x; i < 4 * kTileWords; i += blockDim.x) {
        const int table = i / kTileWords, lane = i / 4 % 32, word = i % 4;
        const int to = permuted(8 * (word >> 1) + (lane >> 2));
        uint32_t pair = 0;
        for (int half = 0; half < 2; ++half) {
            const int from = permuted(8 * (word & 1) + 2 * (lane & 3) + half);
            const int size = table == kInFour ? 4 : table == kInEight ? 8 : 16;
            const bool later = table == kAfterInBlock || (table < kBeforeInBlock && to / size % 2 == 1);
            const bool counts = to / size == from / size && (later ? from > to : from < to);
            if (counts) pair |= 0x3f80u << (16 * half);
        }
        tables[i] = pair;
    }
}

// sums += left * table; left: channels x tokens.
__device__ __forceinline__ void multiply_table(float (&sums)[8], const Operand<false>& left, const uint32_t* table) {
    const uint4 right = reinterpret_cast<const uint4*>(table)[lane_id()];
    multiply_add(sums, left.high, right.x, right.y);
    multiply_add(sums + 4, left.high, right.z, right.w);
}

__device__ __forceinline__ void multiply_table(float (&sums)[8], const Operand<true>& left, const uint32_t* table) {
    const uint4 right = reinterpret_cast<const uint4*>(table)[lane_id()];
    multiply_add(sums, left.low, right.x, right.y);
    multiply_add(sums + 4, left.low, right.z, right.w);
    multiply_add(sums, left.high, right.x, right.y);
    multiply_add(sums + 4, left.high, right.z, right.w);
}

// The weights q of the pairs that meet at a level: scaled_r * sums_r + scaled_k * sums_k.
__device__ __forceinline__ void pair_weights(Operand<false>& q, const Operand<false>& scaled_r, const float (&sums_r)[8],
                                             const Operand<false>& scaled_k, const float (&sums_k)[8]) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        q.high[a] = fma_bf16(scaled_r.high[a], pack_bf16(sums_r[2 * a], sums_r[2 * a + 1]),
                             mul_bf16(scaled_k.high[a], pack_bf16(sums_k[2 * a], sums_k[2 * a + 1])));
    }
}

__device__ __forceinline__ void pair_weights(Operand<true>& q, const Operand<true>& scaled_r, const float (&sums_r)[8],
                                             const Operand<true>& scaled_k, const float (&sums_k)[8]) {
    float r_values[8], k_values[8];
    get_values(r_values, scaled_r);
    get_values(k_values, scaled_k);
#pragma unroll
    for (int i = 0; i < 8; ++i) r_values[i] = r_values[i] * sums_r[i] + k_values[i] * sums_k[i];
    set_values(q, r_values);
}

// Adds up each of the lane's two channels over the channel's four lanes, that is over the block's 16 tokens.
__device__ __forceinline__ void sum_over_block(float (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sums[half] += from_lane_xor<1>(sums[half]);
        sums[half] += from_lane_xor<2>(sums[half]);
    }
}

__device__ __forceinline__ void write_channels(float* row, const float (&values)[2]) {
    if ((lane_id() & 3) != 0) return;
    const int c = permuted(lane_id() >> 2);
    row[c] = values[0];
    row[c + 2] = values[1];
}

template <bool kSplit>
__device__ __forceinline__ void write_block_sums(float* row, const Operand<kSplit>& tile) {
    float values[8], sums[2] = {};
    get_values(values, tile);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i >> 1 & 1] += values[i];
    sum_over_block(sums);
    write_channels(row, sums);
}

template <class Element, class W, int kMaxBlocks, bool kChunked>
__global__ void __launch_bounds__(32 * kMaxBlocks, min_thread_blocks(true, Element::kSplit, kMaxBlocks))
    backward_kernel(const __grid_constant__ Job job) {
    WKV6_SHARED_MEMORY(shared);
    constexpr bool kSplit = Element::kSplit;
    const Work work(job);
    const WKV6Params& params = job.params;
    using Layout = BackwardLayout<kSplit, kMaxBlocks, kChunked>;
    constexpr int kTile = Layout::kTile;
    const Layout layout(work.blocks, work.groups, work.levels);
    const Head<Element> r(params.r, work.b, work.h), k(params.k, work.b, work.h), v(params.v, work.b, work.h);
    const Head<Element> gy(params.gy, work.b, work.h), gr(params.gr, work.b, work.h), gk(params.gk, work.b, work.h);
    const Head<W> w(params.w, work.b, work.h), gw(params.gw, work.b, work.h);
    float* totals = reinterpret_cast<float*>(shared + layout.totals);
    float* between = reinterpret_cast<float*>(shared + layout.between);
    float* sums = reinterpret_cast<float*>(shared + Layout::kSums);
    float* gu_sums = reinterpret_cast<float*>(shared + Layout::kGuSums);
    const auto ga_tile = [&](int row_block, int column_block) {
        return shared + Layout::kGa + (row_block * kMaxBlocks + column_block) * kTile;
    };
    const auto r_tile = [&](int m, int block) { return shared + Layout::kSharedR + (m * kMaxBlocks + block) * kTile; };
    const auto k_tile = [&](int m, int block) { return shared + Layout::kSharedK + (m * kMaxBlocks + block) * kTile; };
    const auto own_tile = [&](int i) { return shared + Layout::kOwn + (work.block * 2 + i) * kTile; };
    const auto table = [&](int i) { return shared + Layout::kTables + i * kTileWords; };
    const auto sums_row = [&](int i, int block) { return sums + (i * kMaxBlocks + block) * 16; };
    const auto v_tile = [&](int block, int group) { return shared + layout.v + (group * work.blocks + block) * kTile; };
    const auto gy_tile = [&](int block, int group) { return shared + layout.gy + (group * work.blocks + block) * kTile; };
    const auto side_tile = [&](int side, int group) {
        return shared + layout.sides + ((side * work.groups + group) * work.blocks + work.block) * kTile;
    };

    prefetch_rows(r, work.place(job, 0));
    prefetch_rows(k, work.place(job, 0));
#pragma unroll 2
    for (int group = 0; group < work.groups; ++group) {
        Rows<Element> v_rows, gy_rows;
        v_rows.load(v, work.place(job, group));
        gy_rows.load(gy, work.place(job, group));
        store(v_tile(work.block, group), v_rows.operand());
        store(gy_tile(work.block, group), gy_rows.operand());
    }
    write_tables(table(0));
    write_block_decays(totals, w, job, work);
    __syncthreads();
    write_decays_between(between, totals, work);

    // gA[t, s]: rows are the own tokens.
    float ga_diagonal[4];
    {
        float own_sums[8] = {}, other_sums[kMaxBlocks - 1][8] = {};
#pragma unroll 1
        for (int group = 0; group < work.groups; ++group) {
            const Operand<kSplit> left = load<kSplit>(gy_tile(work.block, group));
            product(own_sums, left, exchanged(load<kSplit>(v_tile(work.block, group))));
#pragma unroll
            for (int i = 0; i < kMaxBlocks - 1; ++i) {
                const int other = other_block(work.block, i);
                if (other < work.blocks) product(other_sums[i], left, exchanged(load<kSplit>(v_tile(other, group))));
            }
        }
        const int q = lane_id() & 3;
        ga_diagonal[0] = from_lane(own_sums[0], 9 * q);
        ga_diagonal[1] = from_lane(own_sums[1], 9 * q + 4);
        ga_diagonal[2] = from_lane(own_sums[6], 9 * q);
        ga_diagonal[3] = from_lane(own_sums[7], 9 * q + 4);
        Operand<kSplit> tile;
        set_values(tile, own_sums);
        store(ga_tile(work.block, work.block), tile);
#pragma unroll
        for (int i = 0; i < kMaxBlocks - 1; ++i) {
            const int other = other_block(work.block, i);
            if (other >= work.blocks) continue;
            set_values(tile, other_sums[i]);
            store(ga_tile(work.block, other), tile);
        }
    }
    __syncthreads();
    // A transposed: rows are the own tokens as keys.
    PairsInside inside;
    float across[kMaxBlocks - 1][8] = {};

    Rows<Element> next_r, next_k;
    float next_w[8];
    next_r.load(r, work.place(job, 0));
    next_k.load(k, work.place(job, 0));
    load_w(next_w, w, work.place(job, 0));

    for (int group = 0; group < work.groups; ++group) {
        const Place place = work.place(job, group);
        float rates[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) rates[i] = next_w[i];
        to_rates(rates);
        const BlockDecay decay(rates);
        store(own_tile(0), next_r.operand());
        store(own_tile(1), next_k.operand());
        __syncwarp();
        const Operand<kSplit> r_channels = exchanged(load_transposed<kSplit>(own_tile(0)));
        const Operand<kSplit> k_channels = exchanged(load_transposed<kSplit>(own_tile(1)));
        __syncwarp();

        Scale<kSplit> scale;
        Operand<kSplit> scaled_r, scaled_k;
#pragma unroll 1
        for (int m = 0; m < work.levels; ++m) {
            block_scale(scale, decay, between, work, group, m);
            multiply(scaled_r, r_channels, scale);
            multiply(scaled_k, k_channels, scale);
            store(r_tile(m, work.block), scaled_r);
            store(k_tile(m, work.block), scaled_k);
        }

        // Sums for gr and gk; the sums around each token for gw.
        float gr_sums[8], gk_sums[8], around[8] = {}, gu_block[2] = {};
        {
            float u[2], r_values[8], k_values[8];
            load_u(u, job, work, group);
            get_values(r_values, r_channels);
            get_values(k_values, k_channels);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int t = 2 * (i >> 2) + (i & 1), half = i >> 1 & 1;
                gu_block[half] += r_values[i] * k_values[i] * ga_diagonal[t];
                gr_sums[i] = u[half] * ga_diagonal[t] * k_values[i];
                gk_sums[i] = u[half] * ga_diagonal[t] * r_values[i];
            }
            sum_over_block(gu_block);
            inside.add_near(k_values, r_values, u);
        }
        // As right factors: gA by its columns s, and transposed by its columns t.
        if (work.tokens > 1) {
            product(gr_sums, k_channels, pairs_of_level(exchanged(load<kSplit>(ga_tile(work.block, work.block))), 0));
            product(gk_sums, r_channels, pairs_of_level(load_transposed<kSplit>(ga_tile(work.block, work.block)), 0));
        }
#pragma unroll
        for (int level = 1; level < 4; ++level) {
            if (work.tokens <= 1 << level) continue;
            if (level == 1) decay.level2(scale.value);
            if (level == 2) decay.level4(scale.value);
            if (level == 3) decay.level8(scale.value);
            scale.round();
            multiply(scaled_r, r_channels, scale);
            multiply(scaled_k, k_channels, scale);
            store(own_tile(0), scaled_r);
            store(own_tile(1), scaled_k);
            __syncwarp();
            inside.add_level(level, exchanged(load_transposed<kSplit>(own_tile(1))),
                             load_transposed<kSplit>(own_tile(0)));
            __syncwarp();
            float level_r[8] = {}, level_k[8] = {};
            product(level_r, scaled_k,
                    pairs_of_level(exchanged(load<kSplit>(ga_tile(work.block, work.block))), level));
            product(level_k, scaled_r, pairs_of_level(load_transposed<kSplit>(ga_tile(work.block, work.block)), level));
            Operand<kSplit> q;
            pair_weights(q, scaled_r, level_r, scaled_k, level_k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                gr_sums[i] += scale.value[i] * level_r[i];
                gk_sums[i] += scale.value[i] * level_k[i];
            }
            if (level == 1) {  // pairs of tokens: only the neighbour on the far side counts
                float q_values[8];
                get_values(q_values, q);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    around[2 * half + 1] += q_values[2 * half];
                    around[2 * half + 4] += q_values[2 * half + 5];
                }
            } else {
                multiply_table(around, q, table(level == 2 ? kInFour : kInEight));
            }
        }
        __syncthreads();
        write_channels(gu_sums + 16 * work.block, gu_block);
#pragma unroll 1
        for (int m = 0; m < work.levels; ++m) {
            float level_r[8] = {}, level_k[8] = {};
            const Operand<kSplit> left = exchanged(load_transposed<kSplit>(k_tile(m, work.block)));
#pragma unroll
            for (int i = 0; i < kMaxBlocks - 1; ++i) {
                const int other = other_block(work.block, i);
                if (other >= work.blocks || meeting_level(work.block, other) != m) continue;
                product(across[i], left, load_transposed<kSplit>(r_tile(m, other)));
                product(level_r, load<kSplit>(k_tile(m, other)), exchanged(load<kSplit>(ga_tile(work.block, other))));
                product(level_k, load<kSplit>(r_tile(m, other)), load_transposed<kSplit>(ga_tile(other, work.block)));
            }
            block_scale(scale, decay, between, work, group, m);
            Operand<kSplit> q;
            pair_weights(q, load<kSplit>(r_tile(m, work.block)), level_r, load<kSplit>(k_tile(m, work.block)), level_k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                gr_sums[i] += scale.value[i] * level_r[i];
                gk_sums[i] += scale.value[i] * level_k[i];
            }
            multiply_table(around, q, table(work.block >> m & 1 ? kAfterInBlock : kBeforeInBlock));
            if (m > 0) write_block_sums(sums_row(m, work.block), q);
        }
        if constexpr (kChunked) {
            float state_product[2] = {};  // this warp's share of the pairs around the whole chunk
            for (int side = 0; side < 2; ++side) {
                chunk_scale(scale, decay, totals, work, group, side);
                multiply(scaled_r, r_channels, scale);
                multiply(scaled_k, k_channels, scale);
                store(side_tile(side, group), scaled_k);
                if (!has_state(job, work, side)) continue;
                float level_r[8] = {}, level_k[8] = {};
                for (int value_group = 0; value_group < work.groups; ++value_group) {
                    product(level_r, load_state<kSplit>(job, work, 0, side, group, value_group),
                            exchanged(load<kSplit>(gy_tile(work.block, value_group))));
                    product(level_k, load_state<kSplit>(job, work, 1, side, group, value_group),
                            exchanged(load<kSplit>(v_tile(work.block, value_group))));
                }
                Operand<kSplit> q;
                pair_weights(q, scaled_r, level_r, scaled_k, level_k);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    gr_sums[i] += scale.value[i] * level_r[i];
                    gk_sums[i] += scale.value[i] * level_k[i];
                }
                multiply_table(around, q, table(side ? kBeforeInBlock : kAfterInBlock));
                write_block_sums(sums_row(Layout::kMaxLevels + 1 + side, work.block), q);
            }
            if (has_state(job, work, 0) && has_state(job, work, 1)) {
                for (int value_group = work.block; value_group < work.groups; value_group += work.blocks) {
                    float left[8], right[8];
                    for (int kind = 0; kind < 2; ++kind) {
                        load_state_values(left, job, work, kind, 0, group, value_group);
                        load_state_values(right, job, work, 1 - kind, 1, group, value_group);
#pragma unroll
                        for (int i = 0; i < 8; ++i) state_product[i >> 1 & 1] += left[i] * right[i];
                    }
                }
            }
            sum_over_block(state_product);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int c = 16 * group + permuted(8 * half + (lane_id() >> 2));
                state_product[half] *= decay_of_blocks(totals, work.channels, c, 0, work.blocks);
            }
            write_channels(sums_row(0, work.block), state_product);  // row 0: level 0 needs no sums
        }

        write_columns(gr, place, own_tile(0), gr_sums);
        write_columns(gk, place, own_tile(1), gk_sums);
        if (group + 1 < work.groups) {
            next_r.load(r, work.place(job, group + 1));
            next_k.load(k, work.place(job, group + 1));
            load_w(next_w, w, work.place(job, group + 1));
        }

        __syncthreads();
        // The tokens of other blocks in the same half.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int c = permuted(8 * half + (lane_id() >> 2));
            float sum = 0.f;
            for (int m = 1; m < work.levels; ++m) {
                const int start = work.block >> m << m;
                const bool is_later = work.block >> m & 1;
                const int first = is_later ? work.block + 1 : start;
                const int last = is_later ? min(start + (1 << m), work.blocks) : work.block;
                for (int other = first; other < last; ++other) sum += sums_row(m, other)[c];
            }
            if constexpr (kChunked) {
                for (int other = 0; other < work.blocks; ++other) {
                    sum += sums_row(0, other)[c];
                    const int side = other < work.block;  // earlier tokens' pairs with what is on the right
                    if (other == work.block || !has_state(job, work, side)) continue;
                    sum += sums_row(Layout::kMaxLevels + 1 + side, other)[c];
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) around[2 * half + 4 * (j >> 1) + (j & 1)] += sum;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = place.first_token + 4 * (lane_id() & 3) + 2 * (i >> 2) + (i & 1);
            const int c = place.first_channel + permuted(8 * (i >> 1 & 1) + (lane_id() >> 2));
            if (t < place.T && c < place.N) {
                *gw.at(t, c) = W::from_float(rates[i] >= kLargestRate ? 0.f : -rates[i] * around[i]);
            }
        }
        if (threadIdx.x < 16 && place.first_channel + threadIdx.x < place.N) {
            float sum = 0.f;
            for (int block = 0; block < work.blocks; ++block) sum += gu_sums[16 * block + threadIdx.x];
            job.gu_parts[(static_cast<int64_t>(work.head) * job.chunks + work.chunk) * place.N + place.first_channel +
                         threadIdx.x] = sum;
        }
    }

    const Operand<kSplit> own_weights = inside.result<kSplit>();
    Operand<kSplit> other_weights[kMaxBlocks - 1];
#pragma unroll
    for (int i = 0; i < kMaxBlocks - 1; ++i) set_values(other_weights[i], across[i]);

    const Head<Element> gv(params.gv, work.b, work.h);
    for (int group = 0; group < work.groups; ++group) {
        float out[8] = {};
        product(out, own_weights, load_transposed<kSplit>(gy_tile(work.block, group)));
#pragma unroll
        for (int i = 0; i < kMaxBlocks - 1; ++i) {
            const int other = other_block(work.block, i);
            if (other >= work.blocks) continue;
            product(out, other_weights[i], load_transposed<kSplit>(gy_tile(other, group)));
        }
        if constexpr (kChunked) {
            for (int side = 0; side < 2; ++side) {
                if (!has_state(job, work, side)) continue;
#pragma unroll 1
                for (int key_group = 0; key_group < work.groups; ++key_group) {
                    __syncwarp();
                    store(own_tile(0), load_state<kSplit>(job, work, 1, side, key_group, group));
                    __syncwarp();
                    product(out, exchanged(load_transposed<kSplit>(side_tile(side, key_group))),
                            load_transposed<kSplit>(own_tile(0)));
                }
            }
        }
        write_rows(gv, work.place(job, group), out);
    }
}

}  // namespace wkv6
