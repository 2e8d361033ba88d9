// Activations as e4m3 with one scale a row, for FP8 products: the largest magnitude of a row becomes 448.
//
// Numbers: those of `kernels/fp8_linear.py`: times the reciprocal of the scale in fp32, rounded to nearest even.
#include "dependents.cuh"
#include "types.cuh"

constexpr int WIDTH = 16 / sizeof(elem_bits);
constexpr float INVERSE_MAX = 1.0f / 448.0f, TINY = 1.17549435e-38f;  // of e4m3; keeps the scale of zeros from being 0

struct __align__(16) Vector {
    elem_bits elems[WIDTH];
};

struct __align__(WIDTH) Bytes {
    u16 pairs[WIDTH / 2];
};

struct QuantizeRowsParams {
    const elem_bits* x;  // [rows, width]
    u8* data;            // [rows, width]
    float* scale;        // [rows]
    u32 vectors;         // of 16 bytes, a row of x
};

// `low` in the lower byte. NaN stays NaN.
__device__ __forceinline__ u16 to_e4m3x2(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// A CTA a row, read twice: the second time from the caches.
extern "C" __global__ void __launch_bounds__(256) quantize_rows(const __grid_constant__ QuantizeRowsParams p) {
    __shared__ float largest_of[8];
    const Vector* x = reinterpret_cast<const Vector*>(p.x) + static_cast<long>(blockIdx.x) * p.vectors;
    Bytes* data = reinterpret_cast<Bytes*>(p.data) + static_cast<long>(blockIdx.x) * p.vectors;
    wait_for_prerequisites();
    let_dependents_start();
    float largest = 0.0f;
    for (u32 i = threadIdx.x; i < p.vectors; i += blockDim.x) {
        const Vector own = x[i];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) largest = fmaxf(largest, fabsf(to_float(own.elems[e])));
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
    for (u32 warp = 0; warp < blockDim.x / 32; ++warp) largest = fmaxf(largest, largest_of[warp]);
    const float scale = fmaxf(largest * INVERSE_MAX, TINY), inverse = 1.0f / scale;
    if (threadIdx.x == 0) p.scale[blockIdx.x] = scale;
    for (u32 i = threadIdx.x; i < p.vectors; i += blockDim.x) {
        const Vector own = x[i];
        Bytes bytes;
#pragma unroll
        for (int e = 0; e < WIDTH; e += 2)
            bytes.pairs[e / 2] = to_e4m3x2(to_float(own.elems[e]) * inverse, to_float(own.elems[e + 1]) * inverse);
        data[i] = bytes;
    }
}
