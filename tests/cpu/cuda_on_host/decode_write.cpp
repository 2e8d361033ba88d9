// The kernel's own source. Threads share nothing but what lanes of a warp exchange.
#include <bit>
#include <map>
#include <mutex>

#include "cluster.cuh"

inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

struct Warp {
    std::mutex mutex;
    std::map<u32, std::barrier<>> meetings;  // by who comes
    float values[32];
};
inline Warp warps[32];

// All `lanes` leave their values, then each takes one.
inline float __shfl_xor_sync(u32 lanes, float value, u32 far) {
    Warp& warp = warps[threadIdx.x / 32];
    std::barrier<>* meeting;
    {
        std::lock_guard lock(warp.mutex);
        meeting = &warp.meetings.try_emplace(lanes, std::popcount(lanes)).first->second;
    }
    warp.values[threadIdx.x % 32] = value;
    meeting->arrive_and_wait();
    const float taken = warp.values[threadIdx.x % 32 ^ far];
    meeting->arrive_and_wait();
    return taken;
}

#include "decode_write.cu"

extern "C" u64 params_bytes() { return sizeof(DecodeWriteParams); }

extern "C" void run_decode_write(const DecodeWriteParams* params, u32 ctas, u32 threads) {
    run_clusters(ctas, 1, threads, 0, [=] { decode_write(*params); });
}
