#!/usr/bin/env bash
# Starts SLURM with two virtual nodes on this machine, and prints what to set to use it. See README.md.
# Each node has a host name, a network namespace behind a bridge, and a boot id of its own.
set -euo pipefail

HERE=$(dirname "$(realpath "$0")")
NET=10.213.77 # of the nodes
DIR=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
chmod 755 "$DIR"
mkdir "$DIR/munge" "$DIR/state" "$DIR/spool.n1" "$DIR/spool.n2"
sed -e "s|@DIR@|$DIR|g" -e "s|@HOST@|$(hostname -s)|g" -e "s|@NET@|$NET|g" -e "s|@CPUS@|$(nproc)|g" \
    "$HERE/slurm.conf.in" >"$DIR/slurm.conf"
echo "Name=gpu File=/dev/null" >"$DIR/gres.conf" # so that jobs can ask for GPUs, as they do elsewhere
printf '127.0.0.1 localhost\n%s %s\n' "$NET.254" "$(hostname -s)" "$NET.1" n1 "$NET.2" n2 >"$DIR/hosts"
export SLURM_CONF=$DIR/slurm.conf

ip link add mt_slurm type bridge
ip address add "$NET.254/24" dev mt_slurm
ip link set mt_slurm up
for i in 1 2; do
    ip netns add "mt_n$i"
    ip link add "mt_n$i" type veth peer name eth0 netns "mt_n$i"
    ip link set "mt_n$i" master mt_slurm up
    ip -n "mt_n$i" address add "$NET.$i/24" dev eth0
    ip -n "mt_n$i" link set eth0 up
    ip -n "mt_n$i" link set lo up
    cp /proc/sys/kernel/random/uuid "$DIR/boot_id.n$i"
done

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
