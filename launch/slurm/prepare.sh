#!/usr/bin/env bash
# Makes a shard set on a Slurm cluster: an array of jobs reads the corpus, one more job then writes the shards.
#
#   bash launch/slurm/prepare.sh [OPTIONS] -- ARGUMENTS
#
# ARGUMENTS are those of 'python -m data_prep shards' (--input, --tokenizer, --output, settings), passed on as they are.
# Inputs, tokenizer and output must be seen by all nodes alike: a shared folder, or s3://.
#
#   --ranges N           jobs of the array (default: 8)
#   --sbatch OPTION      an option for sbatch, for all jobs; as often as needed
#   --dry-run            show what would be submitted, and what would come of it
#   --help
#
#   bash launch/slurm/prepare.sh --ranges 16 --sbatch --partition=cpu --sbatch --cpus-per-task=8 --sbatch --time=4:00:00 -- \
#       --input 's3://corpus/part-*.jsonl.zst' --tokenizer s3://corpus/tokenizer --output s3://corpus/shards
#
# The last job waits until every job of the array has ended well, and is taken off where one has not. Whatever
# failed, the same command goes on from what is done.
#
# CLOZEWORKS_VENV     the environment to use (default: .venv in the repository root)

set -euo pipefail

# What the jobs run; sbatch copies this file away, so the repository's root comes as an argument.
run_job() {
    local job=$1 root=$2 ranges=$3 python workers=()
    shift 3
    # shellcheck source=launch/slurm/submission.sh
    source "$root/launch/slurm/submission.sh"
    use_environment "$root"
    # Of an option that is given twice the last one holds: the user's own --workers, which come after.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        workers=(--workers "$SLURM_CPUS_PER_TASK")
    fi
    case $job in
        range) exec "$python" -m data_prep shards --shard-range "$SLURM_ARRAY_TASK_ID/$ranges" "${workers[@]}" "$@" ;;
        merge) exec "$python" -m data_prep merge "${workers[@]}" "$@" ;;
    esac
}

submit() {
    local root script python ranges=8 dry_run=0 shifted options=()
    script=${BASH_SOURCE[0]}
    root=$(cd "$(dirname "$script")/../.." && pwd)
    # shellcheck source=launch/slurm/submission.sh
    source "$root/launch/slurm/submission.sh"
    while (($#)); do
        case $1 in
            --ranges) need_number "$@"; ranges=$2; shift 2 ;;
            -h | --help) show_help "$script"; return ;;
            --) shift; break ;;
            *) read_common_option "$@" || die "unknown option '$1'; the arguments of 'data_prep shards' come after --"
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
    local array_id merge_id
    array_id=$("${array[@]}")
    array_id=${array_id%%;*} # on a federation the cluster's name follows
    merge_id=$("${merge[@]}" "--dependency=afterok:$array_id" "${merge_job[@]}")
    echo "array of $ranges ranges: job $array_id; the shards: job ${merge_id%%;*}, once all of it has ended well"
}

if [[ ${1:-} == --job ]]; then
    shift
    run_job "$@"
else
    submit "$@"
fi
