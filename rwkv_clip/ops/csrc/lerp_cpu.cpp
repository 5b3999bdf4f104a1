// Token shift with interpolation on the CPU, row by row: a row's differences to its neighbours are gathered once, into
// the first cache, and plain loops over all channels follow. The compiler makes vectors of these for several
// instruction sets; the loader takes the best one that the machine has.

#include "lerp_cpu.h"

#include <cstring>

#if !defined(LERP_CLONES) && defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define LERP_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#endif
#ifndef LERP_CLONES
#define LERP_CLONES
#endif
#define LERP_VECTORS _Pragma("omp simd")  // the iterations of a loop over channels touch different memory
#define LERP_INLINE static inline __attribute__((always_inline))

namespace {

// row[channels] = the neighbours of token `row` in x, zeros beyond the border. sign -1: the tokens whose neighbour it is.
LERP_INLINE void neighbours(const LerpLayout& at, int64_t row, int channels, int sign, const float* x, float* out) {
    const int token = static_cast<int>(row % at.tokens), column = token % at.width;
    const float* own = x + row * channels;
    if (token >= at.grid) {
        std::memcpy(out, own, sizeof(float) * channels);
        return;
    }
    const int64_t before = -static_cast<int64_t>(channels), above = before * at.width;
    const bool first = column == 0, last = column == at.width - 1;
    const bool top = token < at.width, bottom = token >= at.grid - at.width;
    const bool outside[4] = {sign > 0 ? first : last, sign > 0 ? last : first, sign > 0 ? top : bottom,
                             sign > 0 ? bottom : top};
    const int64_t offset[4] = {sign * before, -sign * before, sign * above, -sign * above};
    const int size = at.head_size / at.directions;
    for (int head = 0; head < channels; head += at.head_size) {
        for (int group = 0; group < at.directions; ++group) {
            float* to = out + head + group * size;
            if (outside[group]) {
                for (int i = 0; i < size; i += 4) std::memset(to + i, 0, 16);
            } else {
                const float* from = own + offset[group] + head + group * size;
                for (int i = 0; i < size; i += 4) std::memcpy(to + i, from + i, 16);
            }
        }
    }
}

LERP_INLINE void difference(const LerpCPUParams& p, int64_t row, float* out) {
    neighbours(p.layout, row, p.channels, 1, p.x, out);
    const float* x = p.x + row * p.channels;
    LERP_VECTORS
    for (int i = 0; i < p.channels; ++i) out[i] -= x[i];
}

}  // namespace

extern "C" LERP_CLONES void lerp_cpu_forward(const LerpCPUParams* params, int add_shares) {
    const LerpCPUParams& p = *params;
    const int channels = p.channels;
    alignas(64) float d[LERP_CPU_CHANNELS];
    for (int64_t row = p.begin; row < p.end; ++row) {
        difference(p, row, d);
        const float* x = p.x + row * channels;
        for (int n = 0; n < p.count; ++n) {
            const float* c = p.c + n * channels;
            float* y = p.y[n] + row * channels;
            if (add_shares) {
                LERP_VECTORS
                for (int i = 0; i < channels; ++i) y[i] = x[i] + d[i] * (c[i] + y[i]);
            } else {
                LERP_VECTORS
                for (int i = 0; i < channels; ++i) y[i] = x[i] + d[i] * c[i];
            }
        }
    }
}

extern "C" LERP_CLONES void lerp_cpu_backward(const LerpCPUParams* params) {
    const LerpCPUParams& p = *params;
    const int channels = p.channels;
    alignas(64) float d[LERP_CPU_CHANNELS];
    for (int64_t row = p.begin; row < p.end; ++row) {
        const int64_t at = row * channels;
        difference(p, row, d);
        float* base = p.new_base + at;
        float* extra = p.new_extra + at;
        const size_t bytes = sizeof(float) * channels;
        p.base ? std::memcpy(base, p.base + at, bytes) : std::memset(base, 0, bytes);
        p.extra ? std::memcpy(extra, p.extra + at, bytes) : std::memset(extra, 0, bytes);
        for (int n = 0; n < p.count; ++n) {
            const float* g = p.gy[n] + at;
            const float* c = p.c + n * channels;
            float* sums = p.sums + n * channels;
            if (p.shares[n]) {
                float* share = p.shares[n] + at;
                LERP_VECTORS
                for (int i = 0; i < channels; ++i) {
                    base[i] += g[i];
                    extra[i] += g[i] * (c[i] + share[i]);
                    share[i] = g[i] * d[i];
                    sums[i] += share[i];
                }
            } else {
                LERP_VECTORS
                for (int i = 0; i < channels; ++i) {
                    base[i] += g[i];
                    extra[i] += g[i] * c[i];
                    sums[i] += g[i] * d[i];
                }
            }
        }
    }
}

extern "C" LERP_CLONES void lerp_cpu_gather(const LerpCPUParams* params, float* result) {
    const LerpCPUParams& p = *params;
    alignas(64) float given[LERP_CPU_CHANNELS];
    for (int64_t row = p.begin; row < p.end; ++row) {
        const int64_t at = row * p.channels;
        neighbours(p.layout, row, p.channels, -1, p.new_extra, given);
        const float *base = p.new_base + at, *extra = p.new_extra + at;
        float* gx = result + at;
        LERP_VECTORS
        for (int i = 0; i < p.channels; ++i) gx[i] = base[i] - extra[i] + given[i];
    }
}
