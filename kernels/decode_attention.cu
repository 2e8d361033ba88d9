// Attention of one new token a row over a paged KV cache, for the decode step: sums the parts of q, k and v, normalises and rotates
// them, writes k and v to the cache, attends, and joins what the parts of the GPU found. One launch a layer, capturable in a graph:
// everything that changes from step to step is read from device memory.
//
// Grid: (num_clusters * cluster CTAs, KV heads, rows), cluster CTAs a cluster. A row and KV head is shared by as many clusters as its
// length is worth; the others leave at once. A warp takes every so-manieth tile of 16 keys, newest first, for all query heads of the
// group (`attend_tiles.cuh`), through stages of shared memory that are filled several tiles ahead (`tile_ring.cuh`). The first tiles
// are asked for before the kernel before has ended. The first CTA's first tile has the new token, whose key and value the CTA makes
// itself (`make_heads.cuh`). How the parts come together: `join_attention.cuh`.
//
// What may be read before `wait_for_prerequisites` (`is_early`). Positions, page tables and older keys and values were written in an
// earlier step. Every launch of this kernel lets its dependents start only after it waited itself, so when any kernel behind it in the
// stream starts, all before it are complete: with one such kernel, or the border of a graph, between the writer and this launch,
// the writer is complete. In the steps of a model, the layer before is one, and the border of the step's graph is one for the first
// layer. Nothing that the step itself writes is read early.
#include "dependents.cuh"
#include "join_attention.cuh"
#include "make_heads.cuh"
#if ELEM == 2
#include "attend_plain.cuh"
#else
#include "attend_tiles.cuh"
#endif

__device__ __forceinline__ Place place_of(const AttentionParams& p) {
    Place at;
    at.row = blockIdx.z, at.kv_head = blockIdx.y, at.group = p.group, at.num_warps = blockDim.x / 32;
    at.cluster = cluster_idx(), at.rank = cluster_rank(), at.size = cluster_size(), at.size_shift = 31 - __clz(at.size);
    at.pair = at.row * p.num_kv + at.kv_head;
    return at;
}

// A row without a token: its output is zeros.
__device__ __forceinline__ void write_zeros(const AttentionParams& p, const Place& at) {
    if (at.cluster != 0) return;
    wait_for_prerequisites();  // who reads the output may still be at it
    for (u32 i = threadIdx.x; i < at.slice(); i += blockDim.x) write_out(p, at, at.quad(i), make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}

// All threads: ready for mail after `cluster_wait`, which `join_and_write` needs of all CTAs.
__device__ __forceinline__ void open_mailbox(const Place& at, Shared& shared) {
    if (at.size == 1) return;
    if (threadIdx.x == 0) expect_bytes(&shared.mailbox, mail_bytes(at));
    __syncwarp();
    cluster_arrive();
}

#if ELEM != 2
// `own`: the warp's shared memory, where its tiles come and its sums stay.
template <int N>
__device__ __forceinline__ void attend(
    const AttentionParams& p, const Place& at, TileRing& ring, const KeyRange& range, u8* own, Shared& shared) {
    WarpAttention<N> attention;
    attention.run(ring, range, at.share(), shared.queries[0], p.scale);
    attention.store(reinterpret_cast<float*>(own), SUM_ROW, shared.scores[threadIdx.x / 32], at.group);
}
#endif

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32) decode_attention(const __grid_constant__ AttentionParams p) {
    extern __shared__ __align__(128) u8 memory[];
    Place at = place_of(p);
    u8* own = memory + threadIdx.x / 32 * p.warp_bytes;
    Shared& shared = *reinterpret_cast<Shared*>(memory + at.num_warps * p.warp_bytes);
    if (!p.is_early) wait_for_prerequisites();
    const long position = position_of(p, at.row);
    if (position < 0) return write_zeros(p, at);
    const KeyRange range = key_range(p, at, position);
    at.active = active_clusters(p, at, range.num_tiles());
    if (at.cluster >= at.active) return;  // without waiting: cluster 0 does, so the launch is not complete before its prerequisites

#if ELEM != 2
    TileRing ring;
    ring.start(range, at.share(), shared_address(own), p.num_stages);
#endif
    open_mailbox(at, shared);
    NewHeads heads;
    heads.prepare(p, at, range, position);
    constexpr u32 QUERY_ELEMS = sizeof(shared.queries[0]) / sizeof(elem_bits);
    for (u32 i = at.group * QUERY_ELEMS + threadIdx.x; i < MAX_GROUP * QUERY_ELEMS; i += blockDim.x) shared.queries[0][i] = 0;

    wait_for_prerequisites();
    let_dependents_start();
    heads.make(p, at, range, memory, shared);
    __syncthreads();
#if ELEM == 2
    PlainAttention attention;
    const elem_bits* new_key = reinterpret_cast<const elem_bits*>(memory);
    attention.run(range, at.share(), new_key, new_key + HEAD_DIM, shared.queries[0], p.scale, at.group);
    attention.store(reinterpret_cast<float*>(own), SUM_ROW, shared.scores[threadIdx.x / 32], at.group);
#else
    if (at.group <= 8) attend<1>(p, at, ring, range, own, shared);
    else attend<2>(p, at, ring, range, own, shared);
#endif
    __syncthreads();
    if (at.size > 1) cluster_wait();  // the others' mailboxes are open
    join_and_write(p, at, memory, shared);
}
