// The packets of `all_reduce_lamport` and `all_reduce_lamport_norm`: one-shot push. Every rank sends its part to every other as packets
// that carry the call's number, and adds what arrives. No barrier, no fence, nothing to clear.
//
// Not for large messages: a rank sends (size - 1) times the message, twice over (half of a packet is its number).
//
// Each CTA is a world of its own: CTA b of one rank talks to CTA b of the others, in a buffer that belongs to b, and counts the
// calls it took part in (`epochs[b]`, in device memory, so that a replayed graph goes on counting). All ranks make the same calls
// with the same grids, so the counts agree. A count wraps (`next_call`): a stale packet could pass for a fresh one only in a place
// that was last written exactly 2^32 - 4 calls ago.
//
// Why two slots are enough. A CTA writes slot e % 2 of a peer at its call e; the peer read that slot at its call e - 2. Before call
// e, this rank finished call e - 1, for which at least one packet of the peer's CTA b and call e - 1 arrived: no grid has a CTA with
// nothing to send. The peer sent it after
// its own call e - 2 was complete, all reads included: kernels of a stream follow each other, and with programmatic launch the
// kernel first waits for the one before it (`wait_for_prerequisites`).
//
// Numbers: fp32 sums in rank order, rounded once: the same bits on every rank. -0.0, NaN and infinities pass as they are.
#pragma once
#include "wait.cuh"

struct LamportParams {
    const elem_bits* x;       // [num_elems] this rank's part
    elem_bits* out;           // [num_elems], may be x
    Pair* inbox[MAX_RANKS];   // of every rank: [2 slots][size sources][max_ctas][cta_packets]
    u32* epochs;              // [max_ctas], own memory
    Watch watch;
    long num_elems;
    u32 rank;
    u32 size;
    u32 max_ctas;
    u32 cta_packets;          // packets of one CTA and source
    u32 is_aligned;           // x and out are 8-byte aligned
};

__device__ __forceinline__ long packet_index(const LamportParams& p, u32 slot, u32 source, u32 packet) {
    return ((static_cast<long>(slot) * p.size + source) * p.max_ctas + blockIdx.x) * p.cta_packets + packet;
}

__device__ __forceinline__ void send(const LamportParams& p, Unit mine, u32 epoch, u32 packet) {
    Pair pair = pack(mine, epoch);
    long index = packet_index(p, epoch & 1, p.rank, packet);
    // Starting behind oneself spreads the ranks' stores over the links.
    for (u32 step = 1; step < p.size; ++step) {
        u32 peer = p.rank + step < p.size ? p.rank + step : p.rank + step - p.size;
        st_relaxed_sys_pair(p.inbox[peer] + index, pair);
    }
}

// This unit summed over all ranks, in rank order.
__device__ __forceinline__ void receive(const LamportParams& p, Unit mine, u32 epoch, u32 packet, u32 site, float* sum) {
#pragma unroll
    for (int i = 0; i < UNIT_ELEMS; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (u32 source = 0; source < p.size; ++source) {
        Unit unit = mine;
        if (source != p.rank) {
            unit = wait_packet(p.inbox[p.rank] + packet_index(p, epoch & 1, source, packet), epoch, p.watch, site, source);
        }
#pragma unroll
        for (int i = 0; i < UNIT_ELEMS; ++i) sum[i] = source == 0 ? to_float(unit.elems[i]) : sum[i] + to_float(unit.elems[i]);
    }
}

__device__ __forceinline__ Unit round_unit(const float* sum) {
    Unit unit;
#pragma unroll
    for (int i = 0; i < UNIT_ELEMS; ++i) unit.elems[i] = from_float(sum[i]);
    return unit;
}

// The call is over for this CTA once all its threads are: count it.
__device__ __forceinline__ void count_call(const LamportParams& p, u32 epoch) {
    __syncthreads();
    if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch;
}
