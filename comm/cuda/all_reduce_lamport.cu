// One-shot push all-reduce for decode sizes. The protocol and why it is safe: `lamport.cuh`.
#include "lamport.cuh"

#define SITE_ALL_REDUCE 1

extern "C" __global__ void __launch_bounds__(512) all_reduce_lamport(const __grid_constant__ LamportParams p) {
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));
    long stride = static_cast<long>(gridDim.x) * blockDim.x;
    long begin = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long num_units = (p.num_elems + UNIT_ELEMS - 1) / UNIT_ELEMS;
    // All of it is sent before any of it is awaited: the links work while the first units arrive.
    u32 packet = threadIdx.x;
    for (long unit = begin; unit < num_units; unit += stride, packet += blockDim.x)
        send(p, load_unit(p.x, unit * UNIT_ELEMS, p.num_elems, p.is_aligned), epoch, packet);
    let_dependents_start(p.watch);
    packet = threadIdx.x;
    for (long unit = begin; unit < num_units; unit += stride, packet += blockDim.x) {
        float sum[UNIT_ELEMS];
        Unit mine = load_unit(p.x, unit * UNIT_ELEMS, p.num_elems, p.is_aligned);
        receive(p, mine, epoch, packet, SITE_ALL_REDUCE, sum);
        store_unit(p.out, unit * UNIT_ELEMS, p.num_elems, p.is_aligned, round_unit(sum));
    }
    count_call(p, epoch);
}
