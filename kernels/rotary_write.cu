// Rotates the queries and keys of new tokens where they lie in the fused projection, and writes keys and values to the paged cache.
//
// Numbers: those of `kernels/rotary.py`: the product with the cosine is rounded by itself, then the sum is.
#include "dependents.cuh"
#include "types.cuh"

constexpr int WIDTH = 16 / sizeof(elem_bits);

struct __align__(16) Vector {
    elem_bits elems[WIDTH];
};

struct RotaryWriteParams {
    elem_bits* qkv;          // [tokens, num_q + 2 num_kv, head_dim], q, then k, then v; q and k are rotated in place
    const elem_bits* turns;  // [tokens, head_dim]: cosines, then sines
    const long* slots;       // [tokens]; below 0: nothing is written to the cache
    elem_bits* keys;         // [slots, num_kv, head_dim]
    elem_bits* values;
    u32 num_q;
    u32 num_kv;
    u32 half;                // vectors of half a head
};

__device__ __forceinline__ float round_to_elem(float value) { return to_float(from_float(value)); }

// A CTA a token; a thread takes a vector of the first half of a head and the one it is rotated with.
extern "C" __global__ void __launch_bounds__(256) rotary_write(const __grid_constant__ RotaryWriteParams p) {
    const u32 num_turned = (p.num_q + p.num_kv) * p.half, head = 2 * p.half;
    wait_for_prerequisites();
    let_dependents_start();
    const long slot = p.slots[blockIdx.x];
    const Vector* turn = reinterpret_cast<const Vector*>(p.turns) + static_cast<long>(blockIdx.x) * head;
    Vector* heads = reinterpret_cast<Vector*>(p.qkv) + static_cast<long>(blockIdx.x) * (p.num_q + 2 * p.num_kv) * head;
    Vector* keys = reinterpret_cast<Vector*>(p.keys) + slot * p.num_kv * head;
    Vector* values = reinterpret_cast<Vector*>(p.values) + slot * p.num_kv * head;
    for (u32 i = threadIdx.x; i < num_turned; i += blockDim.x) {
        const u32 number = i / p.half, at = i % p.half;
        Vector* own = heads + number * head + at;
        Vector low = own[0], high = own[p.half];
        const Vector cosines = turn[at], sines = turn[p.half + at];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            const float x = to_float(low.elems[e]), y = to_float(high.elems[e]);
            const float cosine = to_float(cosines.elems[e]), sine = to_float(sines.elems[e]);
            low.elems[e] = from_float(round_to_elem(x * cosine) - y * sine);
            high.elems[e] = from_float(round_to_elem(y * cosine) + x * sine);
        }
        own[0] = low, own[p.half] = high;
        if (number >= p.num_q && slot >= 0) {
            Vector* key = keys + (number - p.num_q) * head + at;
            key[0] = low, key[p.half] = high;
        }
    }
    if (slot < 0) return;
    const Vector* own_values = heads + (p.num_q + p.num_kv) * head;
    for (u32 i = threadIdx.x; i < p.num_kv * head; i += blockDim.x) values[i] = own_values[i];
}
