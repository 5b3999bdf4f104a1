// What the C++ that tests/ops/ptx.py makes of PTX needs: register moves and the instructions that C++ has not.
#pragma once

#include <algorithm>

#include "wkv6_cuda_warp.cuh"

namespace {

// The same bits as another type of the same size; a predicate as itself.
template <class To, class From>
To as(From from) {
    if constexpr (std::is_same_v<To, bool>) {
        return from;
    } else {
        static_assert(sizeof(To) == sizeof(From), "registers of different widths");
        To to;
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
    T values[kCount];
};

template <class T>
void set(const T (&from)[4], T& a, T& b, T& c, T& d) {
    a = from[0], b = from[1], c = from[2], d = from[3];
}

// cvt.rn.bf16x2.f32 and the rounding of fma.rn.bf16x2: the first operand in the upper half.
inline uint32_t pack_bf16(float high, float low) {
    return wkv6::round_to_bf16(high) << 16 | wkv6::round_to_bf16(low);
}

// a * b + c rounded once to bf16: the sum in double is exact or odd in its last bits, so rounding it to float first
// matters only in the middle between two bf16 numbers.
inline float fma_once(float a, float b, float c) {
    const double exact = static_cast<double>(a) * b + c;
    const float rounded = static_cast<float>(exact);
    uint32_t bits = wkv6::float_to_bits(rounded);
    if ((bits & 0xffffu) == 0x8000u && rounded != exact && std::isfinite(rounded))
        bits += (std::fabs(exact) > std::fabs(static_cast<double>(rounded))) ? 1 : -1;
    return wkv6::bits_to_float(bits);
}

inline uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
    return pack_bf16(fma_once(wkv6::bf16_high(a), wkv6::bf16_high(b), wkv6::bf16_high(c)),
                     fma_once(wkv6::bf16_low(a), wkv6::bf16_low(b), wkv6::bf16_low(c)));
}

// bfi.b32: the low `count` bits of a at `position` of b.
inline uint32_t insert_bits(uint32_t a, uint32_t b, uint32_t position, uint32_t count) {
    const uint32_t mask = static_cast<uint32_t>(((uint64_t{1} << count) - 1) << position);
    return (b & ~mask) | (a << position & mask);
}

// prmt.b32: byte i is the byte of b:a whose number is in bits 4 i ... 4 i + 2 of the selector (no copies of signs).
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

// movmatrix.trans: lane 4g+q has elements (g, 2q) and (g, 2q+1) before, (2q, g) and (2q+1, g) after.
inline uint32_t transposed_matrix(uint32_t matrix) {
    const int lane = emulator::block->current & 31, from = 8 * (lane & 3) + (lane >> 3), shift = (lane >> 2 & 1) * 16;
    const uint32_t first = __shfl_sync(~0u, matrix, from), second = __shfl_sync(~0u, matrix, from + 4);
    return (first >> shift & 0xffffu) | second >> shift << 16;
}

}  // namespace
