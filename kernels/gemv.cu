// x @ weight.T for 1 to 16 rows of x, as fast as the weights can be read: bf16, or e4m3 with one fp32 scale an output row.
//
// A CTA an SM. Its warps stream the weights through shared memory by bulk copies and multiply on the tensor cores, eight weight rows
// (a *tile*) as the columns of the product and the rows of x as its rows, so that 1 to 8 rows of x cost the same. Each warp fills and
// empties slots of its own: no warp waits for another except to add up a tile. The first slots are filled before the kernel before has
// ended; weights do not depend on it.
//
// The inner dimension is cut into *pieces* of PIECE bytes of a weight row. `num_splits` sets of CTAs take a range of pieces each, and
// put out sums of their own, for the reader to add: [num_splits, rows, out].
//
// Where the elements of a product sit (the tensor core does not care which k is which, as long as both sides agree): of every 64 bytes
// of a weight row, lane t of four takes 16 in one load. For bf16 these are four k of each of two products, for e4m3 four of each of
// four. Rows lie PIECE + 64 bytes apart in shared memory, so that eight lanes of a load meet all banks once.
//
// GATE_UP: the weight has gate rows first, then as many up rows; half the warps take a gate tile, half the up tile beside it, and
// silu(gate) * up is put out in bf16, rounded as the separate steps round.
//
// Numbers: fp32 sums, in an order that depends on the shape alone. e4m3 times fp16: x is scaled by 2^-6 and clamped to fp16, which
// loses what is beyond 4.19e6 in x, and below 2^-18 its last bits.
#include "dependents.cuh"
#include "types.cuh"

#ifndef SLOTS
#define SLOTS 3
#endif

constexpr u32 WARPS = 8, TILE = 8, PIECE = 512, PITCH = PIECE + 64, BLOCK = 64;  // bytes, but for WARPS and TILE
constexpr u32 SLOT_BYTES = TILE * PITCH;
constexpr u32 ELEM_BYTES = FP8 ? 1 : 2;      // of a weight
constexpr u32 X_BYTES = 2 / ELEM_BYTES;      // of x beside one byte of a weight row
constexpr float X_SCALE = 0.015625f;         // 2^-6

struct GemvParams {
    const elem_bits* x;        // [rows, in]
    const u8* weight;          // [out, in], rows `in * ELEM_BYTES` apart, 16-byte aligned; GATE_UP: [2 * out, in]
    const float* scale;        // FP8: one a weight row
    const elem_bits* bias;     // one a weight row, or null
    float* sums;               // [num_splits, rows, out]
    elem_bits* product;        // GATE_UP: [rows, out]
    u32 rows;
    u32 in;
    u32 out;
    u32 num_splits;
    u32 warps_a_tile;          // 1, 2, 4 or 8; GATE_UP: of a half, 4
    u32 x_pitch;               // bytes between rows of x in shared memory
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ uint4 lds128(u32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(address));
    return value;
}

__device__ __forceinline__ void sts128(u32 address, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

__device__ __forceinline__ void wait_phase(u32 barrier, u32 parity) {
    u32 is_complete = 0;
    while (!is_complete)
        asm volatile(
            "{\n.reg .pred complete;\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\nselp.u32 %0, 1, 0, complete;\n}"
            : "=r"(is_complete)
            : "r"(barrier), "r"(parity)
            : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if FP8
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two e4m3 in the lower half of `pair`, as fp16.
__device__ __forceinline__ u32 to_half2(u32 pair) {
    u32 halves;
    asm("{\n.reg .b16 low;\ncvt.u16.u32 low, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(halves) : "r"(pair));
    return halves;
}

// Two bf16 as fp16 of 2^-6 times that; fp16's range is not left.
__device__ __forceinline__ u32 scaled_half2(u32 pair) {
    float low = __uint_as_float(pair << 16) * X_SCALE, high = __uint_as_float(pair & 0xffff0000u) * X_SCALE;
    low = fminf(fmaxf(low, -65504.0f), 65504.0f);
    high = fminf(fmaxf(high, -65504.0f), 65504.0f);
    u32 halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}

// This warp's walk over its pieces: tile by tile, in each every `step`th piece of the CTA's range.
struct Walk {
    u32 tile, piece;
};

struct Stream {
    u32 slots, barriers;      // shared addresses of this warp's
    u32 lane;
    u32 first_row;            // GATE_UP: of this warp's half
    u32 first_piece, end_piece, step, tile_step, num_tiles;
    u32 row_bytes;

    __device__ __forceinline__ void advance(Walk& walk) const {
        walk.piece += step;
        if (walk.piece >= end_piece) walk.piece = first_piece, walk.tile += tile_step;
    }

    // Ask for the weights at `walk` to come to slot `slot`.
    __device__ __forceinline__ void fetch(const GemvParams& p, const Walk& walk, u32 slot) const {
        u32 begin = walk.piece * PIECE, bytes = min(PIECE, row_bytes - begin);
        u32 barrier = barriers + slot * 8;
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes * TILE) : "memory");
        __syncwarp();  // no byte arrives before it is expected
        if (lane < TILE) {
            u32 row = min(walk.tile * TILE + lane, p.out - 1) + first_row;  // rows behind the end are not put out
            const u8* source = p.weight + static_cast<long>(row) * row_bytes + begin;
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             slots + slot * SLOT_BYTES + lane * PITCH),
                         "l"(source), "r"(bytes), "r"(barrier)
                         : "memory");
        }
    }
};

// Pieces [first, end) of x's rows to shared memory, zeros behind the end of a row up to a whole block.
__device__ __forceinline__ void load_x(const GemvParams& p, u32 x_shared, u32 first, u32 end) {
    u32 begin = first * PIECE / ELEM_BYTES, stop = min(end * PIECE / ELEM_BYTES, p.in);
    u32 whole = (stop - begin + BLOCK / ELEM_BYTES - 1) / (BLOCK / ELEM_BYTES) * (BLOCK / ELEM_BYTES);
    u32 vectors = whole / 8;
    for (u32 i = threadIdx.x; i < vectors * p.rows; i += blockDim.x) {
        u32 row = i / vectors, k = i % vectors * 8;
        uint4 value = {0, 0, 0, 0};
        if (begin + k < stop) value = *reinterpret_cast<const uint4*>(p.x + static_cast<long>(row) * p.in + begin + k);
#if FP8
        value = {scaled_half2(value.x), scaled_half2(value.y), scaled_half2(value.z), scaled_half2(value.w)};
#endif
        sts128(x_shared + row * p.x_pitch + k * 2, value);
    }
}

// The product of one slot's weights with x, added to c; `x` points at this lane's first element of the piece, for rows g and g + 8.
__device__ __forceinline__ void multiply_piece(float (&c)[2][4], u32 weights, u32 x, u32 x_high, u32 blocks) {
#pragma unroll
    for (u32 b = 0; b < PIECE / BLOCK; ++b) {
        if (b >= blocks) break;
        uint4 w = lds128(weights + b * BLOCK);
#if FP8
        uint4 low = lds128(x + b * 2 * BLOCK), high = lds128(x + b * 2 * BLOCK + 16), low8 = {0, 0, 0, 0}, high8 = {0, 0, 0, 0};
        if (ROWS > 8) low8 = lds128(x_high + b * 2 * BLOCK), high8 = lds128(x_high + b * 2 * BLOCK + 16);
        multiply(c[0], low.x, low8.x, low.y, low8.y, to_half2(w.x), to_half2(w.x >> 16));
        multiply(c[1], low.z, low8.z, low.w, low8.w, to_half2(w.y), to_half2(w.y >> 16));
        multiply(c[0], high.x, high8.x, high.y, high8.y, to_half2(w.z), to_half2(w.z >> 16));
        multiply(c[1], high.z, high8.z, high.w, high8.w, to_half2(w.w), to_half2(w.w >> 16));
#else
        uint4 a = lds128(x + b * BLOCK), a8 = {0, 0, 0, 0};
        if (ROWS > 8) a8 = lds128(x_high + b * BLOCK);
        multiply(c[0], a.x, a8.x, a.y, a8.y, w.x, w.y);
        multiply(c[1], a.z, a8.z, a.w, a8.w, w.z, w.w);
#endif
    }
}

// What weight row `row` adds to and multiplies: the finished sum.
__device__ __forceinline__ float finished(const GemvParams& p, float sum, u32 row, bool is_first_split) {
#if FP8
    sum *= p.scale[row] * (1.0f / X_SCALE);
#endif
    if (p.bias != nullptr && is_first_split) sum += to_float(p.bias[row]);
    return sum;
}

__device__ __forceinline__ float rounded(float value) { return to_float(from_float(value)); }

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) gemv(const __grid_constant__ GemvParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 barriers[WARPS * SLOTS];
    __shared__ float partial[2][WARPS][ROWS > 8 ? 4 : 2][32];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 row_bytes = p.in * ELEM_BYTES, pieces = (row_bytes + PIECE - 1) / PIECE;
    u32 split = blockIdx.x % p.num_splits, set = blockIdx.x / p.num_splits, sets = gridDim.x / p.num_splits;
    u32 first = pieces * split / p.num_splits, end = pieces * (split + 1) / p.num_splits;
#if GATE_UP
    u32 half = warp / 4, team = 0, teams = 1, member = warp % 4, members = 4, first_row = half * p.out;
#else
    u32 members = p.warps_a_tile, teams = WARPS / members, team = warp / members, member = warp % members, first_row = 0;
#endif
    Stream stream = {shared_address(shared) + warp * SLOTS * SLOT_BYTES, shared_address(barriers + warp * SLOTS), lane, first_row,
                     first + member, end, members, sets * teams, (p.out + TILE - 1) / TILE, row_bytes};
    bool has_pieces = stream.first_piece < end;
    if (lane == 0)
        for (u32 s = 0; s < SLOTS; ++s)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(stream.barriers + s * 8) : "memory");
    if (row_bytes % BLOCK != 0)  // the end of a row's last block is multiplied by zeros of x: let it be numbers
        for (u32 i = lane; i < SLOTS * SLOT_BYTES / 16; i += 32) sts128(stream.slots + i * 16, {0, 0, 0, 0});
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the copies write there
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    Walk ahead = {set * teams + team, stream.first_piece}, here = ahead;
    for (u32 s = 0; s < SLOTS; ++s)
        if (has_pieces && ahead.tile < stream.num_tiles) stream.fetch(p, ahead, s), stream.advance(ahead);
    let_dependents_start();
    wait_for_prerequisites();
    u32 x_shared = shared_address(shared) + WARPS * SLOTS * SLOT_BYTES;
    load_x(p, x_shared, first, end);
    __syncthreads();
    u32 x_lane = x_shared + min(g, p.rows - 1) * p.x_pitch + t * 16 * X_BYTES;  // of rows that are not there: computed, not put out
    u32 x_high = x_shared + min(g + 8, p.rows - 1) * p.x_pitch + t * 16 * X_BYTES;
    u32 slot = 0, parity = 0, buffer = 0;
    while (here.tile < stream.num_tiles) {
        u32 tile = here.tile;
        float c[2][4] = {};
        if (!has_pieces) here.tile += stream.tile_step;
        while (here.tile == tile) {
            wait_phase(stream.barriers + slot * 8, parity);
            u32 begin = here.piece * PIECE, blocks = (min(PIECE, row_bytes - begin) + BLOCK - 1) / BLOCK;
            u32 offset = (here.piece - first) * PIECE * X_BYTES;
            multiply_piece(c, stream.slots + slot * SLOT_BYTES + g * PITCH + t * 16, x_lane + offset, x_high + offset, blocks);
            __syncwarp();  // all lanes have read the slot
            if (ahead.tile < stream.num_tiles) stream.fetch(p, ahead, slot), stream.advance(ahead);
            stream.advance(here);
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < (ROWS > 8 ? 4 : 2); ++i) partial[buffer][warp][i][lane] = c[0][i] + c[1][i];
        // The warps of the tile only; a buffer is written again two tiles later, after the barrier in between.
        asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(members * 32 * (GATE_UP ? 2 : 1)) : "memory");
        u32 index = GATE_UP ? threadIdx.x : member * 32 + lane, count = members * 32 * (GATE_UP ? 2 : 1);
        for (; index < p.rows * TILE; index += count) {
            u32 row = index / TILE, column = index % TILE, out = tile * TILE + column;
            u32 source = row % 8 * 4 + column / 2, which = row / 8 * 2 + column % 2;
            if (out >= p.out) continue;
#if GATE_UP
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (u32 w = 0; w < 4; ++w) gate += partial[buffer][w][which][source], up += partial[buffer][4 + w][which][source];
            gate = rounded(finished(p, gate, out, true));
            up = rounded(finished(p, up, p.out + out, true));
            p.product[row * p.out + out] = from_float(rounded(gate / (1.0f + __expf(-gate))) * up);
#else
            float sum = 0.0f;
            for (u32 w = 0; w < members; ++w) sum += partial[buffer][team * members + w][which][source];
            p.sums[(static_cast<long>(split) * p.rows + row) * p.out + out] = finished(p, sum, out, split == 0);
#endif
        }
        buffer ^= 1;
    }
}
