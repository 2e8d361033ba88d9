// The kernel's own source, run by one thread after the other: they share nothing.
#include "cluster.cuh"
#include "decode_write.cu"

extern "C" u64 params_bytes() { return sizeof(DecodeWriteParams); }

extern "C" void run_decode_write(const DecodeWriteParams* params, u32 ctas, u32 threads) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) decode_write(*params);
}
