// A CUDA thread block on the CPU, one fiber per lane, so that the kernels' own source runs without a GPU.
//
// Lanes run one at a time in a seeded random order between two collectives (barrier, shuffle, matrix load or product),
// which brings out a missing barrier as a wrong or NaN result. Shared memory starts as NaN for the same reason. The
// warp's matrix instructions follow the fragment layouts of the PTX ISA. Lanes of a warp that meet in different
// collectives, lanes that leave while others wait, and misaligned vectors end the launch with an error.
// With wkv6_checks.cpp every access to memory is checked as well. Only what the WKV6 kernels use is here.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
struct Index3 {
    int x, y, z;
};

namespace emulator {

constexpr int kFailed = 999;  // what a launch returns that ended with an error; its text is in `message`
constexpr size_t kStackBytes = 64 * 1024;

struct Slot {
    uint32_t words[8];
};

// What the lanes of a warp execute together.
enum Collective { kNone, kSyncwarp, kShuffle, kLoadMatrices, kStoreMatrices, kProduct };

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    int warp_count = 0;   // warp collectives entered
    int sync_count = 0;   // of these, __syncwarp: the ones that order memory accesses
    int block_count = 0;  // block barriers entered
    std::vector<std::pair<uint32_t, const char*>> copies;  // asked for, not there yet
};

struct Warp {
    int arrivals = 0;  // total entries into collectives
    Collective kind = kNone;
};

struct Block {
    std::vector<Lane> lanes;
    std::vector<Warp> warps;
    int block_arrivals = 0;
    std::vector<Slot> slots[2];
    ucontext_t scheduler;
    std::function<void()> body;
    int current = 0;
    bool failed = false;
    bool progress = false;  // a collective was entered or a lane ended since the scheduler's last round
    size_t shared_bytes = 0;
};

inline Block* block = nullptr;
inline Index3 block_index{0, 0, 0};
inline Index3 block_size{0, 1, 1};
inline Index3 grid_size{0, 1, 1};
inline int launches = 0;
inline uint32_t random_state = 1;
inline char message[256];
inline char* shared = nullptr;  // the thread block's memory; after it kSharedRange of addresses that nothing else has
constexpr size_t kSharedRange = size_t{1} << 32;
inline void (*check_prefetch)(const char* address, uint32_t bytes) = nullptr;

// Bytes that a thread block may have; the environment's WKV6_SHARED_KB stands for a smaller device.
inline size_t shared_memory_limit() {
    const char* kilobytes = std::getenv("WKV6_SHARED_KB");
    return 1024 * static_cast<size_t>(kilobytes ? std::atoi(kilobytes) : 227);
}

inline uint32_t random_bits() {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

// Addresses for `bytes`; memory only where it is written.
inline char* reserve(size_t bytes) {
    void* range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) std::abort();
    return static_cast<char*>(range);
}

inline void yield() { swapcontext(&block->lanes[block->current].context, &block->scheduler); }

// Ends the launch. The lanes stay where they are.
inline void fail(const char* format, ...) {
    if (!block->failed) {
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(message, sizeof message, format, arguments);
        va_end(arguments);
    }
    block->failed = true;
    for (;;) yield();
}

inline void warp_barrier(Collective kind) {
    Lane& lane = block->lanes[block->current];
    Warp& warp = block->warps[block->current / 32];
    const int goal = 32 * ++lane.warp_count;
    if (warp.arrivals == goal - 32) warp.kind = kind;
    if (warp.kind != kind) fail("lane %d: collective %d where its warp is in %d", block->current, kind, warp.kind);
    ++warp.arrivals;
    block->progress = true;
    while (warp.arrivals < goal) yield();
    if (kind == kSyncwarp) ++lane.sync_count;
}

inline void block_barrier() {
    Lane& lane = block->lanes[block->current];
    const int goal = block_size.x * ++lane.block_count;
    ++block->block_arrivals;
    block->progress = true;
    while (block->block_arrivals < goal) yield();
}

// Publishes this lane's words and returns all 32 lanes' slots, valid until the lane's next collective.
inline const Slot* exchange(Collective kind, const uint32_t* words, int count) {
    const int parity = block->lanes[block->current].warp_count & 1;
    Slot& slot = block->slots[parity][block->current];
    for (int i = 0; i < count; ++i) slot.words[i] = words[i];
    const int first = block->current / 32 * 32;
    warp_barrier(kind);
    return &block->slots[parity][first];
}

inline void prefetch(const char* address, uint32_t bytes) {
    if (check_prefetch) check_prefetch(address, bytes);
}

template <class T>
T* checked(void* address) {
    if (reinterpret_cast<uintptr_t>(address) % alignof(T)) fail("access of %zu bytes at %p", sizeof(T), address);
    return static_cast<T*>(address);
}

// cp.async of 16 bytes: nothing is there before the wait.
inline void copy_async(uint32_t to, const char* from) { block->lanes[block->current].copies.emplace_back(to, from); }

inline void wait_for_copies() {
    auto& copies = block->lanes[block->current].copies;
    for (const auto& [to, from] : copies)
        *checked<uint4>(shared + to) = *checked<const uint4>(const_cast<char*>(from));
    copies.clear();
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: lane 8 a + i gives the address of row i of matrix a; lane 4g+q receives
// elements 2q and 2q + 1 of row g in register a, with .trans rows 2q and 2q + 1 of column g.
inline void load_matrices(uint32_t (&out)[4], uint32_t address, bool transposed) {
    const Slot* slots = exchange(kLoadMatrices, &address, 1);
    const int lane = block->current % 32;
    for (int a = 0; a < 4; ++a) {
        for (int element = 0; element < 2; ++element) {
            const int row = transposed ? 2 * (lane % 4) + element : lane / 4;
            const int column = transposed ? lane / 4 : 2 * (lane % 4) + element;
            char* from = shared + slots[8 * a + row].words[0];
            checked<uint4>(from);
            const uint32_t value = *reinterpret_cast<uint16_t*>(from + 2 * column);
            out[a] = element ? out[a] | value << 16 : value;
        }
    }
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16: the same the other way, each lane a word of row g.
inline void store_matrices(uint32_t address, const uint32_t (&in)[4]) {
    const Slot* slots = exchange(kStoreMatrices, &address, 1);
    const int lane = block->current % 32;
    for (int a = 0; a < 4; ++a) {
        char* to = shared + slots[8 * a + lane / 4].words[0];
        checked<uint4>(to);
        *reinterpret_cast<uint32_t*>(to + 4 * (lane % 4)) = in[a];
    }
}

inline float bf16(uint32_t pair, int element) {
    const uint32_t bits = element ? pair & 0xffff0000u : pair << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// mma.sync.aligned.m16n8k16 (kDepth 16) or m16n8k8 .row.col.f32.bf16.bf16.f32. With lane = 4g+q and half = 0, 1:
// A register `half` is row g + 8 half, columns 2q, 2q + 1; registers 2 and 3 the same 8 columns further.
// B register `half` is column g, rows 2q + 8 half, and the next. C and D: rows g (0, 1) and g + 8, columns 2q, 2q + 1.
inline void multiply_matrices(float* out, int depth, const uint32_t* a, uint32_t b0, uint32_t b1, const float* c) {
    uint32_t words[6] = {a[0], a[1], 0u, 0u, b0, b1};
    if (depth == 16) words[2] = a[2], words[3] = a[3];
    const Slot* slots = exchange(kProduct, words, 6);
    const int g = block->current % 32 / 4, q = block->current % 4;
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        const int row = i / 2, column = 2 * q + i % 2;
        sums[i] = c[i];
        for (int k = 0; k < depth; ++k) {
            const uint32_t left = slots[4 * g + k % 8 / 2].words[2 * (k / 8) + row];
            const uint32_t right = slots[4 * column + k % 8 / 2].words[4 + k / 8];
            sums[i] += bf16(left, k % 2) * bf16(right, k % 2);
        }
    }
    for (int i = 0; i < 4; ++i) out[i] = sums[i];
}

inline void lane_entry() {
    block->body();
    block->lanes[block->current].done = true;
    block->progress = true;
    yield();
}

// One round of all lanes in a random order; how many ended.
inline int run_round(Block& state, int threads) {
    const int start = random_bits() % threads;
    int step = 1 + random_bits() % 32;
    while (std::gcd(step, threads) > 1) ++step;  // every lane is met
    int ended = 0;
    for (int i = 0; i < threads && !state.failed; ++i) {
        state.current = (start + i * step) % threads;
        Lane& lane = state.lanes[state.current];
        if (lane.done) continue;
        swapcontext(&state.scheduler, &lane.context);
        ended += lane.done;
    }
    return ended;
}

// 0, or kFailed.
template <class Kernel, class Params>
int launch(Kernel kernel, int grid_x, int grid_y, int threads, size_t shared_bytes, const Params& params) {
    grid_size = {grid_x, grid_y, 1};
    block_size = {threads, 1, 1};
    ++launches;
    if (!shared) shared = reserve(kSharedRange);
    Block state;
    state.lanes.resize(threads);
    for (Lane& lane : state.lanes) lane.stack.reset(new char[kStackBytes]);
    state.shared_bytes = shared_bytes;
    block = &state;
    if (shared_bytes > shared_memory_limit()) {
        std::snprintf(message, sizeof message, "%zu bytes of shared memory asked for", shared_bytes);
        state.failed = true;
    }
    for (int index = 0; index < grid_x * grid_y && !state.failed; ++index) {
        block_index = {index % grid_x, index / grid_x, 0};
        state.warps.assign((threads + 31) / 32, Warp{});
        state.block_arrivals = 0;
        for (auto& slots : state.slots) slots.assign(threads, Slot{});
        std::memset(shared, 0xff, shared_bytes);
        state.body = [&] { kernel(params); };
        for (Lane& lane : state.lanes) {
            lane.done = false;
            lane.warp_count = lane.sync_count = lane.block_count = 0;
            lane.copies.clear();
            getcontext(&lane.context);
            lane.context.uc_stack.ss_sp = lane.stack.get();
            lane.context.uc_stack.ss_size = kStackBytes;
            lane.context.uc_link = nullptr;
            makecontext(&lane.context, lane_entry, 0);
        }
        for (int left = threads; left > 0 && !state.failed;) {
            state.progress = false;
            left -= run_round(state, threads);
            if (!state.progress && !state.failed) {
                std::snprintf(message, sizeof message, "%d lanes wait for others that do not come", left);
                state.failed = true;
            }
        }
    }
    block = nullptr;
    return state.failed ? kFailed : 0;
}

}  // namespace emulator

#define threadIdx (Index3{emulator::block->current, 0, 0})
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp() { emulator::warp_barrier(emulator::kSyncwarp); }

inline uint32_t __shfl_sync(unsigned, uint32_t value, int source) {
    return emulator::exchange(emulator::kShuffle, &value, 1)[source & 31].words[0];
}

inline float __shfl_xor_sync(unsigned, float value, int mask) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = emulator::exchange(emulator::kShuffle, &bits, 1)[(emulator::block->current & 31) ^ mask].words[0];
    std::memcpy(&value, &bits, 4);
    return value;
}
