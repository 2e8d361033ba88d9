// Barriers in shared memory that bulk copies count on, for rings of stages: a stage's `full` and `empty`. Of one CTA; nothing here waits
// for another GPU, and a copy from this GPU's memory ends by itself.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// One thread a barrier; then `fence_new_barriers`, and __syncthreads.
__device__ __forceinline__ void open_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The opened barriers are visible to copies that count on them.
__device__ __forceinline__ void fence_new_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives; the phase is complete when that many bytes have come as well.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

// NOTE: tells the last complete phase from the one before by its parity alone. Who waits for a barrier must not skip a phase of it.
__device__ __forceinline__ void wait_phase(u32 barrier, u32 parity) {
    u32 is_complete = 0;
    while (!is_complete)
        asm volatile(
            "{\n.reg .pred complete;\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\nselp.u32 %0, 1, 0, complete;\n}"
            : "=r"(is_complete)
            : "r"(barrier), "r"(parity)
            : "memory");
}

// Contiguous bytes of global memory to shared memory, counted by `barrier`. Addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bulk(u32 target, const void* source, u32 num_bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source),
                 "r"(num_bytes), "r"(barrier)
                 : "memory");
}
