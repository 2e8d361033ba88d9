// Loads whose place in the caches matters.
#pragma once
#include "types.cuh"

// What another CTA of this kernel wrote, from where all SMs see the same.
__device__ __forceinline__ float2 ld_relaxed_gpu(const float2* address) {
    float2 value;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ float4 ld_relaxed_gpu(const float4* address) {
    float4 value;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

// Adds to a counter among the CTAs of one GPU; returns what it held. What the CTA wrote before (ordered by __syncthreads) is visible to
// whoever counts later, and what earlier ones wrote is visible to this CTA after the next __syncthreads.
__device__ __forceinline__ u32 add_acq_rel_gpu(u32* address, u32 value) {
    u32 seen;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(seen) : "l"(address), "r"(value) : "memory");
    return seen;
}
