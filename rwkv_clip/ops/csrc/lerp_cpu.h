// Interface of the interpolation's CPU kernels, free of torch headers. See ops/lerp.py for the mathematics.
//
// Tensors are float32 and contiguous, rows [rows, channels] the tokens of all samples, `begin` and `end` a range of
// them. Four channels in a row share a neighbour. `c` is [count, channels], as is `sums`, which is added to.
#pragma once

#include "lerp.h"

#define LERP_CPU_CHANNELS 4096  // at most

typedef struct {
    LerpLayout layout;
    int64_t begin, end;
    int32_t channels, count;  // count: of results, up to LERP_SHARES
    const float* x;
    const float* c;
    float* y[LERP_SHARES];  // results; with `shares` they hold these before
    const float* gy[LERP_SHARES];
    float* shares[LERP_SHARES];  // lerp_cpu_backward: read, and replaced by their gradients; null: none
    const float *base, *extra;   // lerp_cpu_backward: added to the results of these names; null: none
    float *new_base, *new_extra;
    float* sums;  // gradient of c
} LerpCPUParams;

#ifdef __cplusplus
extern "C" {
#endif

// y_i = x + (neighbour - x) * c_i, or, with `add_shares`, * (c_i + y_i).
void lerp_cpu_forward(const LerpCPUParams* params, int add_shares);
// new_base = base + sum of gy_i, and new_extra = extra + sum of gy_i * (c_i + shares_i), the gradient of neighbour - x.
void lerp_cpu_backward(const LerpCPUParams* params);
// gx = new_base - new_extra + what each token gets as a neighbour; gx may be new_base.
void lerp_cpu_gather(const LerpCPUParams* params, float* gx);

#ifdef __cplusplus
}
#endif
