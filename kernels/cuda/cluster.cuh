// What CTAs of one cluster tell each other through distributed shared memory. Nothing here waits for another GPU.
#pragma once
#include "mbarrier.cuh"
#include "types.cuh"

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ __forceinline__ u32 cluster_idx() {  // of a grid whose clusters lie along x
    u32 idx;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(idx));
    return idx;
}

// Where CTA `rank` of the cluster keeps what this CTA keeps at `own`.
__device__ __forceinline__ u32 shared_address_at(u32 own, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    return remote;
}

// One thread: `mailbox` will be complete when `num_bytes` have arrived by `st_async`. The CTA's other threads and the cluster know of
// it after `cluster_arrive` here and `cluster_wait` there.
__device__ __forceinline__ void expect_bytes(u64* mailbox, u32 num_bytes) {
    u32 address = shared_address(mailbox);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(num_bytes) : "memory");
}

// Both are of whole warps: after a branch that not all lanes took, a warp may come here in pieces, and an instruction that is told
// otherwise ends the kernel as illegal.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `value` into `target` of CTA `rank`, counted by its `mailbox`: one trip, no barrier.
__device__ __forceinline__ void st_async(float* target, u64* mailbox, u32 rank, float value) {
    u32 address = shared_address_at(shared_address(target), rank), counter = shared_address_at(shared_address(mailbox), rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value), "r"(counter)
                 : "memory");
}

// The same for several values: `target` is aligned to all of them.
__device__ __forceinline__ void st_async(float2* target, u64* mailbox, u32 rank, float2 value) {
    u32 address = shared_address_at(shared_address(target), rank), counter = shared_address_at(shared_address(mailbox), rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address), "f"(value.x),
                 "f"(value.y), "r"(counter)
                 : "memory");
}

__device__ __forceinline__ void st_async(float4* target, u64* mailbox, u32 rank, float4 value) {
    u32 address = shared_address_at(shared_address(target), rank), counter = shared_address_at(shared_address(mailbox), rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(counter)
                 : "memory");
}

// All bytes have arrived and are visible. First use of the mailbox only (phase 0).
__device__ __forceinline__ void wait_bytes(u64* mailbox) {
    u32 is_complete = 0;
    while (!is_complete)
        asm volatile(
            "{\n.reg .pred complete;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 complete, [%1], 0;\nselp.u32 %0, 1, 0, complete;\n}"
            : "=r"(is_complete)
            : "r"(shared_address(mailbox))
            : "memory");
}

// The CTA's dynamic shared memory as a `T`; the launch asks for `sizeof(T)` bytes.
template <class T>
__device__ __forceinline__ T& shared_memory() {
    extern __shared__ __align__(16) u8 bytes[];
    return *reinterpret_cast<T*>(bytes);
}

// What CTA `rank` of the cluster keeps where this CTA keeps `own`. Complete once `cluster_arrive` there and `cluster_wait` here passed;
// that CTA must not leave before another such pair.
__device__ __forceinline__ u64 ld_shared_at(const u64* own, u32 rank) {
    u64 value;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(shared_address_at(shared_address(own), rank)) : "memory");
    return value;
}
