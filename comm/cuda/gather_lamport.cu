// Gather of equal parts [rows, local] along the last dimension, to one rank or to all, as packets that carry the call's number.
//
// Moves bits, does no arithmetic. Not for bulk: half of what travels are call numbers.
//
// Each CTA is a world of its own, exactly as in `all_reduce_lamport`, and two slots are enough for the reason given there: a rank has
// heard from CTA b of every peer in call e - 1 before it writes for call e. With a root that must hold of the ranks that receive
// nothing as well, or a fast one would lap the root. So the first packet of a CTA goes to every rank and every rank waits for
// it, whoever receives the rest. The root of one call may differ from that of the next.
#include "wait.cuh"

#define SITE_GATHER 11

constexpr u32 EVERY_RANK = ~0u;

struct GatherParams {
    const elem_bits* x;      // [rows, local] this rank's part
    elem_bits* out;          // [rows, size, local] on ranks that receive, not touched on others
    Pair* inbox[MAX_RANKS];  // of every rank: [2 slots][size sources][max_ctas][cta_packets]
    u32* epochs;             // [max_ctas], own memory
    Watch watch;
    long first;              // of the elements of x, in flat order, that this call moves
    long num_elems;
    long local;
    u32 root;                // EVERY_RANK, or the only rank that receives
    u32 rank;
    u32 size;
    u32 max_ctas;
    u32 cta_packets;
    u32 is_aligned;          // x + first is 8-byte aligned
    u32 is_packed;           // and so is out, and no unit crosses a row
};

__device__ __forceinline__ long packet_index(const GatherParams& p, u32 slot, u32 source, u32 packet) {
    return ((static_cast<long>(slot) * p.size + source) * p.max_ctas + blockIdx.x) * p.cta_packets + packet;
}

__device__ __forceinline__ void send(const GatherParams& p, Unit mine, u32 epoch, u32 packet) {
    Pair pair = pack(mine, epoch);
    long index = packet_index(p, epoch & 1, p.rank, packet);
    for (u32 step = 1; step < p.size; ++step) {
        u32 peer = p.rank + step < p.size ? p.rank + step : p.rank + step - p.size;
        if (p.root == EVERY_RANK || p.root == peer || packet == 0) st_relaxed_sys_pair(p.inbox[peer] + index, pair);
    }
}

// Write a unit of `source`, whose first element is (row, column) of that rank's part. `num_left`: elements from there on.
__device__ __forceinline__ void place(const GatherParams& p, u32 source, long row, long column, long num_left, Unit unit) {
    elem_bits* target = p.out + (row * p.size + source) * p.local + column;
    if (p.is_packed) {
        *reinterpret_cast<u64*>(target) = unit.word;
        return;
    }
#pragma unroll
    for (int i = 0; i < UNIT_ELEMS; ++i) {
        if (i < num_left) *target = unit.elems[i];
        ++target;
        if (++column == p.local) {  // on to the next row, over the other ranks' columns
            column = 0;
            target += (p.size - 1) * p.local;
        }
    }
}

extern "C" __global__ void __launch_bounds__(512) gather_lamport(const __grid_constant__ GatherParams p) {
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));
    bool is_receiver = p.root == EVERY_RANK || p.root == p.rank;
    long stride = static_cast<long>(gridDim.x) * blockDim.x;
    long begin = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long num_units = (p.num_elems + UNIT_ELEMS - 1) / UNIT_ELEMS;
    const elem_bits* x = p.x + p.first;
    u32 packet = threadIdx.x;
    for (long unit = begin; unit < num_units; unit += stride, packet += blockDim.x)
        send(p, load_unit(x, unit * UNIT_ELEMS, p.num_elems, p.is_aligned), epoch, packet);
    let_dependents_start(p.watch);
    packet = threadIdx.x;
    for (long unit = begin; unit < num_units; unit += stride, packet += blockDim.x) {
        if (!is_receiver && packet != 0) break;
        long flat = p.first + unit * UNIT_ELEMS, row = flat / p.local, column = flat % p.local;
        long num_left = p.num_elems - unit * UNIT_ELEMS;
#pragma unroll 1
        for (u32 source = 0; source < p.size; ++source) {
            Unit part;
            if (source == p.rank)
                part = load_unit(x, unit * UNIT_ELEMS, p.num_elems, p.is_aligned);
            else
                part = wait_packet(p.inbox[p.rank] + packet_index(p, epoch & 1, source, packet), epoch, p.watch, SITE_GATHER, source);
            if (is_receiver) place(p, source, row, column, num_left, part);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch;
}
