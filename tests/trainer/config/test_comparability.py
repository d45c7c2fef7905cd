from __future__ import annotations

import pytest

from trainer.config.comparability import differences, digest_for, digest_of, facts_of_metric

VALID = {
    **{"mlm_probability": "0.15", "mask_unit": "token", "seed": "0", "sequence_length": "128", "rows": "9"},
    **{"valid_split": "a" * 64, "tokenizer": "b" * 64, "words": "w", "minimal_pairs": "m", "suite.glue": "s"},
    **{"sentence_pairs": "next_sentence", "own": "rate 0.3", "task": "regression", "examples.test": "t"},
}


@pytest.mark.parametrize(
    ("metric", "fact"),
    [
        *(("valid/mlm_loss", name) for name in ("mlm_probability", "mask_unit", "seed", "sequence_length", "rows")),
        *(("valid/mlm_accuracy_top5", name) for name in ("valid_split", "tokenizer")),
        *(("valid/pair_accuracy", name) for name in ("mlm_probability", "sentence_pairs", "tokenizer")),
        ("valid/own_mlm_loss", "own"),
        ("valid/mlm_loss_at_30", "seed"),
        ("valid/bound_bits_per_byte", "rows"),
        ("valid/causal_loss", "rows"),
        ("valid/word_bits_per_byte", "words"),
        ("valid/minimal_pairs_accuracy", "minimal_pairs"),
        ("suite/glue/average", "suite.glue"),
        ("test/rmse", "examples.test"),
        ("test/rmse", "task"),
    ],
)
def test_a_score_compares_where_what_it_depends_on_is_equal(metric: str, fact: str) -> None:
    assert differences(metric, VALID, VALID) == []
    (different,) = differences(metric, VALID, VALID | {fact: "another"})
    assert f"evaluation.{fact} " in different and different.endswith(" and another")
    without = {name: value for name, value in VALID.items() if name != fact}
    assert differences(metric, without, VALID) and differences(metric, VALID, without)
    assert digest_for(metric, VALID) != digest_for(metric, VALID | {fact: "another"})


@pytest.mark.parametrize(
    ("metric", "fact"),
    [
        ("valid/mlm_loss", "own"),
        ("valid/mlm_loss", "sentence_pairs"),
        ("valid/mlm_loss_at_30", "mlm_probability"),
        ("valid/bound_bits_per_byte", "mask_unit"),
        ("valid/causal_loss", "mlm_probability"),
        ("valid/word_bits_per_byte", "tokenizer"),
        ("valid/word_bits_per_byte", "valid_split"),
        ("valid/minimal_pairs_accuracy", "tokenizer"),
        ("suite/glue/average", "suite.other"),
    ],
)
def test_settings_that_do_not_change_a_score_may_differ(metric: str, fact: str) -> None:
    assert differences(metric, VALID, VALID | {fact: "another"}) == []


def test_a_side_without_facts_is_named() -> None:
    assert differences("valid/mlm_loss", {}, VALID) == ["how the former was measured is not recorded"]
    assert differences("valid/mlm_loss", VALID, {}) == ["how the latter was measured is not recorded"]
    assert differences("valid/mlm_loss", {}, {}) == ["how the former and the latter was measured is not recorded"]


def test_facts_have_short_digits_in_tables() -> None:
    assert digest_of({}) == "-" and len(digest_of(VALID)) == 8
    assert digest_of(VALID) == digest_of(dict(reversed(VALID.items())))
    assert facts_of_metric("loss") == ()
