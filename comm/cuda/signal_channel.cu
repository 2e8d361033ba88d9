// Put-with-signal from one rank to another: the producer writes a payload into a slot in the consumer's memory and makes it known;
// the consumer waits in its own memory, uses the payload, and acknowledges into the producer's memory.
//
// Three slots in turn. Before it writes a slot the producer waits until the message that had it last is acknowledged: three slots
// alone are no back-pressure. Only writes cross the link: no loads, no atomics. Messages are numbered from 1 in device memory, so
// that a replayed graph goes on counting; numbers are compared for equality and skip 0, which is what new memory holds.
//
// Two shapes. *packet*: each 8-byte word carries 4 bytes of payload and the message's number, the consumer waits on the packets
// themselves: one trip over the link, no fence; twice the bytes. *signal*: plain payload, a release, then the slot's signal word.
//
// Two ways to wait for a signal. In the kernel: the signal is the message's number. By a stream memory operation ahead of the kernel
// (`fixed_slot`): its address and value are constants of a captured graph, so the host names the slot, the signal is 1, and the
// consumer's kernel puts it back to 0. Nobody can overtake that reset: the next 1 into the same slot is sent after the producer saw
// the acknowledgement of this message, and the acknowledgement is released after the reset.
#include "wait.cuh"

#define SITE_PUT 6
#define SITE_TAKE 7
#define NUM_SLOTS 3

// What an end of a channel has counted, in its own memory; all zeros at first.
struct State {
    u32 number;           // of its last message
    u32 slot;             // that is due next
    u32 used[NUM_SLOTS];  // number of the last message in each slot
};

struct End {
    u64* slots;      // the consumer's memory: [3][slot_words] of 8 bytes (signal) or of 16 (packet)
    u32* signals;    // the consumer's memory: [3]
    u32* acks;       // the producer's memory: [3]
    State* state;    // own memory
    u32 slot_words;  // 8-byte words of payload that a slot holds
    u32 peer;
    u32 fixed_slot;  // slot of this message, chosen by the host for stream waits; NUM_SLOTS: the one that is due
};

struct MoveParams {
    u64* data;      // [num_words] put: the payload, only read; take: where it goes
    End end;
    Watch watch;
    u32 num_words;
};

struct RelayParams {
    u64* data;      // [num_words] where the payload goes
    End source;     // this rank consumes
    End onward;     // this rank produces
    Watch watch;
    u32 num_words;
};

// One message of one end.
struct Turn {
    u32 number;
    u32 slot;
    u32 before;  // number of the message that had the slot last
};

__device__ __forceinline__ u32 choose(const u32* three, u32 slot) {
    return slot == 0 ? three[0] : slot == 1 ? three[1] : three[2];
}

// Loaded past L1: the kernel before, which may have run on another SM while this one was resident, wrote it.
__device__ __forceinline__ void load_three(const u32* source, u32* three) {
#pragma unroll
    for (int i = 0; i < NUM_SLOTS; ++i) three[i] = ld_relaxed_sys(source + i);
}

__device__ __forceinline__ Turn next_turn(const End& end) {
    u32 last = ld_relaxed_sys(&end.state->number), due = ld_relaxed_sys(&end.state->slot), used[NUM_SLOTS];
    load_three(end.state->used, used);
    Turn turn;
    turn.number = next_call(last);
    turn.slot = end.fixed_slot < NUM_SLOTS ? end.fixed_slot : due;
    turn.before = choose(used, turn.slot);
    return turn;
}

// By one thread, after all have read the state.
__device__ __forceinline__ void end_turn(const End& end, Turn turn) {
    end.state->number = turn.number;
    end.state->slot = turn.slot + 1 == NUM_SLOTS ? 0 : turn.slot + 1;
    end.state->used[turn.slot] = turn.number;
}

__device__ __forceinline__ void wait_until_free(const End& end, Turn turn, Watch watch) {
    wait_equal_acquire(end.acks + turn.slot, turn.before, watch, SITE_PUT, turn.number, end.peer);
}

__device__ __forceinline__ u32 signal_value(const End& end, Turn turn) { return end.fixed_slot < NUM_SLOTS ? 1 : turn.number; }

// The threads of the block meet, and what they did to memory is ordered. One warp is the common case.
__device__ __forceinline__ void meet() {
    if (blockDim.x == 32) __syncwarp();
    else __syncthreads();
}

__device__ __forceinline__ Pair* packets_of(const End& end, Turn turn) {
    return reinterpret_cast<Pair*>(end.slots) + turn.slot * end.slot_words;
}

// Every kernel lets the next one start as soon as the one before is complete: its launch hides behind the wait here, and it still
// waits for this kernel's end before it touches memory.

extern "C" __global__ void __launch_bounds__(1024) packet_put(const __grid_constant__ MoveParams p) {
    wait_for_prerequisites();
    let_dependents_start(p.watch);
    // Acknowledgements, payload and state in one go: one trip to L2 instead of three.
    u32 acks[NUM_SLOTS];
    load_three(p.end.acks, acks);
    Unit first;
    first.word = threadIdx.x < p.num_words ? p.data[threadIdx.x] : 0;
    Turn turn = next_turn(p.end);
    // A relaxed look is enough: packets are sent only after it, and the consumer, who checks the number in every word it takes,
    // acknowledged after it had them all.
    if (choose(acks, turn.slot) != turn.before) wait_until_free(p.end, turn, p.watch);
    Pair* packets = packets_of(p.end, turn);
    if (threadIdx.x < p.num_words) st_relaxed_sys_pair(packets + threadIdx.x, pack(first, turn.number));
    for (u32 i = threadIdx.x + blockDim.x; i < p.num_words; i += blockDim.x) {
        Unit unit;
        unit.word = p.data[i];
        st_relaxed_sys_pair(packets + i, pack(unit, turn.number));
    }
    meet();  // all have read the state
    if (threadIdx.x == 0) end_turn(p.end, turn);
}

extern "C" __global__ void __launch_bounds__(1024) packet_take(const __grid_constant__ MoveParams p) {
    wait_for_prerequisites();
    let_dependents_start(p.watch);
    Turn turn = next_turn(p.end);
    const Pair* packets = packets_of(p.end, turn);
    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x)
        p.data[i] = wait_packet(packets + i, turn.number, p.watch, SITE_TAKE, p.end.peer).word;
    meet();  // all packets are in registers or in `data`
    if (threadIdx.x == 0) {
        // No fence: each packet was seen to be this message's, so no load of the slot is still to come.
        st_relaxed_sys(p.end.acks + turn.slot, turn.number);
        end_turn(p.end, turn);
    }
}

// Take and put of the same payload in one kernel: each packet goes on as it arrives.
extern "C" __global__ void __launch_bounds__(1024) packet_relay(const __grid_constant__ RelayParams p) {
    wait_for_prerequisites();
    let_dependents_start(p.watch);
    u32 acks[NUM_SLOTS];
    load_three(p.onward.acks, acks);
    Turn in = next_turn(p.source), out = next_turn(p.onward);
    if (choose(acks, out.slot) != out.before) wait_until_free(p.onward, out, p.watch);
    const Pair* arriving = packets_of(p.source, in);
    Pair* leaving = packets_of(p.onward, out);
    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x) {
        Unit unit = wait_packet(arriving + i, in.number, p.watch, SITE_TAKE, p.source.peer);
        st_relaxed_sys_pair(leaving + i, pack(unit, out.number));
        p.data[i] = unit.word;
    }
    meet();
    if (threadIdx.x == 0) {
        st_relaxed_sys(p.source.acks + in.slot, in.number);
        end_turn(p.source, in);
        end_turn(p.onward, out);
    }
}

extern "C" __global__ void __launch_bounds__(1024) signal_put(const __grid_constant__ MoveParams p) {
    wait_for_prerequisites();
    let_dependents_start(p.watch);
    Turn turn = next_turn(p.end);
    wait_until_free(p.end, turn, p.watch);  // every thread for itself: its stores come after it
    u64* slot = p.end.slots + turn.slot * p.end.slot_words;
    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x) slot[i] = p.data[i];
    meet();  // all payload stores before the signal, which the release makes known with it
    if (threadIdx.x == 0) {
        st_release_sys(p.end.signals + turn.slot, signal_value(p.end, turn));
        end_turn(p.end, turn);
    }
}

// Wait for the signal in the kernel, unless a stream memory operation before it did. Every thread for itself: its loads come after.
__device__ __forceinline__ void wait_for_signal(const End& end, Turn turn, Watch watch) {
    if (end.fixed_slot < NUM_SLOTS) return;
    wait_equal_acquire(end.signals + turn.slot, turn.number, watch, SITE_TAKE, turn.number, end.peer);
}

// By one thread, before it acknowledges.
__device__ __forceinline__ void reset_signal(const End& end) {
    if (end.fixed_slot < NUM_SLOTS) st_relaxed_sys(end.signals + end.fixed_slot, 0);
}

extern "C" __global__ void __launch_bounds__(1024) signal_take(const __grid_constant__ MoveParams p) {
    wait_for_prerequisites();
    let_dependents_start(p.watch);
    Turn turn = next_turn(p.end);
    wait_for_signal(p.end, turn, p.watch);
    const volatile u64* slot = p.end.slots + turn.slot * p.end.slot_words;
    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x) p.data[i] = slot[i];
    meet();  // all reads before the acknowledgement
    if (threadIdx.x == 0) {
        reset_signal(p.end);
        st_release_sys(p.end.acks + turn.slot, turn.number);
        end_turn(p.end, turn);
    }
}

extern "C" __global__ void __launch_bounds__(1024) signal_relay(const __grid_constant__ RelayParams p) {
    wait_for_prerequisites();
    let_dependents_start(p.watch);
    Turn in = next_turn(p.source), out = next_turn(p.onward);
    wait_until_free(p.onward, out, p.watch);
    wait_for_signal(p.source, in, p.watch);
    const volatile u64* arriving = p.source.slots + in.slot * p.source.slot_words;
    u64* leaving = p.onward.slots + out.slot * p.onward.slot_words;
    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x) {
        u64 word = arriving[i];
        leaving[i] = word;
        p.data[i] = word;
    }
    meet();
    if (threadIdx.x == 0) {
        reset_signal(p.source);
        fence_sys();  // the reset and all reads before the acknowledgement, all payload stores before the signal
        st_relaxed_sys(p.onward.signals + out.slot, signal_value(p.onward, out));
        st_relaxed_sys(p.source.acks + in.slot, in.number);
        end_turn(p.source, in);
        end_turn(p.onward, out);
    }
}
