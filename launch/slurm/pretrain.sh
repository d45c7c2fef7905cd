#!/usr/bin/env bash
# Pretrains on a Slurm cluster: one job that saves before its time limit, requeues itself and resumes.
#
#   bash launch/slurm/pretrain.sh [OPTIONS] -- ARGUMENTS
#
# ARGUMENTS are those of launch/pretrain.py (--config, settings). output_dir must be a folder that all nodes share, or
# checkpoint.upload_to a store that all nodes reach. The script checks both, and all settings, before it submits. Slurm
# passes the environment of this shell on to the job: TORCH_EXTENSIONS_DIR, and the variables AWS_, MLFLOW_, NCCL_ and
# GLOO_.
#
#   --nodes N          nodes, or a range such as 3-4: the run resumes on as many as the job gets (default: 1)
#   --gpus N           GPUs (and ranks) per node (default: 8)
#   --cpus N           CPUs per node (default: 8 per GPU)
#   --grace SECONDS    time before the time limit at which the job gets the signal to save (default: 300)
#   --requeues N       maximum number of requeues (default: 100)
#   --volume DIR       directory that all nodes share; repeat it for several. output_dir must be inside one of them
#                      (default: anywhere but in /tmp, /var/tmp and /dev/shm, which each node has of its own)
#   --sbatch OPTION    option of sbatch; repeat it for several
#   --dry-run          print the job that would be submitted and check ARGUMENTS, but submit nothing
#   --help
#
#   bash launch/slurm/pretrain.sh --nodes 3-4 --gpus 8 --sbatch --partition=gpu --sbatch --time=24:00:00 -- \
#       --config bert_large data.shards=data/shards output_dir=runs/bert_large
#
# The job requeues itself after exit status 75 (stopped after saving), 76 (a rank was lost), and those of a rank that
# was killed (137, for example for lack of memory) or crashed (134, 135, 139). 'clozeworks status OUTPUT_DIR'
# reports the state of the run, and the same command resumes it.
#
# CLOZEWORKS_VENV     folder of the environment (default: .venv in the repository root)

set -euo pipefail

# The work of every node: torchrun with the ranks of this node, ending with their exit status. Slurm sends SIGUSR1 to
# all processes: the ranks save on it; torchrun, which it would kill, inherits that it is ignored.
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

# The work of the job's first node. sbatch copies this file elsewhere, so the root of the repository is an argument.
run_job() {
    local root=$1 gpus=$2 requeues=$3 status=0
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${MASTER_ADDR%%$'\n'*} # the first of them
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs may share a node
    export MASTER_ADDR MASTER_PORT
    shift 3
    # Since Slurm 22.05 srun ignores the job's number of CPUs, and would give the ranks of a node one CPU.
    local cpus=()
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || cpus=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    # Not --kill-on-bad-exit: the end of the first node that has saved would kill the others, whose status would count.
    srun --kill-on-bad-exit=0 --wait=300 --ntasks-per-node=1 "${cpus[@]}" \
        bash "$root/launch/slurm/pretrain.sh" --node "$root" "$gpus" "$@" || status=$?
    # srun ends with the highest status of a node: that of a killed rank rather than the 76 of the surviving ranks.
    # 128 + SIGABRT (NCCL's watchdog), SIGBUS, SIGKILL or SIGSEGV; 143, 130 and 138 follow a second request to stop.
    case $status in 75 | 76 | 134 | 135 | 137 | 139) ;; *) return "$status" ;; esac
    if ((${SLURM_RESTART_COUNT:-0} < requeues)); then
        echo "exit status $status: requeueing the job (requeued ${SLURM_RESTART_COUNT:-0} times so far)"
        scontrol requeue "$SLURM_JOB_ID"
        return
    fi
    echo "error: exit status $status after --requeues $requeues requeues." \
        "Fix: submit the same command again. [too-many-requeues]" >&2
    return "$status"
}

# need_nodes OPTION VALUE: a number or a range.
need_nodes() {
    refuse_repetition "$1"
    [[ ${2:-} =~ ^[1-9][0-9]*(-[1-9][0-9]*)?$ ]] ||
        die "$1 must be N or N-M, got '${2:-}'. Fix: give one. [invalid-range]"
    ((${2%-*} <= ${2#*-})) || die "$1 $2 is not a range. Fix: give the larger number last. [invalid-range]"
}

submit() {
    local root script given='' nodes=1 gpus=8 cpus='' grace=300 requeues=100 dry_run=0 shifted options=() volumes=''
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
            --volume) [[ -n ${2:-} && $2 != *,* ]] ||
                    die "--volume must be a directory without a comma, got '${2:-}'. Fix: give one. [invalid-volume]"
                [[ -d $2 ]] ||
                    die "--volume $2 is no directory of this host. Fix: give the name by which all nodes see it," \
                        "on a host that sees it too. [invalid-volume]"
                volumes+=${volumes:+,}$2; shift 2 ;;
            --requeues) need_number "$@"; requeues=$2; shift 2 ;;
            -h | --help) show_help "$script"; return ;;
            --) shift; break ;;
            *) read_common_option "$@" ||
                die "unknown option '$1'. Fix: give the arguments of pretrain.py after --. [unknown-option]"
                shift "$shifted" ;;
        esac
    done
    need_arguments pretrain.py "$@"

    local command=(sbatch --parsable --job-name=pretrain "--nodes=$nodes" --ntasks-per-node=1
        "--gpus-per-node=$gpus" "--cpus-per-task=${cpus:-$((8 * gpus))}" --requeue --open-mode=append
        "--signal=USR1@$grace" "${options[@]}" "$script" --job "$root" "$gpus" "$requeues" "$@")
    local id python where
    if ((dry_run)); then show_command "${command[@]}"; else need_sbatch; fi
    use_environment "$root" # checks the arguments as the ranks will
    where=$("$python" "$root/launch/pretrain.py" --ranks $((${nodes%-*} * gpus)) "$@" --check-volumes "$volumes")
    if ((dry_run)); then
        echo "$where"
        return
    fi
    id=$("${command[@]}")
    echo "submitted job ${id%%;*}; it saves $grace s before its time limit and requeues itself"
    echo "$where"
}

case ${1:-} in
    --job) shift; run_job "$@" ;;
    --node) shift; run_node "$@" ;;
    *) submit "$@" ;;
esac
