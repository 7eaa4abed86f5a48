#!/bin/sh
# A run on a small disk of its own: first with no room for a checkpoint, then with no room at all, then read-only. To be run in a mount namespace
# (`unshare -rm`). Usage: full_disk.sh DISK OUT PYTHON ARGUMENTS...; what each run said and its exit code go to OUT, and at the end the run folder.
set -u
DISK=$1 OUT=$2 PYTHON=$3
shift 3
mount -t tmpfs -o size=64m tmpfs "$DISK" || exit 77

sao() { "$PYTHON" -m tests.system.scripted_run train "$@"; }
fill() { # leave so many KB
    rm -f "$DISK/ballast"
    free=$(df -k --output=avail "$DISK" | tail -1)
    dd if=/dev/zero of="$DISK/ballast" bs=1024 count=$((free - $1)) 2>/dev/null
}
await() { # the file that matches a pattern, for at most two minutes
    for _ in $(seq 1200); do
        ls $1 >/dev/null 2>&1 && return
        sleep 0.1
    done
}

sao "$@" run.dir="$DISK/run" >"$OUT/checkpoint.log" 2>&1 &
await "$DISK/run/checkpoints/step-*"
fill 600
wait $!
echo $? >"$OUT/checkpoint.code"

rm "$DISK/ballast"
sao resume="$DISK/run" train.steps=40 >"$OUT/full.log" 2>&1 &
before=$(ls "$DISK"/run/trajectories | wc -l)
for _ in $(seq 1200); do
    [ "$(ls "$DISK"/run/trajectories | wc -l)" -gt "$((before + 2))" ] && break
    sleep 0.1
done
fill 0
wait $!
echo $? >"$OUT/full.code"

rm "$DISK/ballast"
mount -o remount,ro "$DISK"
sao resume="$DISK/run" >"$OUT/readonly.log" 2>&1
echo $? >"$OUT/readonly.code"

mount -o remount,rw "$DISK"
sao resume="$DISK/run" >"$OUT/end.log" 2>&1
echo $? >"$OUT/end.code"
cp -r "$DISK/run" "$OUT/run"
