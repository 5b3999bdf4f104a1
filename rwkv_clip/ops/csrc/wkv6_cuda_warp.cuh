// What the WKV6 kernels need of a warp: bf16 pairs, 8x8 matrix loads, the 16x8x16 matrix product.
//
// Every architecture-specific instruction is here. Below sm_80 the same functions are plain code (slow and correct);
// with WKV6_EMULATE defined the file compiles as C++ for tests/ops/emulator, which runs the kernels on the CPU.
#pragma once

#include <stdint.h>

#ifdef WKV6_EMULATE
#include "wkv6_emulator.h"
#define WKV6_SHARED_MEMORY(name) uint32_t* const name = emulator::block->shared.data()
#else
#include <cuda_runtime.h>
#define WKV6_SHARED_MEMORY(name)             \
    extern __shared__ uint4 name##_memory[]; \
    uint32_t* const name = reinterpret_cast<uint32_t*>(name##_memory)
#endif

#if !defined(WKV6_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(WKV6_PLAIN)
#define WKV6_TENSOR_CORES 1
#else
#define WKV6_TENSOR_CORES 0
#endif

namespace wkv6 {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

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
    const float magnitude = exponent ? ldexpf(1024.f + fraction, static_cast<int>(exponent) - 25) : ldexpf(fraction, -24);
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
    if (exponent < -13) exponent = -13;
    const uint32_t units = static_cast<uint32_t>(nearbyintf(ldexpf(magnitude, 11 - exponent)));  // of 2^(exponent - 11)
    return sign | (units + (static_cast<uint32_t>(exponent + 13) << 10));
#else
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
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

__device__ __forceinline__ void prefetch(const void* address) {
#ifndef WKV6_EMULATE
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
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
// Lane 4g+q receives elements (g, 2q) and (g, 2q+1) of matrix a in out[a].
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const uint32_t* matrices) {
#if WKV6_TENSOR_CORES
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(matrices)) + lane_id() * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
#else
    for (int a = 0; a < 4; ++a) out[a] = matrices[32 * a + lane_id()];
#endif
}

// The same with every matrix transposed: lane 4g+q receives elements (2q, g) and (2q+1, g).
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&out)[4], const uint32_t* matrices) {
#if WKV6_TENSOR_CORES
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(matrices)) + lane_id() * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
#else
    const int g = lane_id() >> 2, q = lane_id() & 3, shift = (g & 1) * 16;
    for (int a = 0; a < 4; ++a) {
        const uint32_t first = matrices[32 * a + 8 * q + (g >> 1)] >> shift;
        const uint32_t second = matrices[32 * a + 8 * q + 4 + (g >> 1)] >> shift;
        out[a] = (first & 0xffffu) | second << 16;
    }
#endif
}

// c[16x8] += a[16x16] b[16x8]; a, b in bf16, c in fp32, in the register layout of mma.m16n8k16.
__device__ __forceinline__ void multiply_add(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
#if WKV6_TENSOR_CORES
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const int g = lane_id() >> 2, q = lane_id() & 3;
#if defined(WKV6_EMULATE) && !defined(WKV6_PLAIN)
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const emulator::Slot* slots = emulator::exchange(words, 6);
#endif
    for (int k = 0; k < 4; ++k) {
        for (int half = 0; half < 2; ++half) {  // of the sixteen: elements 8 half + 2k and the next
#if defined(WKV6_EMULATE) && !defined(WKV6_PLAIN)
            const uint32_t top = slots[4 * g + k].words[2 * half], bottom = slots[4 * g + k].words[2 * half + 1];
            const uint32_t left = slots[8 * q + k].words[4 + half], right = slots[8 * q + 4 + k].words[4 + half];
#else
            const uint32_t top = __shfl_sync(kAllLanes, a[2 * half], 4 * g + k);
            const uint32_t bottom = __shfl_sync(kAllLanes, a[2 * half + 1], 4 * g + k);
            const uint32_t left = __shfl_sync(kAllLanes, half ? b1 : b0, 8 * q + k);
            const uint32_t right = __shfl_sync(kAllLanes, half ? b1 : b0, 8 * q + 4 + k);
#endif
            c[0] += bf16_low(top) * bf16_low(left) + bf16_high(top) * bf16_high(left);
            c[1] += bf16_low(top) * bf16_low(right) + bf16_high(top) * bf16_high(right);
            c[2] += bf16_low(bottom) * bf16_low(left) + bf16_high(bottom) * bf16_high(left);
            c[3] += bf16_low(bottom) * bf16_low(right) + bf16_high(bottom) * bf16_high(right);
        }
    }
#endif
}

}  // namespace wkv6
