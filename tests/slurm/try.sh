#!/usr/bin/env bash
# Trains with examples/clusters/multi_node.sbatch on the SLURM of start.sh, warns it, kills a node of it, and prints
# what it sees. Ends with 1 if a promise was not kept. See README.md.
#   try.sh [warned] [signalled] [starting] [anywhen] [early] [killed] [stopped] [dead] [cancelled]
set -uo pipefail

ROOT=$(realpath "$(dirname "$0")/../..")
WORK=${WORK:-$(mktemp -d "${TMPDIR:-/tmp}/slurm_try.XXXXXX")} # set: of an earlier call, whose uninterrupted run is used
: "${SLURM_CONF:?set it to what start.sh printed}"
cd "$ROOT" || exit 1
export OMP_NUM_THREADS=1
FAILED=0

submit() { # output_dir, sbatch's options... -> job id
    local output_dir=$1
    shift
    sbatch --parsable --gpus-per-node=1 --cpus-per-task=1 --output="$output_dir.log" "$@" \
        examples/clusters/multi_node.sbatch --config "$WORK/options.yaml" --output-dir "$output_dir"
}

state() { scontrol show job "$1" | grep -oP 'JobState=\K\w+'; }
restarts() { scontrol show job "$1" | grep -oP 'Restarts=\K\d+'; }
exit_name() { grep -oP '"name": "\K\w+' "$1/exit.json" 2>/dev/null; }
num_steps() { if [ -e "$1/training_metrics_0.jsonl" ]; then wc -l <"$1/training_metrics_0.jsonl"; else echo 0; fi; }
job_line() { echo "    job $1: $(scontrol show job "$1" | grep -oP '(JobState|Restarts|ExitCode|RunTime|TimeLimit)=\S+' | tr '\n' ' ')"; }
ranks() { grep -lz "^LOCAL_RANK=" $(processes "$1" n1 | sed 's|.*|/proc/&/environ|') /dev/null 2>/dev/null; }
processes() { # job, node
    local file
    for file in $(grep -lz "^SLURM_JOB_ID=$1\$" /proc/[0-9]*/environ 2>/dev/null); do
        tr '\0' '\n' <"$file" | grep -qx "SLURMD_NODENAME=$2" && basename "$(dirname "$file")"
    done
}

await() { # seconds, condition...: prints how long it took
    local start=$SECONDS limit=$1
    shift
    until eval "$*"; do
        [ $((SECONDS - start)) -lt "$limit" ] || { promise "within $limit s: $*" false; return 1; }
        sleep 0.5
    done 2>/dev/null
    echo "    $((SECONDS - start)) s until $*"
}

promise() { # text, condition...
    local text=$1
    shift
    if eval "$*"; then echo "ok      $text"; else echo "BROKEN  $text"; FAILED=1; fi
}

same_losses() { # two output directories: every step once, and the same loss in it
    python - "$@" <<'PYTHON'
import json, sys
runs = [[json.loads(line) for line in open(f"{run}/training_metrics_0.jsonl")] for run in sys.argv[1:]]
losses = [{row["step"]: row["loss"] for row in run} for run in runs]
same = losses[0] == losses[1] and all(len(run) == len(steps) for run, steps in zip(runs, losses))
print(f"    {len(runs[0])} and {len(runs[1])} steps, last losses {runs[0][-1]['loss']} and {runs[1][-1]['loss']}")
sys.exit(not same)
PYTHON
}

warned() {
    echo "== the warning: SLURM's own, before the time limit"
    local RUN=$WORK/warned JOB=$(submit "$WORK/warned" --time=2 --signal=B:USR1@50)
    await 900 "[ \$(num_steps $RUN) -ge 1 ]"
    await 300 "[ \$(restarts $JOB) = 1 ]"
    promise "the ranks saved and asked to be requeued (not over before: raise STEPS)" "[ \"\$(exit_name $RUN)\" = saved_and_requeue ]"
    echo "    $(num_steps "$RUN") steps done"
    scontrol update jobid="$JOB" timelimit=30
    await 900 "[ \$(state $JOB) = COMPLETED ]"
    promise "requeued, resumed, done" "[ \"\$(exit_name $RUN)\" = done ]"
    promise "the losses are those of the uninterrupted run" "same_losses $WORK/plain $RUN"
    job_line "$JOB"
}

signalled() {
    echo "== the warning by hand: to the batch shell, to all processes, to those of the step"
    local RUN=$WORK/signalled JOB=$(submit "$WORK/signalled") num_requeues=0 stopped receiver
    for receiver in --batch --full ""; do
        await 300 "[ \$(num_steps $RUN) -ge $((num_requeues * 30 + 10)) ]"
        scancel --signal=USR1 $receiver "$JOB"
        num_requeues=$((num_requeues + 1))
        await 120 "[ \$(restarts $JOB) = $num_requeues ]"
        stopped=$(num_steps "$RUN")
        promise "scancel $receiver: saved after step $stopped and requeued" "[ \"\$(exit_name $RUN)\" = saved_and_requeue ]"
        await 300 "grep -q 'resuming from .*: $stopped steps' $RUN.log"
    done
    await 900 "[ \$(state $JOB) = COMPLETED ]"
    promise "done" "[ \"\$(exit_name $RUN)\" = done ]"
    promise "the losses are those of the uninterrupted run" "same_losses $WORK/plain $RUN"
    job_line "$JOB"
}

anywhen() {
    echo "== the warning to all processes, seconds after the job's start"
    local delay JOB RUN
    for delay in 0 0.5 1 2 4 7 10 13; do
        RUN=$WORK/anywhen_$delay JOB=$(submit "$WORK/anywhen_$delay")
        await 120 "[ \$(state $JOB) = RUNNING ]"
        sleep "$delay"
        scancel --signal=USR1 --full "$JOB"
        await 180 "[ \$(restarts $JOB) = 1 ]"
        promise "after $delay s: requeued" "grep -q '^requeueing' $RUN.log"
        scancel "$JOB"
    done
}

starting() {
    echo "== the warning by hand, while the job starts"
    local RUN=$WORK/starting JOB=$(submit "$WORK/starting")
    await 120 "[ \$(state $JOB) = RUNNING ]"
    scancel --signal=USR1 --batch "$JOB"
    await 180 "[ \$(restarts $JOB) = 1 ]"
    await 180 "[ -n \"\$(ranks $JOB)\" ]"
    scancel --signal=USR1 --full "$JOB"
    await 180 "[ \$(restarts $JOB) = 2 ]"
    await 180 "[ -n \"\$(ranks $JOB)\" ]"
    scancel --signal=USR1 "$JOB"
    await 180 "[ \$(restarts $JOB) = 3 ]"
    await 900 "[ \$(state $JOB) = COMPLETED ]"
    promise "requeued three times, done" "[ \"\$(exit_name $RUN)\" = done ]"
    promise "the losses are those of the uninterrupted run" "same_losses $WORK/plain $RUN"
    job_line "$JOB"
}

early() {
    echo "== a time limit that leaves no time before the warning"
    local RUN=$WORK/early JOB=$(submit "$WORK/early" --time=2 --signal=B:USR1@600)
    await 900 "[ \$(state $JOB) = FAILED ]"
    promise "three requeues brought no step (the first may have)" "[ \$(restarts $JOB) -ge 3 -a \$(restarts $JOB) -le 4 ]"
    promise "the log says why" "grep -q 'not requeued again: 3 requeues have brought no step' $RUN.log"
    grep -h "requeue" "$RUN.log" | cut -c1-160
    job_line "$JOB"
    JOB=$(submit "$WORK/early")
    await 900 "[ \$(state $JOB) = COMPLETED ]"
    promise "submitted again without a limit, it is done" "[ \"\$(exit_name $RUN)\" = done ]"
    promise "the losses are those of the uninterrupted run" "same_losses $WORK/plain $RUN"
}

killed() {
    echo "== the ranks of one node killed"
    local RUN=$WORK/killed JOB=$(submit "$WORK/killed")
    await 900 "[ \$(num_steps $RUN) -ge 50 ]"
    kill -9 $(processes "$JOB" n2)
    await 120 "[ \$(state $JOB) = FAILED ]"
    promise "the whole job ended, and no process of it is left" "[ -z \"\$(processes $JOB n1; processes $JOB n2)\" ]"
    promise "it was not requeued" "[ \$(restarts $JOB) = 0 ]"
    echo "    exit.json: $(tr -d '\n' <"$RUN/exit.json" 2>/dev/null | cut -c1-300)"
    JOB=$(submit "$WORK/killed")
    await 900 "[ \$(state $JOB) = COMPLETED ]"
    promise "submitted again, it resumed and is done" "[ \"\$(exit_name $RUN)\" = done ]"
    promise "the losses are those of the uninterrupted run" "same_losses $WORK/plain $RUN"
}

stopped() {
    echo "== the rank of one node stopped, which nothing wakes"
    local RUN=$WORK/stopped JOB=$(submit "$WORK/stopped") pid
    await 900 "[ \$(num_steps $RUN) -ge 50 ]"
    for pid in $(processes "$JOB" n2); do
        grep -qz "^LOCAL_RANK=" "/proc/$pid/environ" && kill -STOP "$pid"
    done
    await 120 "[ \$(state $JOB) = FAILED ]"
    promise "the whole job ended, and no process of it is left" "[ -z \"\$(processes $JOB n1; processes $JOB n2)\" ]"
    promise "it hung" "[ \"\$(exit_name $RUN)\" = hang ]"
    echo "    exit.json: $(tr -d '\n' <"$RUN/exit.json" 2>/dev/null | cut -c1-300)"
}

dead() {
    echo "== one node dead, SLURM's own processes too"
    local RUN=$WORK/dead JOB=$(submit "$WORK/dead")
    await 900 "[ \$(num_steps $RUN) -ge 50 ]"
    for pid in $(pgrep -f "^slurmstepd: \[$JOB\."); do
        [ "$(nsenter --target "$pid" --uts hostname)" = n2 ] && kill -9 "$pid"
    done
    kill -9 $(cat "$(dirname "$SLURM_CONF")/slurmd.n2.pid") $(processes "$JOB" n2)
    await 120 "[ \$(restarts $JOB) = 1 ]"
    tests/slurm/start_node.sh n2
    await 900 "[ \$(state $JOB) = COMPLETED ]"
    promise "SLURM requeued the job; it resumed and is done" "[ \"\$(exit_name $RUN)\" = done ]"
    promise "the losses are those of the uninterrupted run" "same_losses $WORK/plain $RUN"
}

cancelled() {
    echo "== cancelled"
    local RUN=$WORK/cancelled JOB=$(submit "$WORK/cancelled")
    await 900 "[ \$(num_steps $RUN) -ge 5 ]"
    scancel "$JOB"
    await 90 "[ \$(state $JOB) = CANCELLED ]"
    sleep 15
    promise "a cancelled job stays so" "[ \$(state $JOB) = CANCELLED ]"
    promise "the log has no traceback" "! grep -q Traceback $RUN.log"
    echo "    the log's last lines:"
    tail -n 4 "$RUN.log"
    job_line "$JOB"
    echo "    exit.json: $(tr -d '\n' <"$RUN/exit.json" 2>/dev/null | cut -c1-300)"
}

prepare() {
    echo "== data and model, in $WORK"
    python examples/quickstart/make_data.py --output-dir "$WORK" >"$WORK/prepare.log" 2>&1 ||
        { cat "$WORK/prepare.log"; exit 1; }
    python examples/quickstart/make_tiny_model.py --messages-file "$WORK/train.jsonl" --output-dir "$WORK/model" \
        --vocab-size 1024 >>"$WORK/prepare.log" 2>&1
    python process_data.py --input-file "$WORK/train.jsonl" --output-file "$WORK/data.arrow" \
        --model-name-or-path "$WORK/model" >>"$WORK/prepare.log" 2>&1 || { cat "$WORK/prepare.log"; exit 1; }
    cat >"$WORK/options.yaml" <<YAML
model_name_or_path: $WORK/model
data_path: $WORK/data.arrow
batch_size: 16
max_tokens_per_gpu: 1024
max_steps: ${STEPS:-250}
learning_rate: 1e-3
hang_timeout: 30
checkpoint_every_steps: 20
export_dtype: float32
YAML

    echo "== two nodes, uninterrupted"
    local RUN=$WORK/plain JOB=$(submit "$WORK/plain")
    await 900 "[ \$(state $JOB) = COMPLETED ]"
    promise "two nodes trained and ended with done" "[ \"\$(exit_name $RUN)\" = done ]"
}

[ -e "$WORK/plain/exit.json" ] || prepare
[ $# -gt 0 ] || set -- warned signalled starting anywhen early killed dead cancelled
for part in "$@"; do "$part"; done

echo "== what the runs resumed from"
grep -hi resum "$WORK"/*.log
echo "== logs: $WORK"
exit "$FAILED"
