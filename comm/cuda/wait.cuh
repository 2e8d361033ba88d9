// Everything that waits for another GPU, and the loads and stores that another GPU sees.
//
// A wait never lasts for ever. After `limit_ns` it sets the abort word, writes a record to host-mapped memory, and gives up; every
// later wait of this rank sees the word and gives up at once. The values a kernel computes after that are meaningless: the host
// reads the record before it believes any result.
//
// The abort word is in the GPU's own memory. In host memory it was read by tens of thousands of threads over PCIe as soon as a peer
// was late by half a millisecond, and the flood kept both ranks late for good: 326 us a call where 3 were needed.
#pragma once
#include "dependents.cuh"
#include "types.cuh"

#define MAX_RANKS 8

// In host-mapped memory, one a rank, written once. `aborted` is written last.
struct WaitRecord {
    u32 aborted;
    u32 site;      // which kernel waited
    u32 epoch;     // its call number
    u32 peer;      // for whom
    u32 seen;      // what was there
    u32 expected;  // what should have been
};

struct Watch {
    WaitRecord* record;
    u32* aborted;  // own device memory
    u64 limit_ns;
    u32 is_shared;  // other ranks have this GPU as well
};

// Not where ranks share the GPU. What is behind may be a library's and start early as well, and hold the room that it takes while it
// waits for this kernel, which waits for a peer, whose kernel then finds none. (Found by what stood still, and no longer does.)
__device__ __forceinline__ void let_dependents_start(const Watch& watch) {
    if (!watch.is_shared) let_dependents_start();
}

__device__ __forceinline__ u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ u32 ld_relaxed_sys(const u32* address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ u32 ld_acquire_sys(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_relaxed_sys(u32* address, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Before it: everything this thread did or saw. Then relaxed stores publish it.
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void st_release_sys(u32* address, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Two 8-byte words, each arriving whole; their order among each other is not promised.
struct __align__(16) Pair {
    u64 word[2];
};

__device__ __forceinline__ Pair ld_relaxed_sys_pair(const Pair* address) {
    Pair pair;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.word[0]), "=l"(pair.word[1])
                 : "l"(address)
                 : "memory");
    return pair;
}

__device__ __forceinline__ void st_relaxed_sys_pair(Pair* address, Pair pair) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(pair.word[0]), "l"(pair.word[1])
                 : "memory");
}

// The number of the call after number `count`. After the last one comes 4, not 0: a new inbox holds zeros, which must be no call's
// number, and 2^32 - 1 and 3 leave the same rest by 2 and by 3, so that two or three slots stay in turn.
__device__ __forceinline__ u32 next_call(u32 count) { return count == 0xffffffffu ? 4 : count + 1; }

// A packet: 8 bytes of data, each half together with the number of the call it belongs to in one 8-byte word. Whoever sees the
// number sees the half: arrival is the data, no fence and no second flag.
__device__ __forceinline__ Pair pack(Unit unit, u32 epoch) {
    Pair pair;
    pair.word[0] = static_cast<u64>(epoch) << 32 | unit.half[0];
    pair.word[1] = static_cast<u64>(epoch) << 32 | unit.half[1];
    return pair;
}

__device__ __forceinline__ bool carries(Pair pair, u32 epoch) {
    return static_cast<u32>(pair.word[0] >> 32) == epoch && static_cast<u32>(pair.word[1] >> 32) == epoch;
}

__device__ __forceinline__ Unit unpack(Pair pair) {
    Unit unit;
    unit.half[0] = static_cast<u32>(pair.word[0]);
    unit.half[1] = static_cast<u32>(pair.word[1]);
    return unit;
}

// The slow path of every wait, kept out of line: called every few hundred tries. True when the wait must end.
__device__ __noinline__ bool must_give_up(Watch watch, u64 started, u32 site, u32 epoch, u32 peer, u32 seen, u32 expected) {
    if (ld_relaxed_sys(watch.aborted) != 0) return true;
    if (now_ns() - started < watch.limit_ns) return false;
    if (atomicExch(watch.aborted, 1) != 0) return true;  // another thread writes the record
    watch.record->site = site;
    watch.record->epoch = epoch;
    watch.record->peer = peer;
    watch.record->seen = seen;
    watch.record->expected = expected;
    st_release_sys(&watch.record->aborted, 1);  // pairs with the host's read: the record is whole once this is set
    return true;
}

constexpr u32 TRIES_PER_LOOK = 512;

// Wait until the packet at `address` (in this rank's own memory) is that of call `epoch`.
__device__ __forceinline__ Unit wait_packet(const Pair* address, u32 epoch, Watch watch, u32 site, u32 peer) {
    u64 started = 0;
    for (u32 tries = 1;; ++tries) {
        Pair pair = ld_relaxed_sys_pair(address);
        if (carries(pair, epoch)) return unpack(pair);
        if (tries % TRIES_PER_LOOK == 0) {
            if (started == 0) started = now_ns();
            if (must_give_up(watch, started, site, epoch, peer, static_cast<u32>(pair.word[0] >> 32), epoch)) return unpack(pair);
        }
    }
}

// Wait until the word at `address` (own memory) equals `expected`; what its writer stored before it is visible afterwards.
__device__ __forceinline__ void wait_equal_acquire(const u32* address, u32 expected, Watch watch, u32 site, u32 epoch, u32 peer) {
    u64 started = 0;
    for (u32 tries = 1;; ++tries) {
        u32 seen = ld_acquire_sys(address);
        if (seen == expected) return;
        if (tries % TRIES_PER_LOOK == 0) {
            if (started == 0) started = now_ns();
            if (must_give_up(watch, started, site, epoch, peer, seen, expected)) return;
        }
    }
}
