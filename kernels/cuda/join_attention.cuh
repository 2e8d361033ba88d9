// Joins what warps, CTAs and clusters found of one row and KV head, four elements of the result at a time.
//
// Warps: in shared memory. CTAs of a cluster: each has a slice of the result to join, and the others send it theirs by `st_async`, so
// that nobody waits for more than what it needs, and a CTA that has sent may leave. Clusters: through global memory, where the last
// to arrive at a slice joins it. Always in one order, whoever is last: the same bits every time.
#pragma once
#include "attention_place.cuh"
#include "cluster.cuh"
#include "loads.cuh"
#include "online_softmax.cuh"

// Sums of weighted values, relative to the largest score.
struct Partial {
    float largest, total;
    float4 sum;
};

__device__ __forceinline__ Partial nothing() { return {NO_SCORE, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)}; }

// The first `num` of `parts`, in order.
template <u32 MAX>
__device__ __forceinline__ Partial join(const Partial (&parts)[MAX], u32 num) {
    Partial all = nothing();
#pragma unroll
    for (u32 i = 0; i < MAX; ++i)
        if (i < num) all.largest = fmaxf(all.largest, parts[i].largest);
#pragma unroll
    for (u32 i = 0; i < MAX; ++i)
        if (i < num) {
            const float factor = rescale(parts[i].largest, all.largest);
            all.total += parts[i].total * factor;
            all.sum.x += parts[i].sum.x * factor, all.sum.y += parts[i].sum.y * factor;
            all.sum.z += parts[i].sum.z * factor, all.sum.w += parts[i].sum.w * factor;
        }
    return all;
}

__device__ __forceinline__ Partial partial(float2 scores, float4 sum) { return {scores.x, scores.y, sum}; }

// `memory`: of warp 0, its sums [MAX_GROUP][SUM_ROW]; the other warps' are `warp_bytes` further each.
__device__ __forceinline__ Partial join_warps(
    const AttentionParams& p, const Place& at, const u8* memory, const Shared& shared, u32 quad) {
    const u32 head = quad / QUADS;
    Partial parts[MAX_WARPS];
#pragma unroll
    for (u32 warp = 0; warp < MAX_WARPS; ++warp)
        if (warp < at.num_warps) {
            const float* sums = reinterpret_cast<const float*>(memory + warp * p.warp_bytes) + head * SUM_ROW + quad % QUADS * 4;
            parts[warp] = partial(shared.scores[warp][head], *reinterpret_cast<const float4*>(sums));
        }
    return join(parts, at.num_warps);
}

// This CTA's sums to those who join them.
__device__ __forceinline__ void send(const AttentionParams& p, const Place& at, const u8* memory, Shared& shared) {
    float4* mail = reinterpret_cast<float4*>(shared.mail) + at.rank * at.slice();
    for (u32 quad = threadIdx.x; quad < at.group * QUADS; quad += blockDim.x) {
        const Partial joined = join_warps(p, at, memory, shared, quad);
        const u32 receiver = quad & (at.size - 1);
        st_async(mail + (quad >> at.size_shift), &shared.mailbox, receiver, joined.sum);
        if (quad % QUADS < at.size)  // the first of this head for each receiver
            st_async(&shared.mail_scores[at.rank][quad / QUADS], &shared.mailbox, receiver, make_float2(joined.largest, joined.total));
    }
}

__device__ __forceinline__ u32 mail_bytes(const Place& at) { return at.group * (HEAD_DIM * sizeof(float) + at.size * sizeof(float2)); }

// Number `i` of this CTA's slice.
__device__ __forceinline__ Partial join_cluster(const Place& at, const Shared& shared, u32 i) {
    const float4* mail = reinterpret_cast<const float4*>(shared.mail) + i;
    Partial parts[MAX_CLUSTER];
#pragma unroll
    for (u32 rank = 0; rank < MAX_CLUSTER; ++rank)
        if (rank < at.size) parts[rank] = partial(shared.mail_scores[rank][at.quad(i) / QUADS], mail[rank * at.slice()]);
    return join(parts, at.size);
}

__device__ __forceinline__ void write_out(const AttentionParams& p, const Place& at, u32 quad, float4 value) {
    const float values[4] = {value.x, value.y, value.z, value.w};
    elem_bits* target = p.out + (static_cast<long>(at.row) * p.num_q + at.kv_head * at.group) * HEAD_DIM + 4 * quad;
#pragma unroll
    for (int i = 0; i < 4; i += UNIT_ELEMS) {
        Unit unit;
        for (int j = 0; j < UNIT_ELEMS; ++j) unit.elems[j] = from_float(values[i + j]);
        *reinterpret_cast<u64*>(target + i) = unit.word;
    }
}

__device__ __forceinline__ void write_quotient(const AttentionParams& p, const Place& at, u32 quad, const Partial& joined) {
    const float factor = 1.0f / joined.total;
    const float4 sum = joined.sum;
    write_out(p, at, quad, make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor));
}

// Where cluster `cluster` of this pair leaves a quad, and its scores, both of this CTA's slice.
__device__ __forceinline__ float4* sum_of(const AttentionParams& p, const Place& at, u32 cluster, u32 quad) {
    return reinterpret_cast<float4*>(p.sums) + (static_cast<long>(at.pair) * p.num_clusters + cluster) * at.group * QUADS + quad;
}

__device__ __forceinline__ float2* scores_of(const AttentionParams& p, const Place& at, u32 cluster, u32 quad) {
    return p.scores + ((static_cast<long>(at.pair) * p.num_clusters + cluster) * MAX_CLUSTER + at.rank) * MAX_GROUP + quad / QUADS;
}

// A quad of what several clusters found, several of them at a time on their way.
__device__ __forceinline__ Partial join_clusters(const AttentionParams& p, const Place& at, u32 quad) {
    constexpr u32 AT_ONCE = 8;
    Partial joined[2] = {nothing(), nothing()};
    for (u32 first = 0; first < at.active; first += AT_ONCE) {
        Partial parts[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 cluster = min(first + i, at.active - 1);
            parts[i] = partial(ld_relaxed_gpu(scores_of(p, at, cluster, quad)), ld_relaxed_gpu(sum_of(p, at, cluster, quad)));
        }
        joined[1] = join(parts, at.active - first);
        joined[0] = join(joined, 2);
    }
    return joined[0];
}

// A quad of this CTA's slice, from its cluster: the result, or what the last cluster to arrive makes it from.
__device__ __forceinline__ void leave(const AttentionParams& p, const Place& at, u32 quad, const Partial& joined) {
    if (at.active == 1) {
        write_quotient(p, at, quad, joined);
        return;
    }
    *sum_of(p, at, at.cluster, quad) = joined.sum;
    if (quad % QUADS == at.rank)  // the first of a head within the slice writes for all of it
        *scores_of(p, at, at.cluster, quad) = make_float2(joined.largest, joined.total);
}

// From the sums of the CTA's warps to the result. All threads; the cluster's mailboxes are ready.
__device__ __forceinline__ void join_and_write(const AttentionParams& p, const Place& at, const u8* memory, Shared& shared) {
    if (at.size > 1) {
        send(p, at, memory, shared);
        wait_bytes(&shared.mailbox);
    }
    for (u32 i = threadIdx.x; i < at.slice(); i += blockDim.x)
        leave(p, at, at.quad(i), at.size > 1 ? join_cluster(at, shared, i) : join_warps(p, at, memory, shared, i));
    if (at.active == 1) return;
    __syncthreads();  // the CTA's stores happen before its arrival, which releases them to whoever arrives later
    u32* arrived = p.arrived + at.pair * MAX_CLUSTER + at.rank;
    if (threadIdx.x == 0) shared.ticket = add_acq_rel_gpu(arrived, 1);
    __syncthreads();  // and what the earlier arrivals released happens before the loads below
    if (shared.ticket != at.active - 1) return;
    for (u32 i = threadIdx.x; i < at.slice(); i += blockDim.x) write_quotient(p, at, at.quad(i), join_clusters(p, at, at.quad(i)));
    if (threadIdx.x == 0) *arrived = 0;  // for the next launch, which touches it after this one is complete
}
