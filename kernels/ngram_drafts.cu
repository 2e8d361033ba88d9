// Drafts from the row itself: what followed the last time the row said what it says now (`ngram_drafts.py`). A CTA a row, which
// looks at all its positions.
#include "dependents.cuh"
#include "types.cuh"

constexpr int LONGEST = 4;    // tokens of context that are compared
constexpr int END_BITS = 24;  // of a find: where it ends; its length is above

struct NgramParams {
    const int* history;     // [rows, history_pitch]: the tokens of a row, by position
    const long* positions;  // [rows]: of the row's last token; negative for a row that is not there
    long* drafts;           // [rows, num_drafts]
    u32 num_drafts, history_pitch;
};

extern "C" __global__ void __launch_bounds__(512) ngram_drafts(const __grid_constant__ NgramParams p) {
    __shared__ u32 finds[16];
    wait_for_prerequisites();
    let_dependents_start();
    const long position = p.positions[blockIdx.x];
    const int* history = p.history + blockIdx.x * static_cast<long>(p.history_pitch);
    long* drafts = p.drafts + blockIdx.x * static_cast<long>(p.num_drafts);
    const int last = static_cast<int>(position);
    int suffix[LONGEST];
#pragma unroll
    for (int i = 0; i < LONGEST; ++i) suffix[i] = last >= i ? history[last - i] : -1;
    // The longest match, and of those the latest, is the largest number.
    u32 best = 0;
    for (int end = 1 + threadIdx.x; end <= last; end += blockDim.x) {
        u32 length = 0;
        bool is_equal = true;
#pragma unroll
        for (int i = 0; i < LONGEST; ++i) {
            is_equal = is_equal && end - 1 - i >= 0 && history[max(end - 1 - i, 0)] == suffix[i];
            length += is_equal;
        }
        if (length > 0) best = max(best, length << END_BITS | static_cast<u32>(end));
    }
    best = __reduce_max_sync(0xffffffffu, best);
    if (threadIdx.x % 32 == 0) finds[threadIdx.x / 32] = best;
    __syncthreads();
    for (u32 i = 0; i < blockDim.x / 32; ++i) best = max(best, finds[i]);
    const int start = static_cast<int>(best & ((1u << END_BITS) - 1)), period = last + 1 - start;
    for (u32 i = threadIdx.x; i < p.num_drafts; i += blockDim.x) {
        long draft = 0;
        if (last >= 0) draft = best == 0 ? history[last] : history[start + static_cast<int>(i) % period];
        drafts[i] = draft;
    }
}
