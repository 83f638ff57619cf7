// Runs the kernels of src/tensorhub/cuda/kernels.cu on the CPU: each CUDA thread is a fiber, which goes on to the next barrier
// before another one runs. ORDER says which: what lacks a barrier gives another result in one order than in the other.

#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __constant__ static const
#define __device__ static inline
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static __attribute__((section("block_memory")))

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim;

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

template <typename Word>
static Word __ldg(const Word *at) {
    return *at;
}

static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}

static void __syncthreads();
extern char __start_block_memory[], __stop_block_memory[];  // all that is __shared__: nothing is known of it at first

#include KERNELS

enum { STACK_BYTES = 64 * 1024 };

struct Fiber {
    ucontext_t context;
    bool has_ended;
    unsigned barriers;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static char *stacks;
static void (*kernel)(const u64 *, void *, unsigned);
static const u64 *table;
static void *result;
static unsigned parts;  // thread blocks of one row

static void __syncthreads() {
    Fiber &mine = fibers[threadIdx.x];
    mine.barriers++;
    swapcontext(&mine.context, &scheduler);
}

static void run_fiber() {
    kernel(table, result, parts);
    fibers[threadIdx.x].has_ended = true;
}

// 0, or 1: not all threads of a block have come to the same number of barriers.
static int launch(unsigned blocks, unsigned threads, int order) {
    blockDim.x = threads;
    stacks = (char *)realloc(stacks, (size_t)threads * STACK_BYTES);
    fibers.resize(threads);
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        memset(__start_block_memory, 0xA5, __stop_block_memory - __start_block_memory);
        for (unsigned thread = 0; thread < threads; thread++) {
            Fiber &its = fibers[thread];
            its.has_ended = false;
            its.barriers = 0;
            getcontext(&its.context);
            its.context.uc_stack.ss_sp = stacks + (size_t)thread * STACK_BYTES;
            its.context.uc_stack.ss_size = STACK_BYTES;
            its.context.uc_link = &scheduler;
            makecontext(&its.context, run_fiber, 0);
        }
        for (bool is_running = true; is_running;) {
            is_running = false;
            for (unsigned number = 0; number < threads; number++) {
                threadIdx.x = order ? threads - 1 - number : number;
                Fiber &its = fibers[threadIdx.x];
                if (!its.has_ended) {
                    swapcontext(&scheduler, &its.context);
                    is_running = true;
                }
            }
            for (unsigned thread = 1; thread < threads; thread++)
                if (fibers[thread].barriers != fibers[0].barriers) return 1;
        }
    }
    return 0;
}

static int run(
    void (*which)(const u64 *, void *, unsigned), const u64 *rows, void *to, unsigned count, unsigned threads, int order,
    unsigned each = 1) {
    kernel = which, table = rows, result = to, parts = each;
    return launch(count * each, threads, order);
}

extern "C" int run_digest_chunks(const u64 *rows, void *to, unsigned count, unsigned threads, int order) {
    return run([](const u64 *a, void *b, unsigned) { digest_chunks(a, (u64 *)b); }, rows, to, count, threads, order);
}

extern "C" int run_pack_pieces(const u64 *rows, void *to, unsigned count, unsigned threads, int order) {
    return run([](const u64 *a, void *b, unsigned) { pack_pieces(a, (u8 *)b); }, rows, to, count, threads, order);
}

extern "C" int run_unpack_pieces(const u64 *rows, void *to, unsigned count, unsigned threads, int order) {
    return run([](const u64 *a, void *b, unsigned) { unpack_pieces(a, (u8 *)b); }, rows, to, count, threads, order);
}

extern "C" int run_gather_runs(const u64 *rows, void *to, unsigned count, unsigned threads, int order, unsigned each) {
    return run([](const u64 *a, void *b, unsigned c) { gather_runs(a, (u8 *)b, c); }, rows, to, count, threads, order, each);
}

extern "C" int run_scatter_runs(const u64 *rows, void *to, unsigned count, unsigned threads, int order, unsigned each) {
    return run([](const u64 *a, void *b, unsigned c) { scatter_runs(a, (u8 *)b, c); }, rows, to, count, threads, order, each);
}

// `row`: older, newer, units, firsts, places, differences.
extern "C" int run_list_changes(const u64 *row, void *counts, unsigned blocks, unsigned threads, int order, unsigned width) {
    kernel = [](const u64 *a, void *b, unsigned c) {
        list_changes((u64 *)a[0], (u64 *)a[1], a[2], c, (u32 *)b, (u32 *)a[3], (u32 *)a[4], (u8 *)a[5]);
    };
    table = row, result = counts, parts = width;
    return launch(blocks, threads, order);
}

// `row`: count, places, differences.
extern "C" int run_add_changes(const u64 *row, void *target, unsigned blocks, unsigned threads, int order, unsigned width) {
    kernel = [](const u64 *a, void *b, unsigned c) { add_changes((u8 *)b, c, (u32)a[0], (u32 *)a[1], (u8 *)a[2]); };
    table = row, result = target, parts = width;
    return launch(blocks, threads, order);
}
