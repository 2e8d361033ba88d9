// Heads as vectors of 16 bytes: a thread takes one of the first half of a head and the one it is rotated with, `half` vectors on.
#pragma once
#include "types.cuh"

constexpr int WIDTH = 16 / sizeof(elem_bits);

struct __align__(16) Vector {
    elem_bits elems[WIDTH];
};

struct VectorPair {
    Vector low, high;
};

__device__ __forceinline__ VectorPair load_pair(const Vector* low, u32 half) { return {low[0], low[half]}; }
__device__ __forceinline__ void store_pair(Vector* low, u32 half, const VectorPair& own) { low[0] = own.low, low[half] = own.high; }

// `turn`: cosines, then sines. The product with the cosine is rounded by itself, as `kernels/rotary.py` does; in fp32 only the
// intrinsic holds the compiler to it, so that all kernels turn to the same bits.
__device__ __forceinline__ void rotate(VectorPair& own, const VectorPair& turn) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        const float x = to_float(own.low.elems[e]), y = to_float(own.high.elems[e]);
        const float cosine = to_float(turn.low.elems[e]), sine = to_float(turn.high.elems[e]);
        own.low.elems[e] = from_float(round_to_elem(__fmul_rn(x, cosine)) - y * sine);
        own.high.elems[e] = from_float(round_to_elem(__fmul_rn(y, cosine)) + x * sine);
    }
}
