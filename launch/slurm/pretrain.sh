#!/usr/bin/env bash
# Trains on a Slurm cluster: one job that saves before its time is up, requeues itself and goes on.
#
#   bash launch/slurm/pretrain.sh [OPTIONS] -- ARGUMENTS
#
# ARGUMENTS are those of launch/pretrain.py (--config, settings). output_dir must be a folder that all nodes share, or
# checkpoint.upload_to a store that they all reach; TORCH_EXTENSIONS_DIR, AWS_, MLFLOW_, NCCL_ and GLOO_ variables of
# this shell go with the job, as Slurm passes the environment on.
#
#   --nodes N          nodes, or a range such as 3-4: the run goes on with as many as the job is given (default: 1)
#   --gpus N           GPUs, and so ranks, of each node (default: 8)
#   --cpus N           CPUs of each node (default: 8 for each GPU)
#   --grace SECONDS    how long before the end of its time the job gets the signal to save (default: 300)
#   --requeues N       how often the job goes back into the queue at most (default: 100)
#   --sbatch OPTION    an option for sbatch; as often as needed
#   --dry-run          show what would be submitted, and check ARGUMENTS
#   --help
#
#   bash launch/slurm/pretrain.sh --nodes 3-4 --gpus 8 --sbatch --partition=gpu --sbatch --time=24:00:00 -- \
#       --config bert_large data.shards=data/shards output_dir=runs/bert_large
#
# The job requeues itself after exit status 75 (told to stop, and saved), 76 (a rank was lost), and those of a rank that
# was killed (137, as by want of memory) or crashed (134, 135, 139). Whatever ended it, 'python launch/status.py
# OUTPUT_DIR' tells where it stands, and the same command goes on.
#
# CLOZEWORKS_VENV     the environment to use (default: .venv in the repository root)

set -euo pipefail

# What every node runs: torchrun with the ranks of this node, and their exit status. Slurm sends SIGUSR1 to all
# processes; the ranks save on it, and torchrun, which would die of it, inherits that it is ignored.
run_node() {
    local root=$1 gpus=$2 python
    shift 2
    trap '' USR1
    # shellcheck source=launch/slurm/submission.sh
    source "$root/launch/slurm/submission.sh"
    use_environment "$root"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
    exec "$python" "$root/launch/ranks.py" \
        --nnodes "$SLURM_JOB_NUM_NODES" --node_rank "$SLURM_NODEID" --nproc_per_node "$gpus" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$root/launch/pretrain.py" "$@"
}

# What the job runs on its first node; sbatch copies this file away, so the repository's root comes as an argument.
run_job() {
    local root=$1 gpus=$2 requeues=$3 status=0
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${MASTER_ADDR%%$'\n'*} # the first of them
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs may share a node
    export MASTER_ADDR MASTER_PORT
    shift 3
    # Since 22.05 srun takes the number of CPUs from nobody but its caller, and would give each node's ranks one of them.
    local cpus=()
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || cpus=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    # Not --kill-on-bad-exit: the first node that has saved and left would have the others killed, and their status count.
    srun --kill-on-bad-exit=0 --wait=300 --ntasks-per-node=1 "${cpus[@]}" \
        bash "$root/launch/slurm/pretrain.sh" --node "$root" "$gpus" "$@" || status=$?
    # srun ends with the highest status of a node: that of a rank that was killed, beside the 76 of those that missed it.
    # 128 + SIGABRT (NCCL's watchdog), SIGBUS, SIGKILL or SIGSEGV; 143, 130 and 138 are those of a second request to stop.
    case $status in 75 | 76 | 134 | 135 | 137 | 139) ;; *) return "$status" ;; esac
    if ((${SLURM_RESTART_COUNT:-0} < requeues)); then
        echo "exit status $status: the job goes back into the queue (${SLURM_RESTART_COUNT:-0} times so far)"
        scontrol requeue "$SLURM_JOB_ID"
        return
    fi
    echo "exit status $status, and --requeues $requeues is reached; submit the same command again" >&2
    return "$status"
}

# need_nodes OPTION VALUE: a number or a range.
need_nodes() {
    [[ ${2:-} =~ ^[1-9][0-9]*(-[1-9][0-9]*)?$ ]] || die "$1 needs N or N-M, not '${2:-}'"
    ((${2%-*} <= ${2#*-})) || die "$1 $2: the larger number comes last"
}

submit() {
    local root script nodes=1 gpus=8 cpus='' grace=300 requeues=100 dry_run=0 shifted options=()
    script=${BASH_SOURCE[0]}
    root=$(cd "$(dirname "$script")/../.." && pwd)
    # shellcheck source=launch/slurm/submission.sh
    source "$root/launch/slurm/submission.sh"
    while (($#)); do
        case $1 in
            --nodes) need_nodes "$@"; nodes=$2; shift 2 ;;
            --gpus) need_number "$@"; gpus=$2; shift 2 ;;
            --cpus) need_number "$@"; cpus=$2; shift 2 ;;
            --grace) need_number "$@"; grace=$2; shift 2 ;;
            --requeues) need_number "$@"; requeues=$2; shift 2 ;;
            -h | --help) show_help "$script"; return ;;
            --) shift; break ;;
            *) read_common_option "$@" || die "unknown option '$1'; the arguments of pretrain.py come after --"
                shift "$shifted" ;;
        esac
    done
    need_arguments pretrain.py "$@"

    local command=(sbatch --parsable --job-name=pretrain "--nodes=$nodes" --ntasks-per-node=1
        "--gpus-per-node=$gpus" "--cpus-per-task=${cpus:-$((8 * gpus))}" --requeue --open-mode=append
        "--signal=USR1@$grace" "${options[@]}" "$script" --job "$root" "$gpus" "$requeues" "$@")
    if ((dry_run)); then
        show_command "${command[@]}"
        use_environment "$root" # and the arguments are read as the ranks will read them
        "$python" "$root/launch/pretrain.py" --ranks $((${nodes%-*} * gpus)) "$@" --print-config >/dev/null
        return
    fi
    need_sbatch
    local id
    id=$("${command[@]}")
    echo "job ${id%%;*}; it saves $grace s before its time is up and goes back into the queue"
}

case ${1:-} in
    --job) shift; run_job "$@" ;;
    --node) shift; run_node "$@" ;;
    *) submit "$@" ;;
esac
