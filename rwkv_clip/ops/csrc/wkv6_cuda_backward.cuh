// Backward: gA = gy v^T, then channel group by channel group gr, gk, gw, gu and A, then gv = A^T gy.
//
// gw sums, for every token i, the weights of the pairs that lie around i. With q[s] the weight of all pairs of token s
// that meet at one level, these are the q of the tokens before i in its half, when i is in the earlier half, and of the
// tokens after i in the later half: sums of one sign of direction, without the cancellation of a difference of totals.
#pragma once

#include "wkv6_cuda_forward.cuh"

namespace wkv6 {

// Shared memory of the backward kernel, in bytes. What the loop over channel groups uses has constant addresses.
template <bool kSplit, int kBlocks, bool kChunked>
struct BackwardLayout {
    static constexpr int kTile = kSplit ? 2 * kTileBytes : kTileBytes;
    static constexpr int kLevels = Meeting<kBlocks>::kLevels;
    // Scaled tokens are tiles [level][block]; of five blocks the last one has the last level only.
    static constexpr int kScaledStride = kBlocks == 5 ? 4 : kBlocks;
    static constexpr int kScaledTiles = kLevels > 0 ? (kLevels - 1) * kScaledStride + kBlocks : 0;

    // [row block][column block]. Nothing reads the diagonal in the loop: its tile is the warp's own there.
    static constexpr int kGa = 0;
    static constexpr int kOwnGa = kGa + kBlocks * kBlocks * kTile;  // [block][gA, transposed] fragments
    static constexpr int kZero = kOwnGa + 2 * kBlocks * kTile;      // as long as a block's two fragments
    static constexpr int kScaledR = kZero + 2 * kTile;
    static constexpr int kScaledK = kScaledR + kScaledTiles * kTile;
    static constexpr int kTables = kScaledK + kScaledTiles * kTile;  // [4] fragments
    static constexpr int kSums = kTables + 4 * kTileBytes;           // [level ... side][block][16], float
    static constexpr int kGuSums = kSums + (kLevels + (kChunked ? 3 : 0)) * kBlocks * 64;  // [block][channel], float
    static constexpr bool kKeepsRates = ForwardLayout<kSplit, kBlocks, kChunked>::kKeepsRates;
    static constexpr bool kSharedSides = !kSplit;
    int v, gy, u, totals, between, rates, lone, states, sides, bytes;

    __host__ __device__ explicit BackwardLayout(int groups) {
        const int v_bytes = kBlocks * groups * kTile;
        // [group][block]. In the loop v is not used where there is one chunk, and gu_sums not outside it.
        v = kGuSums + (kChunked ? kBlocks * groups * 64 : 0);
        gy = v + v_bytes;                                                             // [group][block]
        u = gy + v_bytes;                                                             // [channel], float
        totals = u + groups * 64;                                                     // [block][channel], float
        between = totals + kBlocks * groups * 64;                                     // see Between
        rates = between + Between<kBlocks, kChunked>::kRows * kBlocks * groups * 64;  // [group][block]
        lone = rates + (kKeepsRates ? kBlocks * groups * kRatesBytes : 0);  // see Lone
        // [side][kind][value group]; after the loop [parity][side][value group].
        states = lone + Lone<kBlocks, true>::bytes(groups);
        sides = states + (kChunked ? 4 * groups * kTile : 0);  // see Sides
        bytes = sides + (kChunked ? Sides<kSplit, kSharedSides>::bytes(kBlocks, groups) : 0);
    }
};

// Fragments of 0 and 1, as right factors, by which a product over tokens becomes sums over the tokens before or after
// each token of a half: halves of level 4, of level 8, earlier and later block.
enum Table { kInFour, kInEight, kBeforeInBlock, kAfterInBlock };

struct Tables {
    alignas(16) uint32_t words[kTileBytes];  // of four tiles; read 16 bytes at a time

    constexpr Tables() : words() {
        for (int i = 0; i < kTileBytes; ++i) {
            const int table = i / 128, g = i / 16 % 8, q = i / 4 % 4, word = i % 4;
            const int size = table == kInFour ? 4 : table == kInEight ? 8 : 16;
            const int to = position(word / 2, g);
            for (int element = 0; element < 2; ++element) {
                const int from = position(word % 2, 2 * q + element);
                const bool later = table == kAfterInBlock || (table < kBeforeInBlock && to / size % 2 == 1);
                if (to / size == from / size && (later ? from > to : from < to)) words[i] |= 0x3f80u << (16 * element);
            }
        }
    }

    static constexpr int position(int half, int n) { return 4 * (n / 2) + 2 * half + n % 2; }  // `permuted`
};

#ifdef WKV6_EMULATE
static constexpr Tables kAllTables;
#else
static __device__ const Tables kAllTables;
#endif

// sums += left * table; left: channels x tokens.
__device__ __forceinline__ void add_table_product(float (&sums)[8], const Operand<false>& left, Address table,
                                                  const Lane& lane) {
    add_product(sums, left, load_fragment<false>(table + lane.straight), lane);
}

__device__ __forceinline__ void add_table_product(float (&sums)[8], const Operand<true>& left, Address table,
                                                  const Lane& lane) {
    const Operand<false> right = load_fragment<false>(table + lane.straight);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* to = sums + 4 * half;
        multiply_matrices<16>(to, left.low, right.high[2 * half], right.high[2 * half + 1], to, lane);
        multiply_matrices<16>(to, left.high, right.high[2 * half], right.high[2 * half + 1], to, lane);
    }
}

// The sums of the tile's channels over its tokens, to row[16].
template <bool kSplit>
__device__ __forceinline__ void write_channel_sums(float* row, const Operand<kSplit>& tile, const Lane& lane) {
    constexpr uint32_t kOnes = 0x3f803f80u;
    float sums[4] = {};
    if constexpr (kSplit) multiply_matrices<16>(sums, tile.low, kOnes, kOnes, sums, lane);
    multiply_matrices<16>(sums, tile.high, kOnes, kOnes, sums, lane);
    if (lane.q == 0) set_channels(row, sums[0], sums[2], lane);
}

// The weights q of the pairs that meet at a level: scaled_r * sums_r + scaled_k * sums_k.
__device__ __forceinline__ Operand<false> pair_weights(const Operand<false>& scaled_r, const float (&sums_r)[8],
                                                       const Operand<false>& scaled_k, const float (&sums_k)[8]) {
    Operand<false> q;
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        q.high[a] = fma_bf16(scaled_r.high[a], pack_bf16(sums_r[2 * a], sums_r[2 * a + 1]),
                             mul_bf16(scaled_k.high[a], pack_bf16(sums_k[2 * a], sums_k[2 * a + 1])));
    }
    return q;
}

__device__ __forceinline__ Operand<true> pair_weights(const Operand<true>& scaled_r, const float (&sums_r)[8],
                                                      const Operand<true>& scaled_k, const float (&sums_k)[8]) {
    float r_values[8], k_values[8];
    get_values(r_values, scaled_r);
    get_values(k_values, scaled_k);
#pragma unroll
    for (int i = 0; i < 8; ++i) r_values[i] = r_values[i] * sums_r[i] + k_values[i] * sums_k[i];
    Operand<true> q;
    set_values(q, r_values);
    return q;
}

template <class Element, class W, int kBlocks, bool kChunked>
__global__ void __launch_bounds__(32 * kBlocks, backward_occupancy(Element::kSplit, kBlocks, kChunked))
    backward_kernel(const __grid_constant__ Job job) {
    const Address shared = shared_memory();
    constexpr bool kSplit = Element::kSplit;
    using Layout = BackwardLayout<kSplit, kBlocks, kChunked>;
    using Meet = Meeting<kBlocks>;
    constexpr int kTile = Layout::kTile;
    const Lane lane;
    const Work work(job, kChunked ? job.chunk_blocks : kBlocks, blockIdx.x,
                    kChunked ? job.first_chunk + blockIdx.y : blockIdx.y);
    const Layout layout(work.groups);
    const WKV6Params& params = job.params;
    const Head<Element> r(params.r, work.b, work.h), k(params.k, work.b, work.h), v(params.v, work.b, work.h);
    const Head<Element> gy(params.gy, work.b, work.h), gr(params.gr, work.b, work.h), gk(params.gk, work.b, work.h);
    const Head<W> w(params.w, work.b, work.h), gw(params.gw, work.b, work.h);
    float* u = shared_pointer<float>(shared + layout.u);
    float* totals = shared_pointer<float>(shared + layout.totals);
    float* between = shared_pointer<float>(shared + layout.between);
    float* gu_sums = shared_pointer<float>(shared + Layout::kGuSums);
    const auto ga_tile = [&](int row_block, int column_block) {
        return shared + Layout::kGa + (row_block * kBlocks + column_block) * kTile;
    };
    const auto scaled_tile = [&](int from, int m, int block) {
        return shared + from + (m * Layout::kScaledStride + block) * kTile;
    };
    const auto r_tile = [&](int m, int block) { return scaled_tile(Layout::kScaledR, m, block); };
    const auto k_tile = [&](int m, int block) { return scaled_tile(Layout::kScaledK, m, block); };
    const Address own_tile = ga_tile(work.block, work.block);
    const auto table = [&](int i) { return shared + Layout::kTables + i * kTileBytes; };
    const auto sums_row = [&](int i, int block) {
        return shared_pointer<float>(shared + Layout::kSums) + (i * kBlocks + block) * 16;
    };
    const auto v_tile = [&](int block, int group) { return shared + layout.v + (group * kBlocks + block) * kTile; };
    const auto gy_tile = [&](int block, int group) { return shared + layout.gy + (group * kBlocks + block) * kTile; };
    const Address states = shared + layout.states;
    const auto state_tile = [&](int side, int kind, int value_group) {
        return states + ((side * 2 + kind) * work.groups + value_group) * kTile;
    };
    // Asks for the states that are read next, once all warps have read the present ones.
    const auto copy_next_states = [&](int next) {
        if (next < work.groups) {
            copy_states<kSplit, kBlocks, 2>(states, job, work, next);
        } else {
            copy_states_of<kSplit, kBlocks, 2>(kQueriesAndGradients, states, job, work, 0);
        }
    };
    const auto rates_tile = [&](int group) {
        return shared + layout.rates + (group * kBlocks + work.block) * kRatesBytes;
    };
    Sides<kSplit, Layout::kSharedSides> sides(shared + layout.sides, work, lane);  // of k
    const Lone<kBlocks, true> lone(shared + layout.lone, job, work);

    if constexpr (kChunked) copy_next_states(0);
    const Head<Element> both[2] = {v, gy};
    const auto last_token = lone.load(r, k, v, gy);
    load_block(totals, w, both, job, work, lane,
               [&](int group, const Rows<Element>(&rows)[2], const float(&rates)[8]) {
                   store(v_tile(work.block, group), rows[0].operand(), lane);
                   store(gy_tile(work.block, group), rows[1].operand(), lane);
                   if constexpr (Layout::kKeepsRates) store_rates(rates_tile(group), rates, lane);
               });
    for (int i = threadIdx.x; i < kTileBytes / 4; i += blockDim.x) {
        store_shared(table(0) + 16 * i, reinterpret_cast<const uint4*>(kAllTables.words)[i]);
    }
    for (int i = threadIdx.x; i < 2 * kTile / 16; i += blockDim.x) {
        store_shared(shared + Layout::kZero + 16 * i, uint4{0u, 0u, 0u, 0u});
    }
    load_u(u, job, work);
    lone.write(last_token);
    __syncthreads();
    Between<kBlocks, kChunked>::write(between, totals, work, lane);
    lone.write_factors(totals);
    if (Meet::kLone) __syncthreads();

    // gA[t, s]: rows are the own tokens.
    float ga_diagonal[4];
    {
        float sums[kBlocks][8] = {};
        LonePairs lone_pairs;  // gA[own, lone], gA[lone, own]
#pragma unroll 1
        for (int group = 0; group < work.groups; ++group) {
            const Operand<kSplit> left = left_rows<kSplit>(gy_tile(work.block, group), lane);
            if (Meet::kLone) {
                const Operand<kSplit> values = left_rows<kSplit>(v_tile(work.block, group), lane);
                lone.add_ga(lone_pairs, left, values, group, lane);
            }
#pragma unroll
            for (int other = 0; other < kBlocks; ++other) {
                add_product(sums[other], left, right_rows<kSplit>(v_tile(other, group), lane), lane);
            }
        }
#pragma unroll
        for (int other = 0; other < kBlocks; ++other) {
            Operand<kSplit> tile;
            set_values(tile, sums[other]);
            store(ga_tile(work.block, other), tile, lane);
            if (other != work.block) continue;
            ga_diagonal[0] = from_lane(sums[other][0], 9 * lane.q);
            ga_diagonal[1] = from_lane(sums[other][1], 9 * lane.q + 4);
            ga_diagonal[2] = from_lane(sums[other][6], 9 * lane.q);
            ga_diagonal[3] = from_lane(sums[other][7], 9 * lane.q + 4);
        }
        lone.write_ga(lone_pairs, work.block, lane);
    }
    __syncwarp();
    // The own block's gA by levels: each lane reads what it holds of the level's pairs, or zeros.
    const Address own_ga = shared + Layout::kOwnGa + work.block * 2 * kTile + lane.straight;
    store_fragment(own_ga, right_rows<kSplit>(ga_tile(work.block, work.block), lane));
    store_fragment(own_ga + kTile, right_columns<kSplit>(ga_tile(work.block, work.block), lane));
    const auto pairs_of_level = [&](int level) {
        const int apart = (lane.g >> 1) ^ lane.q;
        const bool mine = level == 8 ? apart >= 2 : level == 4 ? apart == 1 : apart == 0;
        return mine ? own_ga : shared + Layout::kZero;
    };
    __syncthreads();
    if constexpr (kChunked) {  // from here on the warp's row of totals is the decay of the whole chunk
        for (int c = lane.id; c < work.channels; c += 32) {
            totals[work.block * work.channels + c] *= between[Between<kBlocks, true>::row_of_side(0, work) + c] *
                                                      between[Between<kBlocks, true>::row_of_side(1, work) + c];
        }
        __syncwarp();
    }

    // The pairs around the whole chunk, the diagonal of a product of states: this warp's share of the sum over value
    // channels, to row 0 of the sums, which level 16 does not need.
    const auto write_state_product = [&](int group) {
        float sums[8] = {};
        if (has_state(job, work, 0) && has_state(job, work, 1)) {
            for (int value_group = work.block; value_group < work.groups; value_group += kBlocks) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    add_product(sums, left_rows<kSplit>(state_tile(side, kKeysAndValues, value_group), lane),
                                right_rows<kSplit>(state_tile(1 - side, kQueriesAndGradients, value_group), lane),
                                lane);
                }
            }
        }
        if ((lane.g >> 1) == lane.q) {
            const float diagonal[2] = {lane.g & 1 ? sums[1] : sums[0], lane.g & 1 ? sums[7] : sums[6]};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int c = 2 * lane.g + half;
                sums_row(0, work.block)[c] = diagonal[half] * totals[work.block * work.channels + 16 * group + c];
            }
        }
    };

    // A transposed: rows are the own tokens as keys.
    PairsInside inside;
    float across[Meet::kSlots][8] = {};
    LonePairs lone_pairs;  // A[own, lone], A[lone, own]

    Rows<Element> next_r, next_k;
    float next_w[8];
    next_r.load(r, work.place(job, 0), lane);
    next_k.load(k, work.place(job, 0), lane);
    if constexpr (!Layout::kKeepsRates) load_w(next_w, w, work.place(job, 0), lane);

#pragma unroll 1
    for (int group = 0; group < work.groups; ++group) {
        if (kChunked && work.empty && group >= 1) {  // its tiles and sums are 0 by now
            if (lane.id < 16) gu_sums[work.block * work.channels + 16 * group + lane.id] = 0.f;
            wait_for_copies();
            __syncthreads();
            write_state_product(group);
            __syncthreads();
            copy_next_states(group + 1);
            continue;
        }
        const Place place = work.place(job, group);
        float rates[8];
        if constexpr (Layout::kKeepsRates) {
            load_rates(rates, rates_tile(group), lane);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) rates[i] = next_w[i];
            to_rates(rates);
        }
        const BlockDecay<kSplit> decay(rates, lane);
        const Unscaled<kSplit> r_channels = to_channels(next_r, own_tile, lane);
        if (kSplit) __syncwarp();
        const Unscaled<kSplit> k_channels = to_channels(next_k, own_tile, lane);
        inside.add_near(next_k, next_r, k_channels, r_channels, u + 16 * group, lane);
        const auto load_next = [&]() {
            if (group + 1 == work.groups) return;
            const Place next = work.place(job, group + 1);
            next_r.load(r, next, lane);
            next_k.load(k, next, lane);
            if constexpr (!Layout::kKeepsRates) load_w(next_w, w, next, lane);
        };
        if constexpr (Layout::kKeepsRates) load_next();

        Scale<kSplit> scale_of[Meet::kLevels > 0 ? Meet::kLevels : 1];
#pragma unroll
        for (int m = 0; m < Meet::kLevels; ++m) {
            if (!Meet::has_level(work.block, m)) continue;
            scale_of[m] = scale_across<kSplit, kBlocks>(decay, between, work, group, m, lane);
            store(r_tile(m, work.block), multiply(r_channels, scale_of[m]), lane);
            store(k_tile(m, work.block), multiply(k_channels, scale_of[m]), lane);
        }

        // Sums for gr and gk; the sums around each token for gw.
        float gr_sums[8], gk_sums[8], around[8] = {}, gu_block[2] = {};
        {
            float r_values[8], k_values[8];
            get_values(r_values, r_channels);
            get_values(k_values, k_channels);
            const float2 two = of_channels(u + 16 * group, lane);
            const float u_values[2] = {two.x, two.y};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int t = 2 * (i >> 2) + (i & 1), half = i >> 1 & 1;
                const float u_ga = u_values[half] * ga_diagonal[t];
                gu_block[half] += r_values[i] * k_values[i] * ga_diagonal[t];
                gr_sums[i] = u_ga * k_values[i];
                gk_sums[i] = u_ga * r_values[i];
            }
        }
        if (Meet::kLone || !work.alone) {
            const Address ga = pairs_of_level(1);
            Operand<kSplit> near = load_fragment<kSplit>(ga), near_t = load_fragment<kSplit>(ga + kTile);
            const auto add_level = [&](auto level) {
                constexpr int kLevel = decltype(level)::value;
                const Scale<kSplit> scale = decay.template inside<kLevel>(lane);
                const Operand<kSplit> scaled_r = multiply(r_channels, scale), scaled_k = multiply(k_channels, scale);
                inside.template add_level<kLevel>(left_columns(scaled_k, lane), right_columns(scaled_r, lane), lane);
                float level_r[8], level_k[8];
                if constexpr (kLevel == 2) {
                    const float zero[8] = {};
                    half_product<true>(level_r, scaled_k, near, zero, lane);
                    half_product<true>(level_k, scaled_r, near_t, zero, lane);
                } else {
                    const Address ga = pairs_of_level(kLevel);
                    new_product(level_r, scaled_k, load_fragment<kSplit>(ga), lane);
                    new_product(level_k, scaled_r, load_fragment<kSplit>(ga + kTile), lane);
                }
                const Operand<kSplit> q = pair_weights(scaled_r, level_r, scaled_k, level_k);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    gr_sums[i] += scale.value(i) * level_r[i];
                    gk_sums[i] += scale.value(i) * level_k[i];
                }
                if constexpr (kLevel == 2) {  // of two neighbours only the one on the far side counts
                    float q_values[8];
                    get_values(q_values, q);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        around[2 * half + 1] += q_values[2 * half];
                        around[2 * half + 4] += q_values[2 * half + 5];
                    }
                } else {
                    add_table_product(around, q, table(kLevel == 4 ? kInFour : kInEight), lane);
                }
            };
            add_level(Constant<8>{});
            add_level(Constant<4>{});
            add_level(Constant<2>{});
            const uint32_t partner = lane.g & 1 ? 0x0000ffffu : 0xffff0000u;
            keep_half_pairs(near, partner);
            keep_half_pairs(near_t, partner);
            half_product<false>(gr_sums, as_operand(k_channels), near, gr_sums, lane);
            half_product<false>(gk_sums, as_operand(r_channels), near_t, gk_sums, lane);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            gu_block[half] += from_lane_xor<1>(gu_block[half]);
            gu_block[half] += from_lane_xor<2>(gu_block[half]);
        }
        if (lane.q == 0) {
            set_channels(gu_sums + work.block * work.channels + 16 * group, gu_block[0], gu_block[1], lane);
        }

        if constexpr (kChunked) wait_for_copies();
        __syncthreads();
        // What a level or a side adds, from the sums over the other tokens.
        const auto add_sums = [&](const Scale<kSplit>& scale, const Operand<kSplit>& scaled_r,
                                  const float (&level_r)[8], const Operand<kSplit>& scaled_k, const float (&level_k)[8],
                                  bool is_later) {
            const Operand<kSplit> q = pair_weights(scaled_r, level_r, scaled_k, level_k);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                gr_sums[i] += scale.value(i) * level_r[i];
                gk_sums[i] += scale.value(i) * level_k[i];
            }
            add_table_product(around, q, table(is_later ? kAfterInBlock : kBeforeInBlock), lane);
            return q;
        };
        for_each<Meet::kLevels>([&](auto level) {
            constexpr int m = decltype(level)::value;
            if (!Meet::has_level(work.block, m)) return;
            float level_r[8] = {}, level_k[8] = {};
            const Operand<kSplit> scaled_r = left_rows<kSplit>(r_tile(m, work.block), lane);
            const Operand<kSplit> scaled_k = left_rows<kSplit>(k_tile(m, work.block), lane);
            const Operand<kSplit> left = left_columns<kSplit>(k_tile(m, work.block), lane);
            if (Meet::meets_lone(work.block, m)) {
                lone.add_pairs(lone_pairs, left_columns<kSplit>(r_tile(m, work.block), lane), left, m, group, lane);
                lone.add_level(level_r, level_k, scaled_r, scaled_k, m, group, work.block, shared + Layout::kZero,
                               lane);
            }
            Meet::template for_each_other<m>(work.block, [&](auto slot, int other) {
                const Operand<kSplit> other_r = left_rows<kSplit>(r_tile(m, other), lane);
                add_product(across[decltype(slot)::value], left, right_columns<kSplit>(r_tile(m, other), lane), lane);
                add_product(level_r, left_rows<kSplit>(k_tile(m, other), lane),
                            right_rows<kSplit>(ga_tile(work.block, other), lane), lane);
                add_product(level_k, other_r, right_columns<kSplit>(ga_tile(other, work.block), lane), lane);
            });
            const Operand<kSplit> q =
                add_sums(scale_of[m], scaled_r, level_r, scaled_k, level_k, Meet::is_later(lane.warp, m));
            if (m > 0) write_channel_sums(sums_row(m, work.block), q, lane);
        });
        if constexpr (kChunked) {
            write_state_product(group);
            for (int side = 0; side < 2; ++side) {
                if (!has_state(job, work, side)) continue;
                const Scale<kSplit> scale = scale_to_chunk<kSplit, kBlocks>(decay, between, work, group, side, lane);
                const Operand<kSplit> scaled_r = multiply(r_channels, scale), scaled_k = multiply(k_channels, scale);
                sides.put(side, group, left_columns(scaled_k, lane));
                float level_r[8] = {}, level_k[8] = {};
#pragma unroll 2
                for (int value_group = 0; value_group < work.groups; ++value_group) {
                    add_product(level_r, left_rows<kSplit>(state_tile(side, kKeysAndValues, value_group), lane),
                                right_rows<kSplit>(gy_tile(work.block, value_group), lane), lane);
                    add_product(level_k, left_rows<kSplit>(state_tile(side, kQueriesAndGradients, value_group), lane),
                                right_rows<kSplit>(v_tile(work.block, value_group), lane), lane);
                }
                const Operand<kSplit> q = add_sums(scale, scaled_r, level_r, scaled_k, level_k, side == 0);
                write_channel_sums(sums_row(Meet::kLevels + 1 + side, work.block), q, lane);
            }
        }

        write_columns(gr, place, own_tile, gr_sums, lane);
        if (kSplit) __syncwarp();
        write_columns(gk, place, own_tile, gk_sums, lane);
        if constexpr (!Layout::kKeepsRates) load_next();  // later: registers

        __syncthreads();
        if constexpr (kChunked) copy_next_states(group + 1);
        // The tokens of other blocks in the same half.
        float beyond[2] = {};
        const auto add_row = [&](const float* row) {
            const float2 two = of_channels(row, lane);
            beyond[0] += two.x;
            beyond[1] += two.y;
        };
#pragma unroll
        for (int m = 1; m < Meet::kLevels; ++m) {
            if (!Meet::has_level(work.block, m)) continue;
#pragma unroll
            for (int i = 1; i < 1 << m; ++i) {
                const int other = work.block ^ i;
                if (other < kBlocks && (other > work.block) == Meet::is_later(work.block, m))
                    add_row(sums_row(m, other));
            }
        }
        if (Meet::kLone && work.block == 2) lone.add_beyond(beyond, totals, group, lane);
        if constexpr (kChunked) {
#pragma unroll
            for (int other = 0; other < kBlocks; ++other) {
                add_row(sums_row(0, other));
                const int side = other < work.block;  // pairs of an earlier token with what is on the right
                const float* row = sums_row(Meet::kLevels + 1 + side, other);
                const bool counts = other != work.block && has_state(job, work, side);
                const float2 two = of_channels(row, lane);
                beyond[0] += counts ? two.x : 0.f;
                beyond[1] += counts ? two.y : 0.f;
            }
        }
        if constexpr (Layout::kKeepsRates) load_rates(rates, rates_tile(group), lane);  // again, to save registers
        {
            const int channel = place.first_channel + 2 * lane.g, token = place.first_token + 4 * lane.q;
            char* to = gw.at(token, channel);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int i = 4 * (t >> 1) + (t & 1);
                const typename W::Two two = W::pack((around[i] + beyond[0]) * -kLn2 * rates[i],
                                                    (around[i + 2] + beyond[1]) * -kLn2 * rates[i + 2]);
                if (token + t < place.T && channel < place.N) *as<typename W::Two>(to) = two;
                to += gw.stride;
            }
        }
    }

    const float lone_ga = lone.own_ga(lane);
#pragma unroll 1
    for (int c = threadIdx.x; c < params.N; c += blockDim.x) {
        float sum = Meet::kLone ? lone.write_gradients(gr, gk, gw, totals, u, lone_ga, c) : 0.f;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) sum += gu_sums[block * work.channels + c];
        job.gu_parts[(static_cast<int64_t>(work.head) * job.chunks + work.chunk) * params.N + c] = sum;
    }

    const Operand<kSplit> own_weights = inside.result<kSplit>(lane);
    Operand<kSplit> other_weights[Meet::kSlots];
#pragma unroll
    for (int slot = 0; slot < Meet::kSlots; ++slot) set_values(other_weights[slot], across[slot]);

    const Head<Element> gv(params.gv, work.b, work.h);
    const LoneWeights as_key = lone.weights(lone_pairs, 0, lane), as_query = lone.weights(lone_pairs, 1, lane);
    const auto finish = [&](int group, float(&sums)[8]) {
        const Operand<kSplit> own_gy = right_columns<kSplit>(gy_tile(work.block, group), lane);
        add_product(sums, own_weights, own_gy, lane);
        lone.add_to_rows(sums, as_query, lone.kGy, group, lane);
        lone.write_part(between, as_key, own_gy, group, work.block, lane);
        for_each<Meet::kLevels>([&](auto level) {
            Meet::template for_each_other<decltype(level)::value>(work.block, [&](auto slot, int other) {
                add_product(sums, other_weights[decltype(slot)::value],
                            right_columns<kSplit>(gy_tile(other, group), lane), lane);
            });
        });
        write_rows(gv, work.place(job, group), sums, lane);
    };
    if constexpr (kChunked) {
        float sums[kMaxGroups][8] = {};
        add_states<kSplit, kBlocks, 2>(sums, sides, states, job, work, kQueriesAndGradients, lane);
        for_each<kMaxGroups>([&](auto index) {
            constexpr int kGroup = decltype(index)::value;
            if (kGroup < work.groups) finish(kGroup, sums[kGroup]);
        });
    } else {
#pragma unroll 1
        for (int group = 0; group < work.groups; ++group) {
            float sums[8] = {};
            finish(group, sums);
        }
        if (Meet::kLone) __syncthreads();
        lone.finish_row(gv, between, lone.kGy, u, lane);
    }
}

}  // namespace wkv6
