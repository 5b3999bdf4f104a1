// Forward: A [T, T] tile by tile in registers, then y = A v.
#pragma once

#include "wkv6_cuda_lone.cuh"
#include "wkv6_cuda_states.cuh"

namespace wkv6 {

// Shared memory of the forward kernel, in bytes. What the loop over channel groups uses has constant addresses.
template <bool kSplit, int kBlocks, bool kChunked>
struct ForwardLayout {
    static constexpr int kTile = kSplit ? 2 * kTileBytes : kTileBytes;
    static constexpr int kLevels = Meeting<kBlocks>::kLevels;
    static constexpr int kScaledK = 0;                                     // [parity][level][block]
    static constexpr int kOwn = kScaledK + 2 * kLevels * kBlocks * kTile;  // [block][2], float32 and float16 only
    static constexpr int kFixed = kOwn + (kSplit ? 2 * kBlocks * kTile : 0);
    static constexpr bool kKeepsRates = !kSplit && !kChunked;  // instead of reading w twice; the others have no room
    int u, totals, between, v, rates, lone, states, bytes;

    __host__ __device__ explicit ForwardLayout(int groups) {
        u = kFixed;                                                              // [channel], float
        totals = u + groups * 64;                                                // [block][channel], float
        between = totals + kBlocks * groups * 64;                                // see Between
        v = between + Between<kBlocks, kChunked>::kRows * kBlocks * groups * 64;  // [group][block]
        rates = v + kBlocks * groups * kTile;                                    // [group][block]
        lone = rates + (kKeepsRates ? kBlocks * groups * kRatesBytes : 0);       // see Lone
        states = lone + Lone<kBlocks, false>::bytes(groups);                     // [parity][side][value group]
        bytes = states + (kChunked ? 4 * groups * kTile : 0);
    }
};

template <class Element, class W, int kBlocks, bool kChunked>
__global__ void __launch_bounds__(32 * kBlocks, forward_occupancy(Element::kSplit, kBlocks))
    forward_kernel(const __grid_constant__ Job job) {
    const Address shared = shared_memory();
    constexpr bool kSplit = Element::kSplit;
    using Layout = ForwardLayout<kSplit, kBlocks, kChunked>;
    using Meet = Meeting<kBlocks>;
    constexpr int kTile = Layout::kTile, kLevels = Meet::kLevels > 0 ? Meet::kLevels : 1;
    const Lane lane;
    const Work work(job, kChunked ? job.chunk_blocks : kBlocks, blockIdx.x,
                    kChunked ? job.first_chunk + blockIdx.y : blockIdx.y);
    const Layout layout(work.groups);
    const WKV6Params& params = job.params;
    const Head<Element> r(params.r, work.b, work.h), k(params.k, work.b, work.h), v(params.v, work.b, work.h);
    const Head<W> w(params.w, work.b, work.h);
    float* u = shared_pointer<float>(shared + layout.u);
    float* totals = shared_pointer<float>(shared + layout.totals);
    float* between = shared_pointer<float>(shared + layout.between);
    const auto k_tile = [&](int parity, int m, int block) {
        return shared + Layout::kScaledK + ((parity * Layout::kLevels + m) * kBlocks + block) * kTile;
    };
    const auto own_tile = [&](int i) { return shared + Layout::kOwn + (work.block * 2 + i) * kTile; };
    const auto v_tile = [&](int block, int group) { return shared + layout.v + (group * kBlocks + block) * kTile; };
    const Address states = shared + layout.states;
    const auto rates_tile = [&](int group) {
        return shared + layout.rates + (group * kBlocks + work.block) * kRatesBytes;
    };
    Sides<kSplit, false> sides(shared, work, lane);  // of r
    const Lone<kBlocks, false> lone(shared + layout.lone, job, work);

    if (!kChunked && work.head < job.ahead) prefetch_rows(r, k, work.place(job, 0), lane);
    if constexpr (kChunked) copy_states<kSplit, kBlocks, 1>(states, job, work, 0);
    const Head<Element> values[1] = {v};
    const auto last_token = lone.load(r, k, v, v);
    load_block(totals, w, values, job, work, lane,
               [&](int group, const Rows<Element>(&rows)[1], const float(&rates)[8]) {
                   store(v_tile(work.block, group), rows[0].operand(), lane);
                   if constexpr (Layout::kKeepsRates) store_rates(rates_tile(group), rates, lane);
               });
    load_u(u, job, work);
    lone.write(last_token);
    __syncthreads();
    Between<kBlocks, kChunked>::write(between, totals, work, lane);
    lone.write_factors(totals);

    PairsInside inside;
    float across[Meet::kSlots][8] = {};
    LonePairs lone_pairs;  // A[own, lone], A[lone, own]

    Rows<Element> next_r, next_k;
    float rates[8];
    next_r.load(r, work.place(job, 0), lane);
    next_k.load(k, work.place(job, 0), lane);
    if constexpr (!Layout::kKeepsRates) load_w(rates, w, work.place(job, 0), lane);

#pragma unroll 1
    for (int group = 0; group < work.groups; ++group) {
        if (kChunked && work.empty && group >= 2) {  // its tiles are 0 by now
            __syncthreads();
            continue;
        }
        if constexpr (Layout::kKeepsRates) {
            load_rates(rates, rates_tile(group), lane);
        } else {
            to_rates(rates);
        }
        const BlockDecay<kSplit> decay(rates, lane);
        if (!kChunked && group + 2 == work.groups) prefetch_other_head<Element, W, kBlocks>(job, work, lane);
        const Unscaled<kSplit> r_channels = to_channels(next_r, own_tile(0), lane);
        const Unscaled<kSplit> k_channels = to_channels(next_k, own_tile(1), lane);
        inside.add_near(next_r, next_k, r_channels, k_channels, u + 16 * group, lane);
        if (group + 1 < work.groups) {
            const Place place = work.place(job, group + 1);
            next_r.load(r, place, lane);
            next_k.load(k, place, lane);
            if constexpr (!Layout::kKeepsRates) load_w(rates, w, place, lane);
        }

        Operand<kSplit> queries[kLevels], own_keys[kLevels];  // of each level, as left factors
#pragma unroll
        for (int m = 0; m < Meet::kLevels; ++m) {
            if (!Meet::has_level(work.block, m)) continue;
            const Scale<kSplit> scale = scale_across<kSplit, kBlocks>(decay, between, work, group, m, lane);
            const Operand<kSplit> keys = multiply(k_channels, scale);
            store(k_tile(group & 1, m, work.block), keys, lane);
            queries[m] = left_columns(multiply(r_channels, scale), lane);
            if (Meet::meets_lone(work.block, m)) own_keys[m] = left_columns(keys, lane);
        }
        if constexpr (kChunked) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                if (!has_state(job, work, side)) continue;
                const Scale<kSplit> scale = scale_to_chunk<kSplit, kBlocks>(decay, between, work, group, side, lane);
                sides.put(side, group, left_columns(multiply(r_channels, scale), lane));
            }
        }
        if (Meet::kLone || !work.alone) {
            const auto add_level = [&](auto level) {
                constexpr int kLevel = decltype(level)::value;
                const Scale<kSplit> scale = decay.template inside<kLevel>(lane);
                inside.template add_level<kLevel>(left_columns(multiply(r_channels, scale), lane),
                                                  right_columns(multiply(k_channels, scale), lane), lane);
            };
            add_level(Constant<8>{});
            add_level(Constant<4>{});
            add_level(Constant<2>{});
        }
        __syncthreads();
        for_each<Meet::kLevels>([&](auto level) {
            constexpr int m = decltype(level)::value;
            if (!Meet::has_level(work.block, m)) return;
            if (Meet::meets_lone(work.block, m)) {
                lone.add_pairs(lone_pairs, queries[m], own_keys[m], m, group, lane);
            }
            Meet::template for_each_other<m>(work.block, [&](auto slot, int other) {
                add_product(across[decltype(slot)::value], queries[m],
                            right_columns<kSplit>(k_tile(group & 1, m, other), lane), lane);
            });
        });
    }

    const Operand<kSplit> own_weights = inside.result<kSplit>(lane);
    Operand<kSplit> other_weights[Meet::kSlots];
#pragma unroll
    for (int slot = 0; slot < Meet::kSlots; ++slot) set_values(other_weights[slot], across[slot]);

    const Head<Element> y(params.y, work.b, work.h);
    const LoneWeights from_lone = lone.weights(lone_pairs, 0, lane), to_lone = lone.weights(lone_pairs, 1, lane);
    const auto finish = [&](int group, float(&sums)[8]) {
        const Operand<kSplit> own_values = right_columns<kSplit>(v_tile(work.block, group), lane);
        add_product(sums, own_weights, own_values, lane);
        lone.add_to_rows(sums, from_lone, lone.kV, group, lane);
        lone.write_part(between, to_lone, own_values, group, work.block, lane);
        for_each<Meet::kLevels>([&](auto level) {
            Meet::template for_each_other<decltype(level)::value>(work.block, [&](auto slot, int other) {
                add_product(sums, other_weights[decltype(slot)::value],
                            right_columns<kSplit>(v_tile(other, group), lane), lane);
            });
        });
        write_rows(y, work.place(job, group), sums, lane);
    };
    if constexpr (kChunked) {
        float sums[kMaxGroups][8] = {};
        add_states<kSplit, kBlocks, 1>(sums, sides, states, job, work, kKeysAndValues, lane);
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
        lone.finish_row(y, between, lone.kV, u, lane);
    }
}

}  // namespace wkv6
