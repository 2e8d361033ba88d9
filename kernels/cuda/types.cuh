// Integer names, element types and packing, for kernels compiled without system headers.
//
// ELEM chooses the element type of a compilation: 0 bfloat16, 1 float16, 2 float32. A *unit* is 8 bytes of elements: what one
// packet carries.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if ELEM == 2
typedef u32 elem_bits;
#else
typedef u16 elem_bits;
#endif

constexpr int UNIT_BYTES = 8;
constexpr int UNIT_ELEMS = UNIT_BYTES / sizeof(elem_bits);

__device__ __forceinline__ float to_float(elem_bits bits) {
#if ELEM == 0
    return __uint_as_float(static_cast<u32>(bits) << 16);
#elif ELEM == 1
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float(bits);
#endif
}

// Round to nearest even, as torch does; NaN stays NaN.
__device__ __forceinline__ elem_bits from_float(float value) {
#if ELEM == 0
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#elif ELEM == 1
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return __float_as_uint(value);
#endif
}

// 8 bytes of elements in registers.
union Unit {
    u64 word;
    u32 half[2];
    elem_bits elems[UNIT_ELEMS];
};

// Elements [first, first + UNIT_ELEMS) of `source`, zeros from `count` on. `is_aligned`: source is 8-byte aligned.
__device__ __forceinline__ Unit load_unit(const elem_bits* source, long first, long count, bool is_aligned) {
    Unit unit;
    if (is_aligned && first + UNIT_ELEMS <= count) {
        unit.word = *reinterpret_cast<const u64*>(source + first);
        return unit;
    }
    unit.word = 0;
#pragma unroll
    for (int i = 0; i < UNIT_ELEMS; ++i)
        if (first + i < count) unit.elems[i] = source[first + i];
    return unit;
}

__device__ __forceinline__ void store_unit(elem_bits* target, long first, long count, bool is_aligned, Unit unit) {
    if (is_aligned && first + UNIT_ELEMS <= count) {
        *reinterpret_cast<u64*>(target + first) = unit.word;
        return;
    }
#pragma unroll
    for (int i = 0; i < UNIT_ELEMS; ++i)
        if (first + i < count) target[first + i] = unit.elems[i];
}
