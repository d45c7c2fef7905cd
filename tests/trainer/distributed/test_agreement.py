"""Ranks that state facts, share a folder, and lock it: differences are refused with the same text on every rank."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.storage.locks import IsHeld
from tests.support.threaded_ranks import ThreadedRanks
from trainer.checkpoint.writer import ALONE
from trainer.distributed import agreement
from trainer.distributed.agreement import Fact, Facts, RankCannotRun, RanksDiffer, agree, only_training, refuse_unshared
from trainer.distributed.exit import PrintedByEveryRank
from trainer.distributed.process_group import Ranks

HOST = socket.gethostname()
Outcome = tuple[str, int, list[str]]
"""The error of a rank ("" for none), its exit status, and what the rank was warned of."""


def fact(value: object) -> Fact:
    return Fact(str(value), str(value))


def facts(problem: UserError | None = None, **values: object) -> Facts:
    """`seed` and what else has to be equal; names that begin with `host_` may differ."""
    named = {name: fact(value) for name, value in values.items()}
    per_host = {name: each for name, each in named.items() if name.startswith("host_")}
    return Facts({name: each for name, each in named.items() if name not in per_host}, per_host, problem)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Facts]], list[Outcome]]:
    """What becomes of each rank, of as many as there are facts."""

    def run(stated: list[Facts]) -> list[Outcome]:
        def one(ranks: Ranks) -> Outcome:
            warnings: list[str] = []
            try:
                agree(stated[ranks.rank], ranks, warnings.append)
            except UserError as error:
                assert type(error) is UserError or isinstance(error, PrintedByEveryRank)
                return str(error), error.exit_status, warnings
            return "", 0, warnings

        return ThreadedRanks(len(stated), (agreement,), monkeypatch).run(one)

    return run


def test_equal_ranks_continue_and_exchange_nothing_but_digests(outcomes, monkeypatch):
    exchanged: list[bytes] = []
    gather = ThreadedRanks.gather_objects
    monkeypatch.setattr(
        ThreadedRanks,
        "gather_objects",
        lambda self, value, ranks: exchanged.append(value) or gather(self, value, ranks),
    )
    assert outcomes([facts(seed=1, name="x" * 9999, host_cache="/a")] * 3) == [("", 0, [])] * 3
    assert {len(each) for each in exchanged} == {64} and len(exchanged) == 3


def test_a_difference_is_refused_on_every_rank_with_name_values_ranks_and_host(outcomes):
    stated = [facts(seed=1, stage=2), facts(seed=1, stage=2), facts(seed=8, stage=2), facts(seed=8, stage=2)]
    (text, status, _), *others = outcomes(stated)
    assert text.startswith(
        f"the ranks do not run the same job: seed is 1 on rank 0 ({HOST}) and 1 more rank and 8 on rank 2 ({HOST}) "
        "and 1 more rank. Fix: "
    )
    assert status == UsageError.exit_status == 2 and others == [(text, status, [])] * 3
    assert issubclass(RanksDiffer, PrintedByEveryRank) and issubclass(RankCannotRun, PrintedByEveryRank)


def test_each_name_that_differs_is_reported_with_its_own_groups_of_ranks(outcomes):
    text, _, _ = outcomes([facts(a=1, b=1, c=1), facts(a=2, b=1, c=1), facts(a=2, b=3, c=1)])[0]
    assert f"a is 1 on rank 0 ({HOST}) and 2 on rank 1 ({HOST}) and 1 more rank; b is 1 on rank 0 ({HOST})" in text
    assert "c is" not in text


def test_a_name_that_a_rank_does_not_have_is_not_set_there(outcomes):
    assert f"b is not set on rank 0 ({HOST}) and 1 on rank 1" in outcomes([facts(a=1), facts(a=1, b=1)])[0][0]


def test_values_that_are_shown_alike_differ_all_the_same(outcomes):
    hidden = [Facts({"uri": Fact(value, "(hidden)")}, {}) for value in ("secret one", "secret two")]
    for text, status, _ in outcomes(hidden):
        assert "uri is (hidden) on rank 0" in text and "secret" not in text and status == 2


def test_permitted_differences_between_hosts_are_warnings_of_the_first_rank(outcomes):
    (error, _, (warning,)), second = outcomes([facts(seed=1, host_cache="/a"), facts(seed=1, host_cache="/b")])
    assert error == "" and second == ("", 0, [])
    assert f"host_cache is /a on rank 0 ({HOST}) and /b on rank 1 ({HOST})" in warning


def test_permitted_differences_hide_no_relevant_one(outcomes):
    stated = [facts(seed=int(rank == 19), host_cache=rank) for rank in range(20)]
    told = outcomes(stated)
    assert {status for _, status, _ in told} == {2}
    assert f"seed is 0 on rank 0 ({HOST}) and 18 more ranks and 1 on rank 19" in told[0][0]


def test_few_ranks_are_named_where_all_differ(outcomes):
    told = outcomes([facts(**{f"n{number}": rank for number in range(30)}) for rank in range(20)])
    assert len({text for text, _, _ in told}) == 1
    assert "n11 is 0 on rank 0" in told[0][0] and "n12 is" not in told[0][0] and "; and 18 more" in told[0][0]


def test_a_problem_of_one_rank_ends_all_with_its_status_and_its_rank(outcomes):
    class Missing(UserError):
        exit_status = 7

    stated = [facts(seed=1, data="x"), facts(Missing("shards are not there"), seed=1)]
    assert outcomes(stated) == [(f"rank 1 ({HOST}): shards are not there", 7, [])] * 2


def test_a_problem_of_a_rank_that_otherwise_states_the_same_is_no_agreement(outcomes):
    stated = [facts(UserError("too little memory"), seed=1), facts(seed=1)]
    assert outcomes(stated) == [(f"rank 0 ({HOST}): too little memory", 1, [])] * 2


def test_a_difference_in_the_settings_is_reported_rather_than_the_problem_that_follows_from_it(outcomes):
    stated = [facts(precision="fp32", data="x"), facts(UsageError("fp16 needs CUDA"), precision="fp16")]
    for text, _, _ in outcomes(stated):
        assert "precision is fp32 on rank 0" in text and "data" not in text.partition("Fix:")[0] and "CUDA" not in text


def test_a_setting_that_only_the_rank_with_the_problem_has_is_reported_rather_than_its_problem(outcomes):
    stated = [facts(a=1, data="x"), facts(UsageError("b contradicts a"), a=1, b=2)]
    text, _, _ = outcomes(stated)[0]
    assert (
        f"b is not set on rank 0 ({HOST}) and 2 on rank 1 ({HOST})" in text and "data" not in text.partition("Fix")[0]
    )


def test_a_problem_of_all_ranks_is_each_ranks_own(outcomes):
    same = [facts(UserError("no manifest"), seed=1)] * 2
    assert outcomes(same) == [("no manifest", 1, [])] * 2
    own = [facts(UserError(f"no manifest in {folder}"), seed=1) for folder in ("a", "b")]
    assert outcomes(own) == [("no manifest in a", 1, []), ("no manifest in b", 1, [])]


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch):
    """Each rank's message where rank N has folder N under the name of the output directory; "" where it goes on."""

    def run(*folders: Path, patience: float = 0.3) -> list[tuple[str, int]]:
        monkeypatch.setattr(agreement, "PATIENCE_SECONDS", patience)

        def one(ranks: Ranks) -> tuple[str, int]:
            try:
                refuse_unshared(str(folders[ranks.rank]), ranks)
            except UserError as error:
                assert isinstance(error, PrintedByEveryRank) or "cannot be written" in str(error)
                return str(error).replace(str(folders[ranks.rank]), "HERE", 1), error.exit_status
            return "", 0

        return ThreadedRanks(len(folders), (agreement,), monkeypatch).run(one)

    return run


def test_one_folder_is_seen_by_all_and_nothing_is_left_in_it(refusals, tmp_path):
    assert refusals(tmp_path, tmp_path, tmp_path) == [("", 0)] * 3
    assert os.listdir(tmp_path) == []


def test_folders_of_their_own_are_refused_on_all_ranks_with_host_and_path_and_nothing_is_left(
    refusals, tmp_path, monkeypatch
):
    monkeypatch.setattr("socket.gethostname", lambda: f"host-of-{threading.current_thread().name[-1]}")
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    told = refusals(mine, mine, other, other)
    assert len(set(told)) == 1 and told[0][1] == 2
    text = told[0][0]
    assert text.startswith("output_dir=HERE is not a directory that all hosts share: rank 0 (host-of-")
    assert f"wrote a file into {mine}, and rank 2 (host-of-" in text and "rank 3 (host-of-" in text
    assert f"cannot access it in {other} (No such file or directory)" in text and "rank 1" not in text
    assert "Fix: mount one directory" in text and "checkpoint.upload_to" in text
    assert os.listdir(mine) == os.listdir(other) == []


def test_the_one_of_many_hosts_that_does_not_see_it_is_found(refusals, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: threading.current_thread().name)
    (tmp_path / "shared").mkdir()
    told = refusals(*[tmp_path / "shared"] * 11, tmp_path / "missing")
    assert {status for _, status in told} == {2} and "and rank 11 (" in told[0][0]


def test_a_file_that_another_host_sees_late_is_waited_for(refusals, tmp_path):
    shared, late = tmp_path / "shared", tmp_path / "late"
    shared.mkdir()
    timer = threading.Timer(0.6, lambda: late.symlink_to(shared))
    timer.start()
    assert refusals(shared, late, patience=60) == [("", 0)] * 2
    timer.join()


def test_files_of_a_killed_start_are_removed_and_do_not_count(refusals, tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        (folder / f"{agreement.PREFIX}abc").write_text("abc")
    assert [status for _, status in refusals(mine, other)] == [2, 2]
    assert os.listdir(mine) == [] and os.listdir(other) == [f"{agreement.PREFIX}abc"]


def test_a_folder_that_the_first_rank_cannot_write_is_reported_on_all_at_once(refusals, tmp_path):
    (tmp_path / "file").touch()
    told = refusals(tmp_path / "file", tmp_path, patience=600)
    assert [status for _, status in told] == [1, 1] and "cannot be written (Not a directory)" in told[0][0]
    assert "cannot be written (Not a directory)" in told[1][0]


def test_a_rank_alone_writes_nothing(tmp_path):
    refuse_unshared(str(tmp_path / "missing"), ALONE)
    assert os.listdir(tmp_path) == []


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LOCK_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(agreement, "LOCK_LOOK_SECONDS", 0.1)


def be_told_nothing(doing: str) -> None:
    pytest.fail(f"nobody waits: {doing}")


def test_a_second_run_in_one_folder_is_refused_on_all_ranks_and_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marks: list[str] = []

    def second(ranks: Ranks) -> str:
        with pytest.raises(UserError) as refused, only_training(str(tmp_path / "run"), ranks, marks.append):
            pytest.fail("both train")
        return str(refused.value)

    with only_training(str(tmp_path / "run"), ALONE, be_told_nothing):
        before = os.listdir(tmp_path / "run")
        nodes = ThreadedRanks(2, (agreement,), monkeypatch)
        (told, told_to_the_other) = nodes.run(second)
        assert os.listdir(tmp_path / "run") == before
    assert told == told_to_the_other and f"(process {os.getpid()} on " in told
    assert f" {tmp_path}/run" in told
    assert f"if no run works there, remove {tmp_path}/run/.lock" in told
    assert len(marks) == 2 * 2, "the watchdog of each rank sees that it waits"
    assert capsys.readouterr().err.count("waiting up to 0.2 s") == 1


@pytest.mark.parametrize(("host", "status"), [("here", 1), ("another", 76)])
def test_a_job_held_by_another_host_is_retried(
    host: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(ranks: Ranks) -> int:
        with pytest.raises(IsHeld) as refused, only_training(str(tmp_path), ranks, lambda doing: None):
            pytest.fail("both train")
        return pickle.loads(pickle.dumps(refused.value)).exit_status

    monkeypatch.setattr("socket.gethostname", lambda: host)
    with only_training(str(tmp_path), ALONE, be_told_nothing):
        monkeypatch.setattr("socket.gethostname", lambda: "here")
        assert ThreadedRanks(2, (agreement,), monkeypatch).run(second) == [status, status]


def test_the_next_training_waits_for_one_that_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LOCK_PATIENCE_SECONDS", 20)
    waits, trained = threading.Event(), []

    def next_one() -> None:
        with only_training(str(tmp_path), ALONE, lambda doing: waits.set()):
            trained.append("the next")

    thread = threading.Thread(target=next_one)
    with only_training(str(tmp_path), ALONE, be_told_nothing):
        thread.start()
        assert waits.wait(10) and trained == []
    thread.join(10)
    assert trained == ["the next"]


def test_other_folders_hinder_none_and_an_ended_training_leaves_no_lock(tmp_path: Path) -> None:
    for _ in range(2):
        one, other = tmp_path / "one", tmp_path / "other"
        with only_training(str(one), ALONE, be_told_nothing), only_training(str(other), ALONE, be_told_nothing):
            (one / "status.json").touch()
        assert os.listdir(one) == ["status.json"] and not other.exists()


def test_a_refused_run_leaves_no_folder_and_removes_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for output_dir in (tmp_path / "empty", tmp_path / "new" / "run"):
        with pytest.raises(UserError, match="too bad"), only_training(str(output_dir), ALONE, be_told_nothing):
            raise UserError("too bad")
    assert os.listdir(tmp_path) == ["empty"]


def test_a_folder_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be written"),
        only_training(str(tmp_path / "file"), ALONE, be_told_nothing),
    ):
        pytest.fail("it trains")
