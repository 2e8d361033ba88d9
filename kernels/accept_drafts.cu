// The end of a speculative step: of a row's drafts those are taken that the model chose as well, and one token more.
//
// A row's chosen tokens are compared with its drafts in order. Tokens go to the host as in `advance_rows.cu`, a word each; words of
// tokens that are not taken carry the step's number as well, so that the host knows them from words that have not come yet.
#include "dependents.cuh"
#include "types.cuh"

constexpr int ID_BITS = 24;  // of a word: the id plus 1, or 0 for no token; the step's number plus 1 is above them
constexpr u64 NOT_TAKEN = (u64(1) << ID_BITS) - 1;

struct AcceptParams {
    const long* ids;      // [rows, num_drafts + 1] chosen
    const float* values;  // their logits: not finite where there was nothing to choose from
    const long* drafts;   // [rows, num_drafts]
    long* token_ids;      // [rows]
    long* positions;      // [rows]; negative for a row that is not there, and then left alone
    int* history;         // [rows, history_pitch]: the tokens of a row, by position
    long* step;           // the number of this step
    u64* ring;            // host memory: [slots][pitch]
    u32 rows, num_drafts, slots, pitch, history_pitch;
};

// One CTA: the step's number must not move before all threads have read it.
extern "C" __global__ void __launch_bounds__(256) accept_drafts(const __grid_constant__ AcceptParams p) {
    wait_for_prerequisites();
    u64 step = static_cast<u64>(*p.step);
    __syncthreads();
    if (threadIdx.x == 0) *p.step = static_cast<long>(step + 1);
    u64* words = p.ring + step % p.slots * p.pitch;
    const u32 width = p.num_drafts + 1;
    for (u32 row = threadIdx.x; row < p.rows; row += blockDim.x) {
        const long* ids = p.ids + row * width;
        const long position = p.positions[row];
        u32 taken = 0;
        for (bool is_going_on = true; taken < width; ++taken) {
            u64 id = NOT_TAKEN;
            if (is_going_on) {
                bool is_finite = (__float_as_uint(p.values[row * width + taken]) & 0x7f800000u) != 0x7f800000u;
                id = is_finite ? static_cast<u64>(ids[taken] + 1) : 0;
                is_going_on = is_finite && taken < p.num_drafts && ids[taken] == p.drafts[row * p.num_drafts + taken];
                long at = position + 1 + taken;
                if (position >= 0 && at < p.history_pitch) p.history[row * static_cast<long>(p.history_pitch) + at] = static_cast<int>(ids[taken]);
                if (!is_going_on) {
                    p.token_ids[row] = ids[taken];
                    if (position >= 0) p.positions[row] = at;
                }
            }
            u64 word = (step + 1) << ID_BITS | id;
            asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(words + row * width + taken), "l"(word) : "memory");
        }
    }
}
