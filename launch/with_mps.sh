#!/bin/sh
# Runs a command with an NVIDIA MPS of its own, so that processes which share a GPU run side by side: sh launch/with_mps.sh COMMAND...
# MPS keeps its pipes and logs in a scratch folder, so that one that is there already is not touched; it ends with the command,
# whose exit code is passed on. Interrupt and termination are passed to the command.
set -u
if [ $# -eq 0 ]; then
    echo "usage: sh launch/with_mps.sh COMMAND [ARGUMENT]..." >&2
    exit 2
fi
if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "nvidia-cuda-mps-control is not here; it comes with the NVIDIA driver" >&2
    exit 127
fi
folder=$(mktemp -d "${TMPDIR:-/tmp}/doorbell-mps.XXXXXX") || exit 1
export CUDA_MPS_PIPE_DIRECTORY="$folder/pipe" CUDA_MPS_LOG_DIRECTORY="$folder/log"
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
if ! nvidia-cuda-mps-control -d; then
    cat "$CUDA_MPS_LOG_DIRECTORY"/*.log >&2 2>/dev/null
    rm -rf "$folder"
    echo "MPS did not start" >&2
    exit 1
fi
# In the background, so that a signal is handled at once and not when the command ends; it keeps our standard input.
child= stopped= interrupted=
stop() {
    stopped=1 interrupted=1
    if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; fi
}
trap stop INT TERM HUP
exec 3<&0
"$@" <&3 3<&- &
child=$!
if [ -n "$stopped" ]; then stop; fi # it came before we knew whom to tell
wait "$child"
code=$?
# What a signal ended may have been the wait, not the command. Where it was the command, whose code we have, 127 is the answer.
while [ -n "$interrupted" ]; do
    interrupted=
    wait "$child"
    again=$?
    if [ "$again" -ne 127 ]; then code=$again; fi
done
echo "quit -t 10" | nvidia-cuda-mps-control >/dev/null 2>&1
rm -rf "$folder"
exit "$code"
