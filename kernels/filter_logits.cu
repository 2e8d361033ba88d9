// Penalties, bias, forbidden ids, top-k, top-p and min-p on whole rows of fp32 logits, in place: what the draw that follows may take
// keeps its logit less the row's highest, all else becomes -inf. A greedy row is not filtered. The plain version, and the numbers,
// are in `kernels/filter_logits.py`.
//
// A cluster a row, a stretch of ids a CTA. Nothing is sorted: a cut of the descending order (ties by rising id) is a key, and
// `kernels/cuda/radix_cut.cuh` finds the key at which a sum of weights reaches a limit. The weights are ones for top-k and for ties, and
// probabilities in fixed point for top-p: integers, so that the sum has no order and every GPU cuts at the same id.
#include "radix_cut.cuh"

constexpr u32 MAX_BIASES = 300, MAX_FORBIDDEN = 64;
constexpr double ONE = 35184372088832.0;  // 2^45: the sum of 2^18 probabilities of at most 1 stays below 2^63

struct RowRules {
    long top_k;      // 0: off
    long free_from;  // first position at which forbidden ids are free
    long seen_slot;
    double top_p;    // 1: off
    double min_p;    // 0: off
    double repetition;
    double presence;
    double frequency;
};

struct FilterParams {
    float* logits;               // [rows, pitch], columns [0, num_ids) count
    const long* token_ids;       // [rows] the token just computed: seen from now on
    const long* positions;       // [rows] where it stands; negative: a row that is not there
    const double* temperatures;  // [rows] 0: greedy
    const RowRules* rules;       // [rows]
    const long* bias_ids;        // [rows, MAX_BIASES] no id twice; -1: none
    const float* biases;         // [rows, MAX_BIASES]
    const long* forbidden_ids;   // [rows, MAX_FORBIDDEN]; -1: none
    u32* seen;                   // [slots, seen_pitch] 2 * times in the output + whether in the prompt
    long pitch;
    long seen_pitch;
    u32 num_ids;
};

// The stretch of ids of one CTA. A thread meets the same ids in every pass, so it needs no barrier for what it wrote itself.
struct Stretch {
    float* logits;
    u32 begin;
    u32 end;

    __device__ __forceinline__ bool holds(long id) const { return id >= begin && id < end; }
};

__device__ __forceinline__ void penalise(const FilterParams& p, const RowRules& rules, const Stretch& stretch, u32 row) {
    bool has_repetition = rules.repetition != 1.0, has_output = rules.presence != 0.0 || rules.frequency != 0.0;
    if (!has_repetition && !has_output) return;
    u32* seen = p.seen + rules.seen_slot * p.seen_pitch;
    if (threadIdx.x == 0 && stretch.holds(p.token_ids[row])) seen[p.token_ids[row]] += 2;
    __syncthreads();  // the count is there before it is read
    float repetition = static_cast<float>(rules.repetition), presence = static_cast<float>(rules.presence);
    float frequency = static_cast<float>(rules.frequency);
    for (u32 id = stretch.begin + threadIdx.x; id < stretch.end; id += blockDim.x) {
        u32 word = seen[id];
        if (word == 0) continue;
        float value = stretch.logits[id];
        // Rounded one by one: a fused multiply-add would say something else than torch.
        if (has_repetition) value = value < 0.0f ? __fmul_rn(value, repetition) : __fdiv_rn(value, repetition);
        if (has_output && word > 1) {
            value = __fsub_rn(value, __fadd_rn(presence, __fmul_rn(frequency, static_cast<float>(word >> 1))));
        }
        stretch.logits[id] = value;
    }
}

__device__ __forceinline__ void add_biases(const FilterParams& p, const Stretch& stretch, u32 row) {
    const long* ids = p.bias_ids + static_cast<long>(row) * MAX_BIASES;
    const float* biases = p.biases + static_cast<long>(row) * MAX_BIASES;
    __syncthreads();  // the penalties are there
    for (u32 i = threadIdx.x; i < MAX_BIASES; i += blockDim.x)
        if (stretch.holds(ids[i])) stretch.logits[ids[i]] = __fadd_rn(stretch.logits[ids[i]], biases[i]);
    __syncthreads();
}

__device__ __forceinline__ void forbid(const FilterParams& p, const Stretch& stretch, u32 row) {
    const long* ids = p.forbidden_ids + static_cast<long>(row) * MAX_FORBIDDEN;
    for (u32 i = threadIdx.x; i < MAX_FORBIDDEN; i += blockDim.x)
        if (stretch.holds(ids[i])) stretch.logits[ids[i]] = float_of(ORDER_OF_NOTHING);
    __syncthreads();
}

// What is left of a row: the ids whose logit is above `order`, and those at `order` up to `last_id`.
struct Cut {
    u32 order;
    u32 last_id;

    __device__ __forceinline__ bool keeps(u32 other, u32 id) const { return other > order || (other == order && id <= last_id); }
};

// Shortens `cut` to the ids before which the weights of those ahead of them sum up to less than `limit_of(sum of all)`.
template <class WeightOf, class LimitOf>
__device__ __forceinline__ Cut shorten(const Stretch& stretch, const Cut& cut, WeightOf weight_of, LimitOf limit_of) {
    auto key_of = [&](u32 id) {
        u32 order = order_of(stretch.logits[id]);
        return cut.keeps(order, id) ? order : 0;
    };
    Found found = find_key(stretch.begin, stretch.end, key_of, weight_of, limit_of);
    u64 weight = weight_of(found.key);
    u64 num_kept = (found.limit - found.above + weight - 1) / weight;  // of the ids at this logit
    if (found.sum <= num_kept * weight) return {found.key, found.key == cut.order ? cut.last_id : ~0u};
    auto tie_of = [&](u32 id) { return order_of(stretch.logits[id]) == found.key && cut.keeps(found.key, id) ? ~id : 0; };
    auto one = [](u32) { return u64(1); };
    return {found.key, ~find_key(stretch.begin, stretch.end, tie_of, one, [&](u64) { return num_kept; }).key};
}

__device__ __forceinline__ void filter(const Stretch& stretch, const RowRules& rules, double temperature, u32 num_ids) {
    u32 highest_order = highest_key(stretch.begin, stretch.end, [&](u32 id) { return order_of(stretch.logits[id]); });
    // Not a finite number: there is nothing to choose from, which the draw will find as well.
    if (highest_order <= ORDER_OF_NOTHING || highest_order >= ORDER_OF_INFINITY) return;
    float highest = float_of(highest_order);
    auto probability_of = [&](float value) { return exp(static_cast<double>(__fsub_rn(value, highest)) / temperature); };
    Cut cut{0, ~0u};
    if (rules.top_k > 0 && rules.top_k < num_ids) {
        u64 top_k = static_cast<u64>(rules.top_k);
        cut = shorten(stretch, cut, [](u32) { return u64(1); }, [&](u64) { return top_k; });
    }
    if (rules.top_p < 1.0) {
        auto limit_of = [&](u64 sum) {
            u64 limit = static_cast<u64>(ceil(rules.top_p * static_cast<double>(sum)));
            return limit == 0 ? u64(1) : limit > sum ? sum : limit;
        };
        auto weight_of = [&](u32 order) { return static_cast<u64>(rint(ONE * probability_of(float_of(order)))); };
        cut = shorten(stretch, cut, weight_of, limit_of);
    }
    for (u32 id = stretch.begin + threadIdx.x; id < stretch.end; id += blockDim.x) {
        float value = stretch.logits[id];
        bool is_kept = cut.keeps(order_of(value), id);
        if (is_kept && rules.min_p > 0.0) is_kept = value == highest || probability_of(value) >= rules.min_p;
        stretch.logits[id] = is_kept ? __fsub_rn(value, highest) : float_of(ORDER_OF_NOTHING);
    }
}

extern "C" __global__ void __launch_bounds__(512) filter_logits(const __grid_constant__ FilterParams p) {
    wait_for_prerequisites();
    u32 row = blockIdx.x / cluster_size();
    if (p.positions[row] >= 0) {
        const RowRules& rules = p.rules[row];
        double temperature = p.temperatures[row];
        u32 share = (p.num_ids + cluster_size() - 1) / cluster_size(), begin = min(cluster_rank() * share, p.num_ids);
        Stretch stretch{p.logits + row * p.pitch, begin, min(begin + share, p.num_ids)};
        penalise(p, rules, stretch, row);
        add_biases(p, stretch, row);
        if (p.positions[row] < rules.free_from) forbid(p, stretch, row);
        if (temperature > 0.0) filter(stretch, rules, temperature, p.num_ids);
    }
    let_dependents_start();
    cluster_arrive();  // no CTA leaves while another reads its shared memory
    cluster_wait();
}
