"""How much memory reading an input takes: read in a process of its own, which tells the most that it held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

_PROGRAM = """
import json, re, sys
from data_prep.config.preparation_config import DocumentSettings
from tests.support.reading import reader_of, units_of

path, settings = sys.argv[1], DocumentSettings(**json.loads(sys.argv[2]))
num_documents, dropped = 0, {}
for unit in units_of(path, settings, 1 << 24):
    reader = reader_of(unit, settings)
    num_documents += sum(1 for _ in reader)
    for reason, count in reader.dropped.items():
        dropped[reason] = dropped.get(reason, 0) + count
# Not ru_maxrss, which begins with what the parent held when it forked.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024
print(json.dumps([num_documents, dropped, peak]))
"""


class Reading(NamedTuple):
    """What came of reading a file, and the most bytes of memory that were held at once."""

    num_documents: int
    dropped: dict[str, int]
    peak_bytes: int


def read_in_a_process(path: Path, **settings: Any) -> Reading:
    """Read all documents of a file; `settings` are those of `DocumentSettings`."""
    command = [sys.executable, "-c", _PROGRAM, str(path), json.dumps(settings)]
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=repository)
    assert done.returncode == 0, done.stderr
    return Reading(*json.loads(done.stdout))
