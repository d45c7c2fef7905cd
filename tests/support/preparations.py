"""How tests make data sets: the one place that knows how text is configured, planned and prepared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import Tokenizer, open_dataset, prepare, train_tokenizer
from data_prep.api.configuration import resolve_config
from data_prep.config.preparation_config import FilterSettings, PreparationConfig
from data_prep.dataset.manifest import Manifest as Manifest
from data_prep.dataset.manifest_records import InputRecord, read_inputs
from data_prep.executors.executors import Executor
from data_prep.filters import registry
from data_prep.filters.registry import Step as Step
from data_prep.filters.registry import described_filters, fingerprint_of
from data_prep.filters.registry import filter_settings as filter_settings
from data_prep.filters.registry import load_filters as load_filters
from data_prep.pipeline import preparation
from data_prep.pipeline.encoding import document_id
from data_prep.pipeline.plan import Plan, make_plan
from data_prep.pipeline.units import ShardRange
from data_prep.text.cleaning import Normalization, normalize
from tests.support.references import clean_paragraphs

NORMALIZATION = Normalization()
"""That is the default."""
NAMING_INPUTS = [".stamps.json", "DATA_CARD.md", "inputs-000001.jsonl", "manifest.json"]
"""Files of a data set that are others where the same documents come from other files."""
Inputs = str | Path | Sequence[str | Path] | Mapping[str, Any]
"""The files of one source, or the files or settings of every source by its name."""


def read_texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """A JSONL file of the texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def normalized(text: str, normalization: Normalization = NORMALIZATION) -> str:
    """The text under a normalization, such as that of a tokenizer, or under the default."""
    return normalize(text, normalization)


def paragraphs_of(text: str, normalization: Normalization = NORMALIZATION) -> list[str]:
    """The paragraphs of a text that are prepared, under a normalization or the default."""
    return clean_paragraphs(text, normalization)


def id_of(text: str) -> int:
    """Its document id."""
    return document_id(normalized(text))


def trained(texts: Iterable[str], folder: Path, **settings: Any) -> Tokenizer:
    """Train a tokenizer on the texts; settings are those of `tokenizer`, such as vocab_size=800."""
    with tempfile.TemporaryDirectory() as work:
        corpus = write_texts(Path(work) / "corpus.jsonl", texts)
        return train_tokenizer(corpus, output=folder, config={"tokenizer": settings}, num_workers=1, fresh=True)


def filter_step(entry: Any, **parameters: Any) -> Step:
    """A filter that is ready to judge documents, by its name or its entry in a configuration."""
    (step,) = load_filters([filter_settings(entry, **parameters)])
    return step


def forget_filters() -> None:
    """Load filters again when they are used next, as another process would."""
    registry._steps.clear()


def filters_fingerprint(entries: Sequence[FilterSettings]) -> str:
    """Of the filters as they are now, which a worker compares."""
    return fingerprint_of(described_filters(entries))


def filter_identity(entry: Any, **parameters: Any) -> Mapping[str, Any]:
    """What the manifest says of a filter."""
    (described,) = described_filters([filter_settings(entry, **parameters)])
    return described


def config_of(inputs: Inputs, *overrides: str, **sections: Any) -> PreparationConfig:
    """As `prepare` would make it; sections are shards={"min_shards": 2}, deduplication=... and so on."""
    return resolve_config(sections, overrides=overrides, **_given(inputs))


def prepared(
    inputs: Inputs,
    tokenizer: str | Path | Tokenizer,
    output: str | Path,
    *overrides: str,
    num_workers: int = 1,
    fresh: bool = False,
    add: bool = False,
    **sections: Any,
) -> Manifest:
    """Make the data set with `data_prep.prepare`, or with `add` add to it, under its own filters or others."""
    where = {"add_to": output, "allow_other_filters": True} if add else {"output": output}
    options = {"num_workers": num_workers, "fresh": fresh, "overrides": overrides, "config": sections}
    return prepare(tokenizer=tokenizer, **where, **options, **_given(inputs)).manifest


@dataclass(frozen=True)
class Planned:
    """A preparation whose inputs are found and divided: to be made as a whole or in ranges."""

    plan: Plan
    tokenizer: Tokenizer

    def make(self, output: str | Path, executor: Executor | int = 1, fresh: bool = False) -> Manifest:
        return preparation.prepare_shards(self.plan, self.tokenizer, str(output), executor, fresh)[0]

    def make_range(self, number: int, num_ranges: int, output: str | Path) -> bool:
        """Returns whether there was work to do."""
        shard_range = ShardRange(number, num_ranges)
        return preparation.map_range(self.plan, self.tokenizer, str(output), 1, shard_range)

    def merge(self, output: str | Path, executor: Executor | int = 1) -> bool:
        """Returns whether there was work to do."""
        return preparation.merge_ranges(self.plan, self.tokenizer, str(output), executor)[1]


def planned(
    inputs: Inputs | PreparationConfig,
    tokenizer: str | Path | Tokenizer,
    *overrides: str,
    parent: str | Path | Manifest | None = None,
    **sections: Any,
) -> Planned:
    """A preparation, or an addition to the data set `parent`, that is yet to be made."""
    config = inputs if isinstance(inputs, PreparationConfig) else config_of(inputs, *overrides, **sections)
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    known = open_dataset(parent).manifest if isinstance(parent, (str, Path)) else parent
    return Planned(make_plan(config, loaded, known), loaded)


def inputs_of(output: str | Path) -> list[InputRecord]:
    """The inputs of a data set, as the files that its manifest names list them."""
    return list(read_inputs(str(output), open_dataset(output).manifest.inputs))


def _given(inputs: Inputs) -> dict[str, Any]:
    if not isinstance(inputs, Mapping):
        return {"inputs": inputs}
    named = {name: each if isinstance(each, Mapping) else {"input": each} for name, each in inputs.items()}
    files = {name: each["input"] for name, each in named.items()}
    paths = {name: str(each) if isinstance(each, (str, Path)) else list(map(str, each)) for name, each in files.items()}
    return {"sources": [{**each, "name": name, "input": paths[name]} for name, each in named.items()]}
