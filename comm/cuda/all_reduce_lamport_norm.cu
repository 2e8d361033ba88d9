// All-reduce, residual add and RMSNorm in one kernel: one row a cluster. The protocol and why it is safe: `lamport.cuh`.
//
// What the norm adds to the plain sum is one exchange inside the cluster. Every warp sends its sum of squares straight into the shared
// memory of every CTA of the row, and each CTA waits until all of them are in: no barrier, one trip. All threads of all ranks then add
// them in one order.
//
// Numbers: rounding as the separate steps have it. The sum over ranks is rounded, then the new residual is, then the norm is taken of
// the rounded values and rounded before the weight.
#include "cluster.cuh"
#include "lamport.cuh"

#define SITE_ALL_REDUCE_NORM 2

struct NormParams {
    LamportParams reduce;      // x: [rows, hidden], not read if there are parts; `out` is not used; max_ctas counts CTAs of all rows
    elem_bits* residual;       // [rows, hidden]: read, and overwritten by the new residual
    elem_bits* normed;         // [rows, hidden]
    const elem_bits* weight;   // [hidden]
    float eps;
    u32 hidden;                // elements a row; a multiple of UNIT_ELEMS, pointers 8-byte aligned
    const float* parts;        // [num_parts][rows, hidden]: this rank's x as sums still to be added; 16-byte aligned
    long part_pitch;           // floats from one part to the next
    u32 num_parts;             // 0: x is whole
    u32 is_next_early;         // the kernel behind may start before this one has anything to show
};

struct __align__(UNIT_ELEMS * sizeof(float)) PartUnit {
    float elems[UNIT_ELEMS];
};

// This rank's unit at element `at`: as it is, or its parts added in order and rounded once.
enum Form { WHOLE, IN_PARTS, EITHER };  // of x, as far as it is known when this is compiled

template <Form FORM>
__device__ __forceinline__ Unit load_own(const NormParams& n, long at) {
    if (FORM == WHOLE || (FORM == EITHER && n.num_parts == 0)) {
        Unit unit;
        unit.word = *reinterpret_cast<const u64*>(n.reduce.x + at);
        return unit;
    }
    PartUnit sum = *reinterpret_cast<const PartUnit*>(n.parts + at);
#pragma unroll 4
    for (u32 part = 1; part < n.num_parts; ++part) {
        PartUnit other = *reinterpret_cast<const PartUnit*>(n.parts + part * n.part_pitch + at);
#pragma unroll
        for (int i = 0; i < UNIT_ELEMS; ++i) sum.elems[i] += other.elems[i];
    }
    return round_unit(sum.elems);
}

constexpr int MAX_UNITS = 4;   // units a thread
constexpr int MAX_CTAS = 8;    // CTAs a row, one cluster
constexpr int MAX_WARPS = 32;  // warps a CTA

struct Shared {
    float4 squares[MAX_CTAS * MAX_WARPS / 4];  // of every warp of the row
    u64 mailbox;
};

// The warps of a row take its units in turn, CTA after CTA, so that every CTA has some; a thread holds up to K.
template <int K, Form FORM>
__device__ __forceinline__ void reduce_and_norm(const NormParams& n, Shared& shared, u32 cta, u32 ctas) {
    const LamportParams& p = n.reduce;
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 units = n.hidden / UNIT_ELEMS, step = ctas * blockDim.x, begin = (warp * ctas + cta) * 32 + lane;
    long row = static_cast<long>(blockIdx.x / ctas) * n.hidden;
    // The weight does not depend on the kernel before.
    Unit weight[K], value[K], residual[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
        if (begin + k * step < units) weight[k].word = *reinterpret_cast<const u64*>(n.weight + (begin + k * step) * UNIT_ELEMS);
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (begin + k * step < units) {
            value[k] = load_own<FORM>(n, row + (begin + k * step) * UNIT_ELEMS);
            residual[k].word = *reinterpret_cast<const u64*>(n.residual + row + (begin + k * step) * UNIT_ELEMS);
        }
    }
#pragma unroll
    for (int k = 0; k < K; ++k)
        if (begin + k * step < units) send(p, value[k], epoch, threadIdx.x + k * blockDim.x);
    if (!n.is_next_early) let_dependents_start(p.watch);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (begin + k * step < units) {
            float sum[UNIT_ELEMS];
            receive(p, value[k], epoch, threadIdx.x + k * blockDim.x, SITE_ALL_REDUCE_NORM, sum);
#pragma unroll
            for (int i = 0; i < UNIT_ELEMS; ++i) {
                float fresh = to_float(from_float(to_float(from_float(sum[i])) + to_float(residual[k].elems[i])));
                value[k].elems[i] = from_float(fresh);
                squares += fresh * fresh;
            }
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    float* mine = reinterpret_cast<float*>(shared.squares) + cta * warps + warp;
    if (ctas == 1) {  // no cluster, and so no mail
        if (lane == 0) *mine = squares;
    } else {
        cluster_wait();  // all CTAs of the row run, and their mailboxes are open
        if (lane < ctas) st_async(mine, &shared.mailbox, lane, squares);
    }
    // While the sums travel.
#pragma unroll
    for (int k = 0; k < K; ++k)
        if (begin + k * step < units)
            *reinterpret_cast<u64*>(n.residual + row + (begin + k * step) * UNIT_ELEMS) = value[k].word;
    if (ctas == 1) __syncthreads();
    else wait_bytes(&shared.mailbox);  // of all CTAs: none is still writing into this one when it ends
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 i = 0; i < (ctas * warps + 3) / 4; ++i) {
        float4 four = shared.squares[i];
        total.x += four.x, total.y += four.y, total.z += four.z, total.w += four.w;
    }
    float scale = rsqrtf(((total.x + total.y) + (total.z + total.w)) / n.hidden + n.eps);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (begin + k * step < units) {
            Unit out;
#pragma unroll
            for (int i = 0; i < UNIT_ELEMS; ++i) {
                float normed = to_float(from_float(to_float(value[k].elems[i]) * scale));
                out.elems[i] = from_float(normed * to_float(weight[k].elems[i]));
            }
            *reinterpret_cast<u64*>(n.normed + row + (begin + k * step) * UNIT_ELEMS) = out.word;
        }
    }
    count_call(p, epoch);
}

extern "C" __global__ void __launch_bounds__(1024) all_reduce_lamport_norm(const __grid_constant__ NormParams n) {
    __shared__ Shared shared;
    // For a product behind, which fills its rings with weights while this kernel waits for its turn. Not for another call of this
    // one, which gains nothing (0.03 to 0.2 us a call were lost).
    if (n.is_next_early) let_dependents_start(n.reduce.watch);
    u32 ctas = cluster_size(), cta = cluster_rank(), words = ctas * (blockDim.x / 32);
    if (threadIdx.x == 0) {
        for (u32 i = words; i % 4 != 0; ++i) reinterpret_cast<float*>(shared.squares)[i] = 0.0f;  // read with the last four
        if (ctas > 1) expect_bytes(&shared.mailbox, words * 4);
    }
    if (ctas > 1) cluster_arrive();
    u32 units = n.hidden / UNIT_ELEMS, step = ctas * blockDim.x;
    // Of the usual width each form has code of its own: a branch among its loads makes the later ones wait for the earlier.
    if (units <= step && n.num_parts == 0) reduce_and_norm<1, WHOLE>(n, shared, cta, ctas);
    else if (units <= step) reduce_and_norm<1, IN_PARTS>(n, shared, cta, ctas);
    else if (units <= 2 * step) reduce_and_norm<2, EITHER>(n, shared, cta, ctas);
    else reduce_and_norm<MAX_UNITS, EITHER>(n, shared, cta, ctas);
}
