// One warp's share of decode attention: all query heads of a group against tiles of 16 cached keys, every `step`-th tile.
//
// Keys and values go from global memory straight to registers, 16 bytes a lane: a key is read once for the whole group, and no shared
// memory, no barrier and no other warp is involved. That works because a matrix product does not mind the order of what it sums over or
// of its columns: each lane calls the 8 neighbouring elements that it loaded "its" columns, and the queries are arranged alike.
//
// While a tile's scores become weights, the keys of the next one are on their way, and while the weights meet the values, too.
#pragma once
#include "loads.cuh"
#include "online_softmax.cuh"
#include "tensor_core.cuh"

constexpr int TILE_KEYS = 16;
constexpr int MAX_GROUP = 16;  // query heads a KV head: the rows of one matrix product
constexpr u32 WHOLE_WARP = 0xffffffffu;

// The cached positions [first, first + count) of one row that its query sees, for one KV head.
struct KeyRange {
    const int* pages;         // page numbers of the row
    const elem_bits* keys;    // this head of slot s is at keys + s * stride
    const elem_bits* values;
    long stride;              // elements from slot to slot
    int first, count;
    u32 page_shift;           // log2 of the page size
};

__device__ __forceinline__ int slot_at(const KeyRange& range, int position) {
    return (range.pages[position >> range.page_shift] << range.page_shift) + (position & ((1 << range.page_shift) - 1));
}

// The slot of key lane % 16 of a tile. Behind the last key it is the last key's: such a slot was written, so it holds no NaN that a
// weight of 0 could not remove.
__device__ __forceinline__ int tile_slot(const KeyRange& range, int tile) {
    int key = tile * TILE_KEYS + static_cast<int>(threadIdx.x % TILE_KEYS);
    return slot_at(range, range.first + min(key, range.count - 1));
}

__device__ __forceinline__ int num_tiles(const KeyRange& range) { return (range.count + TILE_KEYS - 1) / TILE_KEYS; }

#if ELEM != 2

constexpr int QUERY_ROW = HEAD_DIM + 8;          // elements of a query head in shared memory: 16 bytes more spread the banks
constexpr int KEY_LOADS = HEAD_DIM / 32;         // a lane's 16-byte loads of one key; 4 lanes share a key
constexpr int VALUE_LOADS = HEAD_DIM / 64;       // of one value; 8 lanes share it
constexpr int OUT_TILES = 8 * VALUE_LOADS;       // 8 columns each

struct WarpAttention {
    uint4 keys[2][KEY_LOADS];      // of keys g and g + 8 of the tile: elements 8 (t + 4 j) on
    uint4 values[4][VALUE_LOADS];  // of keys 2t, 2t + 1, 2t + 8, 2t + 9: elements 8 (g + 8 h) on
    int next_slot;
    float out[OUT_TILES][4];       // tile 8 h + j, column c: element 8 (c + 8 h) + j; relative to `largest`
    float largest[2], total[2];    // of heads g and g + 8; `total` is this lane's part

    __device__ __forceinline__ void load_keys(const KeyRange& range, int slot) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const elem_bits* key = range.keys + __shfl_sync(WHOLE_WARP, slot, g + 8 * n) * range.stride;
#pragma unroll
            for (int j = 0; j < KEY_LOADS; ++j) keys[n][j] = ld_once(key + 8 * (t + 4 * j));
        }
    }

    __device__ __forceinline__ void load_values(const KeyRange& range, int slot) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const elem_bits* value = range.values + __shfl_sync(WHOLE_WARP, slot, 2 * t + i % 2 + 8 * (i / 2)) * range.stride;
#pragma unroll
            for (int h = 0; h < VALUE_LOADS; ++h) values[i][h] = ld_once(value + 8 * (g + 8 * h));
        }
    }

    // Start the loads of the warp's first tile, which need no query.
    __device__ __forceinline__ void prefetch(const KeyRange& range, int tile, int step) {
        if (tile >= num_tiles(range)) return;
        const int slot = tile_slot(range, tile);
        load_keys(range, slot);
        load_values(range, slot);
        next_slot = tile_slot(range, tile + step);
    }

    // `queries`: [MAX_GROUP][QUERY_ROW] in shared memory. `scale`: of a score, times log2(e).
    __device__ __forceinline__ void run(const KeyRange& range, int tile, int step, const elem_bits* queries, float scale, u32) {
        const int end = num_tiles(range);
        uint4 query[2][KEY_LOADS];  // heads g and g + 8, elements as of the keys
        start(query, queries);
        for (; tile < end; tile += step) {
            float weights[2][4] = {};
            score(weights, query);
            const bool has_next = tile + step < end;
            if (has_next) load_keys(range, next_slot);
            weigh(weights, range.count - tile * TILE_KEYS, scale);
            add_values(weights);
            if (!has_next) break;
            load_values(range, next_slot);
            next_slot = tile_slot(range, tile + 2 * step);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            for (int lanes = 1; lanes < 4; lanes *= 2) total[r] += __shfl_xor_sync(WHOLE_WARP, total[r], lanes);
    }

    __device__ __forceinline__ void start(uint4 (&query)[2][KEY_LOADS], const elem_bits* queries) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = NO_SCORE, total[r] = 0.0f;
#pragma unroll
            for (int j = 0; j < KEY_LOADS; ++j)
                query[r][j] = *reinterpret_cast<const uint4*>(queries + (g + 8 * r) * QUERY_ROW + 8 * (t + 4 * j));
        }
#pragma unroll
        for (int n = 0; n < OUT_TILES; ++n)
            for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }

    // scores[n]: heads in rows, keys 8 n to 8 n + 7 in columns.
    __device__ __forceinline__ void score(float (&scores)[2][4], const uint4 (&query)[2][KEY_LOADS]) {
#pragma unroll
        for (int j = 0; j < KEY_LOADS; ++j) {
            const u32 first[4] = {query[0][j].x, query[1][j].x, query[0][j].y, query[1][j].y};
            const u32 second[4] = {query[0][j].z, query[1][j].z, query[0][j].w, query[1][j].w};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                mma_16x8x16(scores[n], first, keys[n][j].x, keys[n][j].y);
                mma_16x8x16(scores[n], second, keys[n][j].z, keys[n][j].w);
            }
        }
    }

    // Scores to weights relative to the new largest score, and what was summed before relative to it, too. `num_valid`: keys of the
    // tile that exist, at least 1, so that the largest is a number.
    __device__ __forceinline__ void weigh(float (&scores)[2][4], int num_valid, float scale) {
        const int t = threadIdx.x % 4;
        float found[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[n][i] = 8 * n + 2 * t + i % 2 < num_valid ? scores[n][i] * scale : NO_SCORE;
                found[i / 2] = fmaxf(found[i / 2], scores[n][i]);
            }
        float correction[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            for (int lanes = 1; lanes < 4; lanes *= 2) found[r] = fmaxf(found[r], __shfl_xor_sync(WHOLE_WARP, found[r], lanes));
            found[r] = fmaxf(found[r], largest[r]);
            correction[r] = exp2_fast(largest[r] - found[r]);
            largest[r] = found[r];
            total[r] *= correction[r];
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[n][i] = exp2_fast(scores[n][i] - largest[i / 2]);
                total[i / 2] += scores[n][i];
            }
#pragma unroll
        for (int n = 0; n < OUT_TILES; ++n)
            for (int i = 0; i < 4; ++i) out[n][i] *= correction[i / 2];
    }

    __device__ __forceinline__ void add_values(const float (&weights)[2][4]) {
        const u32 a[4] = {pack_elems(weights[0][0], weights[0][1]), pack_elems(weights[0][2], weights[0][3]),
                          pack_elems(weights[1][0], weights[1][1]), pack_elems(weights[1][2], weights[1][3])};
#pragma unroll
        for (int h = 0; h < VALUE_LOADS; ++h) {
            add_value_pair(8 * h + 0, a, values[0][h].x, values[1][h].x, values[2][h].x, values[3][h].x);
            add_value_pair(8 * h + 2, a, values[0][h].y, values[1][h].y, values[2][h].y, values[3][h].y);
            add_value_pair(8 * h + 4, a, values[0][h].z, values[1][h].z, values[2][h].z, values[3][h].z);
            add_value_pair(8 * h + 6, a, values[0][h].w, values[1][h].w, values[2][h].w, values[3][h].w);
        }
    }

    // Two neighbouring elements of four keys, which are two columns.
    __device__ __forceinline__ void add_value_pair(int n, const u32 (&a)[4], u32 v0, u32 v1, u32 v2, u32 v3) {
        mma_16x8x16(out[n], a, low_elems(v0, v1), low_elems(v2, v3));
        mma_16x8x16(out[n + 1], a, high_elems(v0, v1), high_elems(v2, v3));
    }

    // What was summed, to shared memory: `sums` [MAX_GROUP][row] floats, `largests` and `totals` [MAX_GROUP].
    __device__ __forceinline__ void store(float* sums, int row, float* largests, float* totals, u32 group) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 head = g + 8 * r;
            if (head >= group) continue;
            if (t == 0) largests[head] = largest[r], totals[head] = total[r];
#pragma unroll
            for (int n = 0; n < OUT_TILES; n += 4)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float* target = sums + head * row + 8 * (2 * t + c + n / 8 * 8) + n % 8;
                    const int i = 2 * r + c;
                    *reinterpret_cast<float4*>(target) = make_float4(out[n][i], out[n + 1][i], out[n + 2][i], out[n + 3][i]);
                }
        }
    }
};

#else

constexpr int QUERY_ROW = HEAD_DIM;
constexpr int LANE_ELEMS = HEAD_DIM / 32;
constexpr int KEYS_AT_ONCE = 4;

// fp32 has no tensor cores of its precision: plain products, for tests and for the reference. Lane l holds elements l LANE_ELEMS on.
struct WarpAttention {
    float out[MAX_GROUP][LANE_ELEMS];
    float largest[MAX_GROUP], total[MAX_GROUP];

    __device__ __forceinline__ void prefetch(const KeyRange&, int, int) {}

    __device__ __forceinline__ void run(const KeyRange& range, int tile, int step, const elem_bits* queries, float scale, u32 group) {
#pragma unroll
        for (int head = 0; head < MAX_GROUP; ++head) {
            largest[head] = NO_SCORE, total[head] = 0.0f;
            for (int i = 0; i < LANE_ELEMS; ++i) out[head][i] = 0.0f;
        }
        for (; tile < num_tiles(range); tile += step) {
            const int slot = tile_slot(range, tile);
            for (int key = 0; key < TILE_KEYS; key += KEYS_AT_ONCE)
                attend(range, slot, key, range.count - tile * TILE_KEYS, queries, scale, group);
        }
    }

    __device__ __forceinline__ void attend(
        const KeyRange& range, int slot, int key, int num_valid, const elem_bits* queries, float scale, u32 group) {
        const u32 lane = threadIdx.x % 32;
        float keys[KEYS_AT_ONCE][LANE_ELEMS], values[KEYS_AT_ONCE][LANE_ELEMS];
#pragma unroll
        for (int k = 0; k < KEYS_AT_ONCE; ++k) {
            const long at = __shfl_sync(WHOLE_WARP, slot, key + k) * range.stride + lane * LANE_ELEMS;
#pragma unroll
            for (int i = 0; i < LANE_ELEMS; ++i) keys[k][i] = to_float(range.keys[at + i]), values[k][i] = to_float(range.values[at + i]);
        }
#pragma unroll
        for (int head = 0; head < MAX_GROUP; ++head) {
            if (head >= group) break;
            float scores[KEYS_AT_ONCE], found = largest[head];
#pragma unroll
            for (int k = 0; k < KEYS_AT_ONCE; ++k) {
                scores[k] = 0.0f;
#pragma unroll
                for (int i = 0; i < LANE_ELEMS; ++i) scores[k] += keys[k][i] * to_float(queries[head * QUERY_ROW + lane * LANE_ELEMS + i]);
#pragma unroll
                for (int lanes = 16; lanes; lanes /= 2) scores[k] += __shfl_xor_sync(WHOLE_WARP, scores[k], lanes);
                scores[k] = key + k < num_valid ? scores[k] * scale : NO_SCORE;
                found = fmaxf(found, scores[k]);
            }
            // The first keys of a tile exist, so `found` is a number from the first turn on.
            const float correction = exp2_fast(largest[head] - found);
            largest[head] = found, total[head] *= correction;
#pragma unroll
            for (int i = 0; i < LANE_ELEMS; ++i) out[head][i] *= correction;
#pragma unroll
            for (int k = 0; k < KEYS_AT_ONCE; ++k) {
                const float weight = exp2_fast(scores[k] - found);
                total[head] += weight;
#pragma unroll
                for (int i = 0; i < LANE_ELEMS; ++i) out[head][i] += weight * values[k][i];
            }
        }
    }

    __device__ __forceinline__ void store(float* sums, int row, float* largests, float* totals, u32 group) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int head = 0; head < MAX_GROUP; ++head) {
            if (head >= group) break;
            if (lane == 0) largests[head] = largest[head], totals[head] = total[head];
            for (int i = 0; i < LANE_ELEMS; ++i) sums[head * row + lane * LANE_ELEMS + i] = out[head][i];
        }
    }
};

#endif
