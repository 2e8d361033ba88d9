// One warp's share of decode attention in fp32, which has no tensor cores of its precision: plain products, for tests and for the
// reference. Lane l holds elements l LANE_ELEMS on.
#pragma once
#include "key_range.cuh"
#include "online_softmax.cuh"

constexpr int QUERY_ROW = HEAD_DIM;
constexpr int LANE_ELEMS = HEAD_DIM / 32;
constexpr int KEYS_AT_ONCE = 4;

struct PlainAttention {
    float out[MAX_GROUP][LANE_ELEMS];
    float largest[MAX_GROUP], total[MAX_GROUP];

    // `new_key`, `new_value`: of the new token, in shared memory.
    __device__ __forceinline__ void run(const KeyRange& range, const TileShare& share, const elem_bits* new_key,
                                        const elem_bits* new_value, const elem_bits* queries, float scale, u32 group) {
#pragma unroll
        for (int head = 0; head < MAX_GROUP; ++head) {
            largest[head] = NO_SCORE, total[head] = 0.0f;
            for (int i = 0; i < LANE_ELEMS; ++i) out[head][i] = 0.0f;
        }
        for (int tile = share.tile; tile < range.num_tiles(); tile += share.step)
            for (int key = 0; key < TILE_KEYS; key += KEYS_AT_ONCE)
                attend(range, range.key_of(tile, key), new_key, new_value, queries, scale, group);
    }

    __device__ __forceinline__ void attend(const KeyRange& range, int first_key, const elem_bits* new_key, const elem_bits* new_value,
                                           const elem_bits* queries, float scale, u32 group) {
        const u32 lane = threadIdx.x % 32;
        if (first_key >= range.count) return;
        float keys[KEYS_AT_ONCE][LANE_ELEMS], values[KEYS_AT_ONCE][LANE_ELEMS];
#pragma unroll
        for (int k = 0; k < KEYS_AT_ONCE; ++k) {
            const int key = min(first_key + k, range.count - 1);
            const long at = static_cast<long>(range.slot_of(key, range.page_of(key))) * (range.stride / sizeof(elem_bits));
            const elem_bits* source = range.is_new(key) ? new_key : range.keys + at;
            const elem_bits* value = range.is_new(key) ? new_value : range.values + at;
#pragma unroll
            for (int i = 0; i < LANE_ELEMS; ++i) {
                keys[k][i] = to_float(source[lane * LANE_ELEMS + i]);
                values[k][i] = to_float(value[lane * LANE_ELEMS + i]);
            }
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
                scores[k] = first_key + k < range.count ? scores[k] * scale : NO_SCORE;
                found = fmaxf(found, scores[k]);
            }
            const float correction = exp2_fast(largest[head] - found);  // `found` is a number: the first of the keys exists
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

    // As `WarpAttention::store`.
    __device__ __forceinline__ void store(float* sums, int row, float2* scores, u32 group) {
        const u32 lane = threadIdx.x % 32;
        __syncwarp();  // the sums may lie where the new token was
#pragma unroll
        for (int head = 0; head < MAX_GROUP; ++head) {
            if (head >= group) break;
            if (lane == 0) scores[head] = make_float2(largest[head], total[head]);
            for (int i = 0; i < LANE_ELEMS; ++i) sums[head * row + lane * LANE_ELEMS + i] = out[head][i];
        }
    }
};
