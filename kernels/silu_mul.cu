// SiLU(gate) * up of the fused projection, for more rows than the GEMV that does it on the way takes.
//
// Numbers: those of `kernels/silu_mul.py`: SiLU in fp32, rounded, times up, rounded. In half types exponential and quotient are those of
// a few instructions, whose errors are far below the rounding; below -87 a quotient of 1e-36 may come out as 0.
#include "dependents.cuh"
#include "types.cuh"

constexpr int WIDTH = 16 / sizeof(elem_bits);

struct __align__(16) Vector {
    elem_bits elems[WIDTH];
};

struct SiluMulParams {
    const elem_bits* gate_up;  // [rows, 2 * width], gate first
    elem_bits* out;            // [rows, width]
    u32 width;
    u32 is_aligned;            // whether both are 16-byte aligned and a row of either is a multiple of 16 bytes
};

__device__ __forceinline__ elem_bits silu_mul_of(elem_bits gate_bits, elem_bits up_bits) {
    float gate = to_float(gate_bits);
    float silu = sizeof(elem_bits) == 2 ? __fdividef(gate, 1.0f + __expf(-gate)) : gate / (1.0f + expf(-gate));
    return from_float(to_float(from_float(silu)) * to_float(up_bits));
}

// One row a blockIdx.y; the vectors, or elements, of a row are dealt to the threads of gridDim.x CTAs.
extern "C" __global__ void __launch_bounds__(256) silu_mul(const __grid_constant__ SiluMulParams p) {
    const elem_bits* gate = p.gate_up + 2l * blockIdx.y * p.width;
    const elem_bits* up = gate + p.width;
    elem_bits* out = p.out + static_cast<long>(blockIdx.y) * p.width;
    u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    wait_for_prerequisites();
    let_dependents_start();
    if (p.is_aligned) {
#pragma unroll 2
        for (u32 i = first; i < p.width / WIDTH; i += step) {
            Vector a = reinterpret_cast<const Vector*>(gate)[i], b = reinterpret_cast<const Vector*>(up)[i];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) a.elems[k] = silu_mul_of(a.elems[k], b.elems[k]);
            reinterpret_cast<Vector*>(out)[i] = a;
        }
    } else {
        for (u32 i = first; i < p.width; i += step) out[i] = silu_mul_of(gate[i], up[i]);
    }
}
