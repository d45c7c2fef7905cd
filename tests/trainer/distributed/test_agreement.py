"""Ranks that state facts: equal ones go on, different ones are refused with the same text on every rank."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support.threaded_ranks import ThreadedRanks
from trainer.distributed import agreement
from trainer.distributed.agreement import Fact, Facts, RankCannotRun, RanksDiffer, agree
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
