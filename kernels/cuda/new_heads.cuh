// One warp makes a head of the new token ready: sums its parts, adds the bias, normalises, rotates. Each result is rounded to the
// element type where the separate steps would store it.
#pragma once
#include "types.cuh"

constexpr int HALF_ELEMS = HEAD_DIM / 64;  // a lane's elements of each half of a head

// Lane l holds elements l HALF_ELEMS on, and those they are rotated with, half a head further.
struct Head {
    float half[2][HALF_ELEMS];
};

__device__ __forceinline__ int head_elem(int part, int i) {
    return part * (HEAD_DIM / 2) + static_cast<int>(threadIdx.x % 32) * HALF_ELEMS + i;
}

__device__ __forceinline__ float round_to_elem(float value) { return to_float(from_float(value)); }

// A lane's elements of one half of a head, as they lie in memory.
struct __align__(HALF_ELEMS * sizeof(elem_bits)) HalfElems {
    elem_bits elems[HALF_ELEMS];
};

// Of both halves: elements that are on their way, for nothing is done with them yet.
struct RawHead {
    HalfElems half[2];
};

// `first`: this lane's first element of a head.
__device__ __forceinline__ RawHead load_raw_at(const elem_bits* first) {
    RawHead raw;
#pragma unroll
    for (int part = 0; part < 2; ++part) raw.half[part] = *reinterpret_cast<const HalfElems*>(first + part * (HEAD_DIM / 2));
    return raw;
}

// `source`: of a head, aligned to 16 bytes as all here.
__device__ __forceinline__ RawHead load_raw(const elem_bits* source) { return load_raw_at(source + head_elem(0, 0)); }

__device__ __forceinline__ Head to_head(const RawHead& raw) {
    Head head;
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i) head.half[part][i] = to_float(raw.half[part].elems[i]);
    return head;
}

__device__ __forceinline__ RawHead to_raw(const Head& head) {
    RawHead raw;
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i) raw.half[part].elems[i] = from_float(head.half[part][i]);
    return raw;
}

// Floats of a head from this lane's first one on, or zeros if not `is_there`: without a branch, so that many are on their way together.
__device__ __forceinline__ Head load_part_if(const float* first, bool is_there) {
    Head head;
#if HEAD_DIM == 128
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n"
        "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n"
        "@there ld.global.v2.f32 {%0, %1}, [%4];\n@there ld.global.v2.f32 {%2, %3}, [%4 + 256];\n}"
        : "=&f"(head.half[0][0]), "=&f"(head.half[0][1]), "=&f"(head.half[1][0]), "=&f"(head.half[1][1])
        : "l"(first), "r"(static_cast<u32>(is_there)));
#else
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.u32 there, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
        "@there ld.global.f32 %0, [%2];\n@there ld.global.f32 %1, [%2 + 128];\n}"
        : "=&f"(head.half[0][0]), "=&f"(head.half[1][0])
        : "l"(first), "r"(static_cast<u32>(is_there)));
#endif
    return head;
}

__device__ __forceinline__ void add(Head& head, const Head& other) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i) head.half[part][i] += other.half[part][i];
}

__device__ __forceinline__ void round_head(Head& head) {
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i) head.half[part][i] = round_to_elem(head.half[part][i]);
}

// RMSNorm over the head. Rounded before the weight and after it, as `kernels/rms_norm.py` does with half types.
__device__ __forceinline__ void normalise(Head& head, const Head& weight, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int part = 0; part < 2; ++part)
        for (int i = 0; i < HALF_ELEMS; ++i) squares += head.half[part][i] * head.half[part][i];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
    const float scale = rsqrtf(squares / HEAD_DIM + eps);
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < HALF_ELEMS; ++i)
            head.half[part][i] = round_to_elem(round_to_elem(head.half[part][i] * scale) * weight.half[part][i]);
}

// `turn`: cosines and sines of the position, [2][HEAD_DIM / 2] as a head. The product with the cosine is rounded by itself, as
// `kernels/rotary.py` does.
__device__ __forceinline__ void rotate(Head& head, const Head& turn) {
#pragma unroll
    for (int i = 0; i < HALF_ELEMS; ++i) {
        const float x = head.half[0][i], y = head.half[1][i], cosine = turn.half[0][i], sine = turn.half[1][i];
        head.half[0][i] = round_to_elem(round_to_elem(x * cosine) - y * sine);
        head.half[1][i] = round_to_elem(round_to_elem(y * cosine) + x * sine);
    }
}

__device__ __forceinline__ void store_raw(elem_bits* target, const RawHead& raw) {
#pragma unroll
    for (int part = 0; part < 2; ++part) *reinterpret_cast<HalfElems*>(target + head_elem(part, 0)) = raw.half[part];
}
