// One warp's share of decode attention on the tensor cores: all query heads of a group against tiles of 16 cached keys.
//
// Keys are the rows of the products and query heads the columns, so that eight heads cost half of what sixteen do, and a lane has the
// weights and the results of the same two heads of eight: h = 8 n + 2 t and h + 1, with g = lane / 4 and t = lane % 4 throughout.
#pragma once
#include "online_softmax.cuh"
#include "tensor_core.cuh"
#include "tile_ring.cuh"

constexpr int QUERY_ROW = HEAD_DIM + 8;  // elements of a query head in shared memory: 16 bytes more spread the banks
constexpr int STEPS = HEAD_DIM / 16;     // 16 elements of a head each

// `N`: groups of eight query heads.
template <int N>
struct WarpAttention {
    u32 query[N][STEPS][2];          // head 8 n + g: elements 16 j + 2 t, + 1 and those 8 on
    float out[N][STEPS][4];          // elements 16 j + g and, from [2] on, + 8; relative to `largest`
    float largest[N][2], total[N][2];  // `total` is this lane's part

    // `queries`: [MAX_GROUP][QUERY_ROW] in shared memory. `scale`: of a score, times log2(e).
    __device__ __forceinline__ void run(
        TileRing& ring, const KeyRange& range, const TileShare& share, const elem_bits* queries, float scale) {
        const int end = range.num_tiles();
        start(queries);
        for (int tile = share.tile; tile < end; tile += share.step) {
            const u32 keys = ring.wait();
            float weights[N][4];
            score(weights, keys);
            weigh(weights, range.count - range.key_of(tile, 0), scale);
            add_values(weights, keys + TILE_BYTES);
            ring.advance(range, tile, share.step);
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                for (int lanes = 4; lanes < 32; lanes *= 2) total[n][h] += __shfl_xor_sync(WHOLE_WARP, total[n][h], lanes);
    }

    __device__ __forceinline__ void start(const elem_bits* queries) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int j = 0; j < STEPS; j += 2) {
                u32 loaded[4];
                ld_matrices(loaded, shared_address(queries + (8 * n + lane % 8) * QUERY_ROW + 16 * j + lane / 8 * 8));
                query[n][j][0] = loaded[0], query[n][j][1] = loaded[1];
                query[n][j + 1][0] = loaded[2], query[n][j + 1][1] = loaded[3];
            }
#pragma unroll
            for (int j = 0; j < STEPS; ++j)
                for (int i = 0; i < 4; ++i) out[n][j][i] = 0.0f;
            for (int h = 0; h < 2; ++h) largest[n][h] = NO_SCORE, total[n][h] = 0.0f;
        }
    }

    // scores[n]: of key g, and from [2] on g + 8. Two sums at a time: a product waits for the one before into the same sum.
    __device__ __forceinline__ void score(float (&scores)[N][4], u32 keys) {
        const u32 lane = threadIdx.x % 32, row = lane % 16;
        float other[N][4] = {};
#pragma unroll
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < STEPS; j += 2) {
            u32 even[4], odd[4];
            ld_matrices(even, keys + chunk_at(row, 2 * j + lane / 16));
            ld_matrices(odd, keys + chunk_at(row, 2 * j + 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < N; ++n) {
                mma_16x8x16(scores[n], even, query[n][j][0], query[n][j][1]);
                mma_16x8x16(other[n], odd, query[n][j + 1][0], query[n][j + 1][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < 4; ++i) scores[n][i] += other[n][i];
    }

    // Scores to weights relative to the new largest score, and what was summed before relative to it, too. `num_valid`: keys of the
    // tile that exist, at least 1, so that the largest is a number.
    __device__ __forceinline__ void weigh(float (&scores)[N][4], int num_valid, float scale) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float found[2], correction[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] = g + i / 2 * 8 < num_valid ? scores[n][i] * scale : NO_SCORE;
#pragma unroll
            for (int h = 0; h < 2; ++h) found[h] = fmaxf(scores[n][h], scores[n][2 + h]);
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
                for (int h = 0; h < 2; ++h) found[h] = fmaxf(found[h], __shfl_xor_sync(WHOLE_WARP, found[h], lanes));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                found[h] = fmaxf(found[h], largest[n][h]);
                correction[h] = exp2_fast(largest[n][h] - found[h]);
                largest[n][h] = found[h];
                scores[n][h] = exp2_fast(scores[n][h] - found[h]);
                scores[n][2 + h] = exp2_fast(scores[n][2 + h] - found[h]);
                total[n][h] = total[n][h] * correction[h] + scores[n][h] + scores[n][2 + h];
            }
#pragma unroll
            for (int j = 0; j < STEPS; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][j][i] *= correction[i % 2];
        }
    }

    // The weights come with a key a row, and are wanted with a head a row.
    __device__ __forceinline__ void add_values(const float (&weights)[N][4], u32 values) {
        const u32 lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
        u32 turned[N][2];
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) turned[n][i] = transpose_matrix(pack_elems(weights[n][2 * i], weights[n][2 * i + 1]));
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
            u32 loaded[4];
            ld_matrices_transposed(loaded, values + chunk_at(row, 2 * j + lane / 8 % 2));
#pragma unroll
            for (int n = 0; n < N; ++n) mma_16x8x16(out[n][j], loaded, turned[n][0], turned[n][1]);
        }
    }

    // What was summed, to shared memory: `sums` [MAX_GROUP][row] floats, `scores` [MAX_GROUP] largest and total.
    __device__ __forceinline__ void store(float* sums, int row, float2* scores, u32 group) {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        __syncwarp();  // the sums may lie where the tiles were
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 head = 8 * n + 2 * t + h;
                if (head >= group) continue;
                if (g == 0) scores[head] = make_float2(largest[n][h], total[n][h]);
#pragma unroll
                for (int j = 0; j < STEPS; ++j) {
                    sums[head * row + 16 * j + g] = out[n][j][h];
                    sums[head * row + 16 * j + g + 8] = out[n][j][2 + h];
                }
            }
    }
};
