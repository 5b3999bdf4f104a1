// What the interpolation kernels share: where a token's neighbours are, and vectors of bf16 in and out of memory.
#pragma once

#include "lerp.h"
#include "wkv6_cuda_warp.cuh"

namespace lerp {

using namespace wkv6;  // a warp's instructions

constexpr int kHidden = LERP_SHARES * LERP_RANK;

struct LerpJob {
    LerpParams params;
    int rows_per_part, parts, group_size;  // group: channels of a head with the same neighbour
    uint32_t tokens_magic, width_magic, head_magic;  // for `divide`
};

// n / divisor with magic = ceil(2^32 / divisor), right while n * divisor < 2^32; 0 stands for a divisor of 1.
__device__ __forceinline__ int divide(int n, uint32_t magic) {
    return magic ? static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * magic) >> 32) : n;
}

// Where the neighbours of four channels are, or (`opposite`) the tokens whose neighbour one is.
struct Direction {
    bool vertical;
    int low, high;  // there is one for low <= place < high, the place counted in tokens if vertical, else in columns
    int offset;     // elements to it

    __device__ __forceinline__ Direction(const LerpJob& job, int channel, bool opposite) {
        const LerpLayout& layout = job.params.layout;
        const int place = channel - divide(channel, job.head_magic) * layout.head_size, size = job.group_size;
        const int group = (place >= size) + (place >= 2 * size) + (place >= 3 * size);
        const bool backwards = !(group & 1) != opposite;
        vertical = group & 2;
        const int step = vertical ? layout.width : 1, end = vertical ? layout.grid : layout.width;
        low = backwards ? step : 0;
        high = backwards ? end : end - step;
        offset = (backwards ? -step : step) * job.params.channels;
    }
};

// A row's place among its sample's tokens.
struct Place {
    int token, column;
    __device__ __forceinline__ Place(const LerpJob& job, int row) {
        token = row - divide(row, job.tokens_magic) * job.params.layout.tokens;
        column = token - divide(token, job.width_magic) * job.params.layout.width;
    }
};

struct Neighbour {
    int offset;
    bool none;

    // Without branches, at which the loads of several tokens would wait for each other.
    __device__ __forceinline__ Neighbour(const LerpLayout& layout, const Direction& direction, const Place& place) {
        const int at = direction.vertical ? place.token : place.column;
        const bool inside = (at >= direction.low) & (at < direction.high), own = place.token >= layout.grid;
        offset = inside & !own ? direction.offset : 0;
        none = !(inside | own);
    }
};

// No kernel writes what it reads: told so, the compiler moves loads ahead of earlier stores, and they wait together.
template <class Vector>
__device__ __forceinline__ Vector load(const void* address) {
#ifdef WKV6_EMULATE
    return *static_cast<const Vector*>(address);
#else
    return __ldg(static_cast<const Vector*>(address));
#endif
}

__device__ __forceinline__ uint4 load_8(const void* tensor, int64_t element) {
    return load<uint4>(static_cast<const uint16_t*>(tensor) + element);
}

__device__ __forceinline__ uint2 load_4(const void* tensor, int64_t element) {
    return load<uint2>(static_cast<const uint16_t*>(tensor) + element);
}

__device__ __forceinline__ void prefetch_8(const void* tensor, int64_t element) {
    prefetch(reinterpret_cast<const char*>(static_cast<const uint16_t*>(tensor) + element), 16);
}

__device__ __forceinline__ void unpack(float (&out)[8], const uint4& packed) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = bf16_low(words[i]);
        out[2 * i + 1] = bf16_high(words[i]);
    }
}

__device__ __forceinline__ void unpack(float* out, const uint2& packed) {
    out[0] = bf16_low(packed.x);
    out[1] = bf16_high(packed.x);
    out[2] = bf16_low(packed.y);
    out[3] = bf16_high(packed.y);
}

__device__ __forceinline__ void store_8(void* tensor, int64_t element, const float (&values)[8]) {
    uint4 packed;
    packed.x = pack_bf16(values[0], values[1]);
    packed.y = pack_bf16(values[2], values[3]);
    packed.z = pack_bf16(values[4], values[5]);
    packed.w = pack_bf16(values[6], values[7]);
    uint16_t* to = static_cast<uint16_t*>(tensor) + element;
#ifdef WKV6_EMULATE
    *reinterpret_cast<uint4*>(to) = packed;
#else  // one instruction, where the compiler, short of registers, would store word by word
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(packed.x),
                 "r"(packed.y), "r"(packed.z), "r"(packed.w)
                 : "memory");
#endif
}

__device__ __forceinline__ void load_floats(float (&out)[8], const float* from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 four = load<float4>(from + 4 * half);
        out[4 * half] = four.x;
        out[4 * half + 1] = four.y;
        out[4 * half + 2] = four.z;
        out[4 * half + 3] = four.w;
    }
}

// Four channels of the neighbour; 0 where there is none, whose load is of the own row and dropped.
__device__ __forceinline__ uint2 load_neighbour(const void* tensor, int64_t element, const Neighbour& neighbour) {
    uint2 packed = load_4(tensor, element + neighbour.offset);
    packed.x = neighbour.none ? 0u : packed.x;
    packed.y = neighbour.none ? 0u : packed.y;
    return packed;
}

// Directions of eight channels in a row: of the first four and of the others.
struct Directions {
    Direction first, second;
    __device__ __forceinline__ Directions(const LerpJob& job, int channel, bool opposite = false)
        : first(job, channel, opposite), second(job, channel + 4, opposite) {}
};

__device__ __forceinline__ void load_neighbours(float (&out)[8], const void* tensor, int64_t element,
                                                const LerpLayout& layout, const Place& place,
                                                const Directions& directions) {
    unpack(out, load_neighbour(tensor, element, Neighbour(layout, directions.first, place)));
    unpack(out + 4, load_neighbour(tensor, element + 4, Neighbour(layout, directions.second, place)));
}

// x and (neighbour - x) of eight channels.
__device__ __forceinline__ void load_difference(float (&x)[8], float (&difference)[8], const LerpParams& params,
                                                int64_t element, const Place& place, const Directions& directions) {
    unpack(x, load_8(params.x, element));
    load_neighbours(difference, params.x, element, params.layout, place, directions);
#pragma unroll
    for (int i = 0; i < 8; ++i) difference[i] -= x[i];
}

// Copies into shared memory that nothing waits for until it is used: as many bytes are under way as there is room for,
// where registers would hold few. Addresses of tensors are in bytes here.

__device__ __forceinline__ void copy_16(Address to, const void* tensor, int64_t offset) {
    const char* from = static_cast<const char*>(tensor) + offset;
#if WKV6_TENSOR_CORES  // L2 fetches whole lines: their other half is wanted soon
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
                 : "memory");
#else
    store_shared(to, load<uint4>(from));
#endif
}

// 8 bytes, or zeros.
__device__ __forceinline__ void copy_8_if(bool real, Address to, const void* tensor, int64_t offset) {
    const char* from = static_cast<const char*>(tensor) + offset;
#if WKV6_TENSOR_CORES
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(real ? 8 : 0)
                 : "memory");
#else
    store_shared(to, real ? load<uint2>(from) : uint2{0u, 0u});
#endif
}

// The same channels as load_neighbours.
__device__ __forceinline__ void copy_neighbours(Address to, const void* tensor, int64_t offset,
                                                const LerpLayout& layout, const Place& place,
                                                const Directions& directions) {
    const Neighbour first(layout, directions.first, place), second(layout, directions.second, place);
    copy_8_if(!first.none, to, tensor, offset + 2 * first.offset);
    copy_8_if(!second.none, to + 8, tensor, offset + 2 * second.offset + 8);
}

__device__ __forceinline__ void end_group_of_copies() {
#if WKV6_TENSOR_CORES
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// For all but the last `kLeft` groups of the lane's own copies.
template <int kLeft>
__device__ __forceinline__ void wait_for_groups() {
#if WKV6_TENSOR_CORES
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// (neighbour - x) of eight channels, rounded to bf16.
__device__ __forceinline__ uint4 difference_of(const uint4& neighbour, const uint4& x) {
    constexpr uint32_t kMinusOne = 0xbf80bf80u;
    uint4 difference;
    difference.x = fma_bf16(x.x, kMinusOne, neighbour.x);
    difference.y = fma_bf16(x.y, kMinusOne, neighbour.y);
    difference.z = fma_bf16(x.z, kMinusOne, neighbour.z);
    difference.w = fma_bf16(x.w, kMinusOne, neighbour.w);
    return difference;
}

}  // namespace lerp
