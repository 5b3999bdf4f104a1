// Plain interpolation. A thread keeps its eight channels.
#pragma once

#include "lerp_cuda_job.cuh"

namespace lerp {

// A block's threads cover all channels, or one of few equal ranges of them, of as many rows at a time as it can.
struct RowBlock {
    int ranges, vectors, lanes, threads;
    __host__ __device__ explicit RowBlock(int channels) {
        const int all = channels / 8;
        ranges = (all + 255) / 256;
        vectors = (all + ranges - 1) / ranges;
        lanes = 256 / vectors;
        threads = vectors * lanes;
    }
};

template <int kCount>
__global__ void __launch_bounds__(256) lerp_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const RowBlock block(params.channels);
    const int lane = threadIdx.x / block.vectors;
    const int channel = 8 * (block.vectors * blockIdx.y + threadIdx.x % block.vectors);
    if (channel >= params.channels) return;
    const Directions directions(job, channel);
    const int first = blockIdx.x * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    float c[kCount][8];
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_floats(c[i], params.c + i * params.channels + channel);
    for (int row = first + lane; row < end; row += block.lanes) {
        const int64_t element = static_cast<int64_t>(row) * params.channels + channel;
        float x[8], difference[8];
        load_difference(x, difference, params, element, Place(job, row), directions);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float y[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) y[k] = x[k] + difference[k] * c[i][k];
            store_8(params.y[i], element, y);
        }
    }
}

// gx[t] = sum_i gy_i[t] + base[t] - s[t] + s of those whose neighbour t is, with s = sum_i gy_i c_i + extra.
//
// What a thread reads for a token, 16 bytes of each, is on its way to shared memory while it works on the token before.
constexpr int kStages = 2;

template <int kCount, bool kExtra>
constexpr int kReads = 2 + 2 * kCount + (kExtra ? 3 : 0);

template <int kCount, bool kExtra>
__global__ void __launch_bounds__(256, 3) lerp_backward_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const RowBlock block(params.channels);
    const int lane = threadIdx.x / block.vectors;
    const int channel = 8 * (block.vectors * blockIdx.y + threadIdx.x % block.vectors);
    if (channel >= params.channels) return;
    const Directions directions(job, channel), back(job, channel, true);
    const int first = blockIdx.x * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    float c[kCount][8], sums[kCount][8];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        load_floats(c[i], params.c + i * params.channels + channel);
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[i][k] = 0.f;
    }
    const int bytes = 16 * blockDim.x;
    const Address own = shared_memory() + 16 * threadIdx.x;
    const auto copy = [&](int row, int stage) {
        if (row < end) {
            const int64_t offset = 2 * (static_cast<int64_t>(row) * params.channels + channel);
            const Place place(job, row);
            Address to = own + stage * kReads<kCount, kExtra> * bytes;
            copy_16(to, params.x, offset);
            copy_neighbours(to += bytes, params.x, offset, params.layout, place, directions);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                copy_16(to += bytes, params.gy[i], offset);
                copy_neighbours(to += bytes, params.gy[i], offset, params.layout, place, back);
            }
            if constexpr (kExtra) {
                copy_16(to += bytes, params.extra, offset);
                copy_neighbours(to += bytes, params.extra, offset, params.layout, place, back);
                copy_16(to += bytes, params.base, offset);
            }
        }
        end_group_of_copies();
    };
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) copy(first + lane + stage * block.lanes, stage);
    int stage = 0;
    for (int row = first + lane; row < end; row += block.lanes) {
        wait_for_groups<kStages - 1>();
        Address from = own + stage * kReads<kCount, kExtra> * bytes;
        const uint4 x = load_shared<uint4>(from);
        float difference[8], gx[8];
        unpack(difference, difference_of(load_shared<uint4>(from += bytes), x));
#pragma unroll
        for (int k = 0; k < 8; ++k) gx[k] = 0.f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float gy[8], others[8];
            unpack(gy, load_shared<uint4>(from += bytes));
            unpack(others, load_shared<uint4>(from += bytes));
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                sums[i][k] += gy[k] * difference[k];
                gx[k] += gy[k] + (others[k] - gy[k]) * c[i][k];
            }
        }
        if constexpr (kExtra) {
            float extra[8], others[8], base[8];
            unpack(extra, load_shared<uint4>(from += bytes));
            unpack(others, load_shared<uint4>(from += bytes));
            unpack(base, load_shared<uint4>(from += bytes));
#pragma unroll
            for (int k = 0; k < 8; ++k) gx[k] += base[k] + (others[k] - extra[k]);
        }
        copy(row + kStages * block.lanes, stage);
        stage = stage == kStages - 1 ? 0 : stage + 1;
        store_8(params.gx, static_cast<int64_t>(row) * params.channels + channel, gx);
    }
    const int part = blockIdx.x * block.lanes + lane;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        float* to = params.c_parts + (static_cast<int64_t>(part) * kCount + i) * params.channels + channel;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float4*>(to + 4 * half) = float4{sums[i][4 * half], sums[i][4 * half + 1],
                                                               sums[i][4 * half + 2], sums[i][4 * half + 3]};
        }
    }
}

}  // namespace lerp
