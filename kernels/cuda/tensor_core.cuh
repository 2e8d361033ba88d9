// One matrix product of a warp on the tensor cores, and the packing it wants. For 16-bit elements (ELEM 0 and 1).
//
// Which lane holds what, with g = lane / 4 and t = lane % 4 (PTX, mma.m16n8k16): of A (16 x 16) a[0] row g, columns 2t and 2t + 1; a[1]
// row g + 8; a[2] and a[3] the same rows, columns 2t + 8 and 2t + 9. Of B (16 x 8) b0 rows 2t and 2t + 1 of column g, b1 rows 2t + 8
// and 2t + 9. Of C (16 x 8) c[0] and c[1] row g, columns 2t and 2t + 1; c[2] and c[3] row g + 8.
#pragma once
#include "types.cuh"

// c += a b, fp32 sums.
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ELEM == 0
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 elements from shared memory: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes, and gets
// elements 2t and 2t + 1 of row g of each matrix; transposed, those of column g.
__device__ __forceinline__ void ld_matrices(u32 (&matrices)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ld_matrices_transposed(u32 (&matrices)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// A matrix of 8 x 8 elements, elements 2t and 2t + 1 of row g with each lane, turned.
__device__ __forceinline__ u32 transpose_matrix(u32 elems) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(elems));
    return turned;
}

// Two elements, `low` in the lower half.
__device__ __forceinline__ u32 pack_elems(float low, float high) {
    u32 packed;
#if ELEM == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}
