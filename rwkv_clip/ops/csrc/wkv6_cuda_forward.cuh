// Forward: A [T, T] tile by tile in registers, then y = A v.
#pragma once

#include "wkv6_cuda_states.cuh"

namespace wkv6 {

// Shared memory of the forward kernel, in 32-bit words. What the loop over channel groups uses has constant addresses.
template <bool kSplit, int kMaxBlocks, bool kChunked>
struct ForwardLayout {
    static constexpr int kTile = kSplit ? 2 * kTileWords : kTileWords;
    static constexpr int kMaxLevels = max_levels(kMaxBlocks);
    static constexpr int kSharedK = 0;                                               // [parity][level][block]
    static constexpr int kScaledR = kSharedK + 2 * kMaxLevels * kMaxBlocks * kTile;  // [level][block]
    static constexpr int kOwn = kScaledR + kMaxLevels * kMaxBlocks * kTile;          // [block][2]
    static constexpr int kFixed = kOwn + 2 * kMaxBlocks * kTile;
    int totals, between, v, sides, words;

    __host__ __device__ ForwardLayout(int blocks, int groups, int levels) {
        totals = kFixed;                                                     // [block][channel], float
        between = totals + blocks * groups * 16;                             // [level - 1][block][channel], float
        v = between + (levels > 1 ? levels - 1 : 0) * blocks * groups * 16;  // [group][block]
        sides = v + blocks * groups * kTile;                                 // [side][group][block]
        words = sides + (kChunked ? blocks * 2 * groups * kTile : 0);
    }
};

template <class Element, class W, int kMaxBlocks, bool kChunked>
__global__ void __launch_bounds__(32 * kMaxBlocks, min_thread_blocks(false, Element::kSplit, kMaxBlocks))
    forward_kernel(const __grid_constant__ Job job) {
    WKV6_SHARED_MEMORY(shared);
    constexpr bool kSplit = Element::kSplit;
    const Work work(job);
    const WKV6Params& params = job.params;
    using Layout = ForwardLayout<kSplit, kMaxBlocks, kChunked>;
    constexpr int kTile = Layout::kTile;
    const Layout layout(work.blocks, work.groups, work.levels);
    const Head<Element> r(params.r, work.b, work.h), k(params.k, work.b, work.h), v(params.v, work.b, work.h);
    const Head<W> w(params.w, work.b, work.h);
    float* totals = reinterpret_cast<float*>(shared + layout.totals);
    float* between = reinterpret_cast<float*>(shared + layout.between);
    const auto k_tile = [&](int parity, int m, int block) {
        return shared + Layout::kSharedK + ((parity * Layout::kMaxLevels + m) * kMaxBlocks + block) * kTile;
    };
    const auto r_tile = [&](int m) { return shared + Layout::kScaledR + (m * kMaxBlocks + work.block) * kTile; };
    const auto own_tile = [&](int i) { return shared + Layout::kOwn + (work.block * 2 + i) * kTile; };
    const auto v_tile = [&](int block, int group) { return shared + layout.v + (group * work.blocks + block) * kTile; };
    const auto side_tile = [&](int side, int group) {
        return shared + layout.sides + ((side * work.groups + group) * work.blocks + work.block) * kTile;
    };

    prefetch_rows(r, work.place(job, 0));
    prefetch_rows(k, work.place(job, 0));
#pragma unroll 4
    for (int group = 0; group < work.groups; ++group) {
        Rows<Element> rows;
        rows.load(v, work.place(job, group));
        store(v_tile(work.block, group), rows.operand());
    }
    write_block_decays(totals, w, job, work);
    __syncthreads();
    write_decays_between(between, totals, work);

    PairsInside inside;
    float across[kMaxBlocks - 1][8] = {};   // the other blocks

    Rows<Element> next_r, next_k;
    float next_rates[8];
    next_r.load(r, work.place(job, 0));
    next_k.load(k, work.place(job, 0));
    load_w(next_rates, w, work.place(job, 0));

    for (int group = 0; group < work.groups; ++group) {
        to_rates(next_rates);
        const BlockDecay decay(next_rates);
        store(own_tile(0), next_r.operand());
        store(own_tile(1), next_k.operand());
        if (group + 1 < work.groups) {
            next_r.load(r, work.place(job, group + 1));
            next_k.load(k, work.place(job, group + 1));
            load_w(next_rates, w, work.place(job, group + 1));
        }
        __syncwarp();
        const Operand<kSplit> r_channels = exchanged(load_transposed<kSplit>(own_tile(0)));
        const Operand<kSplit> k_channels = exchanged(load_transposed<kSplit>(own_tile(1)));
        __syncwarp();

        Scale<kSplit> scale;
        Operand<kSplit> scaled;
#pragma unroll 1
        for (int m = 0; m < work.levels; ++m) {
            block_scale(scale, decay, between, work, group, m);
            multiply(scaled, r_channels, scale);
            store(r_tile(m), scaled);
            multiply(scaled, k_channels, scale);
            store(k_tile(group & 1, m, work.block), scaled);
        }
        if constexpr (kChunked) {
            for (int side = 0; side < 2; ++side) {
                chunk_scale(scale, decay, totals, work, group, side);
                multiply(scaled, r_channels, scale);
                store(side_tile(side, group), scaled);
            }
        }

        {
            float u[2], r_values[8], k_values[8];
            load_u(u, job, work, group);
            get_values(r_values, r_channels);
            get_values(k_values, k_channels);
            inside.add_near(r_values, k_values, u);
        }
#pragma unroll
        for (int level = 1; level < 4; ++level) {
            if (work.tokens <= 1 << level) continue;
            if (level == 1) decay.level2(scale.value);
            if (level == 2) decay.level4(scale.value);
            if (level == 3) decay.level8(scale.value);
            scale.round();
            multiply(scaled, r_channels, scale);
            store(own_tile(0), scaled);
            multiply(scaled, k_channels, scale);
            store(own_tile(1), scaled);
            __syncwarp();
            inside.add_level(level, exchanged(load_transposed<kSplit>(own_tile(0))),
                             load_transposed<kSplit>(own_tile(1)));
            __syncwarp();
        }

        __syncthreads();
#pragma unroll
        for (int i = 0; i < kMaxBlocks - 1; ++i) {
            const int other = other_block(work.block, i);
            if (other >= work.blocks) continue;
            const int m = meeting_level(work.block, other);
            product(across[i], exchanged(load_transposed<kSplit>(r_tile(m))),
                    load_transposed<kSplit>(k_tile(group & 1, m, other)));
        }
    }

    const Operand<kSplit> own_weights = inside.result<kSplit>();
    Operand<kSplit> other_weights[kMaxBlocks - 1];
#pragma unroll
    for (int i = 0; i < kMaxBlocks - 1; ++i) set_values(other_weights[i], across[i]);

    const Head<Element> y(params.y, work.b, work.h);
    for (int group = 0; group < work.groups; ++group) {
        float sums[8] = {};
        product(sums, own_weights, load_transposed<kSplit>(v_tile(work.block, group)));
#pragma unroll
        for (int i = 0; i < kMaxBlocks - 1; ++i) {
            const int other = other_block(work.block, i);
            if (other >= work.blocks) continue;
            product(sums, other_weights[i], load_transposed<kSplit>(v_tile(other, group)));
        }
        if constexpr (kChunked) {
            for (int side = 0; side < 2; ++side) {
                if (!has_state(job, work, side)) continue;
#pragma unroll 1
                for (int key_group = 0; key_group < work.groups; ++key_group) {
                    __syncwarp();
                    store(own_tile(0), load_state<kSplit>(job, work, 0, side, key_group, group));
                    __syncwarp();
                    product(sums, exchanged(load_transposed<kSplit>(side_tile(side, key_group))),
                            load_transposed<kSplit>(own_tile(0)));
                }
            }
        }
        write_rows(y, work.place(job, group), sums);
    }
}

}  // namespace wkv6
