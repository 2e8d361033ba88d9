// Where, in a cluster's items in descending order of their keys, a sum of weights reaches a limit: a radix search, four rounds of eight
// bits, over items that are computed anew in each. Integers only, so that nothing depends on the order of the threads.
//
// Every CTA of the cluster calls the same functions in the same order, all threads together, and gets the same answer. The caller ends
// with a barrier of the cluster, since CTAs read each other's shared memory.
#pragma once
#include "cluster.cuh"
#include "dependents.cuh"
#include "order.cuh"

constexpr u32 RADIX = 256, LANES = 32;
constexpr u32 ORDER_OF_NOTHING = 0x007fffffu, ORDER_OF_INFINITY = 0xff800000u;  // `order_of` of -inf and of +inf

// Shared memory of a CTA. `lanes`: a histogram a lane, so that the lanes of a warp never meet in a bin or a bank; all zeros between
// the rounds.
struct RadixMemory {
    u64 lanes[RADIX][LANES];
    u64 bins[2][RADIX];  // of this CTA; rounds take turns, so that one barrier a round is enough
    u64 sums[2][RADIX];  // of the cluster: of all bins from this one up
    u64 highest;
    u64 limit;
    u64 above;
    u64 sum;
    u32 digit;
};

// `key`: the highest at which the weights of all keys from it up reach `limit`. `above`: the weights of the keys higher than it;
// `sum`: its own.
struct Found {
    u32 key;
    u64 limit;
    u64 above;
    u64 sum;
};

__device__ __forceinline__ void sum_lanes(RadixMemory& memory, u32 turn) {
    for (u32 bin = threadIdx.x; bin < RADIX; bin += blockDim.x) {
        u64 sum = 0;
        for (u32 i = 0; i < LANES; ++i) {
            u64& lane = memory.lanes[bin][(bin + i) % LANES];  // turned, so that the threads read other banks
            sum += lane;
            lane = 0;
        }
        memory.bins[turn][bin] = sum;
    }
}

// `sums[0]`: of the cluster, each bin with all above it. Ends with a barrier.
__device__ __forceinline__ void sum_cluster(RadixMemory& memory, u32 turn) {
    for (u32 bin = threadIdx.x; bin < RADIX; bin += blockDim.x) {
        u64 sum = 0;
        for (u32 rank = 0; rank < cluster_size(); ++rank) sum += ld_shared_at(&memory.bins[turn][bin], rank);
        memory.sums[0][bin] = sum;
    }
    __syncthreads();
    for (u32 step = 1, from = 0; step < RADIX; step *= 2, from ^= 1) {  // eight steps: the last one writes sums[0]
        for (u32 bin = threadIdx.x; bin < RADIX; bin += blockDim.x)
            memory.sums[from ^ 1][bin] = memory.sums[from][bin] + (bin + step < RADIX ? memory.sums[from][bin + step] : 0);
        __syncthreads();
    }
}

// `key_of(i)`: of item i of [begin, end), the CTA's share; 0 for one that does not count. `weight_of(key)`: may be 0.
// `limit_of(sum of all weights)`: at least 1, at most that sum.
template <class KeyOf, class WeightOf, class LimitOf>
__device__ __forceinline__ Found find_key(u32 begin, u32 end, KeyOf key_of, WeightOf weight_of, LimitOf limit_of) {
    RadixMemory& memory = shared_memory<RadixMemory>();
    for (u32 i = threadIdx.x; i < RADIX * LANES; i += blockDim.x) memory.lanes[i / LANES][i % LANES] = 0;
    __syncthreads();
    u32 key = 0;
    u64 above = 0, limit = 0, sum = 0;
    for (u32 shift = 24, turn = 0; shift < 32; shift -= 8, turn ^= 1) {  // wraps around after 0
        for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) {
            u32 item = key_of(i);
            if (item == 0 || (shift != 24 && item >> (shift + 8) != key >> (shift + 8))) continue;
            u64 weight = weight_of(item);
            if (weight != 0) atomicAdd(&memory.lanes[item >> shift & (RADIX - 1)][threadIdx.x % LANES], weight);
        }
        __syncthreads();
        sum_lanes(memory, turn);
        cluster_arrive();
        cluster_wait();
        sum_cluster(memory, turn);
        if (shift == 24) limit = limit_of(memory.sums[0][0]);
        for (u32 bin = threadIdx.x; bin < RADIX; bin += blockDim.x) {
            u64 higher = above + (bin + 1 < RADIX ? memory.sums[0][bin + 1] : 0), with = above + memory.sums[0][bin];
            if (higher < limit && with >= limit) {  // of one bin only
                memory.digit = bin;
                memory.above = higher;
                memory.sum = with - higher;
            }
        }
        __syncthreads();
        key |= memory.digit << shift;
        above = memory.above;
        sum = memory.sum;
    }
    return {key, limit, above, sum};
}

// The highest `key_of(i)` over the cluster's items; 0 if there is none.
template <class KeyOf>
__device__ __forceinline__ u32 highest_key(u32 begin, u32 end, KeyOf key_of) {
    RadixMemory& memory = shared_memory<RadixMemory>();
    if (threadIdx.x == 0) memory.highest = 0;
    __syncthreads();
    u32 highest = 0;
    for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) highest = max(highest, key_of(i));
    atomicMax(&memory.highest, static_cast<u64>(highest));
    cluster_arrive();
    cluster_wait();
    u64 best = 0;
    for (u32 rank = 0; rank < cluster_size(); ++rank) best = max(best, ld_shared_at(&memory.highest, rank));
    return static_cast<u32>(best);
}
