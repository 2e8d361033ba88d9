// Programmatic dependent launch: a kernel that may start while the one before it in the stream still runs.
#pragma once

// Memory of the kernel before is complete and visible after `wait_for_prerequisites`; a kernel launched without the attribute passes
// both at once.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
