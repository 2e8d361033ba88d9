// What a launch of decode attention is given, which part of it a CTA has, and what its warps tell each other.
#pragma once
#include "key_range.cuh"

constexpr u32 MIN_WARPS = 4, MAX_WARPS = 8, MAX_CLUSTER = 8;
constexpr int SUM_ROW = HEAD_DIM + 4;  // floats; 4 more spread the banks

struct AttentionParams {
    const void* qkv;          // num_parts > 0: floats [num_parts][rows][q, k and v heads][HEAD_DIM]; 0: elements [rows][...]
    const elem_bits* bias;    // [q, k and v heads][HEAD_DIM] or null
    const elem_bits* q_norm;  // [HEAD_DIM] or null, like k_norm
    const elem_bits* k_norm;
    const elem_bits* turns;   // [positions][2][HEAD_DIM / 2] cosines and sines; null: heads are rotated already
    const void* positions;    // [rows] of the new tokens; -1: no token
    const int* pages;         // [rows][max_pages]
    elem_bits* keys;          // [slots][KV heads][HEAD_DIM]
    elem_bits* values;
    elem_bits* out;           // [rows][q heads][HEAD_DIM]
    float* sums;              // [rows][KV heads][num_clusters][group][HEAD_DIM]: of clusters that share a row
    float2* scores;           // [rows][KV heads][num_clusters][MAX_CLUSTER][MAX_GROUP]: largest score, sum of weights
    u32* arrived;             // [rows][KV heads][MAX_CLUSTER], all 0 between launches
    float eps;
    float scale;              // of a score, times log2(e)
    u32 num_q, num_kv, group;  // heads; num_q is group * num_kv
    u32 num_parts, max_pages, page_shift;
    u32 window;               // positions a query sees, its own included; 0: all
    u32 num_clusters;         // at most, a row and KV head
    u32 alone_tiles;          // a warp's tiles up to which one cluster takes a row by itself
    u32 shared_tiles;         // a warp's tiles at least where several clusters share a row
    u32 num_stages;           // tiles a warp has on their way, 2 to MAX_STAGES
    u32 warp_bytes;           // of dynamic shared memory a warp: its stages, later its sums
    u32 is_wide;              // positions are 8 bytes wide, not 4
    u32 is_early;             // see decode_attention.cu
};

// Behind what the warps have in dynamic shared memory. `attention_bytes` of decode_attention.py counts on its size.
struct Shared {
    __align__(16) elem_bits queries[MAX_GROUP][HEAD_DIM + (sizeof(elem_bits) == 2 ? 8 : 0)];
    __align__(16) float mail[MAX_GROUP * HEAD_DIM];  // [CTA of the cluster][this CTA's slice]
    float2 mail_scores[MAX_CLUSTER][MAX_GROUP];   // largest score, sum of weights of each CTA
    float2 scores[MAX_WARPS][MAX_GROUP];          // of each warp
    u64 mailbox;                                  // counts the bytes of mail
    u32 ticket;
};
static_assert(sizeof(Shared) <= (sizeof(elem_bits) == 2 ? 16 : 20) << 10, "more than the launcher asks for");

constexpr u32 QUADS = HEAD_DIM / 4;  // of a head: the result is joined four elements at a time

// Which row, KV head and part of the row's tiles is this CTA's. Of the result of the pair, [group][QUADS], CTA `rank` of a cluster of
// `size` joins quads rank, rank + size, ...: its slice.
struct Place {
    u32 row, kv_head, group, num_warps;
    u32 cluster, rank, size, size_shift;  // size is 1 << size_shift
    u32 pair, active;                     // number of (row, KV head); clusters that share it

    __device__ __forceinline__ u32 slice() const { return group * QUADS >> size_shift; }
    __device__ __forceinline__ u32 quad(u32 i) const { return (i << size_shift) + rank; }  // number i of the slice
    __device__ __forceinline__ bool is_owner() const { return cluster == 0 && rank == 0; }  // it has the tile with the new token

    __device__ __forceinline__ TileShare share() const {
        const u32 first = (cluster * size + rank) * num_warps + threadIdx.x / 32;
        return {static_cast<int>(first), static_cast<int>(active * size * num_warps)};
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
    range.stride = p.num_kv * HEAD_DIM * sizeof(elem_bits);
    range.first = p.window ? max(0, position + 1 - static_cast<int>(p.window)) : 0;
    range.count = position + 1 - range.first;
    range.page_shift = p.page_shift;
    return range;
}

// A row that is short for one cluster is not worth the trip through global memory that several take.
__device__ __forceinline__ u32 active_clusters(const AttentionParams& p, const Place& at, u32 tiles) {
    const u32 warps = at.size * at.num_warps;
    if (tiles <= warps * p.alone_tiles) return 1;
    return min(p.num_clusters, (tiles + warps * p.shared_tiles - 1) / (warps * p.shared_tiles));
}
