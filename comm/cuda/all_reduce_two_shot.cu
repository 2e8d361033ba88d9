// Two-shot all-reduce for prefill sizes: each rank adds one share of the message from all parts (reduce-scatter), then every rank
// copies the finished shares (all-gather). Each rank moves about twice the message, whatever the number of ranks.
//
// Flags as in `all_reduce_one_shot`, two barriers a call: one when the parts are in place, one when the shares are. A CTA adds and
// gathers the same units of every share, so the second barrier, too, is between CTAs of equal number only.
//
// One data slot is not enough, two are: as for the one-shot, with the second barrier of call e - 1 in the place of the first. And as
// there, each CTA has a part of the slots to itself.
//
// Numbers: fp32 sums in rank order, rounded once by the one rank that adds: the same bits everywhere.
#include "wait.cuh"

#define SITE_TWO_SHOT_PARTS 4
#define SITE_TWO_SHOT_SHARES 5

struct __align__(16) Vector {
    Unit unit[2];
};

struct TwoShotParams {
    const elem_bits* x;
    elem_bits* out;
    Vector* parts[MAX_RANKS];  // of every rank: [2 slots][max_ctas][size owners][cta_vectors] of 16 bytes
    u32* flags[MAX_RANKS];     // of every rank: [2 barriers][max_ctas][size]
    u32* epochs;
    Watch watch;
    long num_elems;
    u32 rank;
    u32 size;
    u32 max_ctas;
    u32 cta_vectors;
    u32 is_aligned;            // x and out are 16-byte aligned and num_elems fills whole vectors
};

constexpr int VECTOR_ELEMS = 2 * UNIT_ELEMS;
constexpr int UNROLL = 4;  // loads over the link in flight a thread: a round trip takes about a microsecond

__device__ __forceinline__ void meet(const TwoShotParams& p, u32 barrier, u32 epoch, u32 site) {
    __syncthreads();  // the CTA's stores before its flags
    if (threadIdx.x < p.size && threadIdx.x != p.rank) {
        u32 peer = threadIdx.x, base = (barrier * p.max_ctas + blockIdx.x) * p.size;
        st_release_sys(p.flags[peer] + base + p.rank, epoch);
        wait_equal_acquire(p.flags[p.rank] + base + peer, epoch, p.watch, site, epoch, peer);
    }
    __syncthreads();
}

__device__ __forceinline__ Vector load_vector(const TwoShotParams& p, const elem_bits* source, long vector) {
    if (p.is_aligned) return *reinterpret_cast<const Vector*>(source + vector * VECTOR_ELEMS);
    Vector value;
    value.unit[0] = load_unit(source, vector * VECTOR_ELEMS, p.num_elems, false);
    value.unit[1] = load_unit(source, vector * VECTOR_ELEMS + UNIT_ELEMS, p.num_elems, false);
    return value;
}

__device__ __forceinline__ void store_vector(const TwoShotParams& p, elem_bits* target, long vector, Vector value) {
    if (p.is_aligned) {
        *reinterpret_cast<Vector*>(target + vector * VECTOR_ELEMS) = value;
        return;
    }
    store_unit(target, vector * VECTOR_ELEMS, p.num_elems, false, value.unit[0]);
    store_unit(target, vector * VECTOR_ELEMS + UNIT_ELEMS, p.num_elems, false, value.unit[1]);
}

// A peer's memory, never from this GPU's L1: it is written while this kernel runs.
__device__ __forceinline__ Vector load_peer(const Vector* source) {
    Vector value;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(value.unit[0].word), "=l"(value.unit[1].word)
                 : "l"(source)
                 : "memory");
    return value;
}

extern "C" __global__ void __launch_bounds__(512) all_reduce_two_shot(const __grid_constant__ TwoShotParams p) {
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));
    long num_vectors = (p.num_elems + VECTOR_ELEMS - 1) / VECTOR_ELEMS;
    long share = (num_vectors + p.size - 1) / p.size;
    long area = (static_cast<long>(epoch & 1) * p.max_ctas + blockIdx.x) * p.size * p.cta_vectors + threadIdx.x;
    long stride = static_cast<long>(gridDim.x) * blockDim.x;
    long begin = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (u32 owner = 0; owner < p.size; ++owner) {
        long first = owner * share, last = first + share < num_vectors ? first + share : num_vectors;
        Vector* target = p.parts[p.rank] + area + owner * p.cta_vectors;
        for (long i = begin; first + i < last; i += stride, target += blockDim.x) *target = load_vector(p, p.x, first + i);
    }
    meet(p, 0, epoch, SITE_TWO_SHOT_PARTS);
    long first = p.rank * share, last = first + share < num_vectors ? first + share : num_vectors;
    long local = area + p.rank * p.cta_vectors;
    for (long i = begin; first + i < last; i += UNROLL * stride, local += UNROLL * blockDim.x) {
        float sum[UNROLL][VECTOR_ELEMS];
#pragma unroll 1
        for (u32 source = 0; source < p.size; ++source) {
            Vector part[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
                if (first + i + k * stride < last) part[k] = load_peer(p.parts[source] + local + k * blockDim.x);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
#pragma unroll
                for (int j = 0; j < VECTOR_ELEMS; ++j) {
                    float value = to_float(part[k].unit[j / UNIT_ELEMS].elems[j % UNIT_ELEMS]);
                    sum[k][j] = source == 0 ? value : sum[k][j] + value;
                }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            long vector = first + i + k * stride;
            if (vector >= last) break;
            Vector rounded;
#pragma unroll
            for (int j = 0; j < VECTOR_ELEMS; ++j) rounded.unit[j / UNIT_ELEMS].elems[j % UNIT_ELEMS] = from_float(sum[k][j]);
            p.parts[p.rank][local + k * blockDim.x] = rounded;  // nobody but this rank reads this rank's part of its own share
            store_vector(p, p.out, vector, rounded);
        }
    }
    meet(p, 1, epoch, SITE_TWO_SHOT_SHARES);
    for (u32 step = 1; step < p.size; ++step) {
        u32 owner = (p.rank + step) % p.size;
        first = owner * share;
        last = first + share < num_vectors ? first + share : num_vectors;
        local = area + owner * p.cta_vectors;
        for (long i = begin; first + i < last; i += UNROLL * stride, local += UNROLL * blockDim.x) {
            Vector finished[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
                if (first + i + k * stride < last) finished[k] = load_peer(p.parts[owner] + local + k * blockDim.x);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k)
                if (first + i + k * stride < last) store_vector(p, p.out, first + i + k * stride, finished[k]);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch;
}
