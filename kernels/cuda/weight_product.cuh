// Weights times x on the tensor cores: bf16 by bf16, or (FP8) e4m3 weights as fp16 by x as fp16, which is scaled by 2^-6 and clamped:
// that loses what is beyond 4.19e6 in x, and below 2^-18 its last bits.
//
// Where the elements of a product sit (the tensor core does not care which k is which, as long as both sides agree): of every *block* of
// 64 bytes of a weight row, lane t of four takes 16 in one load. For bf16 these are four k of each of two products, for e4m3 four of each
// of four.
#pragma once
#include "types.cuh"

constexpr u32 BLOCK = 64;                // bytes
constexpr u32 ELEM_BYTES = FP8 ? 1 : 2;  // of a weight
constexpr u32 X_BYTES = 2 / ELEM_BYTES;  // of x beside one byte of a weight row
constexpr float X_SCALE = 0.015625f;     // 2^-6

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if FP8
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two e4m3, in the lower half of `pair`, as fp16.
__device__ __forceinline__ u32 to_half2(u32 pair) {
    u32 halves;
    asm("{\n.reg .b16 low;\ncvt.u16.u32 low, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(halves) : "r"(pair));
    return halves;
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
    u32 halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}

// Two bf16 as fp16 of 2^-6 times that; fp16's range is not left.
__device__ __forceinline__ u32 scaled_half2(u32 pair) {
    float low = __uint_as_float(pair << 16) * X_SCALE, high = __uint_as_float(pair & 0xffff0000u) * X_SCALE;
    return pack_half2(fminf(fmaxf(low, -65504.0f), 65504.0f), fminf(fmaxf(high, -65504.0f), 65504.0f));
}

// Eight elements of x as the products take them.
__device__ __forceinline__ uint4 operand(uint4 x) {
#if FP8
    x = {scaled_half2(x.x), scaled_half2(x.y), scaled_half2(x.z), scaled_half2(x.w)};
#endif
    return x;
}

__device__ __forceinline__ uint4 vector_at(const u8* shared) { return *reinterpret_cast<const uint4*>(shared); }

__device__ __forceinline__ float rounded(float value) { return to_float(from_float(value)); }

// silu(gate) * up, rounded as the separate steps round.
__device__ __forceinline__ elem_bits silu_times(float gate_sum, float up_sum) {
    float gate = rounded(gate_sum);
    return from_float(rounded(gate / (1.0f + __expf(-gate))) * rounded(up_sum));
}
