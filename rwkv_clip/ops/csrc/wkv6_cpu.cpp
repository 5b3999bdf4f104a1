// WKV6 on the CPU: one head (b, h) is one task of an OpenMP loop. The kernel (wkv6_cpu_kernel.h) is compiled for
// several instruction sets and chosen at run time, so that one binary serves every machine of a cluster.
//
// Sources of the operator: RWKV-6 (arXiv 2404.05892), made bidirectional by Vision-RWKV (arXiv 2403.02308) and
// RWKV-CLIP (arXiv 2406.06973).

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>

#include "wkv6.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

// Tokens per chunk: sequences up to kOneChunk are a single one.
constexpr int kOneChunk = 128, kChunk = 64;

// One head in float32. Rows are padded with zeros to Np channels, a chunk's tokens to Lp.
struct Head {
    int T, N, C;
    int64_t Np, Lp;
    float *r, *k, *v, *w, *u, *gy;            // inputs [T, Np], u [Np]
    float *y, *gr, *gk, *gv, *gl, *gu;        // outputs
    float *log_decay, *decay, *products, *A;  // [T, Np] twice, [max(C, N), max(Lp, Np)], [C, Lp]

    int chunks() const { return (T + C - 1) / C; }

    // Length of the chunk that starts at `begin`, or ends at `end`; positions count tokens in the direction of `sign`.
    int chunk_length(int64_t begin, int sign) const { return sign > 0 ? after(begin) : before(T - begin); }
    int chunk_length_before(int64_t end, int sign) const { return sign > 0 ? before(end) : after(T - end); }

private:
    int after(int64_t start) const { return static_cast<int>(T - start < C ? T - start : C); }
    int before(int64_t end) const { return static_cast<int>(end - (end - 1) / C * C); }
};

// What passes between chunks; null for a single chunk.
struct Carry {
    float *state, *transposed, *states;                // [Np, Np] twice, [chunks, Np, Np]
    float *from_start, *to_end, *rows, *total, *sums;  // [C, Np] three times, [Np] twice
};

}  // namespace

#if defined(__x86_64__) && !defined(WKV6_CPU_BASELINE_ONLY)
#define WKV6_CPU_DISPATCH
#endif

#define WKV6_ISA baseline
#ifndef WKV6_VECTOR_BYTES  // a test compiles the baseline with each length
#define WKV6_VECTOR_BYTES 16
#endif
namespace {
#include "wkv6_cpu_kernel.h"
}
#undef WKV6_ISA
#undef WKV6_VECTOR_BYTES

#ifdef WKV6_CPU_DISPATCH

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define WKV6_ISA avx2
#define WKV6_VECTOR_BYTES 32
namespace {
#include "wkv6_cpu_kernel.h"
}
#undef WKV6_ISA
#undef WKV6_VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512vl")
#endif
#define WKV6_ISA avx512
#define WKV6_VECTOR_BYTES 64
namespace {
#include "wkv6_cpu_kernel.h"
}
#undef WKV6_ISA
#undef WKV6_VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // WKV6_CPU_DISPATCH

namespace {

struct Implementation {
    const char* name;
    int lanes;
    void (*forward)(const Head&, Carry&);
    void (*backward)(const Head&, Carry&);
};

const Implementation& implementation() {
    static const Implementation chosen = [] {
#ifdef WKV6_CPU_DISPATCH
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl"))
            return Implementation{"avx512", avx512::W, avx512::forward_head, avx512::backward_head};
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
            return Implementation{"avx2", avx2::W, avx2::forward_head, avx2::backward_head};
#endif
        return Implementation{"baseline", baseline::W, baseline::forward_head, baseline::backward_head};
    }();
    return chosen;
}

// Results below the smallest normal float count as 0 here: products of decays pass through that range all the time and
// some processors need a hundred cycles for each.
class FlushSubnormals {
#if defined(__x86_64__)
public:
    FlushSubnormals() : saved(_mm_getcsr()) { _mm_setcsr(saved | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(saved); }

private:
    unsigned saved;
#else
public:
    FlushSubnormals() {}
#endif
};

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float from_bfloat16(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }

uint16_t to_bfloat16(float value) {  // to nearest even
    const uint32_t bits = as_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_float16(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 0x3ff;
    if (exponent == 0) return as_float(sign | as_bits(static_cast<float>(mantissa) * 0x1p-24f));
    if (exponent == 31) return as_float(sign | 0x7f800000 | (mantissa << 13));
    return as_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t to_float16(float value) {  // to nearest even
    const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffff;
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above: infinity
    if (magnitude < 0x38800000) {                       // below 2^-14: subnormal; the sum rounds to a multiple of 2^-24
        return static_cast<uint16_t>(sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13));
}

int64_t bytes_per_element(WKV6Dtype dtype) { return dtype == WKV6_FLOAT32 ? 4 : 2; }

void load(WKV6Dtype dtype, const void* data, int64_t offset, int64_t row_stride, int T, int N, int64_t Np, float* out) {
    for (int t = 0; t < T; ++t, offset += row_stride, out += Np) {
        const char* row = static_cast<const char*>(data) + offset * bytes_per_element(dtype);
        const uint16_t* half = reinterpret_cast<const uint16_t*>(row);
        if (dtype == WKV6_FLOAT32) {
            std::memcpy(out, row, sizeof(float) * N);
        } else if (dtype == WKV6_BFLOAT16) {
            for (int i = 0; i < N; ++i) out[i] = from_bfloat16(half[i]);
        } else {
            for (int i = 0; i < N; ++i) out[i] = from_float16(half[i]);
        }
        for (int64_t i = N; i < Np; ++i) out[i] = 0;
    }
}

void store(WKV6Dtype dtype, const float* in, int64_t Np, void* data, int64_t offset, int64_t row_stride, int T, int N) {
    for (int t = 0; t < T; ++t, offset += row_stride, in += Np) {
        char* row = static_cast<char*>(data) + offset * bytes_per_element(dtype);
        uint16_t* half = reinterpret_cast<uint16_t*>(row);
        if (dtype == WKV6_FLOAT32) {
            std::memcpy(row, in, sizeof(float) * N);
        } else if (dtype == WKV6_BFLOAT16) {
            for (int i = 0; i < N; ++i) half[i] = to_bfloat16(in[i]);
        } else {
            for (int i = 0; i < N; ++i) half[i] = to_float16(in[i]);
        }
    }
}

// One thread's buffers for a head, in one aligned block.
class Scratch {
public:
    Head head{};
    Carry carry{};

    Scratch(const WKV6Params& p, bool backward) {
        const int64_t lanes = implementation().lanes;
        head.T = p.T;
        head.N = p.N;
        head.C = p.T <= kOneChunk ? p.T : kChunk;
        head.Np = (p.N + lanes - 1) / lanes * lanes;
        head.Lp = (head.C + lanes - 1) / lanes * lanes;
        assign(p, backward);  // counts
        block = static_cast<float*>(std::aligned_alloc(64, used * sizeof(float)));
        if (!block) throw std::bad_alloc();
        used = 0;
        assign(p, backward);
    }
    ~Scratch() { std::free(block); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

private:
    float* block = nullptr;
    int64_t used = 0;

    void take(float*& pointer, int64_t count) {
        pointer = block ? block + used : nullptr;
        used += (count + 15) / 16 * 16;
    }

    void assign(const WKV6Params& p, bool backward) {
        const int64_t Np = head.Np, rows = head.T * Np, chunk = head.C * Np, state = Np * Np;
        for (float** pointer : {&head.r, &head.k, &head.v, &head.w, &head.log_decay, &head.decay}) take(*pointer, rows);
        take(head.u, Np);
        take(head.products, (head.C > p.N ? head.C : p.N) * (head.Lp > Np ? head.Lp : Np));
        take(head.A, head.C * head.Lp);
        if (backward) {
            for (float** pointer : {&head.gy, &head.gr, &head.gk, &head.gv, &head.gl}) take(*pointer, rows);
            take(head.gu, Np);
        } else {
            take(head.y, rows);
        }
        if (head.chunks() == 1) return;
        take(carry.state, state);
        for (float** pointer : {&carry.from_start, &carry.to_end, &carry.rows}) take(*pointer, chunk);
        for (float** pointer : {&carry.total, &carry.sums}) take(*pointer, Np);
        if (backward) {
            take(carry.transposed, state);
            take(carry.states, head.chunks() * state);
        }
    }
};

void load_inputs(const WKV6Params& p, int b, int h, const Head& head) {
    const auto rows = [&](WKV6Dtype dtype, const WKV6Tensor& x, float* out) {
        load(dtype, x.data, b * x.stride_b + h * x.stride_h, x.stride_t, p.T, p.N, head.Np, out);
    };
    rows(p.dtype, p.r, head.r);
    rows(p.dtype, p.k, head.k);
    rows(p.dtype, p.v, head.v);
    rows(p.w_dtype, p.w, head.w);
    load(p.u_dtype, p.u, static_cast<int64_t>(h) * p.N, 0, 1, p.N, head.Np, head.u);
    if (head.gy) rows(p.dtype, p.gy, head.gy);
}

}  // namespace

extern "C" const char* wkv6_cpu_instruction_set() { return implementation().name; }

extern "C" size_t wkv6_cpu_backward_workspace_bytes(const WKV6Params* params) {
    return sizeof(float) * params->B * params->H * params->N;
}

extern "C" void wkv6_cpu_forward(const WKV6Params* params, int num_threads) {
    const WKV6Params& p = *params;
    const int64_t heads = static_cast<int64_t>(p.B) * p.H;
#pragma omp parallel num_threads(num_threads < heads ? num_threads : static_cast<int>(heads))
    {
        const FlushSubnormals guard;
        Scratch scratch(p, false);
        const Head& head = scratch.head;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < heads; ++n) {
            const int b = static_cast<int>(n / p.H), h = static_cast<int>(n % p.H);
            load_inputs(p, b, h, head);
            implementation().forward(head, scratch.carry);
            store(p.dtype, head.y, head.Np, p.y.data, b * p.y.stride_b + h * p.y.stride_h, p.y.stride_t, p.T, p.N);
        }
    }
}

extern "C" void wkv6_cpu_backward(const WKV6Params* params, int num_threads) {
    const WKV6Params& p = *params;
    const int64_t heads = static_cast<int64_t>(p.B) * p.H;
    float* partial = static_cast<float*>(p.workspace);  // gu of each (b, h)
#pragma omp parallel num_threads(num_threads < heads ? num_threads : static_cast<int>(heads))
    {
        const FlushSubnormals guard;
        Scratch scratch(p, true);
        const Head& head = scratch.head;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < heads; ++n) {
            const int b = static_cast<int>(n / p.H), h = static_cast<int>(n % p.H);
            load_inputs(p, b, h, head);
            implementation().backward(head, scratch.carry);
            const auto rows = [&](WKV6Dtype dtype, const float* in, const WKV6Tensor& x) {
                store(dtype, in, head.Np, x.data, b * x.stride_b + h * x.stride_h, x.stride_t, p.T, p.N);
            };
            rows(p.dtype, head.gr, p.gr);
            rows(p.dtype, head.gk, p.gk);
            rows(p.dtype, head.gv, p.gv);
            rows(p.w_dtype, head.gl, p.gw);
            std::memcpy(partial + n * p.N, head.gu, sizeof(float) * p.N);
        }
    }
    // Summed over b in order, so that the result does not depend on the threads.
    for (int64_t i = 0; i < static_cast<int64_t>(p.H) * p.N; ++i) {
        double sum = 0;
        for (int64_t b = 0; b < p.B; ++b) sum += partial[b * p.H * p.N + i];
        const float gu = static_cast<float>(sum);
        store(p.u_dtype, &gu, 1, p.gu, i, 0, 1, 1);
    }
}
