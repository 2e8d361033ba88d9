// Products of a warpgroup (four warps) on Hopper's tensor cores, which read both sides from shared memory: bf16 by bf16, or (FP8) e4m3 by
// e4m3, fp32 sums.
//
// A is 64 weight rows by 32 bytes, from a *box*: 128 bytes of each row, the rows behind each other, 16-byte chunks exchanged by row % 8 as
// the tensor memory accelerator's 128-byte swizzle does, the whole aligned to 1024 bytes. B is 8 columns of x by 32 bytes: 16 bytes of each
// column side by side, and the next 16 bytes of the first column `COLUMNS_USED * 16` bytes on. So columns that are not used need no memory:
// they are whatever lies there, and nobody looks at what they give. Rows of A that are not of the weight likewise.
//
// A lane has, with g = lane / 4, t = lane % 4 and w the warp of the four: of C, c[0] and c[1] row 16 w + g, columns 2t and 2t + 1; c[2] and
// c[3] row 16 w + g + 8.
#pragma once
#include "types.cuh"

constexpr u32 BOX = 128;             // bytes of a weight row
constexpr u32 BOX_STEPS = BOX / 32;  // products that it takes

// What a box at `address` is to the tensor cores: 8 rows take 1024 bytes, 128-byte swizzle. Its next 32 bytes: + 2.
__device__ __forceinline__ u64 box_descriptor(u32 address) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// What x at `address` is to them: no swizzle. Its next 32 bytes: + 2 * `columns`.
__device__ __forceinline__ u64 x_descriptor(u32 address, u32 columns) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(columns) << 16 | 8ull << 32;
}

// Before the first product, and whenever registers that the products use were written.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All products of this warp are done, their results in registers.
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// c = a b, or c += a b if `is_added`. Asynchronous: c must be left alone until `wait_for_products`.
__device__ __forceinline__ void multiply_group(float (&c)[4], u64 a, u64 b, u32 is_added) {
#if FP8
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\nwgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n}"
#else
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "l"(a), "l"(b), "r"(is_added));
}
