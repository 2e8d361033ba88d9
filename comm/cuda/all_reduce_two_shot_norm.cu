// Two-shot all-reduce of many rows, with residual and RMSNorm: each rank adds its share of the rows straight from where the products
// of all ranks lie, norms it, and stores the result at all ranks. What every rank would do to all rows is done once to each, and
// nothing is copied on the way.
//
// `x` and `normed` are in the symmetric heap, one of each. Two barriers a call, between CTAs of equal number. At the first, a peer's
// kernel has begun, so that its product is there and its readers of the last `normed` have ended. At the second, the peer's CTA has
// read what it needs of this rank's `x` and stored its rows here. A rank ends its call when all CTAs of all peers have, so its next
// product may overwrite `x`, and its peers may store the next rows as soon as it begins the next call.
//
// Numbers: fp32 sums in rank order, rounded; then as `kernels/add_norm.cu`. The residual of a row is up to date on its rank
// alone.
#include "sum_of_cta.cuh"
#include "wait.cuh"

#define SITE_TWO_SHOT_NORM_BEGIN 13
#define SITE_TWO_SHOT_NORM_END 14

struct __align__(16) Vector {
    union {
        Pair pair;
        elem_bits elems[16 / sizeof(elem_bits)];
    };
};

struct TwoShotNormParams {
    const Vector* x[MAX_RANKS];  // of every rank: [rows, hidden]
    Vector* normed[MAX_RANKS];   // of every rank: [rows, hidden]
    u32* flags[MAX_RANKS];       // of every rank: [2 barriers][max_ctas][size]
    Vector* residual;            // [rows, hidden]
    const Vector* weight;        // [hidden]
    u32* epochs;
    Watch watch;
    u32 rows;
    u32 vectors;  // a row: at most VECTORS a thread
    u32 rank;
    u32 size;
    u32 max_ctas;
    float eps;
};

constexpr int WIDTH = 16 / sizeof(elem_bits);
constexpr int VECTORS = 2;

__device__ __forceinline__ void meet(const TwoShotNormParams& p, u32 barrier, u32 epoch, u32 site) {
    __syncthreads();  // the CTA's loads and stores before its flags
    if (threadIdx.x < p.size && threadIdx.x != p.rank) {
        const u32 peer = threadIdx.x, base = (barrier * p.max_ctas + blockIdx.x) * p.size;
        st_release_sys(p.flags[peer] + base + p.rank, epoch);
        wait_equal_acquire(p.flags[p.rank] + base + peer, epoch, p.watch, site, epoch, peer);
    }
    __syncthreads();
}

// A CTA takes whole rows, with whole warps.
extern "C" __global__ void __launch_bounds__(512, 2) all_reduce_two_shot_norm(const __grid_constant__ TwoShotNormParams p) {
    __shared__ float sums[2][16];  // in turn: of the row before they may still be read
    wait_for_prerequisites();
    const u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));
    const u32 share = (p.rows + p.size - 1) / p.size;
    const u32 first = p.rank * share, last = first + share < p.rows ? first + share : p.rows;
    meet(p, 0, epoch, SITE_TWO_SHOT_NORM_BEGIN);
    u32 turn = 0;
    for (u32 row = first + blockIdx.x; row < last; row += gridDim.x, turn ^= 1) {
        const long at = static_cast<long>(row) * p.vectors + threadIdx.x;
        float total[VECTORS][WIDTH];
#pragma unroll 2
        for (u32 source = 0; source < p.size; ++source) {
            Vector part[VECTORS];
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
                if (threadIdx.x + k * blockDim.x < p.vectors)
                    part[k].pair = ld_relaxed_sys_pair(&p.x[source][at + k * blockDim.x].pair);
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    const float value = to_float(part[k].elems[e]);
                    total[k][e] = source == 0 ? value : total[k][e] + value;
                }
        }
        Vector own[VECTORS];
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            if (threadIdx.x + k * blockDim.x >= p.vectors) continue;
            own[k] = p.residual[at + k * blockDim.x];
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                own[k].elems[e] = from_float(to_float(own[k].elems[e]) + to_float(from_float(total[k][e])));
                const float value = to_float(own[k].elems[e]);
                squares += value * value;
            }
            p.residual[at + k * blockDim.x] = own[k];
        }
        const float scale = rsqrtf(sum_of_cta(squares, sums[turn]) / static_cast<float>(p.vectors * WIDTH) + p.eps);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const u32 i = threadIdx.x + k * blockDim.x;
            if (i >= p.vectors) continue;
            const Vector factor = p.weight[i];
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                const float normed = to_float(from_float(to_float(own[k].elems[e]) * scale));
                own[k].elems[e] = from_float(normed * to_float(factor.elems[e]));
            }
            for (u32 step = 0; step < p.size; ++step) {  // peers first: their stores take longest
                u32 peer = p.rank + 1 + step;
                if (peer >= p.size) peer -= p.size;
                st_relaxed_sys_pair(&p.normed[peer][at + k * blockDim.x].pair, own[k].pair);
            }
        }
    }
    meet(p, 1, epoch, SITE_TWO_SHOT_NORM_END);
    if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch;
}
