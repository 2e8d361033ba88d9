// One warp makes a head of the new token ready: sums its parts, adds the bias, normalises, rotates. Each result is rounded to the
// element type where the separate steps would store it.
#pragma once
#include "types.cuh"

constexpr int HALF_ELEMS = HEAD_DIM / 64;  // a lane's elements of each half of a head

// Lane l holds elements l HALF_ELEMS on, and those they are rotated with, half a head further.
struct Head {
    float half[2][HALF_ELEMS];
};

__device__ __forceinline__ int head_elem(int part, int i) {
    return part * (HEAD_DIM / 2) + static_cast<int>(threadIdx.x % 32) * HALF_ELEMS + i;
}

__device__ __forceinline__ float round_to_elem(float value) { return to_float(from_float(value)); }

__device__ __forceinline__ Head load_head(const elem_bits* source) {
    Head head;
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i) head.half[part][i] = to_float(source[head_elem(part, i)]);
    return head;
}

__device__ __forceinline__ void add_part(Head& head, const float* source) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#if HEAD_DIM == 128
        const float2 more = *reinterpret_cast<const float2*>(source + head_elem(part, 0));
        head.half[part][0] += more.x, head.half[part][1] += more.y;
#else
        head.half[part][0] += source[head_elem(part, 0)];
#endif
    }
}

// `bias`: of this head, or null.
__device__ __forceinline__ void add_bias_and_round(Head& head, const elem_bits* bias) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i) {
            if (bias != nullptr) head.half[part][i] += to_float(bias[head_elem(part, i)]);
            head.half[part][i] = round_to_elem(head.half[part][i]);
        }
}

// RMSNorm over the head. Rounded before the weight and after it, as `kernels/rms_norm.py` does with half types.
__device__ __forceinline__ void normalise(Head& head, const elem_bits* weight, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int part = 0; part < 2; ++part)
        for (int i = 0; i < HALF_ELEMS; ++i) squares += head.half[part][i] * head.half[part][i];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
    const float scale = rsqrtf(squares / HEAD_DIM + eps);
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i)
            head.half[part][i] = round_to_elem(round_to_elem(head.half[part][i] * scale) * to_float(weight[head_elem(part, i)]));
}

// `turn`: cosines and sines of the position, [2][HEAD_DIM / 2] as a head. The product with the cosine is rounded by itself, as
// `kernels/rotary.py` does.
__device__ __forceinline__ void rotate(Head& head, const Head& turn) {
#pragma unroll
    for (int i = 0; i < HALF_ELEMS; ++i) {
        const float x = head.half[0][i], y = head.half[1][i], cosine = turn.half[0][i], sine = turn.half[1][i];
        head.half[0][i] = round_to_elem(round_to_elem(x * cosine) - y * sine);
        head.half[1][i] = round_to_elem(round_to_elem(y * cosine) + x * sine);
    }
}

__device__ __forceinline__ void store_head(elem_bits* target, const Head& head) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i) target[head_elem(part, i)] = from_float(head.half[part][i]);
}
