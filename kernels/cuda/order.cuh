// Floats as integers that compare the way torch.argmax and torch.sort do: NaN above everything, -0.0 equal to 0.0. 0 is below all.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 order_of(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return ~0u;  // NaN of either sign
    if (bits == 0x80000000u) bits = 0;                   // -0.0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 order_of(double value) {
    constexpr u64 SIGN = 1ull << 63;
    u64 bits = __double_as_longlong(value);
    if ((bits & ~SIGN) > 0x7ff0000000000000ull) return ~0ull;
    if (bits == SIGN) bits = 0;
    return bits & SIGN ? ~bits : bits | SIGN;
}

// The float that has this order; of the NaNs, one.
__device__ __forceinline__ float float_of(u32 order) {
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}
