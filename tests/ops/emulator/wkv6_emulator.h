// A CUDA thread block on the CPU, one fiber per lane, so that the kernels' own source runs without a GPU.
//
// Lanes run one at a time in a seeded random order between two collectives (barrier, shuffle, matrix product), which
// brings out a missing barrier as a wrong or NaN result. Shared memory starts as NaN for the same reason.
// Only what the WKV6 kernels use is here.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
struct Index3 {
    int x, y, z;
};

namespace emulator {

struct Slot {
    uint32_t words[8];
};

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    int warp_count = 0;   // warp collectives entered
    int block_count = 0;  // block barriers entered
};

struct Block {
    std::vector<Lane> lanes;
    std::vector<int> warp_arrivals;  // total entries into warp collectives, per warp
    int block_arrivals = 0;
    std::vector<Slot> slots[2];
    std::vector<uint32_t> shared;
    ucontext_t scheduler;
    std::function<void()> body;
    int current = 0;
};

inline Block* block = nullptr;
inline Index3 block_index{0, 0, 0};
inline Index3 block_size{0, 1, 1};
inline Index3 grid_size{0, 1, 1};
inline uint32_t random_state = 1;
// Bytes that a thread block may have; the environment's WKV6_SHARED_KB stands for a smaller device.
inline size_t shared_memory_limit() {
    const char* kilobytes = std::getenv("WKV6_SHARED_KB");
    return 1024 * static_cast<size_t>(kilobytes ? std::atoi(kilobytes) : 227);
}

inline uint32_t random_bits() {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

inline void yield() { swapcontext(&block->lanes[block->current].context, &block->scheduler); }

inline void warp_barrier() {
    Lane& lane = block->lanes[block->current];
    const int warp = block->current / 32;
    const int goal = 32 * ++lane.warp_count;
    ++block->warp_arrivals[warp];
    while (block->warp_arrivals[warp] < goal) yield();
}

inline void block_barrier() {
    Lane& lane = block->lanes[block->current];
    const int goal = block_size.x * ++lane.block_count;
    ++block->block_arrivals;
    while (block->block_arrivals < goal) yield();
}

// Publishes this lane's words and returns all 32 lanes' slots, valid until the lane's next collective.
inline const Slot* exchange(const uint32_t* words, int count) {
    const int parity = block->lanes[block->current].warp_count & 1;
    Slot& slot = block->slots[parity][block->current];
    for (int i = 0; i < count; ++i) slot.words[i] = words[i];
    const int first = block->current / 32 * 32;
    warp_barrier();
    return &block->slots[parity][first];
}

inline void lane_entry() {
    block->body();
    block->lanes[block->current].done = true;
    yield();
}

template <class Kernel, class Params>
void launch(Kernel kernel, int grid_x, int grid_y, int threads, size_t shared_bytes, const Params& params) {
    if (shared_bytes > shared_memory_limit()) {
        std::fprintf(stderr, "emulator: %zu bytes of shared memory asked for\n", shared_bytes);
        std::abort();
    }
    grid_size = {grid_x, grid_y, 1};
    block_size = {threads, 1, 1};
    Block state;
    state.lanes.resize(threads);
    for (Lane& lane : state.lanes) lane.stack.reset(new char[64 * 1024]);
    block = &state;
    for (int index = 0; index < grid_x * grid_y; ++index) {
        block_index = {index % grid_x, index / grid_x, 0};
        state.warp_arrivals.assign((threads + 31) / 32, 0);
        state.block_arrivals = 0;
        for (auto& slots : state.slots) slots.assign(threads, Slot{});
        state.shared.assign(shared_bytes / 4 + 4, 0xffffffffu);
        state.body = [&] { kernel(params); };
        for (Lane& lane : state.lanes) {
            lane.done = false;
            lane.warp_count = lane.block_count = 0;
            getcontext(&lane.context);
            lane.context.uc_stack.ss_sp = lane.stack.get();
            lane.context.uc_stack.ss_size = 64 * 1024;
            lane.context.uc_link = nullptr;
            makecontext(&lane.context, lane_entry, 0);
        }
        for (int left = threads; left > 0;) {
            const int start = random_bits() % threads;
            const int step =
                2 * (random_bits() % 16) + 1;  // odd: with a count that is a multiple of 32 every lane is met
            for (int i = 0; i < threads; ++i) {
                state.current = (start + i * (threads % step ? step : 1)) % threads;
                Lane& lane = state.lanes[state.current];
                if (lane.done) continue;
                swapcontext(&state.scheduler, &lane.context);
                if (lane.done) --left;
            }
        }
    }
    block = nullptr;
}

}  // namespace emulator

#define threadIdx (Index3{emulator::block->current, 0, 0})
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp() { emulator::warp_barrier(); }

inline uint32_t __shfl_sync(unsigned, uint32_t value, int source) {
    return emulator::exchange(&value, 1)[source & 31].words[0];
}

inline float __shfl_xor_sync(unsigned, float value, int mask) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = emulator::exchange(&bits, 1)[(emulator::block->current & 31) ^ mask].words[0];
    std::memcpy(&value, &bits, 4);
    return value;
}
