#!/usr/bin/env bash
# Prepares a shard set on a Slurm cluster: an array of jobs reads the corpus, a final job writes the shards.
#
#   bash launch/slurm/prepare.sh [OPTIONS] -- ARGUMENTS
#
# ARGUMENTS are those of 'clozeworks shards' (--input, --tokenizer, --output, settings), passed on unchanged.
# All nodes must see inputs, tokenizer and output under the same path: a shared folder, or s3://.
#
#   --ranges N           number of jobs in the array (default: 8)
#   --sbatch OPTION      option of sbatch for all jobs; repeat it for several
#   --dry-run            print the jobs that would be submitted and an estimate of the result, but submit nothing
#   --help
#
#   bash launch/slurm/prepare.sh --ranges 16 --sbatch --partition=cpu --sbatch --cpus-per-task=8 -- \
#       --input 's3://corpus/part-*.jsonl.zst' --tokenizer s3://corpus/tokenizer --output s3://corpus/shards
#
# The final job waits until every job of the array has succeeded, and is cancelled if one has failed. After any failure
# the same command continues from the finished work.
#
# CLOZEWORKS_VENV     folder of the environment (default: .venv in the repository root)

set -euo pipefail

# The work of the jobs. sbatch copies this file elsewhere, so the root of the repository is an argument.
run_job() {
    local job=$1 root=$2 ranges=$3 python workers=()
    shift 3
    # shellcheck source=launch/slurm/submission.sh
    source "$root/launch/slurm/submission.sh"
    use_environment "$root"
    # The user's own --workers count, and an option can be given once.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} && " $* " != *" --workers"[\ =]* ]]; then
        workers=(--workers "$SLURM_CPUS_PER_TASK")
    fi
    case $job in
        range) exec "$python" -m data_prep shards --shard-range "$SLURM_ARRAY_TASK_ID/$ranges" "${workers[@]}" "$@" ;;
        merge) exec "$python" -m data_prep merge "${workers[@]}" "$@" ;;
    esac
}

submit() {
    local root script given='' python ranges=8 dry_run=0 shifted options=()
    script=${BASH_SOURCE[0]}
    root=$(cd "$(dirname "$script")/../.." && pwd)
    # shellcheck source=launch/slurm/submission.sh
    source "$root/launch/slurm/submission.sh"
    while (($#)); do
        case $1 in
            --ranges) need_number "$@"; ranges=$2; shift 2 ;;
            -h | --help) show_help "$script"; return ;;
            --) shift; break ;;
            *) read_common_option "$@" ||
                die "unknown option '$1'. Fix: give the arguments of 'data_prep shards' after --. [unknown-option]"
                shift "$shifted" ;;
        esac
    done
    need_arguments "'data_prep shards'" "$@"

    local array=(sbatch --parsable --job-name=prepare "--array=1-$ranges" "${options[@]}"
        "$script" --job range "$root" "$ranges" "$@")
    local merge=(sbatch --parsable --job-name=merge --kill-on-invalid-dep=yes "${options[@]}")
    local merge_job=("$script" --job merge "$root" "$ranges" "$@")
    if ((dry_run)); then
        show_command "${array[@]}"
        show_command "${merge[@]}" --dependency=afterok:ARRAY "${merge_job[@]}"
        use_environment "$root"
        exec "$python" -m data_prep shards "$@" --dry-run
    fi
    need_sbatch
    use_environment "$root"
    "$python" -m data_prep shards "$@" --dry-run >/dev/null # refuses what the jobs would refuse
    local array_id merge_id
    array_id=$("${array[@]}")
    array_id=${array_id%%;*} # in a federation the name of the cluster follows
    merge_id=$("${merge[@]}" "--dependency=afterok:$array_id" "${merge_job[@]}")
    echo "submitted array job $array_id with $ranges ranges"
    echo "submitted job ${merge_id%%;*}, which writes the shards after the array has succeeded"
    echo "status: squeue --jobs $array_id,${merge_id%%;*}"
}

if [[ ${1:-} == --job ]]; then
    shift
    run_job "$@"
else
    submit "$@"
fi
