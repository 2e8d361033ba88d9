// The textbook one-shot all-reduce: copy the part to where peers can read it, meet at a flag barrier, read all parts, add.
//
// Two data slots in turn, chosen by the call's number, which each CTA counts in device memory. Flags hold the number of the last
// call that is ready and are compared for equality: no order is assumed of a counter that wraps (`next_call`).
//
// Why two slots are enough: to overwrite slot e % 2 at call e a CTA must know that no peer still reads it for call e - 2. A peer sets
// its flag to e - 1 after it finished call e - 2 (kernels of a stream follow each other), and this CTA saw that flag in call e - 1.
// This holds between CTAs of equal number only, so each has a part of the slots to itself: in a buffer shared by all CTAs, a call
// with a smaller grid would give a CTA units that another CTA of a slower peer still reads.
//
// Numbers: as `all_reduce_lamport`.
#include "wait.cuh"

#define SITE_ONE_SHOT 3

struct OneShotParams {
    const elem_bits* x;
    elem_bits* out;
    u64* parts[MAX_RANKS];  // of every rank: [2 slots][max_ctas][cta_units] of 8 bytes
    u32* flags[MAX_RANKS];  // of every rank: [max_ctas][size] words; word (b, source) is written by CTA b of rank `source`
    u32* epochs;
    Watch watch;
    long num_elems;
    u32 rank;
    u32 size;
    u32 max_ctas;
    u32 cta_units;
    u32 is_aligned;
};

extern "C" __global__ void __launch_bounds__(512) all_reduce_one_shot(const __grid_constant__ OneShotParams p) {
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));
    long stride = static_cast<long>(gridDim.x) * blockDim.x;
    long begin = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long num_units = (p.num_elems + UNIT_ELEMS - 1) / UNIT_ELEMS;
    long area = (static_cast<long>(epoch & 1) * p.max_ctas + blockIdx.x) * p.cta_units;
    u32 local = threadIdx.x;
    for (long unit = begin; unit < num_units; unit += stride, local += blockDim.x)
        p.parts[p.rank][area + local] = load_unit(p.x, unit * UNIT_ELEMS, p.num_elems, p.is_aligned).word;
    __syncthreads();  // the CTA's stores happen before its flags, which the release below makes known to the peers
    if (threadIdx.x < p.size && threadIdx.x != p.rank) {
        u32 peer = threadIdx.x;
        st_release_sys(p.flags[peer] + blockIdx.x * p.size + p.rank, epoch);
        wait_equal_acquire(p.flags[p.rank] + blockIdx.x * p.size + peer, epoch, p.watch, SITE_ONE_SHOT, epoch, peer);
    }
    __syncthreads();
    local = threadIdx.x;
    for (long unit = begin; unit < num_units; unit += stride, local += blockDim.x) {
        float sum[UNIT_ELEMS];
#pragma unroll 1
        for (u32 source = 0; source < p.size; ++source) {
            Unit part;
            part.word = *reinterpret_cast<volatile const u64*>(p.parts[source] + area + local);
#pragma unroll
            for (int i = 0; i < UNIT_ELEMS; ++i) sum[i] = source == 0 ? to_float(part.elems[i]) : sum[i] + to_float(part.elems[i]);
        }
        Unit rounded;
#pragma unroll
        for (int i = 0; i < UNIT_ELEMS; ++i) rounded.elems[i] = from_float(sum[i]);
        store_unit(p.out, unit * UNIT_ELEMS, p.num_elems, p.is_aligned, rounded);
    }
    __syncthreads();
    if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch;
}
