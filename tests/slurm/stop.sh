#!/usr/bin/env bash
# Stops the SLURM that start.sh started, and everything that its jobs have running.
set -uo pipefail

DIR=$(dirname "${SLURM_CONF:?set it to what start.sh printed}")
scancel --full --signal=KILL --state=running --me 2>/dev/null
for pid_file in "$DIR"/slurmctld.pid "$DIR"/slurmd.n1.pid "$DIR"/slurmd.n2.pid "$DIR"/munge/pid; do
    [ -s "$pid_file" ] && kill "$(cat "$pid_file")" 2>/dev/null
done
sleep 2
ip link delete mt_slurm
ip netns delete mt_n1
ip netns delete mt_n2
rm -rf "$DIR"
