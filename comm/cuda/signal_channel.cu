// Put-with-signal from one rank to another: the producer writes a payload into a slot in the consumer's memory and rings the
// signal word of that slot; the consumer waits on its own word, uses the payload, and acknowledges into the producer's memory.
//
// Three slots in turn. Before it writes slot n % 3 the producer waits until message n - 3 is acknowledged: three slots alone are no
// back-pressure. Every wait is on a word in the waiter's own memory; only writes cross the link, so the same code runs over PCIe.
// Message numbers are counted in device memory and compared for equality.
#include "wait.cuh"

#define SITE_PUT 6
#define SITE_TAKE 7
#define NUM_SLOTS 3

struct PutParams {
    const u64* payload;    // [num_words]
    u64* slots;            // the consumer's memory: [3][slot_words]
    u32* signals;          // the consumer's memory: [3]
    const u32* acks;       // own memory: [3]
    u32* count;            // own memory: messages sent so far
    Watch watch;
    u32 num_words;
    u32 slot_words;
    u32 peer;
};

extern "C" __global__ void __launch_bounds__(1024) signal_put(const __grid_constant__ PutParams p) {
    wait_for_prerequisites();
    u32 number = *p.count + 1, slot = number % NUM_SLOTS;
    if (threadIdx.x == 0 && number > NUM_SLOTS)
        wait_equal_acquire(p.acks + slot, number - NUM_SLOTS, p.watch, SITE_PUT, number, p.peer);
    __syncthreads();
    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x) p.slots[slot * p.slot_words + i] = p.payload[i];
    __syncthreads();  // all payload stores before the signal, which the release makes known with it
    if (threadIdx.x == 0) {
        st_release_sys(p.signals + slot, number);
        *p.count = number;
    }
}

struct TakeParams {
    u64* out;              // [num_words]
    const u64* slots;      // own memory
    const u32* signals;    // own memory
    u32* acks;             // the producer's memory
    u32* count;            // own memory: messages taken so far
    Watch watch;
    u32 num_words;
    u32 slot_words;
    u32 peer;
};

extern "C" __global__ void __launch_bounds__(1024) signal_take(const __grid_constant__ TakeParams p) {
    wait_for_prerequisites();
    u32 number = *p.count + 1, slot = number % NUM_SLOTS;
    if (threadIdx.x == 0) wait_equal_acquire(p.signals + slot, number, p.watch, SITE_TAKE, number, p.peer);
    __syncthreads();
    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x)
        p.out[i] = *reinterpret_cast<volatile const u64*>(p.slots + slot * p.slot_words + i);
    __syncthreads();  // all reads before the acknowledgement
    if (threadIdx.x == 0) {
        st_release_sys(p.acks + slot, number);
        *p.count = number;
    }
}
