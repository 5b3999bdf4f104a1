// Runs the interpolation's CPU kernels on buffers of exactly the sizes that the interface states, for a build with the
// sanitizers, and compares each result with one that is looked up channel by channel. Prints "right".
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "lerp_cpu.h"

namespace {

using Buffer = std::unique_ptr<float[]>;  // no spare element, so that the sanitizer sees every access outside it

float first_value(int64_t i, int seed) { return 0.1f * static_cast<float>((i * 7919 + seed * 31) % 17 - 8); }

Buffer buffer(int64_t count, int seed) {
    Buffer data(new float[count]);
    for (int64_t i = 0; i < count; ++i) data[i] = first_value(i, seed);
    return data;
}

// The row of the neighbour of `row` for a channel; -1 beyond the border.
int64_t neighbour(const LerpLayout& at, int64_t row, int channel) {
    const int token = static_cast<int>(row % at.tokens), rows = at.grid / at.width;
    if (token >= at.grid) return row;
    const int group = channel % at.head_size / (at.head_size / at.directions);
    const int down[] = {0, 0, -1, 1}, right[] = {-1, 1, 0, 0};
    const int y = token / at.width + down[group], x = token % at.width + right[group];
    if (y < 0 || y >= rows || x < 0 || x >= at.width) return -1;
    return row - token + y * at.width + x;
}

bool near(float found, double exact) { return std::fabs(found - exact) <= 1e-4 * (1 + std::fabs(exact)); }

bool run(const LerpLayout& at, int samples, int channels, int count, bool with_shares) {
    const int64_t rows = static_cast<int64_t>(samples) * at.tokens, size = rows * channels;
    const Buffer x = buffer(size, 1), c = buffer(count * channels, 2), base = buffer(size, 3), extra = buffer(size, 4);
    const Buffer new_base = buffer(size, 5), new_extra = buffer(size, 6), gx = buffer(size, 7);
    const Buffer sums(new float[count * channels]());
    std::vector<Buffer> y, gy, shares;
    LerpCPUParams p{};
    p.layout = at, p.end = rows, p.channels = channels, p.count = count, p.x = x.get(), p.c = c.get();
    p.base = base.get(), p.extra = extra.get(), p.new_base = new_base.get(), p.new_extra = new_extra.get();
    p.sums = sums.get();
    for (int n = 0; n < count; ++n) {
        y.push_back(buffer(size, 8 + n)), shares.push_back(buffer(size, 8 + n)), gy.push_back(buffer(size, 20 + n));
        p.y[n] = y[n].get(), p.gy[n] = gy[n].get(), p.shares[n] = with_shares ? shares[n].get() : nullptr;
    }
    lerp_cpu_forward(&p, with_shares);
    lerp_cpu_backward(&p);
    lerp_cpu_gather(&p, gx.get());

    bool right = true;
    std::vector<double> exact_sums(count * channels), given(size);
    for (int64_t i = 0; i < size; ++i) {
        const int channel = static_cast<int>(i % channels);
        const int64_t from = neighbour(at, i / channels, channel);
        const double d = (from < 0 ? 0.0 : x[from * channels + channel]) - x[i];
        double at_x = base[i], at_d = extra[i];
        for (int n = 0; n < count; ++n) {
            const double before = with_shares ? first_value(i, 8 + n) : 0, g = gy[n][i];
            const double share = c[n * channels + channel] + before;
            right = right && near(y[n][i], x[i] + d * share) && (!with_shares || near(shares[n][i], g * d));
            at_x += g, at_d += g * share, exact_sums[n * channels + channel] += g * d;
        }
        right = right && near(new_base[i], at_x) && near(new_extra[i], at_d);
        given[i] += at_x - at_d;
        if (from >= 0) given[from * channels + channel] += at_d;
    }
    for (int64_t i = 0; i < size; ++i) right = right && near(gx[i], given[i]);
    for (int i = 0; i < count * channels; ++i) right = right && near(sums[i], exact_sums[i]);
    return right;
}

}  // namespace

int main() {
    // Tokens, of them in the grid, patches in a row, channels per head, directions.
    const LerpLayout layouts[] = {{12, 12, 4, 32, 4}, {13, 12, 3, 16, 4}, {5, 5, 1, 32, 4}, {1, 1, 1, 16, 4},
                                  {7, 7, 7, 8, 2},    {1, 1, 1, 32, 2}};
    for (const LerpLayout& layout : layouts)
        for (const int count : {1, 2, 5})
            for (const bool with_shares : {false, true})
                if (!run(layout, 3, 2 * layout.head_size, count, with_shares))
                    return std::printf("wrong: %d tokens, %d results\n", layout.tokens, count), 1;
    std::printf("right\n");
    return 0;
}
