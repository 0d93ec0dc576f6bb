#!/usr/bin/env bash
# Starts SLURM with two virtual nodes on this machine, and prints what to set to use it. See README.md.
set -euo pipefail

HERE=$(dirname "$(realpath "$0")")
DIR=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
chmod 755 "$DIR"
mkdir "$DIR/munge" "$DIR/state" "$DIR/spool.n1" "$DIR/spool.n2"
sed -e "s|@DIR@|$DIR|g" -e "s|@HOST@|$(hostname -s)|g" -e "s|@CPUS@|$(nproc)|g" "$HERE/slurm.conf.in" >"$DIR/slurm.conf"
echo "Name=gpu File=/dev/null" >"$DIR/gres.conf" # so that jobs can ask for GPUs, as they do elsewhere
(cat /etc/hosts && echo "127.0.0.1 n1 n2") >"$DIR/hosts"
export SLURM_CONF=$DIR/slurm.conf

head -c 1024 /dev/urandom >"$DIR/munge/key"
chmod 600 "$DIR/munge/key"
munged --force --key-file="$DIR/munge/key" --socket="$DIR/munge.socket" --pid-file="$DIR/munge/pid" \
    --seed-file="$DIR/munge/seed" --log-file="$DIR/munge/log"
slurmctld -i
"$HERE/start_node.sh" n1
"$HERE/start_node.sh" n2
for _ in $(seq 30); do
    [ "$(sinfo --noheader --states=idle --format=%D)" = 2 ] && break
    sleep 1
done
sinfo >&2
echo "export SLURM_CONF=$SLURM_CONF"
