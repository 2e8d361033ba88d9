#!/bin/sh
# Every collective and the signal channel at 2 ranks under compute-sanitizer's memcheck, from the repository's root.
# Exit code 0: no memory error, and both ranks found all sums right. PYTHON and COMPUTE_SANITIZER name the programs.
set -u
python=${PYTHON:-python3}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
if ! command -v "$sanitizer" >/dev/null; then
    echo "$sanitizer is not here; it comes with the CUDA toolkit: name it with COMPUTE_SANITIZER=" >&2
    exit 2
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# API errors are not reported: the driver answers look-ups of entry points that it lacks with errors, which is how libraries ask.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 \
    "$sanitizer" --tool memcheck --report-api-errors no --target-processes all --error-exitcode 9 \
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.ranks.memcheck_ranks >"$log" 2>&1
status=$?
cat "$log"
fail() {
    echo "memcheck: $1" >&2
    exit 1
}
[ "$status" -eq 0 ] || fail "the run ended with $status"
[ "$(grep -c 'memcheck: rank [01] has checked all sums' "$log")" -eq 2 ] || fail "not both ranks came to their end"
grep -q 'ERROR SUMMARY: ' "$log" || fail "the sanitizer gave no summary"
! grep 'ERROR SUMMARY: ' "$log" | grep -qv 'ERROR SUMMARY: 0 errors' || fail "memory errors, see above"
echo "memcheck: no memory error"
