// x @ weight.T for 1 or 2 rows of x, the weights read as one sweep through memory: bf16, or e4m3 with one fp32 scale an output row.
//
// A *chunk* is a contiguous piece of the weight: some whole rows, or a part of a long one. Chunk i goes to CTA i mod the grid, so that at
// any moment all SMs read neighbouring memory. In a CTA one thread copies chunks into the *slots* of a ring, and each slot has its
// warp, which multiplies its chunks from the first byte to the last: no sums across warps, and no phase of a slot's barriers skipped.
//
// One warp, one row: the row is cut into eight *segments* of whole blocks, which are the columns of B; the same segments of x are the rows
// of A (a second row of x: rows 8 to 15). The diagonal of C then holds eight parts of the dot product, and the rest of C is not looked
// at. Segments that would reach behind the end of the row begin earlier instead, and x is zero there where two overlap: nothing is read
// that is not of the row, so no NaN of a neighbour or of stale memory can get in. Two weight rows at a time share what is read of x.
//
// Banks: eight lanes of a load are on two segments, which must lie an odd number of blocks apart to meet all banks once. Where the length
// of a segment is even, the odd segments take the two blocks of each pair the other way round. x lies in shared memory in the order in
// which it is read.
//
// `num_parts` > 1: each row in that many parts of `part_bytes` (the last may be shorter), with sums of their own for the reader to add:
// [num_parts, ROWS, out]. The grid is a multiple of it, so that a CTA meets one part only, and holds only that of x.
//
// A CTA has an SM, or half of one, to itself, and all of its shared memory is ring. Not all of it is asked for at once: `in_flight` chunks
// keep memory busy, and more of them only stand in the way of the small kernels between products, whose few loads would wait for all
// that was asked for before them. Until the ring is full for the first time, when such kernels run, it is `in_flight_first`. The next
// kernel may start when the last weights are asked for.
//
// GATE_UP: the weight has gate rows first, then as many up rows. A slot takes a chunk of each, and silu(gate) * up is put out in bf16.
//
// Numbers: fp32 sums, in an order that depends on the shape alone.
#include "dependents.cuh"
#include "mbarrier.cuh"
#include "types.cuh"
#include "weight_product.cuh"

constexpr u32 WARPS = 8;  // beside the copying one; slot i is that of warp i mod WARPS, and all bring x to shared memory
constexpr u32 MAX_SLOTS = 16;
constexpr u32 HALVES = GATE_UP ? 2 : 1;
constexpr u32 PLANES = ROWS * X_BYTES;         // vectors of x beside one of a weight row
constexpr u32 PAIR_X_BYTES = 2 * PLANES * 512;  // of all lanes, beside two blocks of each segment
constexpr u32 X_BATCH = PLANES == 1 ? 4 : 2;  // vectors of a weight row whose x a thread asks for at once

struct GemvRowsParams {
    const u8* weight;        // [out, in], GATE_UP [2 * out, in]
    const elem_bits* x;      // [ROWS, in]
    const float* scale;      // FP8: one a weight row
    const elem_bits* bias;   // one a weight row, or null
    float* sums;             // [num_parts, ROWS, out]
    elem_bits* product;      // GATE_UP: [ROWS, out]
    u32 in;
    u32 out;
    u32 num_parts;           // divides the grid
    u32 part_bytes;          // of a weight row
    u32 segment;             // blocks; no part has fewer bytes
    u32 chunk_rows;          // up to 32; 1 where there are parts
    u32 slots;               // of the ring, up to MAX_SLOTS
    u32 in_flight_first;     // chunks that may be under way at once until every slot has been filled, up to `in_flight`
    u32 in_flight;           // the same behind that, up to `slots`: the wait for one must not find its slot in use again
    u32 slot_bytes;          // a multiple of 256
};

// What this CTA multiplies: bytes [begin, begin + bytes) of rows, from chunk `first` on every `step`th.
struct Share {
    u32 begin, bytes, first, step, chunks;
};

__device__ __forceinline__ Share share_of(const GemvRowsParams& p) {
    u32 part = blockIdx.x % p.num_parts, begin = part * p.part_bytes;
    return {begin, min(p.part_bytes, p.in * ELEM_BYTES - begin), blockIdx.x / p.num_parts, gridDim.x / p.num_parts,
            (p.out + p.chunk_rows - 1) / p.chunk_rows};
}

__device__ __forceinline__ u32 rows_of(const GemvRowsParams& p, u32 chunk) { return min(p.chunk_rows, p.out - chunk * p.chunk_rows); }

// One thread: all weights of this CTA, slot after slot. A slot is written again once its warp is done with it.
__device__ __forceinline__ void stream_weights(const GemvRowsParams& p, const Share& share, u32 ring, u32 full, u32 empty) {
    u32 slot = 0, parity = 1;  // a new barrier passes a wait for the phase before its first
    u32 arriving = 0, arriving_parity = 0, count = 0, under_way = 0;
    for (u32 chunk = share.first; chunk < share.chunks; chunk += share.step) {
        u32 size = rows_of(p, chunk) * share.bytes;
        if (under_way < (count++ < p.slots ? p.in_flight_first : p.in_flight)) {
            ++under_way;
        } else {
            wait_phase(full + arriving * 8, arriving_parity);
            if (++arriving == p.slots) arriving = 0, arriving_parity ^= 1;
        }
        wait_phase(empty + slot * 8, parity);
        arrive_expecting(full + slot * 8, HALVES * size);
#pragma unroll
        for (u32 half = 0; half < HALVES; ++half) {
            u64 row = half * p.out + chunk * p.chunk_rows;
            copy_bulk(ring + slot * p.slot_bytes + half * (p.slot_bytes / 2), p.weight + row * (p.in * ELEM_BYTES) + share.begin, size,
                      full + slot * 8);
        }
        if (++slot == p.slots) slot = 0, parity ^= 1;
    }
}

// Where in its rows this lane's segment lies: bytes, of the lane's first vector.
__device__ __forceinline__ u32 segment_begin(u32 segment, u32 bytes, u32 lane) {
    return min(lane / 4 * segment * BLOCK, bytes - segment * BLOCK) + lane % 4 * 16;
}

// Bytes between the blocks of a pair that this lane takes first and second: odd segments of even length the other way round.
__device__ __forceinline__ bool is_turned(u32 segment, u32 lane) { return segment % 2 == 0 && lane / 4 % 2 == 1; }

// This CTA's part of x to shared memory, [segment][PLANES][lane] of vectors, by the multiplying warps.
__device__ __forceinline__ void load_x(const GemvRowsParams& p, const Share& share, u8* x_shared) {
    u32 lane = threadIdx.x % 32, turn = is_turned(p.segment, lane), begin = segment_begin(p.segment, share.bytes, lane);
    u32 own = lane / 4 * p.segment * BLOCK;  // bytes before this are the segment's before
    for (u32 first = threadIdx.x / 32; first < p.segment; first += WARPS * X_BATCH) {
        uint4 value[X_BATCH][PLANES] = {};
#pragma unroll
        for (u32 i = 0; i < X_BATCH; ++i) {
            u32 j = first + i * WARPS, at = begin + (j ^ turn) * BLOCK;
            if (j < p.segment && at >= own)
#pragma unroll
                for (u32 plane = 0; plane < PLANES; ++plane) {
                    const elem_bits* row = p.x + static_cast<u64>(plane / X_BYTES) * p.in;
                    value[i][plane] = *reinterpret_cast<const uint4*>(row + (share.begin + at) / ELEM_BYTES + plane % X_BYTES * 8);
                }
        }
#pragma unroll
        for (u32 i = 0; i < X_BATCH; ++i)
#pragma unroll
            for (u32 plane = 0; plane < PLANES; ++plane)
                if (u32 j = first + i * WARPS; j < p.segment)
                    *reinterpret_cast<uint4*>(x_shared + ((j * PLANES + plane) * 32 + lane) * 16) = operand(value[i][plane]);
    }
}

// One block of each segment of COUNT weight rows times x, added to c: sums that do not wait for each other. Addresses are this lane's.
template <u32 COUNT, u32 CHAINS>
__device__ __forceinline__ void multiply_block(float (&c)[COUNT][CHAINS][4], u32 chain, const u8* weights, u32 row_step, const u8* x) {
    uint4 a[PLANES];
#pragma unroll
    for (u32 plane = 0; plane < PLANES; ++plane) a[plane] = vector_at(x + plane * 512);
#pragma unroll
    for (u32 r = 0; r < COUNT; ++r) {
        uint4 w = vector_at(weights + r * row_step);
#pragma unroll
        for (u32 i = 0; i < X_BYTES; ++i) {
            uint4 low = a[i], high = {0, 0, 0, 0};
            if (ROWS > 1) high = a[(ROWS - 1) * X_BYTES + i];
#if FP8
            u32 first = i == 0 ? w.x : w.z, second = i == 0 ? w.y : w.w;
            u32 b[4] = {to_half2(first), to_half2(first >> 16), to_half2(second), to_half2(second >> 16)};
#else
            u32 b[4] = {w.x, w.y, w.z, w.w};
#endif
            multiply(c[r][(chain + 2 * i) % CHAINS], low.x, high.x, low.y, high.y, b[0], b[1]);
            multiply(c[r][(chain + 2 * i + 1) % CHAINS], low.z, high.z, low.w, high.w, b[2], b[3]);
        }
    }
}

// The whole sum over the diagonal, in all lanes: `half` 0 of the first eight rows of C, 1 of the last.
template <u32 CHAINS>
__device__ __forceinline__ float diagonal_sum(const float (&c)[CHAINS][4], u32 half, u32 lane) {
    u32 g = lane / 4, t = lane % 4;
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (u32 i = 0; i < CHAINS; ++i) low += c[i][half * 2], high += c[i][half * 2 + 1];
    float sum = t == g / 2 ? g % 2 ? high : low : 0.0f;
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

// COUNT weight rows, `row_step` bytes apart, times the rows of x. `weights`, `x`: this lane's first vector.
template <u32 COUNT>
__device__ __forceinline__ void multiply_rows(
    float (&sum)[COUNT][ROWS], const u8* weights, u32 row_step, const u8* x, u32 segment, u32 lane) {
    constexpr u32 CHAINS = 4 / COUNT;
    constexpr u32 PAIRS = 4 / COUNT / (PLANES > 2 ? 2 : 1);  // whose loads are under way together
    float c[COUNT][CHAINS][4] = {};
    bool turn = is_turned(segment, lane);
    const u8 *first = weights + turn * BLOCK, *second = weights + !turn * BLOCK;
    auto multiply_pair = [&](u32 i) {
        multiply_block<COUNT, CHAINS>(c, 0, first + i * 2 * BLOCK, row_step, x + i * PAIR_X_BYTES);
        multiply_block<COUNT, CHAINS>(c, 2, second + i * 2 * BLOCK, row_step, x + i * PAIR_X_BYTES + PAIR_X_BYTES / 2);
    };
    auto advance = [&](u32 pairs) { first += pairs * 2 * BLOCK, second += pairs * 2 * BLOCK, x += pairs * PAIR_X_BYTES; };
    u32 pairs = segment / 2;
#pragma unroll 1
    for (; pairs >= PAIRS; pairs -= PAIRS) {
#pragma unroll
        for (u32 i = 0; i < PAIRS; ++i) multiply_pair(i);
        advance(PAIRS);
    }
#pragma unroll 1
    for (; pairs > 0; --pairs) multiply_pair(0), advance(1);
    if (segment % 2) multiply_block<COUNT, CHAINS>(c, 0, first, row_step, x);
#pragma unroll
    for (u32 r = 0; r < COUNT; ++r)
#pragma unroll
        for (u32 row = 0; row < ROWS; ++row) sum[r][row] = diagonal_sum(c[r], row, lane);
}

// What weight rows add to and multiply; lane i has those of row i of a chunk.
struct RowTerms {
    float scale[HALVES], bias[HALVES];
};

__device__ __forceinline__ RowTerms terms_of(const GemvRowsParams& p, const Share& share, u32 chunk, u32 lane) {
    RowTerms terms = {};
    if (chunk >= share.chunks || lane >= rows_of(p, chunk)) return terms;
#pragma unroll
    for (u32 half = 0; half < HALVES; ++half) {
        u32 row = half * p.out + chunk * p.chunk_rows + lane;
        if (FP8) terms.scale[half] = p.scale[row];
        if (p.bias != nullptr && share.begin == 0) terms.bias[half] = to_float(p.bias[row]);
    }
    return terms;
}

// Lane i puts out row i of a chunk.
__device__ __forceinline__ void put_out(
    const GemvRowsParams& p, const float (&sum)[HALVES][ROWS], const RowTerms& terms, u32 chunk, u32 lane) {
    if (lane >= rows_of(p, chunk)) return;
    u64 out = chunk * p.chunk_rows + lane;
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
        float whole[HALVES];
#pragma unroll
        for (u32 half = 0; half < HALVES; ++half)
            whole[half] = (FP8 ? sum[half][row] * (terms.scale[half] * (1.0f / X_SCALE)) : sum[half][row]) + terms.bias[half];
#if GATE_UP
        p.product[static_cast<u64>(row) * p.out + out] = silu_times(whole[0], whole[1]);
#else
        p.sums[static_cast<u64>(blockIdx.x % p.num_parts * ROWS + row) * p.out + out] = whole[0];
#endif
    }
}

// The sums of all rows of a chunk: lane i has those of row i. `weights`, `x`: this lane's first vector.
__device__ __forceinline__ void multiply_chunk(
    const GemvRowsParams& p, float (&mine)[HALVES][ROWS], const u8* weights, const u8* x, u32 rows, u32 row_bytes, u32 lane) {
    u32 r = 0;
    for (; GATE_UP ? r < rows : r + 1 < rows; r += GATE_UP ? 1 : 2) {
        float sum[2][ROWS];
        multiply_rows<2>(sum, weights + r * row_bytes, GATE_UP ? p.slot_bytes / 2 : row_bytes, x, p.segment, lane);
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
#pragma unroll
            for (u32 row = 0; row < ROWS; ++row)
                if (lane == r + (GATE_UP ? 0 : i)) mine[GATE_UP ? i : 0][row] = sum[i][row];
    }
    if (GATE_UP || r >= rows) return;
    float sum[1][ROWS];
    multiply_rows<1>(sum, weights + r * row_bytes, 0, x, p.segment, lane);
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row)
        if (lane == r) mine[0][row] = sum[0][row];
}

// The chunks of this warp's slots, in the order in which they are copied.
__device__ __forceinline__ void multiply_slots(
    const GemvRowsParams& p, const Share& share, u32 warp, u32 lane, RowTerms terms, const u8* ring, const u8* x, u32 full, u32 empty) {
    const u8* weights = ring + segment_begin(p.segment, share.bytes, lane);
    u32 slot = warp, parity = 0, chunk = share.first + warp * share.step;
    while (chunk < share.chunks) {
        float sum[HALVES][ROWS] = {};
        wait_phase(full + slot * 8, parity);
        multiply_chunk(p, sum, weights + slot * p.slot_bytes, x, rows_of(p, chunk), share.bytes, lane);
        __syncwarp();  // all lanes have read the slot
        if (lane == 0) arrive(empty + slot * 8);
        put_out(p, sum, terms, chunk, lane);
        u32 next = slot + WARPS;
        bool is_round_over = next >= p.slots;
        if (is_round_over) next = warp, parity ^= 1;
        chunk += (next - slot + (is_round_over ? p.slots : 0)) * share.step;
        slot = next;
        terms = terms_of(p, share, chunk, lane);  // asked for now, here when its weights are
    }
}

__device__ __forceinline__ void arrive_with_x() { asm volatile("bar.arrive 1, %0;" ::"r"(WARPS * 32) : "memory"); }
__device__ __forceinline__ void wait_for_x() { asm volatile("bar.sync 1, %0;" ::"r"(WARPS * 32) : "memory"); }

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 2) gemv_rows(const __grid_constant__ GemvRowsParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(8) u64 barriers[2 * MAX_SLOTS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 full = shared_address(barriers), empty = full + MAX_SLOTS * 8;
    Share share = share_of(p);
    if (threadIdx.x < p.slots) {
        open_barrier(full + threadIdx.x * 8, 1);
        open_barrier(empty + threadIdx.x * 8, 1);
        fence_new_barriers();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane == 0) {
            stream_weights(p, share, shared_address(shared), full, empty);
            // Not earlier: the next product's weights would come before the last ones of this.
            let_dependents_start();
            wait_for_prerequisites();  // so that the kernel does not end before the one before it
        }
        return;
    }
    RowTerms terms = terms_of(p, share, share.first + warp * share.step, lane);  // weights too: not the kernel before's
    wait_for_prerequisites();
    u8* x_shared = shared + p.slots * p.slot_bytes;
    load_x(p, share, x_shared);
    if (warp >= p.slots) return arrive_with_x();
    wait_for_x();
    multiply_slots(p, share, warp, lane, terms, shared, x_shared + lane * 16, full, empty);
}
