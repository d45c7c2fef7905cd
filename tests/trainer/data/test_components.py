"""Sources with weights and budgets are components of a mixture; their tokens are recounted over whole runs."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import prepare
from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.toy_run import stage_of
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.data.batch import IGNORED
from trainer.data.components import check_budgets, components_of
from trainer.data.loader import Loader, Position
from trainer.data.samples import row_settings
from trainer.data.shard_set import ShardSet

LENGTH, ROWS = 32, 64
STAGE = StageShape(steps=1, sequence_length=LENGTH, micro_batch_tokens=LENGTH * ROWS, global_batch_tokens=LENGTH * ROWS)
NAMES = ("wiki", "wiki", "web", "web", "books")
"""Source of each train shard."""


@pytest.fixture
def open_sources(tmp_path: Path, corpus_at: Callable[..., Any]) -> Callable[..., tuple[Any, ShardSet]]:
    """Opens a data set of three sources with these weights and budgets; also the corpus, which has the shard of ids."""

    def open_them(**bounds: dict[str, float]) -> tuple[Any, ShardSet]:
        generator = np.random.default_rng(1)
        shards = [[[int(n)] for n in generator.integers(20, 90, 1200)] for _ in NAMES]
        corpus = corpus_at(tmp_path, shards, valid=[[[9]]], sources=sorted(set(NAMES)))
        manifest = corpus.shard_set.manifest
        records = tuple(
            record.model_copy(update={"source": name})
            for record, name in zip(manifest.train.shards, NAMES, strict=True)
        )
        sources = tuple(each.model_copy(update=bounds.get(each.name, {})) for each in manifest.sources)
        train = manifest.train.model_copy(update={"shards": records})
        manifest = manifest.model_copy(update={"train": train, "sources": sources})
        return corpus, ShardSet(corpus.shard_set.url, manifest, tmp_path / "cache")

    return open_them


def natural_tokens(shard_set: ShardSet) -> dict[str, int]:
    records = shard_set.manifest.train.shards
    return {name: sum(record.tokens for record in records if record.source == name) for name in set(NAMES)}


def used_tokens(corpus: Any, shard_set: ShardSet, data: DataSettings, steps: int) -> dict[str, int]:
    """Tokens of each source in the batches of a run, by the id that every token has for itself."""
    loader = Loader([shard_set], stage_of(STAGE, data), Position(0, 0, 0), 0)
    counts: dict[str, int] = dict.fromkeys(NAMES, 0)
    for global_batch in itertools.islice(loader, steps):
        for batch in global_batch.micro_batches:
            ids = batch.input_ids.numpy().copy()
            labels = batch.labels.numpy()
            ids[batch.masked_positions.numpy()[labels != IGNORED]] = labels[labels != IGNORED]
            text = ids[ids >= corpus.first_id] - corpus.first_id
            for shard, number in enumerate(np.bincount(corpus.shard_of[text], minlength=len(NAMES)).tolist()):
                counts[NAMES[shard]] += number
    return counts


@pytest.mark.long
@pytest.mark.parametrize(
    ("bounds", "epochs"),
    [
        (
            {"wiki": {"epochs": 3.0}, "web": {"max_tokens": 30_000}, "books": {"epochs": 0.25}},
            {"wiki": 3.0, "web": 30_000, "books": 0.25},
        ),
        ({"wiki": {"epochs": 3.0, "max_tokens": 70_000}}, {"wiki": 70_000, "web": 1.0, "books": 1.0}),
    ],
)
def test_a_run_over_all_budgets_uses_each_source_by_its_own(
    open_sources: Callable[..., tuple[Any, ShardSet]], bounds: dict[str, Any], epochs: dict[str, float]
) -> None:
    corpus, shard_set = open_sources(**bounds)
    data = DataSettings(shards=shard_set.url, num_workers=0)
    components = components_of(data, [shard_set], row_settings(data, STAGE))
    natural = natural_tokens(shard_set)
    expected = {name: value * natural[name] if value < 100 else value for name, value in epochs.items()}
    # "All budgets together": the positions of every source, special tokens included, as often as it is used.
    tokens_per_position = sum(natural.values()) / (LENGTH * sum(_rows(component.shards) for component in components))
    steps = int(sum(expected.values()) / tokens_per_position / (LENGTH * ROWS))
    check_budgets([components], [steps * LENGTH * ROWS], LENGTH)
    used = used_tokens(corpus, shard_set, data, steps)
    for name, number in expected.items():
        assert used[name] == pytest.approx(number, rel=0.03), (used, expected)


@pytest.mark.long
def test_a_run_over_a_total_uses_each_source_as_the_yaml_says(small_tokenizer: Path, tmp_path: Path) -> None:
    """Wikipedia three times, the web deduplicated against it, and a total, from text to batches.

    Every source has words of its own, each one token, so the tokens of the batches name their source.
    """
    tokenizer = Tokenizer.load(small_tokenizer)
    words = [piece[1:] for piece in tokenizer.pieces if piece[1:].isascii() and piece[1:].isalpha()]
    words = [word for word in dict.fromkeys(words) if len(tokenizer.encode_text(word)) == 1]
    names = ("wikipedia", "web", "books")
    generator = random.Random(0)
    texts = {
        name: [" ".join(generator.choices(words[number::3], k=100)) for _ in range(size)]
        for number, (name, size) in enumerate(zip(names, (240, 1200, 300), strict=True))
    }
    texts["web"][:20] = texts["wikipedia"][:20]  # copies, which stay in the first source
    for name, lines in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    source = {name: {"name": name, "input": str(tmp_path / f"{name}.jsonl")} for name in names}
    total = 240_000  # two tables of the mixture
    config = {
        "sources": [source["wikipedia"] | {"epochs": 3}, source["web"], source["books"] | {"max_tokens": 24_000}],
        "total_tokens": total,
        "shards": {"valid_fraction": 0.1, "min_shards": 2},
    }
    dataset = prepare(config=config, tokenizer=tokenizer, output=tmp_path / "shards", num_workers=1)
    manifest = dataset.manifest
    natural = {name: sum(s.tokens for s in manifest.train.shards if s.source == name) for name in names}
    expected = {"wikipedia": 3 * natural["wikipedia"], "books": 24_000}
    expected["web"] = total - sum(expected.values())
    assert manifest.sources[1].dropped == {"duplicate": 20} and expected["web"] != natural["web"]
    shard_set = ShardSet(str(tmp_path / "shards"), manifest, tmp_path / "cache")
    data = DataSettings(shards=shard_set.url, num_workers=0)
    components = components_of(data, [shard_set], row_settings(data, STAGE))
    positions = sum(component.max_tokens or 0.0 for component in components)  # with special tokens
    steps = int(positions / (LENGTH * ROWS))
    check_budgets([components], [steps * LENGTH * ROWS], LENGTH)
    with pytest.raises(UserError, check=coded("source-budget-exceeded")):
        check_budgets([components], [int(positions * 1.05)], LENGTH)
    source_of = np.full(800, -1)
    for number in range(3):
        source_of[[tokenizer.encode_text(word)[0] for word in words[number::3]]] = number
    counts = np.zeros(3, np.int64)
    loader = Loader([shard_set], stage_of(STAGE, data), Position(0, 0, 0), 0)
    for global_batch in itertools.islice(loader, steps):
        for batch in global_batch.micro_batches:
            ids = batch.input_ids.numpy().copy()
            labels = batch.labels.numpy()
            ids[batch.masked_positions.numpy()[labels != IGNORED]] = labels[labels != IGNORED]
            counts += np.bincount(source_of[ids][source_of[ids] >= 0], minlength=3)
    used = dict(zip(names, counts.tolist(), strict=True))
    assert used == pytest.approx(expected, rel=0.03)
    assert sum(used.values()) == pytest.approx(total, rel=0.03)


@pytest.mark.long
def test_weights_are_shares_of_the_samples(open_sources: Callable[..., tuple[Any, ShardSet]]) -> None:
    corpus, shard_set = open_sources(wiki={"weight": 1.0}, web={"weight": 2.0}, books={"weight": 5.0})
    data = DataSettings(shards=shard_set.url, num_workers=0)
    used = used_tokens(corpus, shard_set, data, 64)  # a whole table of the mixture
    shares = {name: number / sum(used.values()) for name, number in used.items()}
    assert shares == pytest.approx({"wiki": 1 / 8, "web": 2 / 8, "books": 5 / 8}, rel=0.03)


@pytest.mark.long
def test_a_run_beyond_a_budget_is_refused_with_the_longest_one(
    open_sources: Callable[..., tuple[Any, ShardSet]],
) -> None:
    _, shard_set = open_sources(wiki={"epochs": 3.0})
    data = DataSettings(shards=shard_set.url)
    components = components_of(data, [shard_set], row_settings(data, STAGE))
    positions = sum(
        LENGTH * _rows(component.shards) * (3 if component.name == "wiki" else 1) for component in components
    )
    check_budgets([components], [positions], LENGTH)
    check_budgets([components] * 2, [positions // 2, positions // 2], LENGTH)
    with pytest.raises(UserError, check=coded("source-budget-exceeded"), match="wiki"):
        check_budgets([components], [2 * positions], LENGTH)
    with pytest.raises(UserError, check=coded("source-budget-exceeded"), match="wiki"):
        check_budgets([components] * 2, [positions, positions], LENGTH)  # two stages together


def test_a_data_set_without_budgets_is_one_component(corpus: Any) -> None:
    data = DataSettings(shards=corpus.shard_set.url)
    (component,) = components_of(data, [corpus.shard_set], row_settings(data, STAGE))
    assert len(component.shards) == 20 and component.max_tokens is None


@pytest.mark.long
def test_the_share_of_a_data_set_is_divided_among_its_sources(
    open_sources: Callable[..., tuple[Any, ShardSet]], corpus: Any
) -> None:
    _, shard_set = open_sources(wiki={"weight": 1.0}, web={"weight": 2.0}, books={"weight": 5.0})
    data = DataSettings(shards=[{"url": corpus.shard_set.url, "weight": 3}, {"url": shard_set.url, "weight": 1}])
    components = components_of(data, [corpus.shard_set, shard_set], row_settings(data, STAGE))
    assert [component.weight for component in components[:1]] == [3]
    assert {c.name: c.weight for c in components[1:]} == pytest.approx({"wiki": 1 / 8, "web": 2 / 8, "books": 5 / 8})


def _rows(shards: Any) -> int:
    from trainer.data.packing import num_document_rows

    return sum(num_document_rows(each.record.tokens, each.record.documents, LENGTH) for each in shards)
