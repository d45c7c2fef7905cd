# Functions shared by launch/slurm/prepare.sh and launch/slurm/pretrain.sh, which source this file.

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# refuse_repetition OPTION: an option with one value is given once; `given` has those before.
refuse_repetition() {
    [[ " ${given:-} " != *" $1 "* ]] || die "$1 is given twice. Fix: give it once. [option-given-twice]"
    given+=" $1"
}

# need_number OPTION VALUE
need_number() {
    refuse_repetition "$1"
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] ||
        die "$1 must be a number from 1, got '${2:-}'. Fix: give one. [invalid-number]"
}

# Print the comment at the top of a script.
show_help() { sed -n '2,/^$/s/^# \{0,1\}//p' "$1"; }

# read_common_option "$@": parse an option of both scripts; sets `shifted`, `options` and `dry_run`. False for others.
read_common_option() {
    case $1 in
        --sbatch) (($# > 1)) ||
                die "--sbatch needs a value. Fix: give an option of sbatch, such as --partition=NAME. [missing-value]"
            options+=("$2"); shifted=2 ;;
        --dry-run) dry_run=1; shifted=1 ;;
        *) return 1 ;;
    esac
}

# need_arguments PROGRAM "$@": check that there are arguments after --.
need_arguments() { (($# > 1)) || die "no arguments for $1. Fix: give them after --. [missing-arguments]"; }

need_sbatch() {
    command -v sbatch >/dev/null 2>&1 ||
        die "sbatch is not found. Fix: run this on a host with Slurm's commands. [missing-sbatch]"
}

# Print a command, quoted for a shell.
show_command() { printf '%q ' "$@"; echo; }

# use_environment ROOT: set `python` and the variables of a job, which Slurm runs from a copy of its script.
use_environment() {
    export PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
    python=${CLOZEWORKS_VENV:-$1/.venv}/bin/python
}
