#!/usr/bin/env bash
# Starts one node (n1 or n2) of start.sh's SLURM, with a host name of its own, and the names of both.
set -euo pipefail

unshare --mount --uts bash -c \
    "mount --bind '$(dirname "$SLURM_CONF")/hosts' /etc/hosts && hostname '$1' && slurmd -N '$1'"
