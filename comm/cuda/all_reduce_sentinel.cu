// One-shot push all-reduce for the sizes above `all_reduce_lamport`'s: the data travels bare, 16 bytes a store, and the receiver
// knows that an 8-byte word has arrived because it no longer holds the sentinel. Half the bytes of packets that carry their number,
// for the price of clearing what was read.
//
// The sentinel is a word of all ones: elements that are NaN with every payload bit set. A word of real data that looks like it is
// sent with another NaN payload, so no value can be taken for absence and NaN stays NaN; -0.0 and all else pass as they are.
//
// Three slots in turn, per CTA as in `all_reduce_lamport`. At call e a CTA clears its own slot (e - 1) % 3, which it read at call
// e - 1 and which peers write next at call e + 2. They do so after their call e + 1, for which this rank's data of call e + 1 had to
// arrive, which was sent after this call, clearing included, was complete. With two slots peers could write what is being cleared.
// How much to clear is what the CTA's previous call used (`used`), whatever this call's size is.
//
// Numbers: as `all_reduce_lamport`.
#include "wait.cuh"

#define SITE_SENTINEL 8

constexpr u64 SENTINEL = ~0ull;
#if ELEM == 2
constexpr u64 OTHER_NAN = 0x7fffffff7fffffffull;
#else
constexpr u64 OTHER_NAN = 0x7fff7fff7fff7fffull;
#endif

struct SentinelParams {
    const elem_bits* x;
    elem_bits* out;          // may be x
    Pair* inbox[MAX_RANKS];  // of every rank: [3 slots][size sources][max_ctas][cta_vectors], all ones when new
    u32* epochs;             // [max_ctas]
    u32* used;               // [max_ctas] vectors of the CTA's previous call
    Watch watch;
    long num_elems;
    u32 rank;
    u32 size;
    u32 max_ctas;
    u32 cta_vectors;
    u32 is_aligned;          // x and out are 16-byte aligned
};

constexpr int VECTOR_ELEMS = 2 * UNIT_ELEMS;

__device__ __forceinline__ Pair load_vector(const SentinelParams& p, long vector) {
    Pair pair;
    long first = vector * VECTOR_ELEMS;
    if (p.is_aligned && first + VECTOR_ELEMS <= p.num_elems) return *reinterpret_cast<const Pair*>(p.x + first);
    pair.word[0] = load_unit(p.x, first, p.num_elems, false).word;
    pair.word[1] = load_unit(p.x, first + UNIT_ELEMS, p.num_elems, false).word;
    return pair;
}

__device__ __forceinline__ long vector_index(const SentinelParams& p, u32 slot, u32 source, u32 vector) {
    return ((static_cast<long>(slot) * p.size + source) * p.max_ctas + blockIdx.x) * p.cta_vectors + vector;
}

__device__ __forceinline__ Pair sendable(Pair pair) {
    if (pair.word[0] == SENTINEL) pair.word[0] = OTHER_NAN;
    if (pair.word[1] == SENTINEL) pair.word[1] = OTHER_NAN;
    return pair;
}

__device__ __forceinline__ Pair wait_vector(const Pair* address, u32 epoch, Watch watch, u32 peer) {
    u64 started = 0;
    for (u32 tries = 1;; ++tries) {
        Pair pair = ld_relaxed_sys_pair(address);
        if (pair.word[0] != SENTINEL && pair.word[1] != SENTINEL) return pair;
        if (tries % TRIES_PER_LOOK == 0) {
            if (started == 0) started = now_ns();
            if (must_give_up(watch, started, SITE_SENTINEL, epoch, peer, 0, 1)) return pair;
        }
    }
}

extern "C" __global__ void __launch_bounds__(512) all_reduce_sentinel(const __grid_constant__ SentinelParams p) {
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x)), used = ld_relaxed_sys(p.used + blockIdx.x);
    u32 slot = epoch % 3, stale = (slot + 2) % 3;  // not of epoch + 2, which wraps
    long stride = static_cast<long>(gridDim.x) * blockDim.x;
    long begin = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long num_vectors = (p.num_elems + VECTOR_ELEMS - 1) / VECTOR_ELEMS;
    u32 local = threadIdx.x;
    for (long vector = begin; vector < num_vectors; vector += stride, local += blockDim.x) {
        Pair mine = sendable(load_vector(p, vector));
        long index = vector_index(p, slot, p.rank, local);
        for (u32 step = 1; step < p.size; ++step) {
            u32 peer = p.rank + step < p.size ? p.rank + step : p.rank + step - p.size;
            st_relaxed_sys_pair(p.inbox[peer] + index, mine);
        }
    }
    let_dependents_start(p.watch);
    Pair ones;
    ones.word[0] = ones.word[1] = SENTINEL;
    for (u32 source = 0; source < p.size; ++source)
        if (source != p.rank)
            for (u32 i = threadIdx.x; i < used; i += blockDim.x) p.inbox[p.rank][vector_index(p, stale, source, i)] = ones;
    local = threadIdx.x;
    for (long vector = begin; vector < num_vectors; vector += stride, local += blockDim.x) {
        Pair mine = sendable(load_vector(p, vector));
        float sum[VECTOR_ELEMS];
#pragma unroll 1
        for (u32 source = 0; source < p.size; ++source) {
            Pair pair = mine;
            if (source != p.rank)
                pair = wait_vector(p.inbox[p.rank] + vector_index(p, slot, source, local), epoch, p.watch, source);
#pragma unroll
            for (int i = 0; i < VECTOR_ELEMS; ++i) {
                Unit unit;
                unit.word = pair.word[i / UNIT_ELEMS];
                float value = to_float(unit.elems[i % UNIT_ELEMS]);
                sum[i] = source == 0 ? value : sum[i] + value;
            }
        }
        Unit low, high;
#pragma unroll
        for (int i = 0; i < UNIT_ELEMS; ++i) {
            low.elems[i] = from_float(sum[i]);
            high.elems[i] = from_float(sum[UNIT_ELEMS + i]);
        }
        long first = vector * VECTOR_ELEMS;
        if (p.is_aligned && first + VECTOR_ELEMS <= p.num_elems) {
            Pair both;
            both.word[0] = low.word;
            both.word[1] = high.word;
            *reinterpret_cast<Pair*>(p.out + first) = both;
        } else {
            store_unit(p.out, first, p.num_elems, false, low);
            store_unit(p.out, first + UNIT_ELEMS, p.num_elems, false, high);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        p.epochs[blockIdx.x] = epoch;
        long rounds = (num_vectors - static_cast<long>(blockIdx.x) * blockDim.x + stride - 1) / stride;
        p.used[blockIdx.x] = static_cast<u32>(rounds) * blockDim.x;
    }
}
