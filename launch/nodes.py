"""Start pretraining on the hosts of a hostfile.

    clozeworks nodes --hostfile FILE [OPTIONS] -- --config FILE [section.field=value ...]

The arguments after -- are those of launch/pretrain.py. The command starts `deepspeed --hostfile FILE
launch/pretrain.py ...` and takes care of what the launcher leaves to its user:

- It checks the hostfile, that pdsh is installed and that ssh reaches the first host, and makes ssh notice a dead host.
- It forwards the environment variables that the ranks need, and no secrets (the launcher puts them on command lines).
- It passes all arguments unchanged, whatever characters they contain.
- It reaches a single remote host by ssh too, where deepspeed would train on this one.
- If the launcher ends for any reason, the ranks end too. If a host cannot be reached, ssh says so, and the ranks of the
  others leave after distributed.meeting_timeout_seconds.

Exit status: that of the launcher, or 76 if ssh did not reach a host or lost it. output_dir/status.json has the state of
the run.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from data_prep.base.arguments import LARGEST_PORT, at_least
from data_prep.base.environment import environment_now
from data_prep.base.errors import UsageError, run_command
from data_prep.base.known_secrets import secrets_of
from data_prep.base.urls import has_password
from launch.options import add_dry_run, command_parser

PRETRAIN = Path(__file__).resolve().with_name("pretrain.py")
LAUNCHER = "trainer.distributed.launcher"
SSH_OPTIONS = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""By default ssh waits for hours for a host that was cut off."""

_PLAIN = re.compile(r"[\w@+=:,./~-]*", re.ASCII)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("nodes.py", __doc__)
    parser.add_argument("--hostfile", required=True, metavar="FILE", help="file with lines HOST slots=N")
    parser.add_argument(
        "--master-addr", metavar="ADDRESS", help="address of the first host (default: its answer to hostname -I)"
    )
    parser.add_argument(
        "--master-port",
        type=at_least(1, LARGEST_PORT),
        default=29500,
        metavar="PORT",
        help="port on the first host (default %(default)s)",
    )
    parser.add_argument(
        "--interface", metavar="NAME", help="network interface for gloo and NCCL, such as eth0 (default: their choice)"
    )
    parser.add_argument(
        "--forward",
        action="append",
        default=[],
        metavar="NAME",
        help="forward this environment variable too; repeat it for several",
    )
    add_dry_run(parser, "print the command that would be started and check its arguments, but start nothing")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and the arguments of pretrain.py")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    from trainer.preflight.hosts import address_of, read_hostfile

    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if not arguments:
        raise UsageError("no arguments for pretrain.py", fix="give them after --", code="missing-arguments")
    hosts = read_hostfile(options.hostfile)
    for path in (sys.executable, str(PRETRAIN), os.getcwd()):
        if _PLAIN.fullmatch(path) is None:
            raise UsageError(
                f"the launcher would put the path {path!r} on a command line without quotes",
                fix="use a path without spaces and other special characters of the shell",
                code="unquotable-path",
            )
    environment = launcher_environment(environment_now(), options.interface)
    forwarded = forwarded_variables(environment, options.forward)
    command = launcher_command(options.hostfile, options.master_addr, options.master_port, arguments)
    first = next(iter(hosts))
    is_local = len(hosts) == 1 and is_here(first)
    if len(hosts) == 1 and not is_local:
        command.insert(command.index("--no_ssh_check"), "--force_multi")
    left_out = sorted(secrets_of(environment_now()))
    if left_out:
        print(
            f"warning: not forwarded because `ps` would show their values: {', '.join(left_out)}",
            file=sys.stderr,
            flush=True,
        )
    if options.dry_run:
        print(environment_file(forwarded) + shlex.join(command), flush=True)
        check_arguments(arguments, sum(hosts.values()))
        return
    if not is_local and shutil.which("pdsh") is None:
        raise UsageError(
            "pdsh is not installed on this host, and the deepspeed launcher starts the ranks with it",
            fix="install the package pdsh here; the other hosts need only sshd",
            code="missing-pdsh",
        )
    if options.master_addr is None:
        position = command.index("--master_port")
        command[position:position] = ["--master_addr", "127.0.0.1" if is_local else address_of(first)]
    in_memory = os.memfd_create("deepspeed_env", 0)  # a file by name for the launcher that leaves nothing on disk
    os.write(in_memory, environment_file(forwarded).encode())
    os.execvpe(command[0], command, environment | {"DS_ENV_FILE": f"/proc/self/fd/{in_memory}"})


def check_arguments(arguments: Sequence[str], ranks: int) -> None:
    """Check the arguments by running pretrain.py --print-config; end with its status if it refuses them."""
    checked = [sys.executable, str(PRETRAIN), "--ranks", str(ranks), *arguments, "--print-config"]
    status = subprocess.run(checked, stdout=subprocess.DEVNULL, check=False).returncode
    if status:
        sys.exit(status)


def launcher_environment(environment: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """Return the launcher's environment: without secrets, and with ssh options that notice a dead host."""
    secret = secrets_of(environment)
    values = {name: value for name, value in environment.items() if name not in secret}
    values["PDSH_SSH_ARGS_APPEND"] = " ".join([values.get("PDSH_SSH_ARGS_APPEND", ""), *SSH_OPTIONS]).strip()
    if interface is not None:
        values |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return values


def forwarded_variables(environment: Mapping[str, str], more: Iterable[str]) -> dict[str, str]:
    """Return the variables for `.deepspeed_env`, sorted by name.

    Raises:
        UsageError: a value contains characters that the launcher and the shells do not pass on, or is not set.
    """
    from trainer.preflight.hosts import LAUNCHER_PREFIXES, NEEDED_PREFIXES

    for name in more:
        if name not in environment:
            raise UsageError(
                f"--forward {name}: the variable is not set, or holds a secret, which is not forwarded",
                fix="set the variable, or put the secret into a file on every host",
                code="variable-not-forwarded",
            )
    chosen = {name for name in environment if name.startswith(NEEDED_PREFIXES)} | set(more)
    for name in sorted(chosen | {name for name in environment if name.startswith(LAUNCHER_PREFIXES)}):
        if re.search(r'[\n\r\0"$`\\%]', environment[name]):
            raise UsageError(
                f"the variable {name} contains a quote, $, %, backslash or line end, which the launcher's shells on "
                "the other hosts would interpret",
                fix="set it in the login files of the hosts, and unset it here",
                code="unquotable-variable",
            )
    return {name: environment[name] for name in sorted(chosen)}


def environment_file(variables: Mapping[str, str]) -> str:
    """Return the lines of a `.deepspeed_env`, whose reader fails on blank lines and comments."""
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def launcher_command(hostfile: str, address: str | None, port: int, arguments: Sequence[str]) -> list[str]:
    """Return the command line of the deepspeed launcher.

    Raises:
        UsageError: an argument contains a password.
    """
    for argument in arguments:
        if has_password(argument):
            name = argument.partition("=")[0]
            raise UsageError(
                f"{name} contains a password, which `ps` would show on every host",
                fix="write the setting into the YAML file",
                code="secret-in-arguments",
            )
    launcher = [sys.executable, "-m", LAUNCHER, "--hostfile", hostfile, "--no_ssh_check"]
    launcher += ["--master_port", str(port), *(["--master_addr", address] if address else [])]
    return [*launcher, str(PRETRAIN), *map(quoted, arguments)]


def is_here(host: str) -> bool:
    """Return whether a host of the hostfile is this machine, by binding its address."""
    try:
        family, *_, address = socket.getaddrinfo(host.rpartition("@")[2], 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:  # an unknown name (perhaps an alias of ssh), or the address of another machine
        return False
    return True


def quoted(argument: str) -> str:
    r"""Quote an argument as one word for the shell of the other host (bash, zsh, ksh): `a b$c` is `$'a\x20b\x24c'`.

    pdsh expands every % before, and deepspeed puts double quotes around a word with a space; the result has neither.
    """
    if argument and _PLAIN.fullmatch(argument) and not argument.startswith("~"):
        return argument
    plain = re.compile(r"[\w@+=:,./-]", re.ASCII)
    letters = (chr(byte) if byte < 128 and plain.match(chr(byte)) else f"\\x{byte:02x}" for byte in argument.encode())
    return "$'" + "".join(letters) + "'"


if __name__ == "__main__":
    run_command(main)
