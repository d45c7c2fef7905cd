"""Statistics: every figure of report and page is the one that the shards themselves give, counted another way."""

from __future__ import annotations

import hashlib
import html.parser
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from data_prep import Tokenizer, open_dataset
from data_prep.base.errors import UserError
from data_prep.dataset.data_card import data_card
from data_prep.documents.drops import Drop, by_summary
from data_prep.reports import plots
from data_prep.reports.page import read_samples, render_page, write_page
from data_prep.reports.plots import draw_plots
from data_prep.reports.stats import EXACT_LENGTHS, LengthHistogram, Statistics, read_statistics
from data_prep.reports.tables import stats_report
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.hostile_shards import NAMES, NUM_COPIES, NUM_EMPTY, write_hostile_shards
from tests.support.living_data_sets import records_of
from tests.support.preparations import normalized

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


class HostileShards:
    """The data set, its statistics, and what its tars hold, counted from decoded text and token data alone."""

    def __init__(self, folder: Path, texts: list[str]) -> None:
        self.folder, self.texts = folder, texts
        self.statistics: Statistics = read_statistics(str(folder))
        self.document_lengths: list[int] = []
        self.sentence_lengths: list[int] = []
        self.tokens: Counter[int] = Counter()
        self.by_source: list[Counter[str]] = [Counter() for _ in NAMES]
        tokenizer = Tokenizer.load(folder / "tokenizer")
        for path in sorted(folder.glob("*.tar")):
            for record in records_of(path):
                self.tokens.update(record.tokens.tolist())
                self.sentence_lengths.extend(np.diff([*record.sentences.tolist(), len(record.tokens)]).tolist())
                starts = record.documents.tolist()
                for start, stop, source in zip(
                    starts, [*starts[1:], len(record.tokens)], record.sources.tolist(), strict=True
                ):
                    text = tokenizer.decode(record.tokens[start:stop])
                    self.document_lengths.append(stop - start)
                    self.by_source[source].update(
                        documents=1, tokens=stop - start, words=len(text.split()), bytes=len(text.encode())
                    )


@pytest.fixture(scope="module")
def shards(small_tokenizer: Path, small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> HostileShards:
    folder = tmp_path_factory.mktemp("hostile") / "set"
    return HostileShards(folder, write_hostile_shards(folder, small_corpus, small_tokenizer))


class _Cells(html.parser.HTMLParser):
    """The rows of all tables of a page by the heading before them, unescaped; every element is closed in its turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.paragraphs: list[str] = []
        self._in_cell, self._open, self._heading = False, list[str](), ""
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "link", "object", "a", "form") and not any(
            name.startswith("on") for name, _ in attrs
        )
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)
        if tag in ("h1", "h2", "h3"):
            self._heading = ""
        if tag == "p":
            self.paragraphs.append("")
        if tag == "tr":
            self.rows.append([])
            self.tables.setdefault(self._heading, []).append(self.rows[-1])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self._in_cell = tag in ("td", "th", "bdi")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data
        if self._open and self._open[-1] in ("h1", "h2", "h3"):
            self._heading += data
        if self._open and self._open[-1] == "p":
            self.paragraphs[-1] += data


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The cells of each name in the first column of the tables below a heading."""
    return {name: cells for name, *cells in _Cells(page).tables[heading]}


def test_lengths_and_token_counts_are_those_of_the_token_data(shards: HostileShards) -> None:
    statistics = shards.statistics
    for histogram, values in (
        (statistics.document_lengths, shards.document_lengths),
        (statistics.sentence_lengths, shards.sentence_lengths),
    ):
        assert (histogram.num, histogram.sum) == (len(values), sum(values))
        assert (histogram.shortest, histogram.longest) == (min(values), max(values))
        assert histogram.percentile(50) == np.percentile(values, 50, method="inverted_cdf")
    assert {token: count for token, count in enumerate(statistics.token_counts.tolist()) if count} == shards.tokens


def test_sources_in_page_and_report_have_the_counts_of_their_documents(shards: HostileShards) -> None:
    page, report = render_page(shards.statistics, {}), list(stats_report(shards.statistics))
    rows, languages = rows_of(page, "Text and tokens by source"), rows_of(page, "Languages")
    for own, start in zip(shards.by_source, ("plain", "<script>alert(1)", "$\\frac{$ \\u202e\\x1b[31m"), strict=True):
        documents, tokens, words = (f"{own[key]:,}" for key in ("documents", "tokens", "words"))
        rates = [f"{own['tokens'] / own['words']:.3f}", f"{own['bytes'] / own['tokens']:.2f}"]
        cells = next(cells for name, cells in rows.items() if name.startswith(start))
        assert [cells[1], *cells[3:7]] == [documents, tokens, words, *rates]
        line = next(line for line in report if line.startswith(start))
        assert line.split()[-9:] == [cells[0], documents, cells[2], tokens, words, *rates, cells[7], "CC0-1.0"]
    english = Counter(shards.by_source[0]) + Counter(shards.by_source[1])
    assert [*languages["en"][:2], languages["en"][3]] == [
        "2", f"{english['documents']:,}", f"{english['tokens']:,}"
    ]  # fmt: skip
    assert languages["fr"][0] == "1"


def test_the_steps_count_every_document_that_the_shards_lack(shards: HostileShards) -> None:
    page = render_page(shards.statistics, {}, card=data_card(shards.statistics.manifest))
    rows, plain = (
        rows_of(page, "Steps of preparation"),
        _Cells(page).tables["Why documents were left out, step by step"],
    )
    cleaned = [normalized(text) for text in shards.texts]
    assert cleaned.count("") == NUM_EMPTY and len(cleaned) - len({*cleaned} - {""}) == NUM_EMPTY + NUM_COPIES
    num = len(shards.texts)
    assert rows["cleaning"] == [str(num), "2", str(num - 2), "2 empty"]
    assert rows["deduplication"] == [str(num - 2), "3", str(len(shards.document_lengths)), "3 duplicate"]
    assert [row[0] for row in plain] == ["#", "1", "2", "3", "4"]
    assert plain[2][1:] == ["cleaning the text", str(num), "2", str(num - 2), "has no text (2)"]
    assert plain[3][-1] == "has the same text as another document (3)"
    report = "\n".join(stats_report(shards.statistics))
    assert report.count("2 empty") == report.count("3 duplicate") == 1


def test_the_most_frequent_piece_comes_first_with_its_share(shards: HostileShards) -> None:
    (token, count), total = shards.tokens.most_common(1)[0], shards.tokens.total()
    piece, share = shards.statistics.pieces[token], f"{count / total:.2%}"
    assert rows_of(render_page(shards.statistics, {}), "Most frequent tokens")["1"] == [
        str(token),
        piece,
        f"{count:,}",
        share,
    ]
    report = list(stats_report(shards.statistics))
    assert any(line.startswith(f"most frequent tokens: {piece} {share}, ") for line in report)
    unused = len(shards.statistics.pieces) - len(shards.tokens)
    assert report[-1].endswith(f": {unused:,} of {len(shards.statistics.pieces):,}")


@pytest.mark.long
def test_text_of_the_corpus_is_escaped_in_terminal_and_page(shards: HostileShards) -> None:
    pictures = draw_plots(shards.statistics)
    report, card = "\n".join(stats_report(shards.statistics)), data_card(shards.statistics.manifest)
    page = render_page(shards.statistics, pictures, read_samples(str(shards.folder), shards.statistics.manifest), card)
    without_pictures, num = re.subn(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"', "", page)
    assert num == len(pictures) == 8
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt; &quot;&amp;" in page
    assert not re.search(r"https?:|//|src=|href=|url\(|@import", without_pictures)
    for text in (report, page):
        assert "\x1b" not in text and "\u202e" not in text


@pytest.mark.slow  # tests/data_prep/commands/test_stats.py draws those of two equal data sets
def test_plots_are_pictures_of_the_same_bytes_every_time(shards: HostileShards) -> None:
    pictures = draw_plots(shards.statistics)
    assert all(picture.startswith(PNG_MAGIC) and len(picture) > 4000 for picture in pictures.values())
    assert len(set(pictures.values())) == len(pictures)
    assert draw_plots(shards.statistics) == pictures


def test_a_page_is_written_to_a_local_or_remote_folder(shards: HostileShards, tmp_path: Path) -> None:
    pictures = {"one": PNG_MAGIC}
    for output in (str(tmp_path / "new" / "page"), "memory://stats-page/out"):
        page = write_page(output, shards.statistics, pictures)
        assert page == storage.join(output, "index.html")
        assert storage.list_names(output) == ["index.html", "one.png"]
        assert storage.read_bytes(page).decode() == render_page(shards.statistics, pictures)


def test_a_damaged_file_is_named(shards: HostileShards, tmp_path: Path) -> None:
    shutil.copytree(shards.folder, tmp_path, dirs_exist_ok=True)
    name = open_dataset(tmp_path).manifest.token_counts.name
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=name, check=coded("checksum-mismatch")):
        read_statistics(str(tmp_path))


def test_token_counts_that_lack_a_split_are_named(shards: HostileShards, tmp_path: Path) -> None:
    shutil.copytree(shards.folder, tmp_path, dirs_exist_ok=True)
    record = open_dataset(tmp_path).manifest.token_counts
    counts = safetensors.numpy.load_file(tmp_path / record.name)
    data = safetensors.numpy.save({"train": counts["train"]})
    (tmp_path / record.name).write_bytes(data)
    manifest = (tmp_path / "manifest.json").read_text(encoding="utf-8")
    manifest = manifest.replace(record.sha256, hashlib.sha256(data).hexdigest())
    (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    with pytest.raises(UserError, match=f"{record.name}.*valid", check=coded("damaged-counts")):
        read_statistics(str(tmp_path))


def test_sources_beyond_the_thirtieth_share_a_bar(shards: HostileShards, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[tuple[str, float]]] = []
    monkeypatch.setattr(plots, "_bars", lambda axes, bars, label: drawn.append(list(bars)))
    manifest = shards.statistics.manifest
    for number in (30, 31, 33):
        sources = tuple(
            manifest.sources[0].model_copy(update={"name": f"source {n:02}", "tokens": 1000 - n}) for n in range(number)
        )
        statistics = replace(shards.statistics, manifest=manifest.model_copy(update={"sources": sources}))
        plots._tokens_by_source(None, statistics)  # type: ignore[arg-type]
        *bars, last = drawn.pop()
        if number == 30:
            assert (len(bars), last) == (29, ("source 29", 971.0))
        else:
            others = range(30, number)
            assert (len(bars), last) == (30, (f"{len(others)} others", float(sum(1000 - n for n in others))))
        assert [name for name, _ in bars] == [f"source {n:02}" for n in range(len(bars))]


def test_long_and_rare_reasons_leave_room_for_the_bars(shards: HostileShards, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[tuple[str, float]]] = []
    monkeypatch.setattr(plots, "_bars", lambda axes, bars, label: drawn.append(list(bars)))
    manifest = shards.statistics.manifest
    reasons = {f"{'long ' * 30}{number:02}": number + 1 for number in range(42)}
    steps = {"filter 1 mine": reasons}
    source = manifest.sources[0].model_copy(
        update={"dropped": by_summary(Counter({Drop(s, r): n for s, of in steps.items() for r, n in of.items()}))}
    )
    sources = (source.model_copy(update={"dropped_by_step": steps}),)
    statistics = replace(shards.statistics, manifest=manifest.model_copy(update={"sources": sources}))
    plots._drop_reasons(None, statistics)  # type: ignore[arg-type]
    *bars, last = drawn.pop()
    assert last == ("2 others", 3.0) and [count for _, count in bars] == [float(number) for number in range(3, 43)]
    assert all(len(name) == 70 and name.startswith("filter 1 mine: long ") for name, _ in bars)
    assert [name[-2:] for name, _ in bars] == [f"{number:02}" for number in range(2, 42)]


def test_the_page_begins_with_what_was_kept_and_ends_with_the_card(shards: HostileShards) -> None:
    samples = read_samples(str(shards.folder), shards.statistics.manifest)
    assert [sample.source for sample in samples] == list(NAMES)
    texts = [normalized(text).strip() for text in shards.texts]
    for sample in samples:
        assert sample.text and any(text.startswith(sample.text) for text in texts)
        assert sample.is_cut == (sample.text not in texts)
    page = render_page(shards.statistics, {"one": PNG_MAGIC}, samples, data_card(shards.statistics.manifest))
    headings = (
        "came in",
        "What came in",
        "Why documents",
        "A document of each source",
        "<img",
        "Text and tokens",
        "card",
    )
    positions = [page.index(text) for text in headings]
    assert positions == sorted(positions) and f"{samples[0].document_id:016x}" in page
    assert page.count("<details>") == 2, "the most frequent tokens are many, and the card is folded"


@pytest.mark.long
def test_no_empty_plot_is_drawn(shards: HostileShards) -> None:
    manifest = shards.statistics.manifest
    source = manifest.sources[0].model_copy(update={"dropped": {}})
    split = manifest.train.model_copy(update={"shards": manifest.train.shards[:1]})
    none = manifest.valid.model_copy(update={"shards": ()})
    small = manifest.model_copy(update={"sources": (source,), "train": split, "valid": none})
    assert set(draw_plots(replace(shards.statistics, manifest=small))) == {
        "document-lengths",
        "sentence-lengths",
        "frequent-tokens",
        "token-frequencies",
    }


PERCENTS = (0, 0.1, 5, 25, 50, 75, 95, 99.9, 100)


def histogram_of(values: np.ndarray) -> LengthHistogram:
    histogram = LengthHistogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    return histogram


def test_a_case_checked_by_hand() -> None:
    histogram = histogram_of(np.array([3, 1, 4, 1, 5, 9, 2, 6], np.uint32))
    assert (histogram.num, histogram.sum, histogram.shortest, histogram.longest) == (8, 31, 1, 9)
    assert [histogram.percentile(percent) for percent in (0, 25, 50, 75, 100)] == [1, 1, 3, 5, 9]
    assert histogram.bins() == [(1, 1, 2), (2, 3, 2), (4, 7, 3), (8, 15, 1)]
    assert [low for low, _, _ in histogram.bins(2)] == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_exact_where_lengths_are_counted_one_by_one(seed: int) -> None:
    values = np.random.default_rng(seed).lognormal(5, 1.5, 20_001).astype(np.uint32).clip(1, EXACT_LENGTHS - 1)
    histogram = histogram_of(values)
    expected = np.percentile(values, PERCENTS, method="inverted_cdf").tolist()
    assert [histogram.percentile(percent) for percent in PERCENTS] == expected
    assert (histogram.num, histogram.mean) == (len(values), pytest.approx(values.mean()))


def test_longer_lengths_are_never_over_and_at_most_a_third_of_a_percent_under() -> None:
    values = np.random.default_rng(1).lognormal(13, 2, 10_001).astype(np.int64).clip(1)
    histogram = histogram_of(values)
    for percent in PERCENTS:
        expected = int(np.percentile(values, percent, method="inverted_cdf"))
        assert expected * 0.997 <= histogram.percentile(percent) <= expected
    assert histogram.longest == values.max() > EXACT_LENGTHS


@pytest.mark.parametrize("bins_per_octave", [1, 2, 4])
def test_every_length_is_in_exactly_one_bin(bins_per_octave: int) -> None:
    edges = [math.ceil(2 ** (power / 2)) for power in range(70)]
    values = np.array([value + step for value in edges for step in (-1, 0, 1) if value + step > 0], np.int64)
    bins = histogram_of(values).bins(bins_per_octave)
    assert sum(item.num for item in bins) == len(values)
    assert all(one.high + 1 == two.low for one, two in zip(bins, bins[1:], strict=False))
    for low, high, num in bins:
        assert num == ((low <= values) & (values <= high)).sum(), (low, high)


def test_an_empty_split_has_no_lengths() -> None:
    histogram = histogram_of(np.zeros(0, np.uint32))
    assert (histogram.num, histogram.mean, histogram.percentile(50), histogram.bins()) == (0, 0.0, 0, [])
