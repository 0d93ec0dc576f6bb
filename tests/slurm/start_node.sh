#!/usr/bin/env bash
# Starts one node (n1 or n2) of start.sh's SLURM, in its network namespace, with its host name and boot id.
set -euo pipefail

DIR=$(dirname "$SLURM_CONF")
nsenter --net="/run/netns/mt_$1" unshare --mount --uts bash -c "
    mount --bind '$DIR/hosts' /etc/hosts
    mount --bind '$DIR/boot_id.$1' /proc/sys/kernel/random/boot_id
    hostname '$1'
    exec slurmd -N '$1'"
