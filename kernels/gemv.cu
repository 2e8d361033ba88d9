// x @ weight.T for 1 to 16 rows of x, as fast as the weights can be read: bf16, or e4m3 with one fp32 scale an output row.
//
// A CTA an SM. One thread streams the weights through a ring of *stages* in shared memory: a *piece* of each of eight weight rows (a
// *tile*) by one copy of the tensor memory accelerator. Sixteen warps multiply on the tensor cores, the tile's rows as the columns of the
// product and the rows of x as its rows, so that 1 to 8 rows of x cost the same. The ring is filled before the kernel before has ended:
// weights do not depend on it. One large copy matters: by bulk copies of a row each, issuing them took longer than their bytes.
//
// `num_splits` sets of CTAs take a range of the inner dimension each and put out sums of their own, for the reader to add:
// [num_splits, rows, out].
//
// A piece is an odd number of blocks, so that eight lanes of a load, on two rows, meet all banks once.
//
// The next kernel may start when the last weights are asked for: its own first weights then fill the time in which this kernel ends and
// it waits. Earlier would only move bytes from one kernel's time to the other's.
//
// GATE_UP: the weight has gate rows first, then as many up rows; the stages alternate between the two, and silu(gate) * up is put out in
// bf16, rounded as the separate steps round.
//
// Numbers: fp32 sums, in an order that depends on the shape alone.
#include "dependents.cuh"
#include "mbarrier.cuh"
#include "types.cuh"
#include "weight_product.cuh"

constexpr u32 WARPS = 16, TILE = 8;  // multiplying warps; rows
constexpr u32 MAX_STAGES = 16;
constexpr u32 MAX_BLOCKS = 31, STAGE_BYTES = TILE * MAX_BLOCKS * BLOCK;  // of a piece
constexpr u32 HALVES = GATE_UP ? 2 : 1;
constexpr u32 FRAGMENTS = ROWS > 8 ? 4 : 2;  // sums of a lane

struct alignas(64) TensorMap {
    u8 bytes[128];
};

struct GemvParams {
    TensorMap map;             // of the weight: [out, in], GATE_UP [2 * out, in]; a box is eight rows of a piece
    const elem_bits* x;        // [rows, in]
    const float* scale;        // FP8: one a weight row
    const elem_bits* bias;     // one a weight row, or null
    float* sums;               // [num_splits, rows, out]
    elem_bits* product;        // GATE_UP: [rows, out]
    u32 rows;
    u32 in;
    u32 out;
    u32 num_splits;
    u32 stages;                // of the ring, up to MAX_STAGES
    u32 pieces;                // of a split
    u32 piece;                 // bytes of a weight row, an odd number of blocks
    u32 x_pitch;               // bytes between rows of x in shared memory
};

// One thread: all weights of this CTA, stage after stage. A stage is written again once all multiplying warps are done with it. What is
// behind the end of the matrix comes as zeros.
__device__ __forceinline__ void stream_weights(
    const GemvParams& p, u32 begin, u32 first_tile, u32 tile_step, u32 stages, u32 full, u32 empty) {
    u32 stage = 0, parity = 1;  // a new barrier passes a wait for the phase before its first
    for (u32 tile = first_tile; tile * TILE < p.out; tile += tile_step)
        for (u32 i = 0; i < p.pieces; ++i)
#pragma unroll
            for (u32 half = 0; half < HALVES; ++half) {
                wait_phase(empty + stage * 8, parity);
                arrive_expecting(full + stage * 8, p.piece * TILE);
                // In the map's elements of eight bytes.
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                        stages + stage * STAGE_BYTES),
                    "l"(&p.map), "r"((begin + i * p.piece) / 8), "r"(half * p.out + tile * TILE), "r"(full + stage * 8)
                    : "memory");
                if (++stage == p.stages) stage = 0, parity ^= 1;
            }
}

// x from byte `begin` of a weight row on to shared memory, by the multiplying warps; zeros behind its end.
__device__ __forceinline__ void load_x(const GemvParams& p, u32 begin, u8* x_shared) {
    u32 vectors = p.pieces * p.piece / ELEM_BYTES / 8, first = begin / ELEM_BYTES;
    for (u32 row = 0; row < p.rows; ++row)
        for (u32 i = threadIdx.x; i < vectors; i += WARPS * 32) {
            uint4 value = {0, 0, 0, 0};
            if (first + i * 8 < p.in) value = *reinterpret_cast<const uint4*>(p.x + static_cast<long>(row) * p.in + first + i * 8);
            *reinterpret_cast<uint4*>(x_shared + row * p.x_pitch + i * 16) = operand(value);
        }
}

// One block of eight weight rows times x, added to c. Addresses are this lane's; `x_high`: of row g + 8.
__device__ __forceinline__ void multiply_block(float (&c)[2][4], const u8* weights, const u8* x, const u8* x_high) {
    uint4 w = vector_at(weights);
#if FP8
    uint4 low = vector_at(x), high = vector_at(x + 16), low8 = {0, 0, 0, 0}, high8 = {0, 0, 0, 0};
    if (ROWS > 8) low8 = vector_at(x_high), high8 = vector_at(x_high + 16);
    multiply(c[0], low.x, low8.x, low.y, low8.y, to_half2(w.x), to_half2(w.x >> 16));
    multiply(c[1], low.z, low8.z, low.w, low8.w, to_half2(w.y), to_half2(w.y >> 16));
    multiply(c[0], high.x, high8.x, high.y, high8.y, to_half2(w.z), to_half2(w.z >> 16));
    multiply(c[1], high.z, high8.z, high.w, high8.w, to_half2(w.w), to_half2(w.w >> 16));
#else
    uint4 a = vector_at(x), a8 = {0, 0, 0, 0};
    if (ROWS > 8) a8 = vector_at(x_high);
    multiply(c[0], a.x, a8.x, a.y, a8.y, w.x, w.y);
    multiply(c[1], a.z, a8.z, a.w, a8.w, w.z, w.w);
#endif
}

// What weight row `row` adds to and multiplies: the finished sum.
__device__ __forceinline__ float finished(const GemvParams& p, float sum, u32 row, bool is_first_split) {
#if FP8
    sum *= p.scale[row] * (1.0f / X_SCALE);
#endif
    if (p.bias != nullptr && is_first_split) sum += to_float(p.bias[row]);
    return sum;
}

typedef float Partial[HALVES][WARPS][FRAGMENTS][32];

// The tile's sums of all warps, finished and put out.
__device__ __forceinline__ void put_out(const GemvParams& p, const Partial& partial, u32 tile, u32 split) {
    for (u32 index = threadIdx.x; index < p.rows * TILE; index += WARPS * 32) {
        u32 row = index / TILE, column = index % TILE, out = tile * TILE + column;
        u32 source = row % 8 * 4 + column / 2, which = row / 8 * 2 + column % 2;
        if (out >= p.out) continue;
        float sum[HALVES] = {};
#pragma unroll
        for (u32 half = 0; half < HALVES; ++half) {
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) sum[half] += partial[half][w][which][source];
            sum[half] = finished(p, sum[half], half * p.out + out, split == 0);
        }
#if GATE_UP
        p.product[row * p.out + out] = silu_times(sum[0], sum[1]);
#else
        p.sums[(static_cast<long>(split) * p.rows + row) * p.out + out] = sum[0];
#endif
    }
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1) gemv(const __grid_constant__ GemvParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * MAX_STAGES];
    __shared__ Partial partial[2];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 split = blockIdx.x % p.num_splits, first_tile = blockIdx.x / p.num_splits, tile_step = gridDim.x / p.num_splits;
    u32 begin = split * p.pieces * p.piece;
    u32 stages = shared_address(shared), full = shared_address(barriers), empty = full + MAX_STAGES * 8;
    if (threadIdx.x < p.stages) {
        open_barrier(full + threadIdx.x * 8, 1);
        open_barrier(empty + threadIdx.x * 8, WARPS);
        fence_new_barriers();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane == 0) stream_weights(p, begin, first_tile, tile_step, stages, full, empty);
        let_dependents_start();
        wait_for_prerequisites();  // so that the kernel does not end before the one before it
        return;
    }
    wait_for_prerequisites();
    u8* x_shared = shared + p.stages * STAGE_BYTES;
    load_x(p, begin, x_shared);
    asm volatile("bar.sync 1, %0;" ::"r"(WARPS * 32) : "memory");
    const u8* x_lane = x_shared + min(g, p.rows - 1) * p.x_pitch + t * 16 * X_BYTES;  // rows not there: computed, not put out
    const u8* x_high = x_shared + min(g + 8, p.rows - 1) * p.x_pitch + t * 16 * X_BYTES;
    u32 stage = 0, parity = 0, buffer = 0, blocks = p.piece / BLOCK;
    for (u32 tile = first_tile; tile * TILE < p.out; tile += tile_step) {
        float c[HALVES][2][4] = {};
        for (u32 i = 0; i < p.pieces; ++i) {
#pragma unroll
            for (u32 half = 0; half < HALVES; ++half) {
                wait_phase(full + stage * 8, parity);
                const u8* weights = shared + stage * STAGE_BYTES + g * p.piece + t * 16;
                u32 offset = i * p.piece * X_BYTES;
#pragma unroll
                for (u32 b = 0; b < MAX_BLOCKS; b += WARPS) {
                    u32 block = b + warp;
                    if (block < blocks)
                        multiply_block(c[half], weights + block * BLOCK, x_lane + offset + block * BLOCK * X_BYTES,
                                       x_high + offset + block * BLOCK * X_BYTES);
                }
                __syncwarp();  // all lanes have read the stage
                if (lane == 0) arrive(empty + stage * 8);
                if (++stage == p.stages) stage = 0, parity ^= 1;
            }
        }
#pragma unroll
        for (u32 half = 0; half < HALVES; ++half)
#pragma unroll
            for (u32 i = 0; i < FRAGMENTS; ++i) partial[buffer][half][warp][i][lane] = c[half][0][i] + c[half][1][i];
        // A buffer is written again two tiles later, after the barrier of the tile in between.
        asm volatile("bar.sync 1, %0;" ::"r"(WARPS * 32) : "memory");
        put_out(p, partial[buffer], tile, split);
        buffer ^= 1;
    }
}
