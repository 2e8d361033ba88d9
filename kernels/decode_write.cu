// What an attention kernel needs before it that only attends: the new tokens' heads summed from their parts, queries and keys
// normalised and rotated, keys and values in the paged cache, the heads by themselves, and how many tokens each row now has.
//
// Numbers: heads are rounded when they are summed, then as `kernels/rms_norm.py` and `kernels/rotary.py` do.
//
// What may be read before `wait_for_prerequisites` (`is_early`): positions, page table, and what is constant. As that of
// `decode_attention.cu`, a launch lets its dependents start only after it waited itself; so with one of either between the writer
// and this launch, the writer is complete.
#include "dependents.cuh"
#include "head_vectors.cuh"

struct __align__(16) Sums {
    float elems[WIDTH];
};

struct DecodeWriteParams {
    const void* qkv;          // fp32 [num_parts, rows, num_q + 2 num_kv, head_dim], or without the parts, of elements
    const elem_bits* turns;   // [max_positions, head_dim]: cosines, then sines
    const elem_bits* q_norm;  // [head_dim]; null: queries and keys are not normalised
    const elem_bits* k_norm;
    const void* positions;    // [rows], of the new token; negative: none
    const u32* pages;         // [rows, max_pages]
    elem_bits* heads;         // [rows, out_heads, head_dim]
    elem_bits* keys;          // [slots, num_kv, head_dim]
    elem_bits* values;
    u32* lengths;             // [rows]; 0 where there is no token; null: nobody asks
    float eps;
    u32 rows;
    u32 num_q;
    u32 num_kv;
    u32 out_heads;            // the first of q, k and v that are left in `heads`
    u32 half;                 // vectors of half a head
    u32 num_parts;            // 0: qkv is elements
    u32 max_pages;
    u32 page_shift;
    u32 is_wide;              // positions are 8 bytes each, not 4
    u32 is_early;
    u32 row_ctas;             // CTAs of a row
};

constexpr u32 PARTS_AT_ONCE = 3;  // of a sum, behind the first: loads on their way together

__device__ __forceinline__ Sums sums_if(const Sums* source, bool is_there) { return is_there ? *source : Sums{}; }

__device__ __forceinline__ void add(Sums& sums, const Sums& more) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sums.elems[e] += more.elems[e];
}

__device__ __forceinline__ Vector rounded(const Sums& sums) {
    Vector vector;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) vector.elems[e] = from_float(sums.elems[e]);
    return vector;
}

// Vector `at` of head `number` of `row`, and the one it is rotated with.
__device__ __forceinline__ VectorPair load_head(const DecodeWriteParams& p, u32 row, u32 number, u32 at) {
    const u64 row_vectors = static_cast<u64>(p.num_q + 2 * p.num_kv) * 2 * p.half;
    const u64 first = row * row_vectors + number * 2 * p.half + at, part_vectors = p.rows * row_vectors;
    if (p.num_parts == 0) return load_pair(static_cast<const Vector*>(p.qkv) + first, p.half);
    const Sums* own = static_cast<const Sums*>(p.qkv) + first;
    Sums low = own[0], high = own[p.half];
#pragma unroll 1
    for (u32 begin = 1; begin < p.num_parts; begin += PARTS_AT_ONCE) {
        Sums lows[PARTS_AT_ONCE], highs[PARTS_AT_ONCE];
#pragma unroll
        for (u32 part = 0; part < PARTS_AT_ONCE; ++part) {
            const Sums* next = own + (begin + part) * part_vectors;
            lows[part] = sums_if(next, begin + part < p.num_parts), highs[part] = sums_if(next + p.half, begin + part < p.num_parts);
        }
#pragma unroll
        for (u32 part = 0; part < PARTS_AT_ONCE; ++part)
            if (begin + part < p.num_parts) add(low, lows[part]), add(high, highs[part]);  // adding 0 would turn -0 into 0
    }
    return {rounded(low), rounded(high)};
}

// RMSNorm over a head, whose pairs are with `half` lanes side by side, a power of two of them. Rounded before the weight and after it.
__device__ __forceinline__ void normalise(VectorPair& own, const VectorPair& weight, u32 half, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        const float x = to_float(own.low.elems[e]), y = to_float(own.high.elems[e]);
        squares += x * x + y * y;
    }
    const u32 lanes = ((1u << half) - 1) << (threadIdx.x % 32 & ~(half - 1));  // of this head; others of the warp may have left
    for (u32 far = half / 2; far; far /= 2) squares += __shfl_xor_sync(lanes, squares, far);
    const float scale = rsqrtf(squares / static_cast<float>(2 * half * WIDTH) + eps);
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
        own.low.elems[e] = from_float(round_to_elem(to_float(own.low.elems[e]) * scale) * to_float(weight.low.elems[e]));
        own.high.elems[e] = from_float(round_to_elem(to_float(own.high.elems[e]) * scale) * to_float(weight.high.elems[e]));
    }
}

// `row_ctas` CTAs a row; a thread takes a vector of the first half of a head and the one it is rotated with.
extern "C" __global__ void __launch_bounds__(128) decode_write(const __grid_constant__ DecodeWriteParams p) {
    const u32 row = blockIdx.x / p.row_ctas, i = blockIdx.x % p.row_ctas * blockDim.x + threadIdx.x;
    const u32 number = i / p.half, at = i % p.half, head = 2 * p.half, num_turned = p.num_q + p.num_kv;
    if (!p.is_early) wait_for_prerequisites();
    const long position = p.is_wide ? static_cast<const long*>(p.positions)[row] : static_cast<const int*>(p.positions)[row];
    const bool is_there = position >= 0 && number < num_turned + p.num_kv;
    u64 slot = 0;
    VectorPair turn, norm;
    if (is_there) {
        const u32 page = p.pages[static_cast<u64>(row) * p.max_pages + (position >> p.page_shift)];
        slot = (static_cast<u64>(page) << p.page_shift) + (position & ((1l << p.page_shift) - 1));
        turn = load_pair(reinterpret_cast<const Vector*>(p.turns) + position * head + at, p.half);
        if (p.q_norm != nullptr)
            norm = load_pair(reinterpret_cast<const Vector*>(number < p.num_q ? p.q_norm : p.k_norm) + at, p.half);
    }
    wait_for_prerequisites();  // also where there is nothing: a launch must not be complete before its prerequisites
    let_dependents_start();
    if (i == 0 && p.lengths != nullptr) p.lengths[row] = position < 0 ? 0 : static_cast<u32>(position + 1);
    if (!is_there) return;
    VectorPair own = load_head(p, row, number, at);
    if (number < num_turned) {
        if (p.q_norm != nullptr) normalise(own, norm, p.half, p.eps);
        rotate(own, turn);
    }
    if (number < p.out_heads)
        store_pair(reinterpret_cast<Vector*>(p.heads) + (static_cast<u64>(row) * p.out_heads + number) * head + at, p.half, own);
    if (number >= p.num_q) {
        Vector* cache = reinterpret_cast<Vector*>(number < num_turned ? p.keys : p.values);
        const u32 kv_head = number - (number < num_turned ? p.num_q : num_turned);
        store_pair(cache + (slot * p.num_kv + kv_head) * head + at, p.half, own);
    }
}
