// The kernel's own source, run by threads of the host; built in a folder where both lie side by side.
#include "cluster.cuh"
#include "filter_logits.cu"

extern "C" u64 shared_bytes() { return sizeof(RadixMemory); }
extern "C" u64 params_bytes() { return sizeof(FilterParams); }

extern "C" void run_filter_logits(const FilterParams* params, u32 rows, u32 ctas, u32 threads) {
    run_clusters(rows, ctas, threads, sizeof(RadixMemory), [=] { filter_logits(*params); });
}
