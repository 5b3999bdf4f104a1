// Interface of the interpolation kernels, free of torch and CUDA headers. See ops/lerp.py for the mathematics.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define LERP_SHARES 5  // of the data-dependent interpolation: w, k, v, r, g
#define LERP_RANK 32   // of each share's product

// Where each token's neighbours are. Within a head of `head_size` channels each of `directions` equal groups takes one
// neighbour: the token before, after, and, of `width` patches in a row, above and below. Tokens from `grid` on (the
// class token) are their own neighbours.
typedef struct {
    int32_t tokens, grid, width, head_size, directions;
} LerpLayout;

// All tensors are contiguous. Rows are tokens of all samples: [rows, channels] of bfloat16, unless stated.
typedef struct {
    int32_t rows, channels;
    LerpLayout layout;
    int32_t count;        // of the plain interpolation: 1 or 2 results
    const void* x;
    const float* c;       // [count or LERP_SHARES, channels]
    const void* hidden;   // [rows, LERP_SHARES * LERP_RANK]
    const void* w2;       // [LERP_SHARES, LERP_RANK, channels]
    void* w2_packed;      // scratch memory of lerp_packed_bytes
    void* y[LERP_SHARES];
    const void* gy[LERP_SHARES];
    void* base;           // sum of the gradients at x itself; read by lerp_backward (may be null), written by
    void* extra;          // ddlerp_backward, as is the gradient of (neighbour - x)
    void* gx;
    void* g_hidden;
    void* g_w2;
    float* g_c;           // of ddlerp_backward
    float* c_parts;       // of lerp_backward [lerp_parts, count, channels]: g_c, to be added up by the caller
    float* w2_parts;      // with c_parts [ddlerp_parts, ...] scratch memory of ddlerp_backward
    void* stream;
} LerpParams;

#ifdef __cplusplus
extern "C" {
#endif

// Rows of c_parts and w2_parts. They depend on the sizes alone, so that sums come out the same on every run.
int lerp_parts(const LerpParams* params);
int ddlerp_parts(const LerpParams* params);
int lerp_packed_bytes(const LerpParams* params);

// Each returns a cudaError_t. At least one row; channels a multiple of 32; four channels in a row share a neighbour.
int lerp_forward(const LerpParams* params);
int lerp_backward(const LerpParams* params);
int ddlerp_forward(const LerpParams* params);
int ddlerp_backward(const LerpParams* params);
const char* lerp_error_string(int code);

#ifdef __cplusplus
}
#endif
