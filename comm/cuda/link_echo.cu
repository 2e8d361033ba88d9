// One packet to a peer and back, over and over in one kernel: what a hop costs when nothing but the link and the wait is in it.
// A yardstick for benches; no channel, no acknowledgement (the echo is one).
#include "wait.cuh"

#define SITE_ECHO 12

struct EchoParams {
    Pair* mine;    // own memory
    Pair* theirs;  // the peer's
    Watch watch;
    u32 first;     // number of the first round; numbers must not have been used in this memory, nor be 0
    u32 rounds;
    u32 is_leader;
    u32 peer;
};

extern "C" __global__ void __launch_bounds__(32) link_echo(const __grid_constant__ EchoParams p) {
    if (threadIdx.x != 0) return;
    Unit unit;
    unit.word = 0;
    for (u32 number = p.first; number != p.first + p.rounds; ++number) {
        if (p.is_leader) st_relaxed_sys_pair(p.theirs, pack(unit, number));
        unit = wait_packet(p.mine, number, p.watch, SITE_ECHO, p.peer);
        if (!p.is_leader) st_relaxed_sys_pair(p.theirs, pack(unit, number));
    }
}
