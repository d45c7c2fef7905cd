from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.base.processor import Processor, parse_cpuinfo, this_processor

XEON = """processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Processor
flags		: fpu sse2 avx2 avx512f avx512bw avx512_bf16 amx_bf16 amx_tile
bugs		: spectre_v1

processor	: 1
vendor_id	: GenuineIntel
model name	: another
flags		: fpu
"""
ARM = """processor	: 0
BogoMIPS	: 243.75
Features	: fp asimd crc32 sve bf16
CPU implementer	: 0x41
"""


def test_the_description_is_read_from_the_first_core() -> None:
    sets = ("amx_bf16", "avx2", "avx512_bf16", "avx512f")
    assert parse_cpuinfo(XEON) == Processor("Intel(R) Xeon(R) Processor", "GenuineIntel", sets)
    arm = parse_cpuinfo(ARM)
    assert (arm.vendor, arm.instruction_sets) == ("", ("asimd", "bf16", "sve")) and arm.name


def test_a_machine_without_cpuinfo_has_no_instruction_sets() -> None:
    assert parse_cpuinfo("").instruction_sets == () and parse_cpuinfo("").name


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the kernel tells nothing")
def test_the_processor_of_this_machine_is_described() -> None:
    assert this_processor().instruction_sets
