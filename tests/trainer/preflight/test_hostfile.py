from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from trainer.preflight.hostfile import read_hostfile


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "lists no host"), ("one slots=two", "line 1"), ("one slots=2\none slots=2", "line 2"), ("one", "line 1")],
)
def test_a_hostfile_that_the_launcher_would_misread_is_refused(text, said, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_hostfile(str(tmp_path / "hosts"))


def test_a_missing_hostfile_is_refused(tmp_path):
    with pytest.raises(UsageError, check=coded("missing-hostfile")):
        read_hostfile(str(tmp_path / "none"))


def test_hosts_keep_their_order_and_comments_go(tmp_path):
    (tmp_path / "hosts").write_text(
        "# nodes\none slots=2\n\nme@two.example.org slots=8 # the big one\n10.0.0.7 slots=1\n"
    )
    hosts = read_hostfile(str(tmp_path / "hosts"))
    assert list(hosts.items()) == [("one", 2), ("me@two.example.org", 8), ("10.0.0.7", 1)]


@pytest.mark.fault(
    row="48",
    fault="shell metacharacters and ssh options as host names of a hostfile",
    required="refused with the line; nothing is run",
)
@pytest.mark.parametrize(
    "name", ["-oProxyCommand=touch${IFS}x", "$(touch${IFS}x)", "a;b", "`x`", "n[1-4]", "a@b@c", "%h", "-x"]
)
def test_a_name_that_a_shell_ssh_or_pdsh_would_read_otherwise_is_refused(name, tmp_path):
    (tmp_path / "hosts").write_text(f"one slots=1\n{name} slots=1\n")
    with pytest.raises(UsageError, match="line 2", check=coded("invalid-hostfile")):
        read_hostfile(str(tmp_path / "hosts"))
