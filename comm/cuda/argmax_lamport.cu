// Arg-max, or a draw, over a vocabulary whose rows are split over the ranks: the same id on every rank, in one kernel.
//
// Several CTAs share a row. Each sends its best to every rank, its own included, as packets that carry the call's number; the
// row's first CTA waits for those of all CTAs of all ranks and compares. So CTAs of one GPU meet in the same way as GPUs do, with
// no atomic, no fence and nothing to clear. A best is two packets: {order}, {id, logit}.
//
// Each row is a world of its own, with its own call number (`epochs[row]`, device memory), read by all CTAs of the row when they
// start and advanced by the first one after it has heard from all of them.
//
// Why two slots are enough: as in `all_reduce_lamport`, with the row in the place of the CTA. At its call e a rank writes slot e % 2,
// which the peer read at its call e - 2. Before, this rank finished call e - 1, for which the peer's bests of the same row had
// arrived; they were sent after the peer's call e - 2 was complete (stream order; `wait_for_prerequisites` under programmatic
// launch). All ranks make the same calls with the same rows and CTAs a row.
//
// Who may wait: only the first CTA of a row does, so a grid goes on as long as the GPU holds more CTAs than the call has rows.
#include "vocabulary.cuh"
#include "wait.cuh"

#define SITE_ARGMAX 9
#define SITE_DRAW 10

struct ArgmaxParams {
    const elem_bits* logits;  // [rows, pitch], columns [0, num_valid) count
    long* ids;                // [rows]
    float* values;            // [rows] the chosen ids' logits, or null
    Pair* inbox[MAX_RANKS];   // of every rank: [2 slots][size sources][max_rows][max_ctas] bests of two packets
    u32* epochs;              // [max_rows], own memory
    Watch watch;
    long pitch;
    u32 num_valid;            // may be 0 on some ranks
    u32 first_id;             // of column 0
    u32 rank;
    u32 size;
    u32 row_ctas;             // CTAs a row in this call, <= max_ctas
    u32 max_rows;
    u32 max_ctas;
};

struct DrawParams {
    ArgmaxParams argmax;
    const double* temperatures;  // [rows]; 0 takes the highest logit
    const u64* starts;           // [rows, window]: where the noise of a row begins, by position modulo window
    const long* positions;       // [rows], or null for 0
    u32 window;
};

__device__ __forceinline__ long packet_index(const ArgmaxParams& p, u32 slot, u32 source, u32 row, u32 cta) {
    return 2 * (((static_cast<long>(slot) * p.size + source) * p.max_rows + row) * p.max_ctas + cta);
}

__device__ __forceinline__ RowShare share_of_cta(const ArgmaxParams& p) {
    u32 row = blockIdx.x / p.row_ctas;
    return {p.logits + row * p.pitch, p.num_valid, p.first_id, blockIdx.x % p.row_ctas, p.row_ctas};
}

// Lanes 0 to 2 * size - 1 of the first warp send one packet each.
__device__ __forceinline__ void send_best(const ArgmaxParams& p, const Best& best, u32 epoch, u32 row, u32 cta) {
    if (threadIdx.x >= 2 * p.size) return;
    u32 half = threadIdx.x % 2, peer = (p.rank + threadIdx.x / 2) % p.size;
    Unit unit;
    if (half == 0) {
        unit.word = best.order;
    } else {
        unit.half[0] = best.id;
        unit.half[1] = best.value;
    }
    st_relaxed_sys_pair(p.inbox[peer] + packet_index(p, epoch & 1, p.rank, row, cta) + half, pack(unit, epoch));
}

__device__ __forceinline__ Best wait_best(const Pair* packets, u32 epoch, const Watch& watch, u32 site, u32 source) {
    Unit order = wait_packet(packets, epoch, watch, site, source);
    Unit rest = wait_packet(packets + 1, epoch, watch, site, source);
    return {order.word, rest.half[0], rest.half[1]};
}

__device__ __forceinline__ void exchange(const ArgmaxParams& p, Best best, u32 epoch, u32 site) {
    __shared__ Best scratch[BEST_WARPS], gathered[BEST_WARPS];
    u32 row = blockIdx.x / p.row_ctas, cta = blockIdx.x % p.row_ctas;
    send_best(p, best_of_cta(best, scratch), epoch, row, cta);
    let_dependents_start(p.watch);
    if (cta != 0) return;
    best = no_best();
    for (u32 i = threadIdx.x; i < p.size * p.row_ctas; i += blockDim.x) {
        u32 source = i / p.row_ctas;
        const Pair* packets = p.inbox[p.rank] + packet_index(p, epoch & 1, source, row, i % p.row_ctas);
        Best other = wait_best(packets, epoch, p.watch, site, source);
        if (is_better(other, best)) best = other;
    }
    best = best_of_cta(best, gathered);  // its barrier: all packets of the row are read
    if (threadIdx.x == 0) {
        // No id at all, which only a call that gave up can meet: the next kernel looks ids up in a table, so let it be one.
        p.ids[row] = best.order == 0 ? 0 : static_cast<long>(best.id);
        if (p.values != nullptr) p.values[row] = __uint_as_float(best.value);
        p.epochs[row] = epoch;
    }
}

extern "C" __global__ void __launch_bounds__(256) argmax_lamport(const __grid_constant__ ArgmaxParams p) {
    wait_for_prerequisites();
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x / p.row_ctas));
    exchange(p, highest_logit(share_of_cta(p)), epoch, SITE_ARGMAX);
}

extern "C" __global__ void __launch_bounds__(256) draw_lamport(const __grid_constant__ DrawParams n) {
    const ArgmaxParams& p = n.argmax;
    wait_for_prerequisites();
    u32 row = blockIdx.x / p.row_ctas;
    u32 epoch = next_call(ld_relaxed_sys(p.epochs + row));
    double temperature = n.temperatures[row];
    Best best;
    if (temperature > 0.0) {
        u64 position = n.positions == nullptr ? 0 : static_cast<u64>(n.positions[row]) % n.window;
        best = highest_draw(share_of_cta(p), temperature, n.starts[static_cast<u64>(row) * n.window + position]);
    } else {
        best = highest_logit(share_of_cta(p));
    }
    exchange(p, best, epoch, SITE_DRAW);
}
