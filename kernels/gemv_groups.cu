// x @ weight.T for a few rows of x, at the rate the weights can be read: bf16, or e4m3 with one fp32 scale an output row.
//
// A weight is cut into *tiles* of `box_rows` output rows, dealt to the CTAs in turn, and a tile into *boxes* of 128 bytes of each of its
// rows. They come through a ring of slots in shared memory, by the tensor memory accelerator; GROUPS warpgroups take the boxes in turn
// and let the tensor cores read them where they lie (`group_product.cuh`): weights never pass through registers, and e4m3 is
// multiplied as it is.
//
// e4m3 weights are multiplied by x in two e4m3 parts, x = s (high + low / 16), which hold all eight bits of a bf16, as two columns. s is a
// power of two for every 128 elements of a row, found from their largest. The tensor cores add e4m3 products with about 14 bits, so the
// sums of a box are taken out and added in fp32.
//
// GATE_UP: the weight has gate rows first, then as many up rows. A box has half as many of each, and silu(gate) * up is put out in bf16,
// rounded as the separate steps round.
//
// What is behind the end of a weight row comes as zeros, and x is zero there. Rows of A that a box does not have are not looked at.
//
// Numbers: fp32 sums, in an order that depends on the shape alone.
#include "dependents.cuh"
#include "group_product.cuh"
#include "mbarrier.cuh"
#include "types.cuh"
#include "weight_product.cuh"

constexpr u32 GROUP = 128;                   // threads of a warpgroup; GROUPS of them multiply, boxes in turn
constexpr u32 MAX_SLOTS = 32;                // a multiple of GROUPS is used, so that a slot is always of the same group
constexpr u32 HALVES = GATE_UP ? 2 : 1;
constexpr u32 BOX_ELEMS = BOX / ELEM_BYTES;
constexpr u32 PARTS = FP8 ? 2 : 1;           // of x: columns of a row of it
constexpr u32 TILE = 64, COLUMNS = 8;        // of a product

struct alignas(64) TensorMap {
    u8 bytes[128];
};

struct GemvGroupsParams {
    TensorMap map;           // of the weight, [out, in], GATE_UP [2 * out, in]; a box is `box_rows` by 128 bytes, swizzled by 128
    const elem_bits* x;      // [rows, in]
    const float* scale;      // FP8: one a weight row
    const elem_bits* bias;   // one a weight row, or null
    float* sums;             // [rows, out]
    elem_bits* product;      // GATE_UP: [rows, out]
    u32 rows;                // rows * PARTS <= COLUMNS
    u32 in;
    u32 out;
    u32 tiles;
    u32 boxes;               // of a tile
    u32 box_rows;            // of each half
    u32 half_rows;           // box_rows rounded up to 8
    u32 slots;
    u32 slot_bytes;          // a multiple of 1024
    u32 in_flight_first;     // boxes of a group that may be under way at once until its slots are full for the first time
    u32 in_flight;           // the same behind that, up to its slots
};

__device__ __forceinline__ void copy_box(u32 target, const TensorMap& map, u32 byte, u32 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
                 "l"(&map), "r"(byte), "r"(row), "r"(barrier)
                 : "memory");
}

// One thread a group: the boxes of the group, slot after slot. A slot is written again once the group is done with it. One thread for all
// would take longer than the bytes of small boxes do.
__device__ __forceinline__ void stream_weights(const GemvGroupsParams& p, u32 group, u32 ring, u32 full, u32 empty) {
    u32 slot = group, parity = 1, box = group;  // a new barrier passes a wait for the phase before its first
    u32 arriving = group, arriving_parity = 0, count = 0, under_way = 0;
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        for (; box < p.boxes; box += GROUPS) {
            if (under_way < (count++ < p.slots / GROUPS ? p.in_flight_first : p.in_flight)) {  // see `gemv_rows.cu`
                ++under_way;
            } else {
                wait_phase(full + arriving * 8, arriving_parity);
                arriving += GROUPS;
                if (arriving >= p.slots) arriving = group, arriving_parity ^= 1;
            }
            wait_phase(empty + slot * 8, parity);
            arrive_expecting(full + slot * 8, HALVES * p.box_rows * BOX);
#pragma unroll
            for (u32 half = 0; half < HALVES; ++half)
                copy_box(ring + slot * p.slot_bytes + half * p.half_rows * BOX, p.map, box * BOX, half * p.out + tile * p.box_rows,
                         full + slot * 8);
            slot += GROUPS;
            if (slot >= p.slots) slot = group, parity ^= 1;
        }
        box -= p.boxes;
    }
}

__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u32 packed;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

// A pair of e4m3, the lower half of `pair`, as floats.
__device__ __forceinline__ float2 unpack_e4m3(u32 pair) {
    u32 halves = to_half2(pair);
    float2 value;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(value.x), "=f"(value.y)
        : "r"(halves));
    return value;
}

// Four bf16 times `factor`, as high and low parts.
__device__ __forceinline__ uint2 to_parts(u32 first, u32 second, float factor) {
    const float x[4] = {__uint_as_float(first << 16) * factor, __uint_as_float(first & 0xffff0000u) * factor,
                        __uint_as_float(second << 16) * factor, __uint_as_float(second & 0xffff0000u) * factor};
    u32 high = pack_e4m3(x[0], x[1], x[2], x[3]);
    float2 front = unpack_e4m3(high), back = unpack_e4m3(high >> 16);
    return {high, pack_e4m3((x[0] - front.x) * 16.0f, (x[1] - front.y) * 16.0f, (x[2] - back.x) * 16.0f, (x[3] - back.y) * 16.0f)};
}

// The power of two that brings `largest` into [128, 256), for e4m3 ends at 448; and 2 to the minus that.
__device__ __forceinline__ float2 scale_for(float largest) {
    u32 exponent = __float_as_uint(largest) >> 23;  // of infinities and NaN 255: their elements stay what they are, or become NaN
    int shift = min(max(134 - static_cast<int>(exponent), -120), 120);
    return {__uint_as_float(static_cast<u32>(127 + shift) << 23), __uint_as_float(static_cast<u32>(127 - shift) << 23)};
}

// x to shared memory as the products take it, by both groups: 16 lanes take 128 elements, each lane eight. `back`: [boxes][rows], what the
// sums of a box are to be multiplied by.
__device__ __forceinline__ void load_x(const GemvGroupsParams& p, u8* x_shared, float* back) {
    constexpr u32 PIECE = 128, UNROLL = 4, STEP = GROUPS * GROUP / 16;
    u32 pieces = (p.boxes * BOX_ELEMS + PIECE - 1) / PIECE, total = pieces * p.rows, lane = threadIdx.x % 16;
    for (u32 of_warp = threadIdx.x / 32 * 2; of_warp < total; of_warp += STEP * UNROLL) {
        u32 first = of_warp + threadIdx.x / 16 % 2;
        uint4 value[UNROLL] = {};
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            u32 index = first + i * STEP, row = index / pieces, at = index % pieces * PIECE + lane * 8;
            if (index < total && at < p.in) value[i] = *reinterpret_cast<const uint4*>(p.x + static_cast<u64>(row) * p.in + at);
        }
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            u32 index = first + i * STEP, row = index / pieces, piece = index % pieces, at = piece * PIECE + lane * 8;
#if FP8
            const u32 words[4] = {value[i].x, value[i].y, value[i].z, value[i].w};
            u32 largest = 0;  // bf16 without their signs are ordered as integers
#pragma unroll
            for (u32 k = 0; k < 4; ++k) largest = max(largest, max(words[k] & 0x7fffu, words[k] >> 16 & 0x7fffu));
#pragma unroll
            for (u32 step = 8; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
            float2 scale = scale_for(__uint_as_float(largest << 16));
            if (index >= total) continue;
            uint2 front = to_parts(words[0], words[1], scale.x), end = to_parts(words[2], words[3], scale.x);
            // [16 elements][row][high, low] of 16 bytes, of which this lane has half.
            u8* target = x_shared + ((at / 16 * p.rows + row) * 2) * 16 + at % 16;
            *reinterpret_cast<uint2*>(target) = {front.x, end.x};
            *reinterpret_cast<uint2*>(target + 16) = {front.y, end.y};
            if (lane == 0) back[piece * p.rows + row] = scale.y;
#else
            if (index < total && at < p.boxes * BOX_ELEMS) *reinterpret_cast<uint4*>(x_shared + (at / 8 * p.rows + row) * 16) = value[i];
#endif
        }
    }
    // Who reads it are the tensor cores, which see what this thread wrote only behind this.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

typedef float Partial[GROUPS][TILE][COLUMNS];

// Thread `thread` of a group: the sums of both groups, finished and put out, a row of x and a weight row of the tile at a time.
__device__ __forceinline__ void put_out(const GemvGroupsParams& p, const Partial& partial, u32 tile, u32 thread) {
    for (u32 index = thread; index < p.rows * p.box_rows; index += GROUP) {
        u32 row = index / p.box_rows, column = index % p.box_rows, out = tile * p.box_rows + column;
        if (out >= p.out) continue;
        float whole[HALVES];
#pragma unroll
        for (u32 half = 0; half < HALVES; ++half) {
            u32 weight_row = half * p.out + out;
            float sum = 0.0f;
#pragma unroll
            for (u32 group = 0; group < GROUPS; ++group) sum += partial[group][half * p.half_rows + column][row];
            if (FP8) sum *= p.scale[weight_row];
            if (p.bias != nullptr) sum += to_float(p.bias[weight_row]);
            whole[half] = sum;
        }
#if GATE_UP
        p.product[static_cast<u64>(row) * p.out + out] = silu_times(whole[0], whole[1]);
#else
        p.sums[static_cast<u64>(row) * p.out + out] = whole[0];
#endif
    }
}

// The boxes of this group, tile after tile.
__device__ __forceinline__ void multiply_boxes(
    const GemvGroupsParams& p, u32 ring, u32 x_shared, const float* back, Partial (&partial)[2], u32 full, u32 empty) {
    u32 group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    u32 columns = p.rows * PARTS, slot = group, parity = 0, box = group, which = 0;
    u64 x = x_descriptor(x_shared, columns);
    bool is_used = 2 * t < columns;
    u32 row = min(t, p.rows - 1);  // FP8: of x, whose parts this lane's columns are
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, which ^= 1) {
        float c[4] = {}, sum[2] = {};
        for (; box < p.boxes; box += GROUPS) {
            float factor = FP8 ? back[box * p.rows + row] : 0.0f;
            wait_phase(full + slot * 8, parity);
            __syncwarp();  // the products are of whole warps
            u64 a = box_descriptor(ring + slot * p.slot_bytes), b = x + box * (BOX / 16) * columns;
            begin_products();
#pragma unroll
            for (u32 step = 0; step < BOX_STEPS; ++step) multiply_group(c, a + 2 * step, b + 2 * step * columns, FP8 ? step : 1);
            commit_products();
            wait_for_products();
            if (lane == 0) arrive(empty + slot * 8);
            if (FP8) {
                sum[0] += (c[0] + c[1] * 0.0625f) * factor;
                sum[1] += (c[2] + c[3] * 0.0625f) * factor;
            }
            slot += GROUPS;
            if (slot >= p.slots) slot = group, parity ^= 1;
        }
        box -= p.boxes;
        if (is_used) {
            float* target = partial[which][group][warp * 16 + g];
            if (FP8) {
                target[t] = sum[0], target[8 * COLUMNS + t] = sum[1];
            } else {
                target[2 * t] = c[0], target[2 * t + 1] = c[1];
                target[8 * COLUMNS + 2 * t] = c[2], target[8 * COLUMNS + 2 * t + 1] = c[3];
            }
        }
        // The other group writes this half again two tiles on, behind the barrier of the tile between.
        asm volatile("bar.sync 1, %0;" ::"r"(GROUPS * GROUP) : "memory");
        if (group == 0) put_out(p, partial[which], tile, thread);
    }
}

extern "C" __global__ void __launch_bounds__(GROUPS * (GROUP + 32), 4 / GROUPS) gemv_groups(const __grid_constant__ GemvGroupsParams p) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * MAX_SLOTS];
    __shared__ Partial partial[2];
    u32 full = shared_address(barriers), empty = full + MAX_SLOTS * 8, ring = shared_address(shared);
    if (threadIdx.x < p.slots) {
        open_barrier(full + threadIdx.x * 8, 1);
        open_barrier(empty + threadIdx.x * 8, GROUP / 32);
        fence_new_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= GROUPS * GROUP) {
        if (threadIdx.x % 32 == 0) {
            stream_weights(p, threadIdx.x / 32 - GROUPS * GROUP / 32, ring, full, empty);
            let_dependents_start();
            wait_for_prerequisites();  // so that the kernel does not end before the one before it
        }
        return;
    }
    u32 x_bytes = p.boxes * BOX * PARTS * p.rows;
    u8* x_shared = shared + p.slots * p.slot_bytes;
    float* back = reinterpret_cast<float*>(x_shared + x_bytes);
    wait_for_prerequisites();
    load_x(p, x_shared, back);
    asm volatile("bar.sync 1, %0;" ::"r"(GROUPS * GROUP) : "memory");
    multiply_boxes(p, ring, shared_address(x_shared), back, partial, full, empty);
}
