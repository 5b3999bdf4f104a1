// What the WKV6 kernels need of a warp: bf16 pairs, 8x8 matrix loads, the 16x8x16 matrix product.
//
// Every architecture-specific instruction is here. Below sm_80 the same functions are plain code (slow and correct);
// with WKV6_EMULATE defined the file compiles as C++ for tests/ops/emulator, which runs the kernels on the CPU.
#pragma once

#include <stdint.h>

#ifdef WKV6_EMULATE
#include "wkv6_emulator.h"
#else
#include <cuda_runtime.h>
#endif

#if !defined(WKV6_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(WKV6_PLAIN)
#define WKV6_TENSOR_CORES 1
#else
#define WKV6_TENSOR_CORES 0
#endif

// The emulator's own functions for the warp's matrix instructions, instead of the plain code.
#if defined(WKV6_EMULATE) && !defined(WKV6_PLAIN)
#define WKV6_EMULATED_MATRICES 1
#else
#define WKV6_EMULATED_MATRICES 0
#endif

namespace wkv6 {

constexpr unsigned kAllLanes = 0xffffffffu;

// A lane's place in its warp: 4 g + q.
struct Lane {
    int id, g, q, warp;
    uint32_t straight, crossed;  // byte offsets of its row of four 8x8 matrices, in order and with 1 and 2 exchanged

    __device__ __forceinline__ Lane() {
        // A shuffle of what is already there: its result stays in a register, where the thread index would be read
        // again from its slow register at each use.
        const int thread =
            static_cast<int>(__shfl_sync(kAllLanes, static_cast<uint32_t>(threadIdx.x), threadIdx.x & 31));
        id = thread & 31;
        warp = thread >> 5;
        g = id >> 2;
        q = id & 3;
        straight = 16 * id;
        crossed = 16 * ((id & 7) | (id & 8) << 1 | (id & 16) >> 1);
    }
};

// The same in all lanes of a warp, and known to the compiler to be so.
__device__ __forceinline__ int warp_id() {
    return static_cast<int>(__shfl_sync(kAllLanes, static_cast<uint32_t>(threadIdx.x) >> 5, 0));
}

// Conversions -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bits_to_float(uint32_t bits) {
#ifdef WKV6_EMULATE
    float value;
    memcpy(&value, &bits, 4);
    return value;
#else
    return __uint_as_float(bits);
#endif
}

__device__ __forceinline__ uint32_t float_to_bits(float value) {
#ifdef WKV6_EMULATE
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
#else
    return __float_as_uint(value);
#endif
}

// Keeps a value from being computed again at its use.
__device__ __forceinline__ void keep(uint32_t& value) {
#ifndef WKV6_EMULATE
    asm volatile("" : "+r"(value));
#endif
}

__device__ __forceinline__ void keep(float& value) {
#ifndef WKV6_EMULATE
    asm volatile("" : "+f"(value));
#endif
}

// bf16 is the upper half of a float; a register holds two, the first in the low half.
__device__ __forceinline__ float bf16_low(uint32_t pair) { return bits_to_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint32_t round_to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#if WKV6_TENSOR_CORES
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return round_to_bf16(low) | round_to_bf16(high) << 16;
#endif
}

// a * b + c for each half, rounded once.
__device__ __forceinline__ uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
#if WKV6_TENSOR_CORES
    uint32_t pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    return pair;
#else
    return pack_bf16(bf16_low(a) * bf16_low(b) + bf16_low(c), bf16_high(a) * bf16_high(b) + bf16_high(c));
#endif
}

__device__ __forceinline__ uint32_t mul_bf16(uint32_t a, uint32_t b) {
    return fma_bf16(a, b, 0x80008000u);  // -0: keeps the sign of a zero product
}

__device__ __forceinline__ float half_to_float(uint32_t bits) {
#ifdef WKV6_EMULATE
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | fraction << 13);
    const float magnitude =
        exponent ? ldexpf(1024.f + fraction, static_cast<int>(exponent) - 25) : ldexpf(fraction, -24);
    return sign ? -magnitude : magnitude;
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
#endif
}

__device__ __forceinline__ uint32_t float_to_half(float value) {
#ifdef WKV6_EMULATE
    const uint32_t sign = float_to_bits(value) >> 16 & 0x8000u;
    const float magnitude = fabsf(value);
    if (!(magnitude == magnitude)) return 0x7fffu;
    if (magnitude >= 65520.f) return sign | 0x7c00u;
    int exponent;
    frexpf(magnitude, &exponent);
    if (exponent < -13 || magnitude == 0.f) exponent = -13;
    const uint32_t units = static_cast<uint32_t>(nearbyintf(ldexpf(magnitude, 11 - exponent)));  // of 2^(exponent - 11)
    return sign | (units + (static_cast<uint32_t>(exponent + 13) << 10));
#else
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

// The smaller one; NaN when either is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
#if WKV6_TENSOR_CORES
    float value;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
#else
    return a > b ? b : a;
#endif
}

// 2^x; 2^-inf = 0. Results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef WKV6_EMULATE
    const float value = exp2f(x);
    return value < 1.17549435e-38f ? 0.f : value;
#else
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
#endif
}

// Asks the L2 cache for `bytes` from address on, ahead of their use: in steps of 64, as DRAM is read. A bulk prefetch
// (sm_90) takes its operands from the whole warp: with an address per lane the compiler makes a loop of 32 rounds of it.
__device__ __forceinline__ void prefetch(const char* address, uint32_t bytes) {
#ifdef WKV6_EMULATE
    emulator::prefetch(address, bytes);
#else
    for (uint32_t i = 0; i < bytes; i += 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(address + i));
#endif
}

// Shared memory -----------------------------------------------------------------------------------------------------

using Address = uint32_t;  // of a byte in shared memory

#ifdef WKV6_EMULATE
__device__ __forceinline__ Address shared_memory() { return 0; }
template <class T>
__device__ __forceinline__ T* shared_pointer(Address address) {
    return emulator::checked<T>(emulator::shared + address);
}
#else
extern __shared__ uint4 wkv6_shared_memory[];
__device__ __forceinline__ Address shared_memory() {
    return static_cast<Address>(__cvta_generic_to_shared(wkv6_shared_memory));
}
template <class T>
__device__ __forceinline__ T* shared_pointer(Address address) {
    return reinterpret_cast<T*>(__cvta_shared_to_generic(address));
}
#endif

template <class T>
__device__ __forceinline__ T load_shared(Address address) {
    return *shared_pointer<const T>(address);
}

template <class T>
__device__ __forceinline__ void store_shared(Address address, const T& value) {
    *shared_pointer<T>(address) = value;
}

// Copies 16 bytes from global memory without waiting for them.
__device__ __forceinline__ void copy_async(Address to, const char* from) {
#if WKV6_TENSOR_CORES
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
                 : "memory");
#elif defined(WKV6_EMULATE)
    emulator::copy_async(to, from);
#else
    store_shared(to, *reinterpret_cast<const uint4*>(from));
#endif
}

// Waits for the lane's own copies; other lanes may read them after the next barrier.
__device__ __forceinline__ void wait_for_copies() {
#if WKV6_TENSOR_CORES
    asm volatile("cp.async.wait_all;" ::: "memory");
#elif defined(WKV6_EMULATE)
    emulator::wait_for_copies();
#endif
}

// Exchanges ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float from_lane(float value, int lane) {
    return bits_to_float(__shfl_sync(kAllLanes, float_to_bits(value), lane));
}

template <int kMask>
__device__ __forceinline__ float from_lane_xor(float value) {
    return __shfl_xor_sync(kAllLanes, value, kMask);
}

// Four 8x8 matrices of 16-bit elements, 128 bytes each, one after another in shared memory.
// Lane 4g+q holds elements (g, 2q) and (g, 2q+1) of matrix a in register a. kCrossed: matrices in the order 0, 2, 1, 3.
template <bool kCrossed>
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], Address matrices, const Lane& lane) {
#if WKV6_TENSOR_CORES
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(matrices + (kCrossed ? lane.crossed : lane.straight))
                 : "memory");
#elif WKV6_EMULATED_MATRICES
    emulator::load_matrices(out, matrices + (kCrossed ? lane.crossed : lane.straight), false);
#else
    for (int a = 0; a < 4; ++a) {
        out[a] = load_shared<uint32_t>(matrices + 128 * (kCrossed ? a >> 1 | (a & 1) << 1 : a) + 4 * lane.id);
    }
#endif
}

// The same with every matrix transposed: lane 4g+q receives elements (2q, g) and (2q+1, g).
template <bool kCrossed>
__device__ __forceinline__ void load_transposed_matrices(uint32_t (&out)[4], Address matrices, const Lane& lane) {
#if WKV6_TENSOR_CORES
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(matrices + (kCrossed ? lane.crossed : lane.straight))
                 : "memory");
#elif WKV6_EMULATED_MATRICES
    emulator::load_matrices(out, matrices + (kCrossed ? lane.crossed : lane.straight), true);
#else
    const int shift = (lane.g & 1) * 16;
    for (int a = 0; a < 4; ++a) {
        const Address word = matrices + 128 * (kCrossed ? a >> 1 | (a & 1) << 1 : a) + 32 * lane.q + 4 * (lane.g >> 1);
        const uint32_t first = load_shared<uint32_t>(word), second = load_shared<uint32_t>(word + 16);
        out[a] = (first >> shift & 0xffffu) | second >> shift << 16;
    }
#endif
}

__device__ __forceinline__ void store_matrices(Address matrices, const uint32_t (&in)[4], const Lane& lane) {
#if WKV6_TENSOR_CORES && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(matrices + lane.straight),
                 "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
                 : "memory");
#elif WKV6_EMULATED_MATRICES
    emulator::store_matrices(matrices + lane.straight, in);
#else
#pragma unroll
    for (int a = 0; a < 4; ++a) store_shared(matrices + 128 * a + 4 * lane.id, in[a]);
#endif
}

// An 8x8 matrix transposed in registers: shared memory is the busiest part of these kernels.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix, const Lane& lane) {
#if WKV6_TENSOR_CORES || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750 && !defined(WKV6_PLAIN))
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
#else
    const int from = 8 * lane.q + (lane.g >> 1), shift = 16 * (lane.g & 1);
    const uint32_t first = __shfl_sync(kAllLanes, matrix, from), second = __shfl_sync(kAllLanes, matrix, from + 4);
    return (first >> shift & 0xffffu) | second >> shift << 16;
#endif
}

// out[16x8] = a[16 x kDepth] b[kDepth x 8] + c[16x8]; a, b in bf16, in the register layouts of mma.m16n8k16 and
// mma.m16n8k8 (b1, a[2] and a[3] are not read then). out and c may be the same.
template <int kDepth>
__device__ __forceinline__ void multiply_matrices(float* out, const uint32_t* a, uint32_t b0, uint32_t b1,
                                                  const float* c, const Lane& lane) {
#if WKV6_TENSOR_CORES
    if constexpr (kDepth == 16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    } else {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
            : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
#elif WKV6_EMULATED_MATRICES
    emulator::multiply_matrices(out, kDepth, a, b0, b1, c);
#else
    float sums[4] = {c[0], c[1], c[2], c[3]};
    for (int k = 0; k < 4; ++k) {
        for (int half = 0; half < kDepth / 8; ++half) {  // elements 8 half + 2k and the next
            const uint32_t top = __shfl_sync(kAllLanes, a[2 * half], 4 * lane.g + k);
            const uint32_t bottom = __shfl_sync(kAllLanes, a[2 * half + 1], 4 * lane.g + k);
            const uint32_t left = __shfl_sync(kAllLanes, half ? b1 : b0, 8 * lane.q + k);
            const uint32_t right = __shfl_sync(kAllLanes, half ? b1 : b0, 8 * lane.q + 4 + k);
            sums[0] += bf16_low(top) * bf16_low(left) + bf16_high(top) * bf16_high(left);
            sums[1] += bf16_low(top) * bf16_low(right) + bf16_high(top) * bf16_high(right);
            sums[2] += bf16_low(bottom) * bf16_low(left) + bf16_high(bottom) * bf16_high(left);
            sums[3] += bf16_low(bottom) * bf16_low(right) + bf16_high(bottom) * bf16_high(right);
        }
    }
    for (int i = 0; i < 4; ++i) out[i] = sums[i];
#endif
}

}  // namespace wkv6
