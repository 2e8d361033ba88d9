#!/bin/sh
# What only a node of 4 or 8 GPUs can tell, in one go of ten minutes: sh launch/eight_gpus.sh [--gpus N] [--reduced] [--step-limit S]
# The tests of ranks, then the benches at 4 and 8 ranks, one a GPU; each appends its records to results/, and the page is made at
# the end. A step is a target of the Makefile with a limit in seconds, cut to what is left of the ten minutes. One that fails does
# not keep the others from running: the last lines say how each ended, and the exit code is 1 if any failed.
#
# --gpus N        use the first N of the GPUs that are there, instead of all
# --reduced       small models and numbers, 4 and 8 ranks on however few GPUs, under MPS where they share them: a rehearsal
# --step-limit S  no step may take longer than S seconds
# PYTHON=         the Python that has torch; python3 by default
set -u
cd "$(dirname "$0")/.." || exit 1

TOTAL_S=590 # of the whole run; a step that does not end at its limit has ten more
LAST_S=60   # of them kept for the page
usage() {
    echo "$1; usage: sh launch/eight_gpus.sh [--gpus N] [--reduced] [--step-limit S]" >&2
    exit 2
}
check_number() { # OPTION VALUE: a whole number above zero
    case $2 in '' | *[!0-9]* | 0*) usage "$1 takes a number above zero, not '$2'" ;; esac
}

gpus='' reduced='' step_limit=$TOTAL_S
while [ $# -gt 0 ]; do
    case $1 in
    --gpus) check_number "$1" "${2-}" && gpus=$2 && shift ;;
    --reduced) reduced=1 ;;
    --step-limit) check_number "$1" "${2-}" && step_limit=$2 && shift ;;
    *) usage "no such option: $1" ;;
    esac
    shift
done
python=${PYTHON:-python3}
there=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
gpus=${gpus:-$there}
if [ "$gpus" -gt "$there" ] || [ "$there" -eq 0 ]; then usage "there are $there GPUs"; fi
if [ "$gpus" -lt 4 ] && [ -z "$reduced" ]; then usage "4 or 8 GPUs are needed, or --reduced, not $gpus"; fi
if [ "$gpus" -lt "$there" ]; then
    CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((gpus - 1)))
    export CUDA_VISIBLE_DEVICES
fi

if [ -n "$reduced" ]; then
    model=qwen2.5-0.5b calls=20000 requests=100 degrees='4 8'
else
    model=qwen2.5-72b calls=1000000 requests=1000 degrees=4
    if [ "$gpus" -ge 8 ]; then degrees='4 8'; fi
fi
most=${degrees##* }

started=$(date +%s) summary='' failed=0 child='' stopped=''
stop() {
    stopped=1
    if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; fi
}
trap stop INT TERM HUP

note() { # SECONDS OUTCOME STEP
    summary="$summary$(printf '%4d s  %-24s  %s' "$1" "$2" "$3")
"
}

# step LIMIT RANKS TARGET [VARIABLE]...: under an MPS of its own where RANKS share GPUs; `timeout` ends all that the step started.
step() {
    limit=$1 ranks=$2
    shift 2
    name="make $*"
    set -- make --no-print-directory "$@" "PYTHON=$python"
    if [ "$ranks" -gt "$gpus" ]; then set -- sh launch/with_mps.sh "$@"; fi
    left=$((started + TOTAL_S - LAST_S - $(date +%s)))
    if [ "$ranks" -eq 0 ]; then left=$((left + LAST_S)); fi
    for most_s in "$step_limit" "$left"; do
        if [ "$limit" -gt "$most_s" ]; then limit=$most_s; fi
    done
    if [ -n "$stopped" ] || [ "$limit" -le 0 ]; then
        failed=1
        note 0 "not run" "$name"
        return
    fi
    echo
    echo "== $name, at most $limit s"
    began=$(date +%s)
    timeout -k 10 "$limit" "$@" &
    child=$!
    if [ -n "$stopped" ]; then stop; fi # it came before we knew whom to tell
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the step
        wait "$child"
        code=$?
    done
    child=
    took=$(($(date +%s) - began))
    case $code in
    0) outcome=done ;;
    124 | 137) outcome="exit code $code, timed out" ;;
    *) outcome="exit code $code" ;;
    esac
    if [ "$code" -ne 0 ]; then failed=1; fi
    note "$took" "$outcome" "$name"
}

echo "$gpus GPUs: ranks of $degrees, $model"
step 180 "$most" test-ranks "RANKS=$most"
for tp in $degrees; do step 60 "$tp" bench-comm "TP=$tp"; done
step 90 "$most" bench-soak "TP=$most" "CALLS=$calls" MPS=
for tp in $degrees; do
    for dtype in bf16 fp8; do step 60 "$tp" bench-decode "MODEL=$model" "TP=$tp" "DTYPE=$dtype"; done
done
for prompt in 512 2048; do step 60 "$most" bench-prefill "MODEL=$model" "TP=$most" "PROMPT=$prompt"; done
step 90 "$most" bench-drift "TP=$most" "REQUESTS=$requests"
step 75 "$most" bench-speculate "MODEL=$model" "TP=$most" TRIALS=0.8:5 OUTPUT=129 REPEATS=1
# Plots are drawn where they can be; the page is made from the records either way.
if "$python" -c 'import matplotlib' 2>/dev/null; then plots=1; else plots=; fi
step "$LAST_S" 0 results "PLOTS=$plots"

echo
printf '%s' "$summary"
echo "$(($(date +%s) - started)) s in all; $([ "$failed" -eq 0 ] && echo "every step done" || echo "some steps failed")"
exit "$failed"
