"""Minimal pairs: files, masked copies, accuracies, and minicons as an independent implementation."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import write_byte_level, write_wordpiece
from trainer.data.minimal_pairs import (
    EncodedPairs,
    EncodedSentence,
    MaskedCopies,
    MinimalPair,
    as_json,
    judge,
    pair_scores,
    read_minimal_pairs,
    report_lines,
)
from trainer.evaluation.masked_scorers import PretrainingScorer, SentenceEncoder, TransformersScorer, scorer_of
from trainer.inference.checkpoint_model import load_checkpoint
from trainer.inference.fill_mask import FillMask

MASK = 4
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "v1"
TEXTS = ("The cats sleep.", "The cats sleeps.", "A checkpoint is written [SEP] once", "x", "caf\u00e9 \u6f22\u5b57!")


def pair(good: str, bad: str, paradigm: str = "p", field: str = "f") -> MinimalPair:
    return MinimalPair(good, bad, paradigm, field, "file, line 1")


def test_a_pair_is_a_line_of_either_kind_of_file(tmp_path: Path) -> None:
    line = {"sentence_good": "a b", "sentence_bad": "b a", "UID": "order", "field": "syntax"}
    (tmp_path / "one.jsonl").write_text(json.dumps(line) + "\n\n")
    bare = {"sentence_good": "c", "sentence_bad": "d", "other": [1], "field": None}
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(json.dumps(bare).encode()))
    (tmp_path / "three.jsonl").write_text(json.dumps(bare | {"UID": 7}))
    (tmp_path / "README.md").write_text("not a pair")
    first, numbered, second = read_minimal_pairs(str(tmp_path))
    assert first[:4] == ("a b", "b a", "order", "syntax")
    assert second[:4] == ("c", "d", "two", "") and numbered[:4] == ("c", "d", "7", "")
    assert read_minimal_pairs(tmp_path / "one.jsonl") == [first]


def test_files_of_other_systems_and_of_subdirectories_are_read(tmp_path: Path) -> None:
    """A byte order mark, CRLF, text beyond the BMP, and files of one name in two directories; hidden files are not."""
    line = json.dumps({"sentence_good": "naïve 漢字 🙂", "sentence_bad": "b"}, ensure_ascii=False)
    for folder in ("a", "b", ".hidden"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n{line}\r\n".encode())
    (tmp_path / "a" / "._one.jsonl").write_bytes(b"\x00\x05\x16")
    found = read_minimal_pairs(tmp_path)
    assert [each.paradigm for each in found] == ["a/one", "a/one", "b/one", "b/one"]
    assert {each.good for each in found} == {"naïve 漢字 🙂"} and found[1].location.endswith("line 2")
    assert {each.field for each in found} == {""}


def test_overall_counts_pairs_and_the_mean_counts_paradigms() -> None:
    pairs = [pair("a", "b", "p")] * 3 + [pair("a", "b", "q")]
    report = judge(pairs, np.array([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [1.0, 1.0]]))
    assert (report.overall.share, report.mean_of_paradigms) == (0.75, 0.5)
    assert any("mean of the paradigms is 50.00%" in line for line in report_lines(report))
    assert as_json(pairs, np.zeros((4, 2)), report)["mean_of_paradigms"] == 0.5
    table = list(report_lines(judge([pair("a", "b", "p\x1b[2J")], np.zeros((1, 2)))))
    assert any(line.startswith(r"p\x1b[2J ") for line in table), "a paradigm's name cannot control a terminal"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"sentence_good": "a", "sentence_bad": "b"}\n{"sentence_good": "a"}', "line 2: sentence_bad"),
        ("a.jsonl", b'{"sentence_good": "a", "sentence_bad": " "}', "line 1: sentence_bad"),
        ("a.jsonl", b'{"sentence_good": 3, "sentence_bad": "b"}', r"line 1: sentence_good must be a sentence \(3\)"),
        ("a.jsonl", b"[]", "line 1: not a JSON object"),
        ("a.jsonl", rb'{"sentence_good": "a \ud800", "sentence_bad": "b"}', "line 1: a text holds half a surrogate"),
        ("a.jsonl", rb'{"sentence_good": "a", "sentence_bad": "b", "UID": "\udc00"}', "line 1: a text holds half"),
        ("a.jsonl", b"\xff{", "line 1: not valid JSON"),
        ("a.jsonl", b"\n", "no minimal pair"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"x" * 100, mtime=0)[:-12], "a.jsonl.gz cannot be read"),
        ("a.txt", b"", "no .jsonl"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_minimal_pairs(tmp_path)


def test_a_path_that_does_not_exist_is_said_not_to_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=coded("no-minimal-pairs")):
        read_minimal_pairs(tmp_path / "none")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), most=st.integers(1, 9))
def test_every_own_token_is_masked_once_and_nothing_else_changes(lengths: list[int], most: int) -> None:
    sentences = [
        EncodedSentence(np.array([2, *range(10 * n + 10, 10 * n + 10 + length), 3]), np.arange(1, length + 1))
        for n, length in enumerate(lengths)
    ]
    pairs = [pair(str(number), str(len(lengths) - 1 - number)) for number in range(len(lengths))]
    encoded = EncodedPairs.encode(pairs, lambda text: sentences[int(text)], MASK, 11)
    texts = list(dict.fromkeys(text for each in pairs for text in each[:2]))
    seen = []
    for first, stop in encoded.batches(lambda length: most):
        assert stop - first <= most
        copies = encoded.copies(first, stop)
        for text, ids, position, target in zip(
            [texts[number] for number in encoded.owners[first:stop]], *copies, strict=True
        ):
            owner = int(text)
            expected = sentences[owner].ids.copy()
            assert target == expected[position]
            expected[position] = MASK
            assert ids.tolist() == expected.tolist()
            seen.append((owner, position))
    assert sorted(seen) == [(n, p) for n, length in enumerate(lengths) for p in range(1, length + 1)]


def counting_scorer(copies: MaskedCopies) -> np.ndarray:
    """-1 nat for each unit of the masked token's id."""
    return -copies.targets.astype(np.float64)


def letters(text: str) -> EncodedSentence:
    ids = [2, *(ord(character) - 96 for character in text), 3]
    return EncodedSentence(np.array(ids), np.arange(1, len(ids) - 1))


def test_a_score_is_the_sum_over_the_sentence() -> None:
    pairs = [pair("ab", "abc"), pair("c", "ab")]
    encoded = EncodedPairs.encode(pairs, letters, MASK, 10)
    assert (len(encoded.sentences), encoded.num_copies) == (3, 6), "a sentence that occurs twice is encoded once"
    scores = pair_scores(encoded, counting_scorer)
    assert scores.tolist() == [[-3.0, -6.0], [-3.0, -3.0]]


def test_a_sentence_without_token_or_too_long_and_a_score_that_is_not_finite_are_refused() -> None:
    """A sum over no token would be 0, above every score."""
    with pytest.raises(UserError, match="line 1: ", check=coded("text-without-token")):
        EncodedPairs.encode([pair("ab", "")], letters, MASK, 4)
    with pytest.raises(UserError, match="line 1: .* 5 tokens.* 4", check=coded("text-too-long")):
        EncodedPairs.encode([pair("ab", "abc")], letters, MASK, 4)
    encoded = EncodedPairs.encode([pair("ab", "c")], letters, MASK, 9)
    with pytest.raises(UserError, match="'ab'", check=coded("weights-not-finite")):
        pair_scores(encoded, lambda copies: np.where(copies.targets == 2, np.nan, 0.0))


def test_a_tie_is_wrong_and_groups_are_counted_apart() -> None:
    pairs = [pair("a", "b", "p"), pair("a", "b", "p"), pair("a", "b", "q", ""), pair("a", "b", "q", "")]
    report = judge(pairs, np.array([[2.0, 1.0], [1.0, 1.0], [1.0, 2.0], [3.0, 1.0]]))
    assert (report.overall.share, report.overall.num_ties) == (0.5, 1)
    assert {name: each.share for name, each in report.paradigms.items()} == {"p": 0.5, "q": 0.5}
    assert list(report.fields) == ["f"]
    values = as_json(pairs, np.zeros((4, 2)), report)
    assert (values["overall"], values["paradigms"], values["fields"]) == (0.5, {"p": 0.5, "q": 0.5}, {"f": 0.5})
    assert len(values["pairs"]) == 4
    assert any(line.startswith("overall") and " 50.00 " in line for line in report_lines(report))


@pytest.mark.long
def test_the_interval_is_that_of_resampled_pairs() -> None:
    """Against a plain bootstrap that draws pairs; the bounds of 10,000 resamples vary by less than a pair's share."""
    generator = np.random.default_rng(1)
    right = generator.random(400) < 0.7
    pairs = [pair("a", "b", "p" if number < 100 else "q") for number in range(400)]
    found = judge(pairs, np.stack([right, np.full(400, 0.5)], axis=1)).overall
    groups = (right[:100], right[100:])
    drawn = [sum(generator.choice(group, len(group)).sum() for group in groups) / 400 for _ in range(10_000)]
    assert [found.low, found.high] == pytest.approx(np.quantile(drawn, (0.025, 0.975)).tolist(), abs=1 / 400)


@pytest.fixture(scope="module")
def exported() -> FillMask:
    return FillMask.load(GOLDEN / "export")


def scores_of(model: FillMask, pairs: list[MinimalPair], dtype: torch.dtype = torch.float32) -> np.ndarray:
    scorer, tokenizer = scorer_of(model, torch.device("cpu"), dtype), model.tokenizer
    encoded = EncodedPairs.encode(pairs, SentenceEncoder(tokenizer), tokenizer.mask_token_id, model.max_length)
    return pair_scores(encoded, scorer)


def test_only_the_sentence_itself_is_masked(exported: FillMask) -> None:
    """The tokenizer's [CLS] and [SEP] are not; a "[SEP]" in the text is text."""
    found = SentenceEncoder(exported.tokenizer)("a [SEP]")
    assert found.own.tolist() == list(range(1, len(found.ids) - 1))
    assert not set(exported.tokenizer.all_special_ids) & set(found.ids[found.own].tolist())


@pytest.mark.long
def test_a_run_and_transformers_score_alike(tmp_path: Path, exported: FillMask) -> None:
    """The golden run and its export differ in steps, so the run's weights are exported again."""
    from trainer.hf_export.export import export_checkpoint

    trained = load_checkpoint(GOLDEN / "run")
    export_checkpoint(GOLDEN / "run", tmp_path / "export")
    pairs = [pair(good, bad) for good, bad in itertools.permutations(TEXTS, 2)]
    ours = scores_of(trained, pairs)
    assert isinstance(scorer_of(trained, torch.device("cpu"), torch.float32), PretrainingScorer)
    assert ours == pytest.approx(scores_of(FillMask.load(tmp_path / "export"), pairs), abs=1e-4)


def write_roberta_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Byte-level BPE with <s>, </s> and a <mask> that takes the space before it, as roberta-base has it."""
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, 400, special_tokens=ROBERTA_NAMES, show_progress=False)
    backend.save_model(str(folder))
    transformers.RobertaTokenizerFast.from_pretrained(folder).save_pretrained(folder)


def write_unigram_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """SentencePiece's unigram model that puts a space before the text, with the names of XLM-RoBERTa."""
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=120, special_tokens=ROBERTA_NAMES, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{role}_token": name for role, name in names.items()}
    ).save_pretrained(folder)


ROBERTA_NAMES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
KINDS: dict[str, tuple[Callable[[Path, Sequence[str]], object], dict[str, Any]]] = {
    "bert": (write_wordpiece, {}),
    "roberta": (write_roberta_tokenizer, {}),
    "xlm-roberta": (write_unigram_tokenizer, {}),
    "deberta-v2": (write_unigram_tokenizer, {**_DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}),
    "modernbert": (write_byte_level, {}),
    "electra": (write_wordpiece, {"embedding_size": 8}),
    "albert": (write_unigram_tokenizer, {"embedding_size": 8}),
    "distilbert": (write_wordpiece, {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}),
    "mpnet": (write_wordpiece, {}),
}
"""By model type, the tokenizer and sizes that are this type's own."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-4, id="fp32"),  # sums of about 20 tokens, each within rounding of fp32
        pytest.param(torch.float64, 1e-6, id="float64"),
    ],
)
@pytest.mark.parametrize("kind", ["export", *KINDS])
def test_scores_are_those_of_minicons(
    kind: str, dtype: torch.dtype, tolerance: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """minicons masks and sums in its own way, in batches padded to the longest."""
    from minicons import scorer

    folder = GOLDEN / "export" if kind == "export" else other_model(kind, tmp_path_factory.mktemp(kind))
    model = FillMask.load(folder)
    texts = [text for text in TEXTS if "[" not in text] + ["The cats " * 4, "zzz \u2603 unknown  words?"]
    pairs = [pair(good, bad) for good, bad in itertools.permutations(texts, 2)]
    ours = scores_of(model, pairs, dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of the sums that minicons makes
    try:
        peer = scorer.MaskedLMScorer(str(folder), "cpu")
        peer.model = peer.model.to(dtype)
        peer.tokenizer.batch_encode_plus = peer.tokenizer.__call__  # which transformers 5 has no longer
        for column, texts_of in enumerate(([each.good for each in pairs], [each.bad for each in pairs])):
            theirs = peer.sequence_score(texts_of, reduction=lambda scores: scores.sum(0).item(), PLL_metric="original")
            assert ours[:, column] == pytest.approx(theirs, abs=tolerance)
    finally:
        torch.set_default_dtype(before)


def other_model(kind: str, folder: Path) -> Path:
    """A random model of another architecture and kind of tokenizer."""
    write_tokenizer, sizes = KINDS[kind]
    write_tokenizer(folder, [*TEXTS, "sat on the mat and it was written"] * 3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    common = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.AutoConfig.for_model(
        kind,
        **{**common, **sizes},
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=66,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    for parameter in model.parameters():  # scores that differ by more than rounding
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


class HeadOnAnotherModule(transformers.BertForMaskedLM):
    """Its head does not read what `base_model` returns."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = self.bert.encoder(self.bert.embeddings(input_ids)).last_hidden_state
        return transformers.modeling_outputs.MaskedLMOutput(logits=self.cls(hidden))


class NeedsMore(transformers.BertForMaskedLM):
    """It cannot be called with token ids and an attention mask alone."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, language: torch.Tensor) -> Any:
        raise AssertionError("it is not called")


def test_a_head_that_reads_something_else_is_scored_in_full_and_other_inputs_are_refused() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=20, **sizes)
    plain, other, more = (kind(config) for kind in (transformers.BertForMaskedLM, HeadOnAnotherModule, NeedsMore))
    other.load_state_dict(plain.state_dict())
    sentence = EncodedSentence(np.array([2, 7, 8, 9, 3]), np.array([1, 2, 3]))
    copies = EncodedPairs.encode([pair("a", "a")], lambda text: sentence, MASK, 5).copies(0, 3)
    cpu, dtype = torch.device("cpu"), torch.float64
    expected = TransformersScorer(plain, cpu, dtype)(copies)
    np.testing.assert_allclose(TransformersScorer(other, cpu, dtype)(copies), expected, atol=1e-12)
    with pytest.raises(UserError, match="NeedsMore .*language", check=coded("model-not-scorable")):
        TransformersScorer(more, cpu, dtype)(copies)
