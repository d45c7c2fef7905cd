"""This machine's processor: its name and the instruction sets on which the speed of arithmetic depends."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

_RELEVANT = frozenset(
    {"avx", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "asimdhp", "bf16", "i8mm", "sve"}
)


class Processor(NamedTuple):
    """The kernel's description of the first core."""

    name: str
    vendor: str
    """`GenuineIntel`, `AuthenticAMD`; empty if the kernel names none, as on ARM."""
    instruction_sets: tuple[str, ...]
    """Those for vectors and matrices, by the kernel's names, sorted."""


@cache
def this_processor() -> Processor:
    """Return the processor of this machine from /proc/cpuinfo."""
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        return parse_cpuinfo("")


def parse_cpuinfo(text: str) -> Processor:
    """Parse the first core of the text of /proc/cpuinfo."""
    first: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    flags = (first.get("flags") or first.get("Features") or "").split()
    return Processor(
        first.get("model name") or platform.machine(), first.get("vendor_id", ""), tuple(sorted(_RELEVANT & set(flags)))
    )
