// Runs the CPU kernels on buffers of exactly the sizes that the interface states, for a build with the address and the
// undefined-behaviour sanitizer. Arguments: nothing. Exit status 0 when nothing was found and every result is finite.
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "wkv6.h"

namespace {

// A buffer on the heap with no spare byte, so that the sanitizer sees every access outside it.
std::unique_ptr<float[]> buffer(int64_t count, float scale) {
    std::unique_ptr<float[]> data(new float[count]);
    for (int64_t i = 0; i < count; ++i) data[i] = scale * static_cast<float>((i * 7919) % 17 - 8);
    return data;
}

bool run(int B, int T, int H, int N) {
    const int64_t count = static_cast<int64_t>(B) * T * H * N;
    std::vector<std::unique_ptr<float[]>> tensors;
    const auto tensor = [&](float scale) {
        tensors.push_back(buffer(count, scale));
        return WKV6Tensor{tensors.back().get(), static_cast<int64_t>(T) * H * N, static_cast<int64_t>(H) * N, N};
    };
    WKV6Params p{};
    p.B = B, p.T = T, p.H = H, p.N = N;
    p.r = tensor(0.1f), p.k = tensor(0.2f), p.v = tensor(0.3f), p.w = tensor(0.8f), p.gy = tensor(0.1f);
    p.y = tensor(0), p.gr = tensor(0), p.gk = tensor(0), p.gv = tensor(0), p.gw = tensor(0);
    const auto u = buffer(H * N, 0.1f), gu = buffer(H * N, 0);
    std::unique_ptr<char[]> workspace(new char[wkv6_cpu_backward_workspace_bytes(&p)]);
    p.u = u.get(), p.gu = gu.get(), p.workspace = workspace.get();
    wkv6_cpu_forward(&p, 2);
    wkv6_cpu_backward(&p, 2);
    bool finite = true;
    for (const auto& data : tensors)
        for (int64_t i = 0; i < count; ++i) finite = finite && std::isfinite(data[i]);
    for (int64_t i = 0; i < H * N; ++i) finite = finite && std::isfinite(gu[i]);
    return finite;
}

}  // namespace

int main() {
    for (const int T : {1, 2, 3, 4, 5, 15, 16, 17, 49, 127, 128, 129, 193})
        for (const int N : {4, 8, 20, 80, 128}) {
            if (T > 100 && N > 20) continue;
            if (!run(2, T, 2, N)) return std::printf("not finite: T = %d, N = %d\n", T, N), 1;
        }
    std::printf("%s\n", wkv6_cpu_instruction_set());
    return 0;
}
