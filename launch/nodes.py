"""Train on the hosts of a hostfile: `nodes.py --hostfile FILE [OPTIONS] -- --config FILE [section.field=value ...]`.

It starts `deepspeed --hostfile FILE launch/pretrain.py ...` with what that leaves to the user: a hostfile that is there
and sound, an ssh that notices a dead host, the variables that the ranks need on every host, no secret among them (the
launcher puts them on command lines), and arguments that reach the ranks as they are, whatever characters they hold. A
single host that is not this one is reached by ssh too (deepspeed would train here), the launcher's end, whatever ended
it, ends the ranks, and a host that ssh does not reach ends the launch.
What comes after -- are the arguments of launch/pretrain.py. Exit status: the launcher's, or 76 where a host was not
reached; output_dir/status.json tells the truth.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from data_prep.base.arguments import LARGEST_PORT, at_least
from data_prep.base.errors import UsageError, run_command
from data_prep.base.urls import has_password
from data_prep.storage.known_secrets import secrets_of
from trainer.preflight.host_checks import LAUNCHER_PREFIXES, NEEDED_PREFIXES
from trainer.preflight.hostfile import read_hostfile

PRETRAIN = Path(__file__).resolve().with_name("pretrain.py")
LAUNCHER = "trainer.distributed.deepspeed_launcher"
SSH_OPTIONS = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""Left alone, ssh waits for hours for a host that was cut off."""

_PLAIN = re.compile(r"[\w@+=:,./~-]*", re.ASCII)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="nodes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hostfile", required=True, metavar="FILE", help="lines HOST slots=N")
    parser.add_argument("--master-addr", metavar="ADDRESS", help="of the first host (default: it is asked by ssh)")
    parser.add_argument(
        "--master-port", type=at_least(1, LARGEST_PORT), default=29500, metavar="PORT", help="default %(default)s"
    )
    parser.add_argument(
        "--interface", metavar="NAME", help="network interface for gloo and NCCL, such as eth0 (default: theirs)"
    )
    parser.add_argument(
        "--forward", action="append", default=[], metavar="NAME", help="forward this variable too; as often as needed"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be started, and check its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and the arguments of pretrain.py")
    options = parser.parse_args()
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if not arguments:
        raise UsageError("no arguments for pretrain.py; give them after --")
    hosts = read_hostfile(options.hostfile)
    for path in (sys.executable, str(PRETRAIN), os.getcwd()):
        if _PLAIN.fullmatch(path) is None:
            raise UsageError(
                f"the path {path!r} stands unquoted on the launcher's command line; use one without spaces "
                "and without other characters that a shell reads"
            )
    environment = launcher_environment(os.environ, options.interface)
    forwarded = forwarded_variables(environment, options.forward)
    command = launcher_command(options.hostfile, options.master_addr, options.master_port, arguments)
    if len(hosts) == 1 and not is_here(next(iter(hosts))):
        command.insert(command.index("--no_ssh_check"), "--force_multi")
    left_out = sorted(secrets_of(os.environ))
    if left_out:
        print(f"not forwarded, as `ps` would show it: {', '.join(left_out)}", file=sys.stderr, flush=True)
    if options.dry_run:
        print(environment_file(forwarded) + shlex.join(command), flush=True)
        check_arguments(arguments, sum(hosts.values()))
        return
    in_memory = os.memfd_create("deepspeed_env", 0)  # the launcher reads it by name, and nothing is left behind
    os.write(in_memory, environment_file(forwarded).encode())
    os.execvpe(command[0], command, environment | {"DS_ENV_FILE": f"/proc/self/fd/{in_memory}"})


def check_arguments(arguments: Sequence[str], ranks: int) -> None:
    """Have pretrain.py read its arguments as it will for so many ranks; what it refuses ends this process as it did."""
    checked = [sys.executable, str(PRETRAIN), "--ranks", str(ranks), *arguments, "--print-config"]
    status = subprocess.run(checked, stdout=subprocess.DEVNULL, check=False).returncode
    if status:
        sys.exit(status)


def launcher_environment(environment: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """What the launcher gets: no secrets, and ssh that notices a dead host."""
    secret = secrets_of(environment)
    values = {name: value for name, value in environment.items() if name not in secret}
    values["PDSH_SSH_ARGS_APPEND"] = " ".join([values.get("PDSH_SSH_ARGS_APPEND", ""), *SSH_OPTIONS]).strip()
    if interface is not None:
        values |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return values


def forwarded_variables(environment: Mapping[str, str], more: Iterable[str]) -> dict[str, str]:
    """The variables for `.deepspeed_env`, sorted by name.

    Raises:
        UsageError: one holds what neither the launcher nor the shells between can carry, or is not set.
    """
    for name in more:
        if name not in environment:
            raise UsageError(
                f"--forward {name}: there is no such variable, or it holds a secret, which is not forwarded"
            )
    chosen = {name for name in environment if name.startswith(NEEDED_PREFIXES)} | set(more)
    for name in sorted(chosen | {name for name in environment if name.startswith(LAUNCHER_PREFIXES)}):
        if re.search(r'[\n\r\0"$`\\%]', environment[name]):
            raise UsageError(
                f"the variable {name} holds a quote, $, %, backslash or line end, which a shell of the launcher on the "
                "other hosts would read; set it in the login files of the hosts and unset it here"
            )
    return {name: environment[name] for name in sorted(chosen)}


def environment_file(variables: Mapping[str, str]) -> str:
    """The lines of a `.deepspeed_env`: its reader fails on blank lines and comments."""
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def launcher_command(hostfile: str, address: str | None, port: int, arguments: Sequence[str]) -> list[str]:
    """The deepspeed launcher's command line.

    Raises:
        UsageError: an argument holds a password.
    """
    for argument in arguments:
        if has_password(argument):
            name = argument.partition("=")[0]
            raise UsageError(
                f"{name} holds a password, which `ps` would show on every host; write it into the YAML file"
            )
    launcher = [sys.executable, "-m", LAUNCHER, "--hostfile", hostfile, "--no_ssh_check"]
    launcher += ["--master_port", str(port), *(["--master_addr", address] if address else [])]
    return [*launcher, str(PRETRAIN), *map(quoted, arguments)]


def is_here(host: str) -> bool:
    """Whether a host of the hostfile is this machine: its address can be bound here."""
    try:
        family, *_, address = socket.getaddrinfo(host.rpartition("@")[2], 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:  # nobody knows the name (it may be ssh's own), or the address is another machine's
        return False
    return True


def quoted(argument: str) -> str:
    r"""The argument as one word for the shell of the other host (bash, zsh, ksh): `a b$c` becomes `$'a\x20b\x24c'`.

    Before it, pdsh reads every % and deepspeed puts double quotes around what has a space; here is neither.
    """
    if argument and _PLAIN.fullmatch(argument) and not argument.startswith("~"):
        return argument
    plain = re.compile(r"[\w@+=:,./-]", re.ASCII)
    letters = (chr(byte) if byte < 128 and plain.match(chr(byte)) else f"\\x{byte:02x}" for byte in argument.encode())
    return "$'" + "".join(letters) + "'"


if __name__ == "__main__":
    run_command(main)
