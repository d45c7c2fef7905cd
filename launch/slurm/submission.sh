# What launch/slurm/prepare.sh and launch/slurm/pretrain.sh share; sourced by them.

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# need_number OPTION VALUE
need_number() {
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$1 needs a number from 1, not '${2:-}'"
}

# Print the comment at the top of a script.
show_help() { sed -n '2,/^$/s/^# \{0,1\}//p' "$1"; }

# read_common_option "$@": an option that both know; sets `shifted`, appends to `options`, sets `dry_run`. False for others.
read_common_option() {
    case $1 in
        --sbatch) (($# > 1)) || die "--sbatch needs an option of sbatch, such as --partition=NAME"
            options+=("$2"); shifted=2 ;;
        --dry-run) dry_run=1; shifted=1 ;;
        *) return 1 ;;
    esac
}

# need_arguments PROGRAM "$@": what comes after -- is there.
need_arguments() { (($# > 1)) || die "no arguments for $1; give them after --"; }

need_sbatch() { command -v sbatch >/dev/null 2>&1 || die "sbatch is not found; run this where Slurm's commands are"; }

# One word for every argument, quoted for a shell.
show_command() { printf '%q ' "$@"; echo; }

# use_environment ROOT: of a job, which Slurm runs from a copy of its script; sets `python`.
use_environment() {
    export PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
    python=${CLOZEWORKS_VENV:-$1/.venv}/bin/python
}
