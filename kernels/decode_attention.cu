// Attention of one new token a row over a paged KV cache, for the decode step: sums the parts of q, k and v, normalises and rotates
// them, writes k and v to the cache, attends, and joins what the parts of the GPU found. One launch a layer, capturable in a graph:
// everything that changes from step to step is read from device memory.
//
// Grid: (num_clusters * cluster CTAs, KV heads, rows), cluster CTAs a cluster. A row and KV head is shared by as many clusters as its
// length is worth; the others leave at once. A warp takes every so-manieth tile of 16 keys (`attend_tiles.cuh`) for all query heads of
// the group. The new key and value are no tile: one CTA, the owner, adds them by itself, straight from where it made them.
//
// Joining: warps in shared memory, CTAs of a cluster through distributed shared memory, each CTA a slice of the result. Only if several
// clusters share a row, their slices go through global memory, and the last to arrive there joins them. Always in one order, whoever
// is last: the same bits every time.
//
// What may be read before `wait_for_prerequisites` (`is_early`). Positions, page tables and older keys and values were written in an
// earlier step. Every launch of this kernel lets its dependents start only after it waited itself, so when any kernel behind it in the
// stream starts, all before it are complete: with one such kernel, or the border of a graph, between the writer and this launch,
// the writer is complete. In the steps of a model, the layer before is one, and the border of the step's graph is one for the first
// layer. Nothing that the step itself writes is read early.
#include "attend_tiles.cuh"
#include "cluster.cuh"
#include "dependents.cuh"
#include "new_heads.cuh"

constexpr int NUM_WARPS = 4;
constexpr int THREADS = 32 * NUM_WARPS;
constexpr int MAX_CLUSTER = 8;
constexpr int SUM_ROW = HEAD_DIM + 4;                                      // floats; 4 more spread the banks
constexpr int HEADS_A_WARP = (MAX_GROUP + 2 + NUM_WARPS - 1) / NUM_WARPS;  // the group's, k and v
constexpr int ALONE_TILES = 4;   // a warp's tiles up to which one cluster takes a row by itself: joining several costs as much
constexpr int SHARED_TILES = 2;  // a warp's tiles at least where several clusters share a row

struct AttentionParams {
    const void* qkv;          // num_parts > 0: floats [num_parts][rows][q, k and v heads][HEAD_DIM]; 0: elements [rows][...]
    const elem_bits* bias;    // [q, k and v heads][HEAD_DIM] or null
    const elem_bits* q_norm;  // [HEAD_DIM] or null, like k_norm
    const elem_bits* k_norm;
    const elem_bits* turns;   // [positions][2][HEAD_DIM / 2] cosines and sines
    const void* positions;    // [rows] of the new tokens; -1: no token
    const int* pages;         // [rows][max_pages]
    elem_bits* keys;          // [slots][KV heads][HEAD_DIM]
    elem_bits* values;
    elem_bits* out;           // [rows][q heads][HEAD_DIM]
    float* sums;              // [rows][KV heads][num_clusters][group][HEAD_DIM]: of clusters that share a row
    float* scores;            // [rows][KV heads][num_clusters][MAX_CLUSTER][MAX_GROUP][2]: largest score, sum of weights
    u32* arrived;             // [rows][KV heads][MAX_CLUSTER], all 0 between launches
    float eps;
    float scale;              // of a score, times log2(e)
    u32 num_q, num_kv;        // heads
    u32 num_parts, max_pages, page_shift;
    u32 window;               // positions a query sees, its own included; 0: all
    u32 num_clusters;         // at most, a row and KV head
    u32 is_wide;              // positions are 8 bytes wide, not 4
    u32 is_early;             // see above
};

struct Shared {
    __align__(16) float sums[NUM_WARPS][MAX_GROUP][SUM_ROW];  // of each warp; [0] is then the CTA's
    __align__(16) elem_bits queries[MAX_GROUP][QUERY_ROW];
    float largest[NUM_WARPS][MAX_GROUP], total[NUM_WARPS][MAX_GROUP];
    float cta_largest[MAX_GROUP], cta_total[MAX_GROUP];
    float new_key[HEAD_DIM], new_value[HEAD_DIM], new_score[MAX_GROUP];
    u32 ticket;
};

// Which row, KV head and part of the row's keys is this CTA's.
struct Place {
    u32 row, kv_head, group, cluster, rank, size;  // `rank` of `size` CTAs in the cluster
    u32 pair, active;                              // number of (row, KV head); clusters that share it

    __device__ __forceinline__ bool is_owner() const { return cluster == 0 && rank == 0; }
    __device__ __forceinline__ u32 slice() const { return group * HEAD_DIM / size; }  // elements of the result a CTA joins
};

// Sum of weighted values, relative to the largest score.
struct Partial {
    float largest, total, sum;

    __device__ __forceinline__ void add(float other_largest, float other_total, float other_sum) {
        const float both = fmaxf(largest, other_largest);
        const float own = rescale(largest, both), other = rescale(other_largest, both);
        total = total * own + other_total * other;
        sum = sum * own + other_sum * other;
        largest = both;
    }
};

__device__ __forceinline__ long position_of(const AttentionParams& p, u32 row) {
    return p.is_wide ? static_cast<const long long*>(p.positions)[row] : static_cast<const int*>(p.positions)[row];
}

__device__ __forceinline__ KeyRange key_range(const AttentionParams& p, const Place& at, int position) {
    KeyRange range;
    range.pages = p.pages + static_cast<long>(at.row) * p.max_pages;
    range.keys = p.keys + at.kv_head * HEAD_DIM;
    range.values = p.values + at.kv_head * HEAD_DIM;
    range.stride = static_cast<long>(p.num_kv) * HEAD_DIM;
    range.first = p.window ? max(0, position + 1 - static_cast<int>(p.window)) : 0;
    range.count = position - range.first;
    range.page_shift = p.page_shift;
    return range;
}

__device__ __forceinline__ u32 active_clusters(const AttentionParams& p, u32 tiles, u32 size) {
    const u32 warps = size * NUM_WARPS;
    if (tiles <= warps * ALONE_TILES) return 1;
    return min(p.num_clusters, (tiles + warps * SHARED_TILES - 1) / (warps * SHARED_TILES));
}

// Heads of the new token: queries of the group to shared memory, and by the owner k and v there and to the cache.
__device__ __forceinline__ void make_heads(
    const AttentionParams& p, const Place& at, const KeyRange& range, int position, const Head& turn, Shared& shared) {
    const u32 warp = threadIdx.x / 32, count = at.group + (at.is_owner() ? 2 : 0), width = p.num_q + 2 * p.num_kv;
    Head heads[HEADS_A_WARP] = {};
    u32 numbers[HEADS_A_WARP];  // among q, k and v heads
#pragma unroll
    for (int i = 0; i < HEADS_A_WARP; ++i) {
        const u32 idx = warp + NUM_WARPS * i;
        numbers[i] = idx < at.group ? at.kv_head * at.group + idx : p.num_q + at.kv_head + (idx == at.group ? 0 : p.num_kv);
        if (p.num_parts == 0 && idx < count)
            heads[i] = load_head(static_cast<const elem_bits*>(p.qkv) + (static_cast<long>(at.row) * width + numbers[i]) * HEAD_DIM);
    }
#pragma unroll 4
    for (u32 part = 0; part < p.num_parts; ++part)
#pragma unroll
        for (int i = 0; i < HEADS_A_WARP; ++i)
            if (warp + NUM_WARPS * i < count) {
                const long row = static_cast<long>(part) * gridDim.z + at.row;
                add_part(heads[i], static_cast<const float*>(p.qkv) + (row * width + numbers[i]) * HEAD_DIM);
            }
#pragma unroll
    for (int i = 0; i < HEADS_A_WARP; ++i) {
        const u32 idx = warp + NUM_WARPS * i;
        if (idx >= count) break;
        const bool is_key = idx == at.group, is_value = idx == at.group + 1;
        add_bias_and_round(heads[i], p.bias == nullptr ? nullptr : p.bias + numbers[i] * HEAD_DIM);
        if (!is_value) {
            if (p.q_norm != nullptr) normalise(heads[i], is_key ? p.k_norm : p.q_norm, p.eps);
            rotate(heads[i], turn);
        }
        if (!is_key && !is_value) {
            store_head(shared.queries[idx], heads[i]);
            continue;
        }
        const long slot = slot_at(range, position);
        store_head((is_key ? p.keys : p.values) + (slot * p.num_kv + at.kv_head) * HEAD_DIM, heads[i]);
        float* kept = is_key ? shared.new_key : shared.new_value;
        for (int half = 0; half < 2; ++half)
            for (int n = 0; n < HALF_ELEMS; ++n) kept[head_elem(half, n)] = heads[i].half[half][n];
    }
}

// The owner: scores of the new key.
__device__ __forceinline__ void score_new_key(const AttentionParams& p, const Place& at, Shared& shared) {
    for (u32 head = threadIdx.x / 32; head < at.group; head += NUM_WARPS) {
        float score = 0.0f;
        for (u32 i = threadIdx.x % 32; i < HEAD_DIM; i += 32) score += to_float(shared.queries[head][i]) * shared.new_key[i];
        for (int lanes = 16; lanes; lanes /= 2) score += __shfl_xor_sync(WHOLE_WARP, score, lanes);
        if (threadIdx.x % 32 == 0) shared.new_score[head] = score * p.scale;
    }
}

// Sums of the warps, and at the owner of the new key, into `sums[0]`, `cta_largest` and `cta_total`.
__device__ __forceinline__ void join_warps(const Place& at, Shared& shared) {
    for (u32 elem = threadIdx.x; elem < at.group * HEAD_DIM; elem += THREADS) {
        const u32 head = elem / HEAD_DIM, i = elem % HEAD_DIM;
        Partial joined = {shared.largest[0][head], shared.total[0][head], shared.sums[0][head][i]};
#pragma unroll
        for (int warp = 1; warp < NUM_WARPS; ++warp)
            joined.add(shared.largest[warp][head], shared.total[warp][head], shared.sums[warp][head][i]);
        if (at.is_owner()) joined.add(shared.new_score[head], 1.0f, shared.new_value[i]);
        shared.sums[0][head][i] = joined.sum;
        if (i == 0) shared.cta_largest[head] = joined.largest, shared.cta_total[head] = joined.total;
    }
}

// One element of the result from all CTAs of the cluster. Every load is on its way before the first is used.
__device__ __forceinline__ Partial join_cluster(const Place& at, const Shared& shared, u32 elem) {
    const u32 head = elem / HEAD_DIM;
    float largest[MAX_CLUSTER], total[MAX_CLUSTER], sum[MAX_CLUSTER];
#pragma unroll
    for (u32 rank = 0; rank < MAX_CLUSTER; ++rank)
        if (rank < at.size) {
            largest[rank] = ld_shared_at(&shared.cta_largest[head], rank);
            total[rank] = ld_shared_at(&shared.cta_total[head], rank);
            sum[rank] = ld_shared_at(&shared.sums[0][head][elem % HEAD_DIM], rank);
        }
    Partial joined = {largest[0], total[0], sum[0]};
#pragma unroll
    for (u32 rank = 1; rank < MAX_CLUSTER; ++rank)
        if (rank < at.size) joined.add(largest[rank], total[rank], sum[rank]);
    return joined;
}

__device__ __forceinline__ void write_out(const AttentionParams& p, const Place& at, u32 elem, float value) {
    p.out[(static_cast<long>(at.row) * p.num_q + at.kv_head * at.group) * HEAD_DIM + elem] = from_float(value);
}

// Where cluster `cluster` of this pair leaves element `elem`, and its largest score and sum of weights, both of this rank's slice.
__device__ __forceinline__ float* sum_of(const AttentionParams& p, const Place& at, u32 cluster, u32 elem) {
    return p.sums + (static_cast<long>(at.pair) * p.num_clusters + cluster) * at.group * HEAD_DIM + elem;
}

__device__ __forceinline__ float* scores_of(const AttentionParams& p, const Place& at, u32 cluster, u32 elem) {
    const long place = (static_cast<long>(at.pair) * p.num_clusters + cluster) * MAX_CLUSTER + at.rank;
    return p.scores + (place * MAX_GROUP + elem / HEAD_DIM) * 2;
}

// One element of the result from all clusters of the pair, several at a time on their way.
__device__ __forceinline__ Partial join_clusters(const AttentionParams& p, const Place& at, u32 elem) {
    constexpr u32 AT_ONCE = 8;
    Partial joined = {NO_SCORE, 0.0f, 0.0f};
    for (u32 first = 0; first < at.active; first += AT_ONCE) {
        float largest[AT_ONCE], total[AT_ONCE], sum[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 cluster = min(first + i, at.active - 1);
            const float* scores = scores_of(p, at, cluster, elem);
            largest[i] = ld_relaxed_gpu(scores), total[i] = ld_relaxed_gpu(scores + 1);
            sum[i] = ld_relaxed_gpu(sum_of(p, at, cluster, elem));
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i)
            if (first + i < at.active) joined.add(largest[i], total[i], sum[i]);
    }
    return joined;
}

// This CTA's slice, from the cluster to global memory: the result, or what the last cluster to arrive makes it from.
__device__ __forceinline__ void join_and_write(const AttentionParams& p, const Place& at, Shared& shared) {
    const u32 begin = at.rank * at.slice(), end = begin + at.slice();
    for (u32 elem = begin + threadIdx.x; elem < end; elem += THREADS) {
        const Partial joined = join_cluster(at, shared, elem);
        if (at.active == 1) {
            write_out(p, at, elem, joined.sum / joined.total);
            continue;
        }
        *sum_of(p, at, at.cluster, elem) = joined.sum;
        if (elem != begin && elem % HEAD_DIM != 0) continue;  // the first of a head within the slice writes for all of it
        float* scores = scores_of(p, at, at.cluster, elem);
        scores[0] = joined.largest, scores[1] = joined.total;
    }
    if (at.active == 1) return;
    __syncthreads();  // the CTA's stores happen before its arrival, which releases them to whoever arrives later
    u32* arrived = p.arrived + at.pair * MAX_CLUSTER + at.rank;
    if (threadIdx.x == 0) shared.ticket = add_acq_rel_gpu(arrived, 1);
    __syncthreads();  // and what the earlier arrivals released happens before the loads below
    if (shared.ticket != at.active - 1) return;
    for (u32 elem = begin + threadIdx.x; elem < end; elem += THREADS) {
        const Partial joined = join_clusters(p, at, elem);
        write_out(p, at, elem, joined.sum / joined.total);
    }
    if (threadIdx.x == 0) *arrived = 0;  // for the next launch, which touches it after this one is complete
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) decode_attention(const __grid_constant__ AttentionParams p) {
    __shared__ Shared shared;
    const u32 warp = threadIdx.x / 32;
    Place at;
    at.size = cluster_size(), at.rank = cluster_rank(), at.cluster = blockIdx.x / at.size;
    at.row = blockIdx.z, at.kv_head = blockIdx.y, at.group = p.num_q / p.num_kv, at.pair = at.row * p.num_kv + at.kv_head;
    if (!p.is_early) wait_for_prerequisites();
    const long position = position_of(p, at.row);
    if (position < 0) {
        if (at.cluster != 0) return;
        wait_for_prerequisites();  // who reads the output may still be at it
        for (u32 elem = at.rank * at.slice() + threadIdx.x; elem < (at.rank + 1) * at.slice(); elem += THREADS)
            write_out(p, at, elem, 0.0f);
        return;
    }
    const KeyRange range = key_range(p, at, position);
    at.active = active_clusters(p, num_tiles(range), at.size);
    if (at.cluster >= at.active) return;  // without waiting: cluster 0 does, so the launch is not complete before its prerequisites

    WarpAttention attention;
    const int tile = (at.cluster * at.size + at.rank) * NUM_WARPS + warp, step = at.active * at.size * NUM_WARPS;
    attention.prefetch(range, tile, step);
    const Head turn = load_head(p.turns + position * HEAD_DIM);
    for (u32 i = at.group * QUERY_ROW + threadIdx.x; i < MAX_GROUP * QUERY_ROW; i += THREADS) shared.queries[0][i] = 0;

    wait_for_prerequisites();
    let_dependents_start();
    make_heads(p, at, range, position, turn, shared);
    __syncthreads();
    if (at.is_owner()) score_new_key(p, at, shared);
    attention.run(range, tile, step, shared.queries[0], p.scale, at.group);
    attention.store(shared.sums[warp][0], SUM_ROW, shared.largest[warp], shared.total[warp], at.group);
    __syncthreads();
    join_warps(at, shared);
    cluster_arrive();  // the CTA's sums are complete
    cluster_wait();    // and so are those of the cluster
    join_and_write(p, at, shared);
    __syncwarp();
    cluster_arrive();  // done with the others' shared memory
    cluster_wait();    // and they with this CTA's
}
