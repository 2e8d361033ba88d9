// residual += x, out = RMSNorm(residual) * weight: one pass over the rows of a step of many tokens.
//
// Numbers: those of `kernels/rms_norm.py` after the addition: the sum is rounded, the norm is taken of the rounded sum in fp32,
// rounded, times the weight, rounded.
#include "dependents.cuh"
#include "sum_of_cta.cuh"
#include "types.cuh"

constexpr int WIDTH = 16 / sizeof(elem_bits);
constexpr int VECTORS = 4;  // most vectors a thread

struct __align__(16) Vector {
    elem_bits elems[WIDTH];
};

struct AddNormParams {
    const elem_bits* x;       // [rows, hidden]
    elem_bits* residual;      // [rows, hidden], updated
    const elem_bits* weight;  // [hidden]
    elem_bits* out;           // [rows, hidden]
    u32 vectors;              // of 16 bytes, a row: at most VECTORS a thread
    float eps;
};

// A CTA a row, of whole warps.
extern "C" __global__ void __launch_bounds__(512) add_norm(const __grid_constant__ AddNormParams p) {
    const Vector* x = reinterpret_cast<const Vector*>(p.x) + static_cast<long>(blockIdx.x) * p.vectors;
    Vector* residual = reinterpret_cast<Vector*>(p.residual) + static_cast<long>(blockIdx.x) * p.vectors;
    Vector* out = reinterpret_cast<Vector*>(p.out) + static_cast<long>(blockIdx.x) * p.vectors;
    const Vector* weight = reinterpret_cast<const Vector*>(p.weight);
    __shared__ float sums[32];
    Vector own[VECTORS], added[VECTORS];
    wait_for_prerequisites();
    let_dependents_start();
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i < p.vectors) own[k] = residual[i], added[k] = x[i];
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i >= p.vectors) continue;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            own[k].elems[e] = from_float(to_float(own[k].elems[e]) + to_float(added[k].elems[e]));
            const float value = to_float(own[k].elems[e]);
            squares += value * value;
        }
        residual[i] = own[k];
    }
    const float scale = rsqrtf(sum_of_cta(squares, sums) / static_cast<float>(p.vectors * WIDTH) + p.eps);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const u32 i = threadIdx.x + k * blockDim.x;
        if (i >= p.vectors) continue;
        const Vector factor = weight[i];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            const float normed = to_float(from_float(to_float(own[k].elems[e]) * scale));
            own[k].elems[e] = from_float(normed * to_float(factor.elems[e]));
        }
        out[i] = own[k];
    }
}
