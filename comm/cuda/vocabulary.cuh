// The best vocabulary id of a part of a row of logits: what one CTA finds alone, before ranks compare. No peers, no waiting.
//
// "Best" is an order of bits, not of floats, so that every CTA and rank compares alike: a larger `order` wins, the lower id among
// equals. NaN is above everything and -0.0 equals 0.0, as in torch.argmax.
#pragma once
#include "order.cuh"

struct __align__(16) Best {
    u64 order;  // 0: no id at all; every number's is above it
    u32 id;
    u32 value;  // the id's logit, fp32 bits
};

__device__ __forceinline__ Best no_best() { return {0, ~0u, 0}; }

__device__ __forceinline__ bool is_better(const Best& a, const Best& b) {
    return a.order > b.order || (a.order == b.order && a.id < b.id);
}

// Standard Gumbel noise of an id in the stream that begins at `start`: the integer and fp64 steps of `kernels/gumbel.py`.
__device__ __forceinline__ double gumbel(u64 start, u32 id) {
    u64 bits = (static_cast<u64>(id) + 1) * 0x9E3779B97F4A7C15ull + start;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    bits ^= bits >> 31;
    double uniform = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
    return -log(-log(uniform));
}

// What a CTA reads of a row: its share of `num_valid` logits, dealt to the threads of `ctas` CTAs. The first one is id `first_id`.
struct RowShare {
    const elem_bits* row;
    u32 num_valid;
    u32 first_id;
    u32 cta;
    u32 ctas;
};

struct __align__(16) LogitVector {
    elem_bits elems[16 / sizeof(elem_bits)];
};

// Highest logit of this thread's part, in 16-byte loads from the aligned address at or before the row: any row is fine, aligned
// or not. What lies outside the row is not read. A thread meets its ids in rising order: among equals the first stays.
__device__ __forceinline__ Best highest_logit(const RowShare& share) {
    constexpr u32 WIDTH = 16 / sizeof(elem_bits), UNROLL = 2;  // more would only make code to fetch
    u32 shift = static_cast<u32>(reinterpret_cast<u64>(share.row) % 16 / sizeof(elem_bits));
    const elem_bits* base = share.row - shift;
    u32 end = shift + share.num_valid, step = share.ctas * blockDim.x * WIDTH;
    u32 best_order = 0, best_at = 0, best_value = 0;
    auto consider = [&](elem_bits elem, u32 at) {
        float value = to_float(elem);
        u32 order = order_of(value);
        if (order > best_order) {
            best_order = order;
            best_at = at;
            best_value = __float_as_uint(value);
        }
    };
    for (u32 first = (share.cta * blockDim.x + threadIdx.x) * WIDTH; first < end; first += UNROLL * step) {
        LogitVector vector[UNROLL];
        bool is_whole[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k) {
            u32 at = first + k * step;
            is_whole[k] = at >= shift && at + WIDTH <= end;
            if (is_whole[k]) vector[k] = *reinterpret_cast<const LogitVector*>(base + at);
        }
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k) {
            u32 at = first + k * step;
            if (is_whole[k]) {
#pragma unroll
                for (u32 i = 0; i < WIDTH; ++i) consider(vector[k].elems[i], at + i);
            } else {  // an end of the row
#pragma unroll 1
                for (u32 i = at < shift ? shift : at; i < at + WIDTH && i < end; ++i) consider(base[i], i);
            }
        }
    }
    if (best_order == 0) return no_best();
    return {best_order, share.first_id + best_at - shift, best_value};
}

// Highest logit / temperature + noise of this thread's part, in fp64. One element a thread and round: the two logarithms take
// far longer than the load, and so more threads share them.
__device__ __forceinline__ Best highest_draw(const RowShare& share, double temperature, u64 start) {
    Best best = no_best();
#pragma unroll 1
    for (u32 i = share.cta * blockDim.x + threadIdx.x; i < share.num_valid; i += share.ctas * blockDim.x) {
        float value = to_float(share.row[i]);
        u32 id = share.first_id + i;
        u64 order = order_of(static_cast<double>(value) / temperature + gumbel(start, id));
        if (order > best.order) best = {order, id, __float_as_uint(value)};
    }
    return best;
}

__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll 1
    for (int offset = 16; offset > 0; offset /= 2) {
        Best other;
        other.order = __shfl_xor_sync(0xffffffffu, best.order, offset);
        other.id = __shfl_xor_sync(0xffffffffu, best.id, offset);
        other.value = __shfl_xor_sync(0xffffffffu, best.value, offset);
        if (is_better(other, best)) best = other;
    }
    return best;
}

constexpr u32 BEST_WARPS = 8;  // of a CTA, at most

// The best of the CTA, on every thread. `scratch`: [BEST_WARPS] shared; a barrier must come before it is used again.
__device__ __forceinline__ Best best_of_cta(Best best, Best* scratch) {
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = best;
    __syncthreads();
    best = no_best();
#pragma unroll
    for (u32 warp = 0; warp < BEST_WARPS; ++warp)
        if (warp < blockDim.x / 32 && is_better(scratch[warp], best)) best = scratch[warp];
    return best;
}
