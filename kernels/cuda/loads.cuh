// Loads whose place in the caches matters.
#pragma once
#include "types.cuh"

// 16 bytes that this SM reads once: they need not push anything out of L1. Volatile, so that a load written before a wait is also
// issued before it.
__device__ __forceinline__ uint4 ld_once(const void* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// What another CTA of this kernel wrote, from where all SMs see the same.
__device__ __forceinline__ float ld_relaxed_gpu(const float* address) {
    float value;
    asm("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
    return value;
}

// Adds to a counter among the CTAs of one GPU; returns what it held. What the CTA wrote before (ordered by __syncthreads) is visible to
// whoever counts later, and what earlier ones wrote is visible to this CTA after the next __syncthreads.
__device__ __forceinline__ u32 add_acq_rel_gpu(u32* address, u32 value) {
    u32 seen;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(seen) : "l"(address), "r"(value) : "memory");
    return seen;
}
