// What `kernels/cuda/cluster.cuh` offers, on the host: a CUDA thread is a thread, barriers are barriers, and shared memory is a block
// a CTA. One cluster at a time.
#pragma once
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(threads)
#define __grid_constant__

struct Dim {
    unsigned x;
};
inline thread_local Dim threadIdx, blockIdx, blockDim;

using std::max;
using std::min;

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned long long __double_as_longlong(double value) {
    unsigned long long bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }

#include "types.cuh"

struct Cta {
    std::unique_ptr<std::barrier<>> barrier;
    std::vector<u64> memory;
};

struct Cluster {
    std::vector<Cta> ctas;
    std::unique_ptr<std::barrier<>> barrier;
};

inline thread_local Cluster* cluster_here;
inline thread_local u32 rank_here;

inline u32 cluster_rank() { return rank_here; }
inline u32 cluster_size() { return static_cast<u32>(cluster_here->ctas.size()); }
inline void __syncthreads() { cluster_here->ctas[rank_here].barrier->arrive_and_wait(); }
inline void cluster_arrive() {}
inline void cluster_wait() { cluster_here->barrier->arrive_and_wait(); }
inline void atomicAdd(u64* target, u64 value) { __atomic_fetch_add(target, value, __ATOMIC_RELAXED); }
inline void atomicMax(u64* target, u64 value) {
    u64 seen = __atomic_load_n(target, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(target, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

template <class T>
T& shared_memory() {
    return *reinterpret_cast<T*>(cluster_here->ctas[rank_here].memory.data());
}

inline u64 ld_shared_at(const u64* own, u32 rank) {
    return cluster_here->ctas[rank].memory[own - cluster_here->ctas[rank_here].memory.data()];
}

// Runs `kernel()` as a grid of `clusters` clusters of `ctas` CTAs of `threads` threads. Shared memory begins as garbage.
template <class KernelCall>
void run_clusters(u32 clusters, u32 ctas, u32 threads, size_t shared_bytes, KernelCall kernel) {
    for (u32 first = 0; first < clusters * ctas; first += ctas) {
        Cluster cluster;
        cluster.ctas.resize(ctas);
        cluster.barrier = std::make_unique<std::barrier<>>(ctas * threads);
        for (Cta& cta : cluster.ctas) {
            cta.barrier = std::make_unique<std::barrier<>>(threads);
            cta.memory.assign(shared_bytes / sizeof(u64), 0xdeadbeefdeadbeefull);
        }
        std::vector<std::thread> running;
        for (u32 i = 0; i < ctas * threads; ++i)
            running.emplace_back([&, i] {
                cluster_here = &cluster;
                rank_here = i / threads;
                threadIdx.x = i % threads;
                blockIdx.x = first + rank_here;
                blockDim.x = threads;
                kernel();
            });
        for (std::thread& thread : running) thread.join();
    }
}
