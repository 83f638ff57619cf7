// The kernels: digests of chunks (XXH3-64, seed 0), packing and unpacking of tiny tensors, gathering and scattering of runs, and
// which words of two versions differ.
//
// Compiled by NVRTC, through cupy.RawModule, on first use; includes nothing. tests/cuda runs this very file on the CPU,
// thread by thread, between barriers in any order. So nothing here depends on warps running in step.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

typedef ulonglong2 Pair;  // what one load of 16 bytes gives: x is the lower address

// ------------------------------------------------------------------------------------------------------------ digests
//
// XXH3 (doc/xxhash_spec.md of github.com/Cyan4973/xxHash) cuts a long input into blocks of 16 stripes of 64 bytes. Eight
// accumulators take up each stripe by additions, and are scrambled behind each block. What a block adds to them does not
// depend on what they hold. So the threads of one thread block sum up as many blocks side by side as there are threads / 4,
// and 8 threads then fold these sums into the accumulators one after the other: an addition and a scramble a KiB. The fold
// is done by another warp each time, while the others load on.

#define THREADS_MAX 256
#define STRIPE_BYTES 64
#define BLOCK_STRIPES 16
#define BLOCK_BYTES (STRIPE_BYTES * BLOCK_STRIPES)
#define THREADS_PER_BLOCK 4  // each has 16 bytes of every stripe
#define SHORT_BYTES_MAX 240
#define SCRAMBLE_WORD 16  // of the secret
#define MERGE_BYTE 11
#define LAST_BYTE 121

#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL
#define PRIME_MX2 0x9FB21C651E98DF25ULL

__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL, 0x78e5c0cc4ee679cbULL,
    0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL, 0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL,
    0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL, 0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL,
    0x647378d9c97e9fc8ULL, 0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
};

__constant__ u64 START[8] = {
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
};

// The secret's 8 bytes from there, little-endian.
__device__ u64 secret_at(u32 byte) {
    u32 shift = 8 * (byte % 8);
    return shift ? SECRET[byte / 8] >> shift | SECRET[byte / 8 + 1] << (64 - shift) : SECRET[byte / 8];
}

// 8 bytes from any address, by aligned loads alone: both words have bytes of the input. (Nobody writes what is digested: so
// these are loads that the compiler may move past all others.)
__device__ u64 load(const u8 *at) {
    u32 shift = 8 * ((u64)at % 8);
    const u64 *words = (const u64 *)(at - (u64)at % 8);
    return shift ? __ldg(words) >> shift | __ldg(words + 1) << (64 - shift) : __ldg(words);
}

__device__ u64 load_few(const u8 *at, u32 count) {
    u64 found = 0;
    for (u32 byte = 0; byte < count; byte++) found |= (u64)at[byte] << (8 * byte);
    return found;
}

__device__ u64 fold_product(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

__device__ u64 avalanche(u64 x) {
    x = (x ^ x >> 37) * PRIME_MX1;
    return x ^ x >> 32;
}

__device__ u64 avalanche_xxh64(u64 x) {
    x = (x ^ x >> 33) * PRIME64_2;
    x = (x ^ x >> 29) * PRIME64_3;
    return x ^ x >> 32;
}

__device__ u64 rotated(u64 x, u32 by) { return x << by | x >> (64 - by); }

__device__ u64 swapped(u64 x) {
    u64 found = 0;
    for (u32 byte = 0; byte < 8; byte++) found |= (x >> (8 * byte) & 255) << (56 - 8 * byte);
    return found;
}

__device__ u64 mixed(const u8 *at, u32 secret) {
    return fold_product(load(at) ^ secret_at(secret), load(at + 8) ^ secret_at(secret + 8));
}

// Of SHORT_BYTES_MAX bytes at most, by one thread.
__device__ u64 digest_short(const u8 *input, u32 nbytes) {
    if (nbytes == 0) return avalanche_xxh64(SECRET[7] ^ SECRET[8]);
    if (nbytes <= 3) {
        u32 all = (u32)input[nbytes - 1] | nbytes << 8 | (u32)input[0] << 16 | (u32)input[nbytes >> 1] << 24;
        return avalanche_xxh64((u64)((u32)SECRET[0] ^ (u32)(SECRET[0] >> 32)) ^ all);
    }
    if (nbytes <= 8) {
        u64 x = SECRET[1] ^ SECRET[2] ^ (load_few(input + nbytes - 4, 4) | load_few(input, 4) << 32);
        x ^= rotated(x, 49) ^ rotated(x, 24);
        x *= PRIME_MX2;
        x ^= (x >> 35) + nbytes;
        x *= PRIME_MX2;
        return x ^ x >> 28;
    }
    if (nbytes <= 16) {
        u64 low = SECRET[3] ^ SECRET[4] ^ load(input), high = SECRET[5] ^ SECRET[6] ^ load(input + nbytes - 8);
        return avalanche(nbytes + swapped(low) + high + fold_product(low, high));
    }
    u64 sum = nbytes * PRIME64_1;
    if (nbytes <= 128) {
        for (u32 at = 0; at <= (nbytes - 1) / 32; at++)
            sum += mixed(input + 16 * at, 32 * at) + mixed(input + nbytes - 16 * at - 16, 32 * at + 16);
        return avalanche(sum);
    }
    for (u32 at = 0; at < 8; at++) sum += mixed(input + 16 * at, 16 * at);
    sum = avalanche(sum);
    for (u32 at = 8; at < nbytes / 16; at++) sum += mixed(input + 16 * at, 16 * (at - 8) + 3);
    return avalanche(sum + mixed(input + nbytes - 16, 119));
}

__device__ u64 product(u64 data, u64 secret) {
    u64 key = data ^ secret;
    return (key & 0xffffffffULL) * (key >> 32);
}

// What a block adds to two neighbouring accumulators, whose bytes of its first stripe are at `at`, of that alignment.
template <int ALIGNMENT>
__device__ Pair sum_block(const u8 *at, const u64 *secret) {
    Pair data[BLOCK_STRIPES], sum = {0, 0};
    const u32 shift = 8 * ((u64)at % 8);  // of each stripe, and not 0 where it is used
#pragma unroll
    for (u32 stripe = 0; stripe < BLOCK_STRIPES; stripe++) {  // all loads are on their way before the first is needed
        const u8 *its = at + stripe * STRIPE_BYTES;
        if (ALIGNMENT == 16) {
            data[stripe] = __ldg((const Pair *)its);
        } else if (ALIGNMENT == 8) {
            data[stripe].x = __ldg((const u64 *)its);
            data[stripe].y = __ldg((const u64 *)its + 1);
        } else {
            const u64 *words = (const u64 *)(its - shift / 8);
            const u64 middle = __ldg(words + 1);
            data[stripe].x = __ldg(words) >> shift | middle << (64 - shift);
            data[stripe].y = middle >> shift | __ldg(words + 2) << (64 - shift);
        }
    }
#pragma unroll
    for (u32 stripe = 0; stripe < BLOCK_STRIPES; stripe++) {
        sum.x += product(data[stripe].x, secret[stripe]) + data[stripe].y;
        sum.y += product(data[stripe].y, secret[stripe + 1]) + data[stripe].x;
    }
    return sum;
}

__device__ u64 scrambled(u64 x, u32 lane) { return (x ^ x >> 47 ^ SECRET[SCRAMBLE_WORD + lane]) * PRIME32_1; }

// digests[i] = XXH3-64 of chunks[2 * i + 1] bytes at the address chunks[2 * i]. One thread block for each chunk, of a
// multiple of 32 and at most THREADS_MAX threads.
extern "C" __global__ void __launch_bounds__(THREADS_MAX) digest_chunks(const u64 *chunks, u64 *digests) {
    __shared__ u64 sums[2][THREADS_MAX / THREADS_PER_BLOCK][8];
    __shared__ u64 accumulators[8];
    __shared__ u64 secret[24];
    const u8 *input = (const u8 *)chunks[2 * (u64)blockIdx.x];
    const u64 nbytes = chunks[2 * (u64)blockIdx.x + 1];
    const u32 thread = threadIdx.x;
    if (nbytes <= SHORT_BYTES_MAX) {
        if (thread == 0) digests[blockIdx.x] = digest_short(input, (u32)nbytes);
        return;
    }
    if (thread < 8) accumulators[thread] = START[thread];
    if (thread < 24) secret[thread] = SECRET[thread];
    __syncthreads();
    const u64 blocks = (nbytes - 1) / BLOCK_BYTES;
    const u32 tile = blockDim.x / THREADS_PER_BLOCK, mine = thread / THREADS_PER_BLOCK, pair = thread % THREADS_PER_BLOCK;
    const u32 alignment = (u64)input % 16 == 0 ? 16 : (u64)input % 8 == 0 ? 8 : 1;
    u32 half = 0, turn = 0;
    for (u64 first = 0; first < blocks; first += tile) {
        if (first + mine < blocks) {
            const u8 *at = input + (first + mine) * BLOCK_BYTES + 16 * pair;
            const u64 *words = secret + 2 * pair;
            Pair sum = alignment == 16 ? sum_block<16>(at, words) : alignment == 8 ? sum_block<8>(at, words) : sum_block<1>(at, words);
            sums[half][mine][2 * pair] = sum.x;
            sums[half][mine][2 * pair + 1] = sum.y;
        }
        __syncthreads();  // the last fold is over, too: its warp has come here
        if (thread / 32 == turn && thread % 32 < 8) {
            const u32 lane = thread % 32, count = blocks - first < tile ? (u32)(blocks - first) : tile;
            u64 x = accumulators[lane];
#pragma unroll 8
            for (u32 block = 0; block < count; block++) x = scrambled(x + sums[half][block][lane], lane);
            accumulators[lane] = x;
        }
        half ^= 1;
        turn = turn + 1 == blockDim.x / 32 ? 0 : turn + 1;
    }
    __syncthreads();
    if (thread < 8) {  // the stripes behind the last whole block, and the last 64 bytes
        u64 x = accumulators[thread];
        const u32 other = 8 * (thread ^ 1), own = 8 * thread;
        const u8 *at = input + blocks * BLOCK_BYTES;
        for (u32 stripe = 0; stripe < (nbytes - 1 - blocks * BLOCK_BYTES) / STRIPE_BYTES; stripe++, at += STRIPE_BYTES)
            x += product(load(at + own), secret[stripe + thread]) + load(at + other);
        at = input + nbytes - STRIPE_BYTES;
        accumulators[thread] = x + product(load(at + own), secret_at(LAST_BYTE + own)) + load(at + other);
    }
    __syncthreads();
    if (thread == 0) {
        u64 sum = nbytes * PRIME64_1;
        for (u32 lane = 0; lane < 8; lane += 2)
            sum += fold_product(
                accumulators[lane] ^ secret_at(MERGE_BYTE + 8 * lane),
                accumulators[lane + 1] ^ secret_at(MERGE_BYTE + 8 * lane + 8));
        digests[blockIdx.x] = avalanche(sum);
    }
}

// ------------------------------------------------------------------------------------------------------------- packing
//
// A row of `pieces` is (a tensor's address, offset in the region, bytes); one thread block copies one row. Whoever makes
// the table cuts large tensors into several rows.

template <typename Word>
__device__ void copy_words(const u8 *from, u8 *to, u64 nbytes) {
    const u64 words = nbytes / sizeof(Word), step = blockDim.x;
    const Word *source = (const Word *)from;
    Word *target = (Word *)to;
    u64 at = threadIdx.x;
    for (; at + 3 * step < words; at += 4 * step) {  // four loads on their way at a time
        Word a = source[at], b = source[at + step], c = source[at + 2 * step], d = source[at + 3 * step];
        target[at] = a;
        target[at + step] = b;
        target[at + 2 * step] = c;
        target[at + 3 * step] = d;
    }
    for (; at < words; at += step) target[at] = source[at];
    for (u64 byte = words * sizeof(Word) + threadIdx.x; byte < nbytes; byte += step) to[byte] = from[byte];
}

__device__ void copy_bytes(const u8 *from, u8 *to, u64 nbytes) {
    const u64 both = (u64)from | (u64)to;
    if (both % 16 == 0)
        copy_words<Pair>(from, to, nbytes);
    else if (both % 4 == 0)
        copy_words<u32>(from, to, nbytes);
    else if (both % 2 == 0)
        copy_words<unsigned short>(from, to, nbytes);
    else
        copy_words<u8>(from, to, nbytes);
}

extern "C" __global__ void __launch_bounds__(THREADS_MAX) pack_pieces(const u64 *pieces, u8 *region) {
    const u64 *row = pieces + 3 * (u64)blockIdx.x;
    copy_bytes((const u8 *)row[0], region + row[1], row[2]);
}

extern "C" __global__ void __launch_bounds__(THREADS_MAX) unpack_pieces(const u64 *pieces, u8 *region) {
    const u64 *row = pieces + 3 * (u64)blockIdx.x;
    copy_bytes(region + row[1], (u8 *)row[0], row[2]);
}

// ------------------------------------------------------------------------------------------------ gathering, scattering
//
// A row of `spread` is (offset in the region, address, bytes of a run, then three loops around runs: times, bytes apart). All
// of a row's runs are one behind the other in the region, and apart from each other at the address. `parts` thread blocks
// share one row. Rows of more than 2^31 bytes are cut by whoever makes the table.

#define LOOPS 3
#define ROW_WORDS (3 + 2 * LOOPS)

template <typename Word, bool INTO_REGION>
__device__ void move_runs(const u64 *row, u8 *region, u32 part, u32 parts) {
    const u32 run = (u32)(row[2] / sizeof(Word));
    const u32 outer = (u32)row[3], middle = (u32)row[5], inner = (u32)row[7];
    const u32 words = run * outer * middle * inner, step = blockDim.x;
    const u32 share = (words / parts / step + 1) * step;  // of each part but the last ones
    const u64 first = (u64)part * share, behind = first + share;
    const u32 end = behind < words ? (u32)behind : words;
    Word *together = (Word *)(region + row[0]);
    for (u64 at = first + threadIdx.x; at < end; at += step) {
        const u32 number = (u32)at / run, within = (u32)at - number * run;
        const u32 above = number / inner, i = above / middle;
        const u64 start = row[1] + i * row[4] + (above - i * middle) * row[6] + (number - above * inner) * row[8];
        Word *apart = (Word *)start + within;
        if (INTO_REGION)
            together[at] = *apart;
        else
            *apart = together[at];
    }
}

template <bool INTO_REGION>
__device__ void move_row(const u64 *spread, u8 *region, u32 parts) {
    const u64 *row = spread + ROW_WORDS * (u64)(blockIdx.x / parts);
    const u32 part = blockIdx.x % parts;
    const u64 all = ((u64)region + row[0]) | row[1] | row[2] | row[4] | row[6] | row[8];
    if (all % 16 == 0)
        move_runs<Pair, INTO_REGION>(row, region, part, parts);
    else if (all % 8 == 0)
        move_runs<u64, INTO_REGION>(row, region, part, parts);
    else if (all % 4 == 0)
        move_runs<u32, INTO_REGION>(row, region, part, parts);
    else if (all % 2 == 0)
        move_runs<unsigned short, INTO_REGION>(row, region, part, parts);
    else
        move_runs<u8, INTO_REGION>(row, region, part, parts);
}

extern "C" __global__ void __launch_bounds__(THREADS_MAX) gather_runs(const u64 *spread, u8 *region, u32 parts) {
    move_row<true>(spread, region, parts);
}

extern "C" __global__ void __launch_bounds__(THREADS_MAX) scatter_runs(const u64 *spread, u8 *region, u32 parts) {
    move_row<false>(spread, region, parts);
}

// ------------------------------------------------------------------------------------------------------------- changes
//
// Words of 1, 2 or 4 bytes. `places` are their numbers, `differences` are modulo what a word holds (`deltas.Listed`).

#define TILE_UNITS 2048  // of 8 bytes, for a thread block

__device__ u32 word_of(u64 unit, u32 number, u32 width) { return (u32)(unit >> 8 * width * number) & 0xffffffffU >> (32 - 8 * width); }

// counts[i] = the words that differ in tile i of two versions of so many units. Then, with `places`: these words, those of tile
// i from firsts[i] on.
extern "C" __global__ void __launch_bounds__(THREADS_MAX) list_changes(
    const u64 *older, const u64 *newer, u64 units, u32 width, u32 *counts, const u32 *firsts, u32 *places, u8 *differences) {
    __shared__ u32 sums[THREADS_MAX];
    const u32 thread = threadIdx.x, each = 8 / width;
    const u64 start = (u64)blockIdx.x * TILE_UNITS, end = start + TILE_UNITS < units ? start + TILE_UNITS : units;
    u32 found = places ? firsts[blockIdx.x] : 0;
    for (u64 first = start; first < end; first += blockDim.x) {
        const u64 at = first + thread;
        const u64 before = at < end ? __ldg(older + at) : 0, after = at < end ? __ldg(newer + at) : 0;
        u32 mine = 0;
        for (u32 number = 0; number < each; number++) mine += word_of(before, number, width) != word_of(after, number, width);
        sums[thread] = mine;
        __syncthreads();
        for (u32 apart = 1; apart < blockDim.x; apart *= 2) {  // sums[i] becomes the sum up to i
            const u32 more = thread >= apart ? sums[thread - apart] : 0;
            __syncthreads();
            sums[thread] += more;
            __syncthreads();
        }
        if (places && mine) {
            u32 to = found + sums[thread] - mine;
            for (u32 number = 0; number < each; number++) {
                const u32 by = word_of(after, number, width) - word_of(before, number, width);
                if (by == 0) continue;
                places[to] = (u32)(at * each) + number;
                if (width == 1)
                    differences[to] = (u8)by;
                else if (width == 2)
                    ((unsigned short *)differences)[to] = (unsigned short)by;
                else
                    ((u32 *)differences)[to] = by;
                to++;
            }
        }
        found += sums[blockDim.x - 1];
        __syncthreads();  // before the next sums are written
    }
    if (!places && thread == 0) counts[blockIdx.x] = found;
}

// A thread for each of the words: no two are the same.
extern "C" __global__ void __launch_bounds__(THREADS_MAX) add_changes(
    u8 *target, u32 width, u32 count, const u32 *places, const u8 *differences) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    if (width == 1)
        target[places[at]] += differences[at];
    else if (width == 2)
        ((unsigned short *)target)[places[at]] += ((const unsigned short *)differences)[at];
    else
        ((u32 *)target)[places[at]] += ((const u32 *)differences)[at];
}
