// What an attention kernel of a library needs before it in a decode step: the new token's heads summed from their parts, queries and
// keys rotated, keys and values written to the paged cache, queries by themselves, and how many tokens each row now has.
//
// Numbers: heads are rounded when they are summed, then rotated as `kernels/rotary.py` does.
#include "dependents.cuh"
#include "types.cuh"

constexpr int WIDTH = 16 / sizeof(elem_bits);

struct __align__(16) Vector {
    elem_bits elems[WIDTH];
};

struct __align__(16) Sums {
    float elems[WIDTH];
};

struct DecodeWriteParams {
    const void* qkv;         // fp32 [num_parts, rows, num_q + 2 num_kv, head_dim], or without the parts, of elements
    const elem_bits* turns;  // [max_positions, head_dim]: cosines, then sines
    const void* positions;   // [rows], of the new token; negative: none
    const u32* pages;        // [rows, max_pages]
    elem_bits* queries;      // [rows, num_q, head_dim]
    elem_bits* keys;         // [slots, num_kv, head_dim]
    elem_bits* values;
    u32* lengths;            // [rows]; 0 where there is no token
    u32 rows;
    u32 num_q;
    u32 num_kv;
    u32 half;                // vectors of half a head
    u32 num_parts;           // 0: qkv is elements
    u32 max_pages;
    u32 page_shift;
    u32 is_wide;             // positions are 8 bytes each, not 4
    u32 row_ctas;            // CTAs of a row
};

__device__ __forceinline__ float round_to_elem(float value) { return to_float(from_float(value)); }

// Vector `at` of `row`, counted from the row's first.
__device__ __forceinline__ Vector load_head(const DecodeWriteParams& p, u32 row, u32 at) {
    const u64 row_vectors = static_cast<u64>(p.num_q + 2 * p.num_kv) * 2 * p.half, first = row * row_vectors + at;
    if (p.num_parts == 0) return static_cast<const Vector*>(p.qkv)[first];
    const Sums* parts = static_cast<const Sums*>(p.qkv) + first;
    Sums sums = parts[0];
    for (u32 part = 1; part < p.num_parts; ++part) {
        const Sums more = parts[part * p.rows * row_vectors];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) sums.elems[e] += more.elems[e];
    }
    Vector heads;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) heads.elems[e] = from_float(sums.elems[e]);
    return heads;
}

// `row_ctas` CTAs a row; a thread takes a vector of the first half of a head and the one it is rotated with, or one of a value.
extern "C" __global__ void __launch_bounds__(128) decode_write(const __grid_constant__ DecodeWriteParams p) {
    const u32 row = blockIdx.x / p.row_ctas, i = blockIdx.x % p.row_ctas * blockDim.x + threadIdx.x;
    const u32 num_turned = (p.num_q + p.num_kv) * p.half, head = 2 * p.half;
    wait_for_prerequisites();
    let_dependents_start();
    const long position = p.is_wide ? static_cast<const long*>(p.positions)[row] : static_cast<const int*>(p.positions)[row];
    if (i == 0) p.lengths[row] = position < 0 ? 0 : static_cast<u32>(position + 1);
    if (position < 0 || i >= num_turned + p.num_kv * head) return;
    const u32 page = p.pages[static_cast<u64>(row) * p.max_pages + (position >> p.page_shift)];
    const u64 slot = (static_cast<u64>(page) << p.page_shift) + (position & ((1l << p.page_shift) - 1));
    if (i >= num_turned) {
        const u32 at = i - num_turned;
        reinterpret_cast<Vector*>(p.values)[slot * p.num_kv * head + at] = load_head(p, row, (p.num_q + p.num_kv) * head + at);
        return;
    }
    const u32 number = i / p.half, at = i % p.half;
    const Vector* turn = reinterpret_cast<const Vector*>(p.turns) + position * head;
    Vector low = load_head(p, row, number * head + at), high = load_head(p, row, number * head + p.half + at);
    const Vector cosines = turn[at], sines = turn[p.half + at];
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        const float x = to_float(low.elems[e]), y = to_float(high.elems[e]);
        const float cosine = to_float(cosines.elems[e]), sine = to_float(sines.elems[e]);
        low.elems[e] = from_float(round_to_elem(x * cosine) - y * sine);
        high.elems[e] = from_float(round_to_elem(y * cosine) + x * sine);
    }
    Vector* target = number < p.num_q
        ? reinterpret_cast<Vector*>(p.queries) + (static_cast<u64>(row) * p.num_q + number) * head
        : reinterpret_cast<Vector*>(p.keys) + (slot * p.num_kv + number - p.num_q) * head;
    target[at] = low, target[p.half + at] = high;
}
