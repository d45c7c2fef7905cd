"""Reading of DeepSpeed's hostfile; refuses lines that the launcher would misread."""

from __future__ import annotations

import re
from pathlib import Path

from data_prep.base.errors import UsageError

_HOST_LINE = re.compile(r"(\S+)\s+slots=([1-9][0-9]{0,5})")
# The name becomes a word of ssh and pdsh: none that begins with a hyphen, and none that a shell or pdsh would expand.
_HOST = re.compile(r"(?:[\w.-]+@)?\w[\w.:-]*", re.ASCII)
_SHOWN_CHARACTERS = 100


def read_hostfile(path: str) -> dict[str, int]:
    """Return the slots by host, in the order of the file.

    Raises:
        UsageError: it is missing (the deepspeed launcher would only warn, and train on one node), or a line is wrong.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # lines end as in the launcher
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"hostfile {path} cannot be read ({why}), and the launcher would train on one node",
            fix="give the path of a file with lines 'HOST slots=N'",
            code="missing-hostfile",
        ) from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.fullmatch(text)
        if match is None or match[1] in hosts:
            quoted = repr(text[:_SHOWN_CHARACTERS])
            raise UsageError(
                f"hostfile {path}, line {number}: {quoted} is not 'HOST slots=N', each host once",
                fix="correct the line",
                code="invalid-hostfile",
            )
        if _HOST.fullmatch(match[1]) is None or match[1].startswith("-"):
            raise UsageError(
                f"hostfile {path}, line {number}: {match[1][:_SHOWN_CHARACTERS]!r} is not a host name",
                fix=("use letters, digits, dots, colons, hyphens and underscores, with USER@ before it where needed"),
                code="invalid-hostfile",
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UsageError(
            f"hostfile {path} lists no host",
            fix="write lines 'HOST slots=N'",
            code="invalid-hostfile",
        )
    return hosts
