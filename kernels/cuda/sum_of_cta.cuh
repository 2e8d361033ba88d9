// A sum over the threads of a CTA of whole warps.
#pragma once
#include "types.cuh"

// The sum of `value`, on every thread. `sums`: of shared memory, a word a warp, which no thread still reads from the call before.
__device__ __forceinline__ float sum_of_cta(float value, float* sums) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    value = lane < blockDim.x / 32 ? sums[lane] : 0.0f;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}
