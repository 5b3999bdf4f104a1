// Checks of every memory access of the emulated kernels.
//
// The kernels' sources are compiled with g++'s -fsanitize=thread, which calls __tsan_* before each access; these are
// here instead of the sanitizer's own. What ends the launch with an error:
//
//   shared memory   an access outside what was asked for; two accesses to a word, one of them a write, by lanes of
//                   different warps without __syncthreads between, or of one warp without __syncwarp or __syncthreads
//                   between (shuffles and matrix instructions do not order memory)
//   tensors         an access to anything but the elements of an input (reads) or of an output (writes); an output
//                   written twice, or, at the end, not at all
//   scratch memory  an access outside it; a read or a second write of what no earlier launch has written, nor the same
//                   lane, nor, before a __syncthreads, another lane of the same thread block
//
// Tensors are to lie in memory from wkv6_checks_allocate.
#include <vector>

#include "wkv6.h"
#include "wkv6_emulator.h"

namespace {

using emulator::block;
using emulator::fail;

// Thread blocks and their barriers, counted through all launches.
int64_t moment_of(int barrier) {
    return (static_cast<int64_t>(emulator::launches) << 40 |
            static_cast<int64_t>(emulator::block_index.y * emulator::grid_size.x + emulator::block_index.x) << 20) +
           barrier;
}

// Shared memory -----------------------------------------------------------------------------------------------------

// A lane's position between barriers: of the whole block (all blocks of all launches counted through) and of the warp.
struct Moment {
    int64_t block = -1;
    int warp = 0;
};

constexpr int kMaxWarps = 8;

struct Word {
    Moment written;
    int writer = -1;
    struct {
        Moment moment;
        uint32_t lanes = 0;
    } reads[kMaxWarps];  // by the lanes of each warp at its last moment
};

std::vector<Word> words;

void race(const char* kind, int lane, int other, size_t offset) {
    fail("shared memory: %s of byte %zu by lanes %d and %d without a barrier between", kind, offset, lane, other);
}

void access_word(size_t index, bool is_write) {
    Word& word = words[index];
    const int lane = block->current, warp = lane / 32;
    const emulator::Lane& state = block->lanes[lane];
    const Moment now{moment_of(state.block_count), state.sync_count};
    if (word.written.block == now.block && word.writer != lane &&
        (word.writer / 32 != warp || word.written.warp == now.warp))
        race(is_write ? "two writes" : "a write and a read", lane, word.writer, 4 * index);
    auto& own = word.reads[warp];
    const bool same = own.moment.block == now.block && own.moment.warp == now.warp;
    if (!is_write) {
        own.lanes = (same ? own.lanes : 0u) | 1u << lane % 32;
        own.moment = now;
        return;
    }
    for (int other = 0; other < kMaxWarps; ++other) {
        if (other != warp && word.reads[other].moment.block == now.block)
            race("a read and a write", lane, 32 * other + __builtin_ctz(word.reads[other].lanes), 4 * index);
    }
    if (const uint32_t others = same ? own.lanes & ~(1u << lane % 32) : 0u)
        race("a read and a write", lane, 32 * warp + __builtin_ctz(others), 4 * index);
    word.written = now;
    word.writer = lane;
}

// Tensors and scratch memory ----------------------------------------------------------------------------------------

enum Use : uint8_t { kForbidden, kInput, kOutput, kScratch };

struct Granule {  // two bytes
    Use use = kForbidden;
    uint32_t written = 0;  // launch
    int64_t moment = 0;    // of scratch memory: thread block and barrier of the write
    int writer = -1;
};

constexpr size_t kArenaBytes = size_t{1} << 26, kGuard = size_t{1} << 33, kGap = 4096;
char* arena = nullptr;  // guards before and after it have no other use
size_t arena_used = 0;
std::vector<Granule> granules;

bool in_guarded_arena(uintptr_t address) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(arena) - kGuard;
    return arena && address - first < 2 * kGuard + kArenaBytes;
}

void access_arena(uintptr_t address, size_t bytes, bool is_write) {
    const intptr_t offset = static_cast<intptr_t>(address) - reinterpret_cast<intptr_t>(arena);
    if (offset < 0 || offset + bytes > arena_used) fail("access far outside the tensors");
    for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) {
        Granule& granule = granules[i];
        const bool allowed = is_write ? granule.use == kOutput || granule.use == kScratch
                                      : granule.use == kInput || granule.use == kScratch;
        if (!allowed) fail("lane %d: %s outside the tensors", block->current, is_write ? "write" : "read");
        const uint32_t launch = emulator::launches;
        const int64_t now = moment_of(block->lanes[block->current].block_count);
        const bool is_own = granule.writer == block->current || granule.moment < now;
        const bool is_ordered = granule.written < launch || (is_own && granule.moment >= moment_of(0));
        if (!is_write && granule.use == kScratch && !(granule.written && is_ordered))
            fail("lane %d: read of scratch memory that no earlier launch has written", block->current);
        if (is_write && (granule.use == kOutput ? granule.written > 0 : !is_ordered))
            fail("lane %d: second write to the same place", block->current);
        if (is_write) granule = Granule{granule.use, launch, now, block->current};
    }
}

void prefetch(const char* address, uint32_t bytes) {
    if (in_guarded_arena(reinterpret_cast<uintptr_t>(address)))
        access_arena(reinterpret_cast<uintptr_t>(address), bytes, false);
}

void allow(const void* data, size_t bytes, Use use) {
    const size_t offset = static_cast<const char*>(data) - arena;
    for (size_t i = offset / 2; i < (offset + bytes) / 2; ++i) granules[i].use = use;
}

size_t size_of(WKV6Dtype dtype) { return dtype == WKV6_FLOAT32 ? 4 : 2; }

void allow(const WKV6Params& params, const WKV6Tensor& tensor, WKV6Dtype dtype, Use use) {
    const size_t size = size_of(dtype);
    for (int b = 0; b < params.B; ++b)
        for (int t = 0; t < params.T; ++t)
            for (int h = 0; h < params.H; ++h) {
                const int64_t row = b * tensor.stride_b + t * tensor.stride_t + h * tensor.stride_h;
                allow(static_cast<char*>(tensor.data) + row * size, params.N * size, use);
            }
}

void access(void* pointer, size_t bytes, bool is_write) {
    if (!block || block->failed) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(emulator::shared);
    if (offset < emulator::kSharedRange) {
        if (offset + bytes > block->shared_bytes) fail("access to byte %zu of shared memory", size_t(offset));
        for (size_t i = offset / 4; i < (offset + bytes + 3) / 4; ++i) access_word(i, is_write);
    } else if (in_guarded_arena(address)) {
        access_arena(address, bytes, is_write);
    }
}

}  // namespace

extern "C" {

// Forgets all tensors.
void wkv6_checks_reset() {
    if (!arena) {
        arena = emulator::reserve(2 * kGuard + kArenaBytes) + kGuard;
        granules.resize(kArenaBytes / 2);
        words.resize(256 * 1024 / 4);
        emulator::check_prefetch = prefetch;
    }
    arena_used = 0;
}

// Memory of NaN for a tensor, 256-byte aligned; null when there is no more.
void* wkv6_checks_allocate(size_t bytes) {
    const size_t start = (arena_used + kGap + 255) / 256 * 256;
    if (start + bytes + kGap > kArenaBytes) return nullptr;
    arena_used = start + bytes;
    std::memset(arena + start, 0xff, bytes);
    return arena + start;
}

// What the next call of wkv6_cuda_forward or wkv6_cuda_backward may read and write.
void wkv6_checks_begin(const WKV6Params* params, int backward, size_t workspace_bytes) {
    const WKV6Params& p = *params;
    std::fill(granules.begin(), granules.begin() + (arena_used + kGap) / 2, Granule{});
    for (const WKV6Tensor& x : {p.r, p.k, p.v}) allow(p, x, p.dtype, kInput);
    allow(p, p.w, p.w_dtype, kInput);
    allow(p.u, p.H * p.N * size_of(p.u_dtype), kInput);
    if (backward) {
        allow(p, p.gy, p.dtype, kInput);
        for (const WKV6Tensor& x : {p.gr, p.gk, p.gv}) allow(p, x, p.dtype, kOutput);
        allow(p, p.gw, p.w_dtype, kOutput);
        allow(p.gu, p.H * p.N * size_of(p.u_dtype), kOutput);
    } else {
        allow(p, p.y, p.dtype, kOutput);
    }
    allow(p.workspace, workspace_bytes, kScratch);
}

// Elements of outputs that were not written, after the call.
size_t wkv6_checks_unwritten() {
    size_t count = 0;
    for (size_t i = 0; i < arena_used / 2; ++i) count += granules[i].use == kOutput && !granules[i].written;
    return count;
}

#define WKV6_CHECK(name, bytes, is_write) \
    void __tsan_##name(void* address) { access(address, bytes, is_write); }
WKV6_CHECK(read1, 1, false)
WKV6_CHECK(read2, 2, false)
WKV6_CHECK(read4, 4, false)
WKV6_CHECK(read8, 8, false)
WKV6_CHECK(read16, 16, false)
WKV6_CHECK(write1, 1, true)
WKV6_CHECK(write2, 2, true)
WKV6_CHECK(write4, 4, true)
WKV6_CHECK(write8, 8, true)
WKV6_CHECK(write16, 16, true)
WKV6_CHECK(unaligned_read2, 2, false)
WKV6_CHECK(unaligned_read4, 4, false)
WKV6_CHECK(unaligned_read8, 8, false)
WKV6_CHECK(unaligned_read16, 16, false)
WKV6_CHECK(unaligned_write2, 2, true)
WKV6_CHECK(unaligned_write4, 4, true)
WKV6_CHECK(unaligned_write8, 8, true)
WKV6_CHECK(unaligned_write16, 16, true)
void __tsan_read_range(void* address, size_t bytes) { access(address, bytes, false); }
void __tsan_write_range(void* address, size_t bytes) { access(address, bytes, true); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_init() {}

}  // extern "C"
