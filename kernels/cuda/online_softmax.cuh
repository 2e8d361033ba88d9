// The arithmetic of a softmax whose terms come piece by piece: weights relative to the largest score so far, in base 2.
#pragma once
#include "types.cuh"

#define NO_SCORE __uint_as_float(0xff800000u)  // -infinity: the largest score of no keys at all

__device__ __forceinline__ float exp2_fast(float value) {  // 2 ulp; 0 for -infinity
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// What a sum relative to `own` counts for in one relative to `largest` >= own.
__device__ __forceinline__ float rescale(float own, float largest) { return own == NO_SCORE ? 0.0f : exp2_fast(own - largest); }
