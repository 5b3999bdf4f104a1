// Plain interpolation. A thread keeps its eight channels; a block's threads cover all channels of some rows.
#pragma once

#include "lerp_cuda_job.cuh"

namespace lerp {

template <int kCount>
__global__ void __launch_bounds__(512) lerp_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const int vectors = params.channels / 8, channel = 8 * (threadIdx.x % vectors);
    const Directions directions(params, channel);
    const int first = blockIdx.x * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    float c[kCount][8];
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_floats(c[i], params.c + i * params.channels + channel);
    for (int row = first + threadIdx.x / vectors; row < end; row += blockDim.x / vectors) {
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
template <int kCount, bool kExtra>
__global__ void __launch_bounds__(512) lerp_backward_kernel(const LerpJob job) {
    const LerpParams& params = job.params;
    const int vectors = params.channels / 8, channel = 8 * (threadIdx.x % vectors), lanes = blockDim.x / vectors;
    const Directions directions(params, channel), back(params, channel, true);
    const int first = blockIdx.x * job.rows_per_part, end = min(params.rows, first + job.rows_per_part);
    float c[kCount][8], sums[kCount][8];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        load_floats(c[i], params.c + i * params.channels + channel);
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[i][k] = 0.f;
    }
    for (int row = first + threadIdx.x / vectors; row < end; row += lanes) {
        const int64_t element = static_cast<int64_t>(row) * params.channels + channel;
        const Place place(job, row);
        float x[8], difference[8], gx[8], s[8];
        load_difference(x, difference, params, element, place, directions);
#pragma unroll
        for (int k = 0; k < 8; ++k) gx[k] = 0.f;
        if constexpr (kExtra) {
            float own[8], others[8];
            unpack(gx, load_8(params.base, element));
            unpack(own, load_8(params.extra, element));
            load_neighbours(others, params.extra, element, params.layout, place, back);
#pragma unroll
            for (int k = 0; k < 8; ++k) gx[k] += others[k] - own[k];
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float gy[8];
            unpack(gy, load_8(params.gy[i], element));
            load_neighbours(s, params.gy[i], element, params.layout, place, back);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                sums[i][k] += gy[k] * difference[k];
                gx[k] += gy[k] + (s[k] - gy[k]) * c[i][k];
            }
        }
        store_8(params.gx, element, gx);
    }
    const int part = blockIdx.x * lanes + threadIdx.x / vectors;
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
