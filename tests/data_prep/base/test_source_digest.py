"""Digests of functions: a change of what a function does changes the digest, wherever the change is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from data_prep.base.source_digest import function_digest


@pytest.mark.parametrize(
    "source",
    [
        "def keep(d): return {0}",
        "LIMIT = {0}\ndef keep(d): return [LIMIT for word in d]",
        "def used(w): return {0}\ndef keep(d): return any(used(word) for word in d)",
        "LIMIT = {0}\ndef keep(d):\n    def inner(): return LIMIT\n    return inner()",
        "A = lambda d: {0}\nB = lambda d: 5\ndef keep(d): return B(d) or A(d)",
        "import functools\n@functools.lru_cache\ndef used(w): return {0}\ndef keep(d): return used(d)",
        "import functools\ndef wrapping(f):\n    @functools.wraps(f)\n    def inner(d): return {0}\n    return inner\n"
        "@wrapping\ndef keep(d): return None",
        "class Base:\n    def __call__(self, d): return {0}\nclass keep(Base): ...",
        "def used(): return {0}\nclass keep:\n    @staticmethod\n    def s(): return used()\n"
        "    def __call__(self, d): return self.s()",
        "def used(): return {0}\nclass keep:\n    @property\n    def p(self): return used()\n"
        "    def __call__(self, d): return self.p",
        "LIMIT = {0}\nclass keep:\n    limit = LIMIT\n    def __call__(self, d): return self.limit",
        "LIMIT = {0}\nfrom dataclasses import dataclass\n@dataclass\nclass keep:\n    limit: int = 1\n"
        "    def __call__(self, d): return self.limit + LIMIT",
    ],
)
def test_a_change_of_what_is_used_changes_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for number in (1, 2, 1):
        (tmp_path / "own_keep.py").write_text(source.format(number) + "\n")
        sys.modules.pop("own_keep", None)
        importlib.invalidate_caches()
        importlib.import_module("linecache").checkcache()
        digests.append(function_digest(importlib.import_module("own_keep").keep))
    monkeypatch.delitem(sys.modules, "own_keep")
    assert None not in digests and digests[0] == digests[2] != digests[1]
