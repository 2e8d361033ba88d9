// One-shot push all-reduce for decode sizes: every rank sends its part to every other as packets that carry the call's number,
// and adds what arrives. No barrier, no fence, nothing to clear.
//
// Not for large messages: a rank sends (size - 1) times the message, twice over (half of a packet is its number).
//
// Each CTA is a world of its own: CTA b of one rank talks to CTA b of the others, in a buffer that belongs to b, and counts the
// calls it took part in (`epochs[b]`, in device memory, so that a replayed graph goes on counting). All ranks make the same calls
// with the same grids, so the counts agree. A count wraps (`next_call`): a stale packet could pass for a fresh one only in a place
// that was last written exactly 2^32 - 4 calls ago.
//
// Why two slots are enough. A CTA writes slot e % 2 of a peer at its call e; the peer read that slot at its call e - 2. Before call
// e, this rank finished call e - 1, for which at least one packet of the peer's CTA b and call e - 1 arrived. The peer sent it after
// its own call e - 2 was complete, all reads included: kernels of a stream follow each other, and with programmatic launch the
// kernel first waits for the one before it (`wait_for_prerequisites`).
//
// Numbers: fp32 sums in rank order, rounded once: the same bits on every rank. -0.0, NaN and infinities pass as they are.
#include "wait.cuh"

#define SITE_ALL_REDUCE 1
#define SITE_ALL_REDUCE_NORM 2

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
    let_dependents_start();
    packet = threadIdx.x;
    for (long unit = begin; unit < num_units; unit += stride, packet += blockDim.x) {
        float sum[UNIT_ELEMS];
        Unit mine = load_unit(p.x, unit * UNIT_ELEMS, p.num_elems, p.is_aligned);
        receive(p, mine, epoch, packet, SITE_ALL_REDUCE, sum);
        store_unit(p.out, unit * UNIT_ELEMS, p.num_elems, p.is_aligned, round_unit(sum));
    }
    count_call(p, epoch);
}

struct NormParams {
    LamportParams reduce;      // x: [rows, hidden]; `out` is not used; max_ctas counts CTAs of all rows
    elem_bits* residual;       // [rows, hidden]: read, and overwritten by the new residual
    elem_bits* normed;         // [rows, hidden]
    const elem_bits* weight;   // [hidden]
    float eps;
    u32 hidden;                // elements a row; a multiple of UNIT_ELEMS, pointers 8-byte aligned
};

constexpr int NORM_MAX_UNITS = 4;   // units a thread
constexpr int NORM_MAX_CTAS = 8;    // CTAs a row, one cluster
constexpr int NORM_MAX_WARPS = 32;  // warps a CTA

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// Give `value` to `target` in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ void st_cluster(float* target, u32 rank, float value) {
    u32 own = static_cast<u32>(__cvta_generic_to_shared(target)), remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

// One row a cluster: residual += sum over ranks of x; normed = RMSNorm(residual) * weight. Rounding as the separate steps have it:
// the sum is rounded, then the new residual is, then the norm is taken of the rounded values and rounded before the weight.
extern "C" __global__ void __launch_bounds__(1024) all_reduce_lamport_norm(const __grid_constant__ NormParams n) {
    const LamportParams& p = n.reduce;
    __shared__ float partial[NORM_MAX_CTAS * NORM_MAX_WARPS];  // of every warp of the row
    u32 ctas = cluster_size(), cta = cluster_rank(), warps = blockDim.x / 32;
    u32 units = n.hidden / UNIT_ELEMS, step = ctas * blockDim.x, begin = cta * blockDim.x + threadIdx.x;
    long row = static_cast<long>(blockIdx.x / ctas) * n.hidden;
    // The weight does not depend on the kernel before.
    Unit weight[NORM_MAX_UNITS];
#pragma unroll
    for (int k = 0; k < NORM_MAX_UNITS; ++k)
        if (begin + k * step < units) weight[k].word = *reinterpret_cast<const u64*>(n.weight + (begin + k * step) * UNIT_ELEMS);
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // this CTA runs: its shared memory may be written
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));
    Unit value[NORM_MAX_UNITS], residual[NORM_MAX_UNITS];
#pragma unroll
    for (int k = 0; k < NORM_MAX_UNITS; ++k) {
        if (begin + k * step < units) {
            value[k].word = *reinterpret_cast<const u64*>(p.x + row + (begin + k * step) * UNIT_ELEMS);
            residual[k].word = *reinterpret_cast<const u64*>(n.residual + row + (begin + k * step) * UNIT_ELEMS);
        }
    }
#pragma unroll
    for (int k = 0; k < NORM_MAX_UNITS; ++k)
        if (begin + k * step < units) send(p, value[k], epoch, threadIdx.x + k * blockDim.x);
    let_dependents_start();
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < NORM_MAX_UNITS; ++k) {
        if (begin + k * step < units) {
            float sum[UNIT_ELEMS];
            receive(p, value[k], epoch, threadIdx.x + k * blockDim.x, SITE_ALL_REDUCE_NORM, sum);
#pragma unroll
            for (int i = 0; i < UNIT_ELEMS; ++i) {
                float fresh = to_float(from_float(to_float(from_float(sum[i])) + to_float(residual[k].elems[i])));
                value[k].elems[i] = from_float(fresh);
                squares += fresh * fresh;
            }
            *reinterpret_cast<u64*>(n.residual + row + (begin + k * step) * UNIT_ELEMS) = value[k].word;
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all CTAs of the row run
    // Every warp tells every CTA of the row: one barrier, and all threads and ranks add in one order.
    if (threadIdx.x % 32 < ctas) st_cluster(partial + cta * warps + threadIdx.x / 32, threadIdx.x % 32, squares);
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    float total = 0.0f;
    for (u32 i = 0; i < ctas * warps; ++i) total += partial[i];
    float scale = rsqrtf(total / n.hidden + n.eps);
#pragma unroll
    for (int k = 0; k < NORM_MAX_UNITS; ++k) {
        if (begin + k * step < units) {
            Unit out;
#pragma unroll
            for (int i = 0; i < UNIT_ELEMS; ++i) {
                float normed = to_float(from_float(to_float(value[k].elems[i]) * scale));
                out.elems[i] = from_float(normed * to_float(weight[k].elems[i]));
            }
            *reinterpret_cast<u64*>(n.normed + row + (begin + k * step) * UNIT_ELEMS) = out.word;
        }
    }
    // No CTA may end while another could still write into its shared memory: the barrier above came after the last such write.
    count_call(p, epoch);
}
