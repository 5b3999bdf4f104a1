// WKV6 for one head on the CPU, in float32 with explicit vectors. Included once per instruction set by wkv6_cpu.cpp,
// which defines WKV6_ISA (a namespace) and WKV6_VECTOR_BYTES (16, 32 or 64). No include guard, no templates and no
// standard headers in here: the compiler's target changes between inclusions.
//
// Notation of wkv6.h. Within a chunk of tokens every pair (t, s) is treated by itself: A[t, s] and the gradients use
// running products of decays, all <= 1, so nothing overflows and nothing is divided. Across chunks an N x N state
// carries the sum over earlier tokens, so that a long sequence costs O(T).
//
// The gradient of log d[m] is the sum over the pairs that straddle m of gA * r * k * D. It is summed directly (Horner's
// scheme from one side times a running product from the other). The usual difference of cumulative sums cancels.
//
// The direction backward in time is the same computation on reversed tokens: row pointers with a negative stride.

namespace WKV6_ISA {

typedef float vec __attribute__((vector_size(WKV6_VECTOR_BYTES), may_alias));
typedef int ivec __attribute__((vector_size(WKV6_VECTOR_BYTES), may_alias));
typedef float vec4 __attribute__((vector_size(16), may_alias));
typedef int ivec4 __attribute__((vector_size(16)));
constexpr int W = WKV6_VECTOR_BYTES / 4;

#if defined(__clang__)
#define WKV6_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define WKV6_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, ivec4{i, j, k, l})
#endif
#define WKV6_INLINE static inline __attribute__((always_inline))

WKV6_INLINE vec& at(float* p) { return *reinterpret_cast<vec*>(p); }
WKV6_INLINE const vec& at(const float* p) { return *reinterpret_cast<const vec*>(p); }

// The sums of the lanes of four vectors.
WKV6_INLINE void sums_of_lanes(const vec& a, const vec& b, const vec& c, const vec& d, vec4& sums) {
    vec4 x0{}, x1{}, x2{}, x3{};
    for (int n = 0; n < W / 4; ++n) {
        x0 += reinterpret_cast<const vec4*>(&a)[n];
        x1 += reinterpret_cast<const vec4*>(&b)[n];
        x2 += reinterpret_cast<const vec4*>(&c)[n];
        x3 += reinterpret_cast<const vec4*>(&d)[n];
    }
    const vec4 y0 = WKV6_SHUFFLE(x0, x1, 0, 4, 1, 5) + WKV6_SHUFFLE(x0, x1, 2, 6, 3, 7);
    const vec4 y1 = WKV6_SHUFFLE(x2, x3, 0, 4, 1, 5) + WKV6_SHUFFLE(x2, x3, 2, 6, 3, 7);
    sums = WKV6_SHUFFLE(y0, y1, 0, 1, 4, 5) + WKV6_SHUFFLE(y0, y1, 2, 3, 6, 7);
}

WKV6_INLINE float sum_of_lanes(const vec& x) {
    vec4 sums;
    sums_of_lanes(x, x, x, x, sums);
    return sums[0];
}

// exp(x) for x <= 88, relative error below 2e-7; 0 below -87 (results that are not normal numbers), NaN for NaN.
WKV6_INLINE void exponential(const vec& x, vec& result) {
    const vec y = x < -87.0f ? vec{} - 87.0f : x;
    const vec shifter = vec{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const vec n = (y * 1.44269504f + shifter) - shifter;
    const vec f = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = vec{} + 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    const ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    result = p * reinterpret_cast<const vec&>(bits);
    result = x < -87.0f ? vec{} : result;
}

// rows[T, Np]: raw w -> log decay -exp(w), and decay = exp(-exp(w)). Above 4.7 the decay is 0 in float32.
WKV6_INLINE void decays(int64_t count, const float* w, float* log_decay, float* decay) {
    for (int64_t i = 0; i < count; i += W) {
        const vec x = at(w + i);
        vec rate, d;
        exponential(x > 4.7f ? vec{} + 4.7f : x, rate);
        exponential(-rate, d);
        at(log_decay + i) = -rate;
        at(decay + i) = x > 4.7f ? vec{} : d;
    }
}

// C[rows, width] (+)= A[rows, depth] B[depth, width]; `rows` <= 6 is a literal, so that the accumulators are registers.
WKV6_INLINE void multiply_rows(const int rows, int depth, int width, const float* a, ptrdiff_t a_row,
                               ptrdiff_t a_column, const float* b, ptrdiff_t b_row, float* c, ptrdiff_t c_row,
                               bool add) {
    for (int j = 0; j < width; j += 2 * W) {
        const bool two = j + W < width;
        const int second = two ? W : 0;
        vec sum0[6], sum1[6];
        for (int i = 0; i < rows; ++i) sum0[i] = sum1[i] = vec{};
        const float* column = a;
        const float* row = b + j;
        for (int l = 0; l < depth; ++l, column += a_column, row += b_row) {
            const vec b0 = at(row), b1 = at(row + second);
#pragma GCC unroll 6
            for (int i = 0; i < rows; ++i) {
                const float x = column[i * a_row];
                sum0[i] += x * b0;
                sum1[i] += x * b1;
            }
        }
        for (int i = 0; i < rows; ++i) {
            float* out = c + i * c_row + j;
            at(out) = add ? at(out) + sum0[i] : sum0[i];
            if (two) at(out + W) = add ? at(out + W) + sum1[i] : sum1[i];
        }
    }
}

// C[rows, width] = A B, or C += A B. A has any strides; rows of B and C are contiguous, width is a multiple of W.
static __attribute__((noinline)) void multiply(int rows, int depth, int width, const float* a, ptrdiff_t a_row,
                                               ptrdiff_t a_column, const float* b, ptrdiff_t b_row, float* c,
                                               ptrdiff_t c_row, bool add) {
    int i = 0;
    for (; i + 6 <= rows; i += 6)
        multiply_rows(6, depth, width, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, add);
    for (; i + 2 <= rows; i += 2)
        multiply_rows(2, depth, width, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, add);
    if (i < rows) multiply_rows(1, depth, width, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, add);
}

// Tokens per block. The pairs of a block's tokens with a token s before the block share the decays from s to the block;
// the block's tokens differ by the decays inside it.
constexpr int BLOCK = 4;

// A[L, Lp] of one chunk in one direction: A(t, s) = a[(t * Lp + s) * sign] for all pairs of s before t. Row pointers
// stand at the direction's first token. keys: scratch [L, Np], k[s] times the decays between s and the current block.
WKV6_INLINE void attend(int L, int64_t Np, int64_t Lp, int sign, const float* r, const float* k, const float* d,
                        float* keys, float* a) {
    alignas(64) float rows[BLOCK * 128],
        total[128];  // r times the decays from the block's start; all decays of the block
    const ptrdiff_t step = sign * Np, a_row = sign * Lp;
    for (int begin = 0; begin < L; begin += BLOCK) {
        const int count = L - begin < BLOCK ? L - begin : BLOCK;
        if (count < BLOCK) std::memset(rows, 0, sizeof(rows));
        for (int64_t i = 0; i < Np; i += W) {
            vec product = vec{} + 1.0f;
            for (int j = 0; j < count; ++j) {
                const ptrdiff_t token = (begin + j) * step + i;
                at(rows + j * Np + i) = at(r + token) * product;
                product *= at(d + token);
            }
            at(total + i) = product;
        }
        for (int s = 0; s < begin; ++s) {
            vec sum0{}, sum1{}, sum2{}, sum3{};
            float* key = keys + s * Np;
            for (int64_t i = 0; i < Np; i += W) {
                const vec x = at(key + i);
                sum0 += x * at(rows + i);
                sum1 += x * at(rows + Np + i);
                sum2 += x * at(rows + 2 * Np + i);
                sum3 += x * at(rows + 3 * Np + i);
                at(key + i) = x * at(total + i);
            }
            vec4 sums;
            sums_of_lanes(sum0, sum1, sum2, sum3, sums);
            for (int j = 0; j < count; ++j) a[(begin + j) * a_row + s * sign] = sums[j];
        }
        for (int j = 1; j < count; ++j) {  // pairs inside the block, with rows as r[t] times the decays after s
            std::memcpy(rows, r + (begin + j) * step, sizeof(float) * Np);
            for (int s = begin + j - 1; s >= begin; --s) {
                vec sum{};
                for (int64_t i = 0; i < Np; i += W) {
                    const vec x = at(rows + i);
                    sum += x * at(k + s * step + i);
                    at(rows + i) = x * at(d + s * step + i);
                }
                a[(begin + j) * a_row + s * sign] = sum_of_lanes(sum);
            }
        }
        for (int64_t i = 0; i < Np; i += W) {
            vec product = vec{} + 1.0f;
            for (int s = begin + count - 1; s >= begin; --s) {
                at(keys + s * Np + i) = at(k + s * step + i) * product;
                product *= at(d + s * step + i);
            }
        }
    }
}

// A[L, Lp] of one chunk, both directions and the diagonal. r, k, d: [L, Np]; u: [Np]; keys: scratch [L, Np].
static __attribute__((noinline)) void attention(int L, int64_t Np, int64_t Lp, const float* r, const float* k,
                                                const float* d, const float* u, float* keys, float* A) {
    const ptrdiff_t last = (L - 1) * Np;
    attend(L, Np, Lp, 1, r, k, d, keys, A);
    attend(L, Np, Lp, -1, r + last, k + last, d + last, keys, A + (L - 1) * Lp + (L - 1));
    for (int t = 0; t < L; ++t) {
        vec diagonal{};
        for (int64_t i = 0; i < Np; i += W) diagonal += at(r + t * Np + i) * at(k + t * Np + i) * at(u + i);
        A[t * Lp + t] = sum_of_lanes(diagonal);
    }
}

// The pairs (t, s) of a block's tokens t0, ..., t0 + rows - 1 (`rows` is a literal) with each other and with all tokens
// s before the block, for W channels. between[s]: the decays between s and the block; taken on to the next block.
WKV6_INLINE void pair_block(const int rows, int t0, ptrdiff_t step, ptrdiff_t g_step, const float* r, const float* k,
                            const float* d, const float* g, float* gr, float* gk, float* gl, float* between) {
    const ptrdiff_t next = g_step > 0 ? 1 : -1;  // from g(t, s) to g(t, s + 1)
    const float* gt[BLOCK];
    vec right[BLOCK];  // r times the decays from the block's start
    vec left[BLOCK];   // sum over s of g k[s] times the decays from s to the block
    vec total = vec{} + 1.0f;
    for (int j = 0; j < rows; ++j) {
        gt[j] = g + (t0 + j) * g_step;
        right[j] = at(r + (t0 + j) * step) * total;
        left[j] = vec{};
        total *= at(d + (t0 + j) * step);
    }
    vec passed{};  // sum over s' < s of the gradient of k[s'] times k[s'], without the decays from s on
    for (int s = 0; s < t0; ++s) {
        const vec decays = at(between + s * W), key = at(k + s * step), decayed_key = key * decays;
        vec gradient{};
#pragma GCC unroll 4
        for (int j = 0; j < rows; ++j) {
            const float x = gt[j][s * next];
            gradient += x * right[j];
            left[j] += x * decayed_key;
        }
        at(gk + s * step) += decays * gradient;
        const vec decayed = at(d + s * step) * passed;
        at(gl + s * step) += decays * decayed;
        passed = decayed + key * gradient;
        at(between + s * W) = decays * total;
    }
    for (int j = 0; j < rows; ++j) {
        vec inside[BLOCK];
        vec product = at(r + (t0 + j) * step);
        for (int n = j - 1; n >= 0; --n) {
            const int s = t0 + n;
            inside[n] = product;
            at(gk + s * step) += gt[j][s * next] * product;
            product *= at(d + s * step);
        }
        for (int n = 0; n < j; ++n) {
            const int s = t0 + n;
            const vec decayed = at(d + s * step) * left[j];
            at(gl + s * step) += inside[n] * decayed;
            left[j] = decayed + gt[j][s * next] * at(k + s * step);
        }
        at(gr + (t0 + j) * step) += left[j];
    }
    vec product = vec{} + 1.0f;
    for (int s = t0 + rows - 1; s >= t0; --s) {
        at(between + s * W) = product;
        product *= at(d + s * step);
    }
}

// Gradients of one chunk's pairs in one direction (s before t). Row pointers stand at the direction's first token.
// g(t, s) = g[(t * Lp + s) * sign] is the gradient of A. Adds to gr, gk and gl (the gradient of log d).
// between: scratch [L, W].
static __attribute__((noinline)) void pair_gradients(int L, int64_t Np, int64_t Lp, int sign, const float* r,
                                                     const float* k, const float* d, const float* g, float* gr,
                                                     float* gk, float* gl, float* between) {
    const ptrdiff_t step = sign * Np, g_step = sign * Lp;
    for (int64_t i = 0; i < Np; i += W) {
        int t = 0;
        for (; t + BLOCK <= L; t += BLOCK)
            pair_block(BLOCK, t, step, g_step, r + i, k + i, d + i, g, gr + i, gk + i, gl + i, between);
        for (; t < L; ++t) pair_block(1, t, step, g_step, r + i, k + i, d + i, g, gr + i, gk + i, gl + i, between);
    }
}

// What one direction needs of a chunk whose first token the row pointers stand at:
// from_start[t] = decays of the chunk's tokens before t, to_end[t] = decays of those after t, total = decays of all.
// From sums of log decays, not running products: their rounding would add up over a long sequence.
static void chunk_decays(int L, int64_t Np, ptrdiff_t step, const float* log_decay, float* from_start, float* to_end,
                         float* total) {
    for (int64_t i = 0; i < Np; i += W) {
        vec sum{};
        for (int t = 0; t < L; ++t) {
            exponential(sum, at(from_start + t * Np + i));
            sum += at(log_decay + t * step + i);
        }
        exponential(sum, at(total + i));
        sum = vec{};
        for (int t = L - 1; t >= 0; --t) {
            exponential(sum, at(to_end + t * Np + i));
            sum += at(log_decay + t * step + i);
        }
    }
}

// out[t] = a[t] * b[t]; a has row stride `step`, b and out are [L, Np].
static void scale_rows(int L, int64_t Np, const float* a, ptrdiff_t step, const float* b, float* out) {
    for (int t = 0; t < L; ++t)
        for (int64_t i = 0; i < Np; i += W) at(out + t * Np + i) = at(a + t * step + i) * at(b + t * Np + i);
}

// state[i, :] = total[i] * state[i, :] + sum_t keys[t, i] values[t, :]; keys: [L, Np], values: row stride `step`.
static void advance_state(int L, int N, int64_t Np, const float* total, const float* keys, const float* values,
                          ptrdiff_t step, float* state) {
    for (int i = 0; i < N; ++i)
        for (int64_t j = 0; j < Np; j += W) at(state + i * Np + j) *= total[i];
    multiply(N, L, static_cast<int>(Np), keys, 1, Np, values, step, state, Np, true);
}

static void transpose(int rows, int columns, const float* in, ptrdiff_t in_row, float* out, ptrdiff_t out_row) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) out[j * out_row + i] = in[i * in_row + j];
}

// Add to y what earlier chunks contribute, in one direction. Row pointers stand at the direction's first token.
static void carry_forward(const Head& h, int sign, Carry& c) {
    const int64_t Np = h.Np;
    const ptrdiff_t step = sign * Np, first = sign > 0 ? 0 : (h.T - 1) * Np;
    std::memset(c.state, 0, sizeof(float) * Np * Np);
    for (int64_t begin = 0; begin < h.T;) {
        const int L = h.chunk_length(begin, sign);
        const ptrdiff_t start = first + begin * step;
        chunk_decays(L, Np, step, h.log_decay + start, c.from_start, c.to_end, c.total);
        if (begin > 0) {
            scale_rows(L, Np, h.r + start, step, c.from_start, c.rows);
            multiply(L, h.N, static_cast<int>(Np), c.rows, Np, 1, c.state, Np, h.y + start, step, true);
        }
        scale_rows(L, Np, h.k + start, step, c.to_end, c.rows);
        advance_state(L, h.N, Np, c.total, c.rows, h.v + start, step, c.state);
        begin += L;
    }
}

// Add to the gradients what pairs in different chunks contribute, in one direction.
static void carry_backward(const Head& h, int sign, Carry& c) {
    const int64_t Np = h.Np;
    const int N = h.N, width = static_cast<int>(Np);
    const ptrdiff_t step = sign * Np, first = sign > 0 ? 0 : (h.T - 1) * Np;
    const int chunks = h.chunks();

    // states[c]: sum over the tokens before chunk c of k, decayed to its start, times v.
    std::memset(c.states, 0, sizeof(float) * Np * Np);
    int64_t begin = 0;
    for (int n = 0; n + 1 < chunks; ++n) {
        const int L = h.chunk_length(begin, sign);
        const ptrdiff_t start = first + begin * step;
        float* next = c.states + (n + 1) * Np * Np;
        std::memcpy(next, next - Np * Np, sizeof(float) * Np * Np);
        chunk_decays(L, Np, step, h.log_decay + start, c.from_start, c.to_end, c.total);
        scale_rows(L, Np, h.k + start, step, c.to_end, c.rows);
        advance_state(L, N, Np, c.total, c.rows, h.v + start, step, next);
        begin += L;
    }

    // state: sum over the tokens after the chunk of r, decayed to its end, times gy.
    std::memset(c.state, 0, sizeof(float) * Np * Np);
    int64_t end = h.T;
    for (int n = chunks - 1; n >= 0; --n) {
        const int L = h.chunk_length_before(end, sign);
        const ptrdiff_t start = first + (end - L) * step;
        const float *r = h.r + start, *k = h.k + start, *d = h.decay + start, *earlier = c.states + n * Np * Np;
        float* gl = h.gl + start;
        chunk_decays(L, Np, step, h.log_decay + start, c.from_start, c.to_end, c.total);
        if (n > 0) {  // s in earlier chunks, t in this one
            transpose(N, N, earlier, Np, c.transposed, Np);
            multiply(L, N, width, h.gy + start, step, 1, c.transposed, Np, c.rows, Np, false);
            for (int64_t i = 0; i < Np; i += W) {
                vec right{};
                for (int t = L - 1; t >= 0; --t) {
                    const vec gradient = at(c.rows + t * Np + i), before = at(c.from_start + t * Np + i);
                    at(h.gr + start + t * step + i) += before * gradient;
                    right *= at(d + t * step + i);
                    at(gl + t * step + i) += before * right;
                    right += at(r + t * step + i) * gradient;
                }
            }
        }
        if (n + 1 < chunks) {  // s in this chunk or earlier, t in later ones
            transpose(N, N, c.state, Np, c.transposed, Np);
            multiply(L, N, width, h.v + start, step, 1, c.transposed, Np, c.rows, Np, false);
            std::memset(c.sums, 0, sizeof(float) * Np);
            for (int i = 0; i < N; ++i) {
                vec sum{};
                for (int64_t j = 0; j < Np; j += W) sum += at(earlier + i * Np + j) * at(c.state + i * Np + j);
                c.sums[i] = sum_of_lanes(sum);
            }
            for (int64_t i = 0; i < Np; i += W) {
                vec left = at(c.sums + i);
                for (int s = 0; s < L; ++s) {
                    const vec gradient = at(c.rows + s * Np + i), after = at(c.to_end + s * Np + i);
                    at(h.gk + start + s * step + i) += after * gradient;
                    left *= at(d + s * step + i);
                    at(gl + s * step + i) += after * left;
                    left += at(k + s * step + i) * gradient;
                }
            }
            scale_rows(L, Np, k, step, c.to_end, c.rows);
            multiply(L, N, width, c.rows, Np, 1, c.state, Np, h.gv + start, step, true);
        }
        scale_rows(L, Np, r, step, c.from_start, c.rows);
        advance_state(L, N, Np, c.total, c.rows, h.gy + start, step, c.state);
        end -= L;
    }
}

// y of one head from r, k, v, w, u (all float32 in h).
static void forward_head(const Head& h, Carry& c) {
    const int64_t Np = h.Np;
    decays(h.T * Np, h.w, h.log_decay, h.decay);
    for (int64_t begin = 0; begin < h.T;) {
        const int L = h.chunk_length(begin, 1);
        const ptrdiff_t start = begin * Np;
        attention(L, Np, h.Lp, h.r + start, h.k + start, h.decay + start, h.u, h.products, h.A);
        multiply(L, L, static_cast<int>(Np), h.A, h.Lp, 1, h.v + start, Np, h.y + start, Np, false);
        begin += L;
    }
    if (h.chunks() > 1) {
        carry_forward(h, 1, c);
        carry_forward(h, -1, c);
    }
}

// gr, gk, gv, gw, gu of one head. gw is written over gl.
static void backward_head(const Head& h, Carry& c) {
    const int64_t Np = h.Np, Lp = h.Lp, size = sizeof(float) * h.T * Np;
    const int N = h.N, width = static_cast<int>(Np);
    decays(h.T * Np, h.w, h.log_decay, h.decay);
    std::memset(h.gr, 0, size);
    std::memset(h.gk, 0, size);
    std::memset(h.gl, 0, size);
    std::memset(h.gu, 0, sizeof(float) * Np);
    for (int64_t begin = 0; begin < h.T;) {
        const int L = h.chunk_length(begin, 1);
        const ptrdiff_t start = begin * Np, last = (L - 1) * Np;
        const float *r = h.r + start, *k = h.k + start, *d = h.decay + start, *gy = h.gy + start;
        float *gr = h.gr + start, *gk = h.gk + start, *gl = h.gl + start;
        attention(L, Np, Lp, r, k, d, h.u, h.products, h.A);
        multiply(L, L, width, h.A, 1, Lp, gy, Np, h.gv + start, Np, false);
        // The gradient of A: gy v^T, with the transposed v in `products`.
        std::memset(h.products, 0, sizeof(float) * N * Lp);
        transpose(L, N, h.v + start, Np, h.products, Lp);
        multiply(L, N, static_cast<int>(Lp), gy, Np, 1, h.products, Lp, h.A, Lp, false);
        for (int t = 0; t < L; ++t) {
            const float g = h.A[t * Lp + t];
            for (int64_t i = t * Np, j = 0; j < Np; i += W, j += W) {
                const vec gru = g * at(r + i), gku = g * at(k + i);
                at(h.gu + j) += gru * at(k + i);
                at(gr + i) += gku * at(h.u + j);
                at(gk + i) += gru * at(h.u + j);
            }
        }
        const float* corner = h.A + (L - 1) * Lp + (L - 1);
        pair_gradients(L, Np, Lp, 1, r, k, d, h.A, gr, gk, gl, h.products);
        pair_gradients(L, Np, Lp, -1, r + last, k + last, d + last, corner, gr + last, gk + last, gl + last,
                       h.products);
        begin += L;
    }
    if (h.chunks() > 1) {
        carry_backward(h, 1, c);
        carry_backward(h, -1, c);
    }
    for (int64_t i = 0; i < h.T * Np; i += W) at(h.gl + i) *= at(h.log_decay + i);
}

#undef WKV6_INLINE
#undef WKV6_SHUFFLE

}  // namespace WKV6_ISA
