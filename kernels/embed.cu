// Rows of a vocabulary-parallel embedding: each rank looks up the ids that it holds and writes zeros for the others.
//
// The start of a decode step. May zero a second buffer of the same shape on the way, which saves a launch where one is needed.
#include "dependents.cuh"
#include "types.cuh"

struct EmbedParams {
    const void* ids;         // [rows], int64 or int32: written by the step before
    const elem_bits* table;  // [end - begin or more, hidden]
    elem_bits* out;          // [rows, hidden]
    elem_bits* zeroed;       // [rows, hidden], or null
    long begin;              // id of the table's first row
    long end;                // ids from here on, and below `begin`, are another rank's
    u32 vectors;             // of 16 bytes, a row
    u32 is_wide;             // whether ids are int64
};

// One row a blockIdx.y; the vectors of a row are dealt to the threads of gridDim.x CTAs.
extern "C" __global__ void __launch_bounds__(256) embed(const __grid_constant__ EmbedParams p) {
    u32 row = blockIdx.y, first = blockIdx.x * blockDim.x + threadIdx.x;
    uint4 zeros = {0, 0, 0, 0};
    wait_for_prerequisites();  // for the ids, and for whoever still reads what is overwritten here
    let_dependents_start();
    long id = p.is_wide ? static_cast<const long*>(p.ids)[row] : static_cast<const int*>(p.ids)[row];
    bool is_own = id >= p.begin && id < p.end;
    const uint4* source = reinterpret_cast<const uint4*>(p.table) + (is_own ? id - p.begin : 0) * p.vectors;
    uint4* out = reinterpret_cast<uint4*>(p.out) + static_cast<long>(row) * p.vectors;
    uint4* zeroed = reinterpret_cast<uint4*>(p.zeroed) + static_cast<long>(row) * p.vectors;
    for (u32 i = first; i < p.vectors; i += gridDim.x * blockDim.x) {
        out[i] = is_own ? source[i] : zeros;
        if (p.zeroed != nullptr) zeroed[i] = zeros;
    }
}
