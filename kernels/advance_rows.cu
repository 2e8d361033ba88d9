// The end of a decode step: the chosen tokens become the next step's input, one position on, and go to the host.
//
// The host looks for them in memory of its own (`ring`, mapped). A word carries the token and the number of its step, and 8 bytes
// arrive whole, so whoever sees the number sees the token: no flag, no order between words, no fence.
#include "dependents.cuh"
#include "types.cuh"

constexpr int ID_BITS = 24;  // of a word: the id plus 1, or 0 for no token; the step's number plus 1 is above them

struct AdvanceParams {
    const long* ids;       // [rows] chosen
    const float* values;   // [rows] their logits: not finite where there was nothing to choose from
    long* token_ids;       // [rows]
    long* positions;       // [rows]; negative for a row that is not there, and then left alone
    long* step;            // the number of this step
    u64* ring;             // host memory: [slots][pitch]
    u32 rows, slots, pitch;
};

// One CTA: the step's number must not move before all threads have read it.
extern "C" __global__ void __launch_bounds__(256) advance_rows(const __grid_constant__ AdvanceParams p) {
    wait_for_prerequisites();
    u64 step = static_cast<u64>(*p.step);
    __syncthreads();
    if (threadIdx.x == 0) *p.step = static_cast<long>(step + 1);
    u64* words = p.ring + step % p.slots * p.pitch;
    for (u32 row = threadIdx.x; row < p.rows; row += blockDim.x) {
        long id = p.ids[row], position = p.positions[row];
        bool is_finite = (__float_as_uint(p.values[row]) & 0x7f800000u) != 0x7f800000u;
        p.token_ids[row] = id;
        if (position >= 0) p.positions[row] = position + 1;
        u64 word = (step + 1) << ID_BITS | (is_finite ? static_cast<u64>(id + 1) : 0);
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(words + row), "l"(word) : "memory");
    }
}
