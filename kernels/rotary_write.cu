// Rotates the queries and keys of new tokens where they lie in the fused projection, and writes keys and values to the paged cache.
//
// Numbers: those of `kernels/rotary.py`: the product with the cosine is rounded by itself, then the sum is.
#include "dependents.cuh"
#include "head_vectors.cuh"

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
        Vector* place = heads + number * head + at;
        VectorPair own = load_pair(place, p.half);
        rotate(own, load_pair(turn + at, p.half));
        store_pair(place, p.half, own);
        if (number >= p.num_q && slot >= 0) store_pair(keys + (number - p.num_q) * head + at, p.half, own);
    }
    if (slot < 0) return;
    const Vector* own_values = heads + (p.num_q + p.num_kv) * head;
    for (u32 i = threadIdx.x; i < p.num_kv * head; i += blockDim.x) values[i] = own_values[i];
}
