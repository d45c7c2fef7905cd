"""The commands that look at a model: vectors, neighbors, pairs, attention."""

from __future__ import annotations

import io
import json
import resource
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas
import pytest

from data_prep.base.errors import UsageError, UserError
from launch import embed, next_sentence, show_attention
from tests.support.error_codes import coded
from trainer.inference.attention_maps import attention_maps


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, command: ModuleType, *arguments: str, stdin: str = "") -> None:
    monkeypatch.setattr(sys, "argv", ["command.py", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
    command.main()


def test_vectors_go_to_npy_from_stdin_and_to_parquet_from_a_table(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", str(tiny_hugging_face))
    run(monkeypatch, embed, *model, "--output", "v.npy", stdin="the cat\n\n" + "a dog " * 40 + "\n")
    assert (
        "2 vectors of size 16; 1 of 2 texts longer than the model's 32 tokens: their ends are not read"
        in capsys.readouterr().out
    )
    Path("t.csv").write_text("id,text\n1,the cat\n")
    run(monkeypatch, embed, *model, "--input", "t.csv", "--text-column", "text", "--output", "v.parquet")
    table = pandas.read_parquet("v.parquet")
    assert table["text"].tolist() == ["the cat"]
    np.testing.assert_allclose(table["embedding"][0], np.load("v.npy")[0], atol=1e-6)


def test_vectors_and_pictures_that_cannot_be_written_whole_leave_the_old_file(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a .pyc cut at the limit fails every later import
    for name, write in (
        ("v.npy", lambda: embed.write_vectors(Path("v.npy"), ["a"] * 999, np.zeros((999, 16), np.float32))),
        (
            "v.png",
            lambda: run(monkeypatch, show_attention, "--model", str(tiny_hugging_face), "--output", "v.png", "a"),
        ),
    ):
        Path(name).write_bytes(b"old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(UserError, match=rf"{name} cannot be written: (?!None)"):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert Path(name).read_bytes() == b"old"
    assert {path.name for path in Path().iterdir()} == {"v.npy", "v.png"}


def test_empty_lines_are_skipped_and_rows_without_text_have_no_vector(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", str(tiny_hugging_face))
    run(monkeypatch, embed, *model, "--output", "v.npy", stdin="\ufeffthe cat\n\na\u2028dog\n")
    printed = capsys.readouterr()
    assert "v.npy: 2 vectors" in printed.out and "skipped 1 empty lines of standard input" in printed.err
    table = (*model, "--input", "t.jsonl", "--text-column", "text", "--output")
    Path("t.jsonl").write_text('{"text": null}\n{"text": "a"}\n{"text": ["a"]}\n{"text": "dog"}\n')
    for output in ("t.npy", "t.parquet"):
        run(monkeypatch, embed, *table, output)
        assert "no vector for rows 1, 3 (row 1, column 'text': the cell is empty)" in capsys.readouterr().err
    vectors, written = np.load("t.npy"), pandas.read_parquet("t.parquet")
    assert np.isnan(vectors).all(axis=1).tolist() == [True, False, True, False]
    assert written["text"].tolist()[1::2] == ["a", "dog"] and written["embedding"].isna().tolist()[::2] == [True, True]
    np.testing.assert_array_equal(vectors[1::2], np.stack(written["embedding"][1::2]))
    for line, message in (('{"text": null}', "without a value in column 'text'"), ('{"text": ["a"]}', "a list, and")):
        Path("t.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match=message):
            run(monkeypatch, embed, *table, "v.npy")
    Path("latin.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    for path, message in (
        ("latin.txt", r"is not UTF-8 \(byte 3\)"),
        ("none.txt", r"none\.txt does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            run(monkeypatch, embed, *model, "--input", path, "--output", "v.npy")
    with pytest.raises(UsageError, check=coded("missing-output-folder")):
        run(monkeypatch, embed, *model, "--output", "none/v.npy", stdin="a\n")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (next_sentence, ("the \udcff", "it ran")),
        (show_attention, ("--output", "heads.png", "the \udcff")),
        (embed, ("--neighbors", "\udcff")),
        (embed, ("--occurrences", "\udcff")),
        (show_attention, ("--numbers", "the \udcff")),
    ],
)
def test_bytes_of_another_encoding_are_wrong_usage(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, command: ModuleType, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, check=coded("input-not-utf8")):
        run(monkeypatch, command, "--model", str(tiny_hugging_face), *arguments)


def test_neighbors_are_shown_static_and_in_the_texts_given(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(tiny_hugging_face), "--neighbors", "cat", "--top-k", "3")
    run(monkeypatch, embed, *arguments)
    assert len(capsys.readouterr().out.splitlines()) == 1
    run(monkeypatch, embed, *arguments, "--input", "-", stdin="the cat sat\na dog ran\n")
    static, context = capsys.readouterr().out.splitlines()
    assert "embedding table" in static and "(1 time in 2 texts)" in context and context.count(",") == 2


def test_occurrences_are_compared_a_line_each(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(tiny_hugging_face), "--occurrences", "cat")
    run(monkeypatch, embed, *arguments, stdin="the cat sat\na dog ran\nthe cat sat\ncat \x1b[1m on a mat\n")
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert title == "'cat': 3 occurrences in 4 texts" and header.split()[:4] == [
        "number",
        "static",
        "context",
        "nearest",
    ]
    cells = [line.split(maxsplit=4) for line in lines]
    assert [each[0] for each in cells] == ["1", "2", "3"] and {each[1] for each in cells} == {"1.000"}
    assert [each[3] for each in cells][:2] == ["2", "1"], "the same sentence is the nearest"
    assert cells[0][2] == cells[1][2] == "1.000" and float(cells[2][2]) < 0.9995
    assert cells[0][4] == "the [cat] sat" and cells[2][4] == r"[cat] \x1b[1m on a mat"
    run(monkeypatch, embed, *arguments, "--layer", "0", stdin="the cat\n")
    assert capsys.readouterr().out.splitlines()[-1].split()[2:4] == ["1.000", "-"]
    for also in (("--output", "v.npy"), ("--neighbors", "cat")):
        with pytest.raises(SystemExit):
            run(monkeypatch, embed, *arguments, *also, stdin="the cat\n")
    with pytest.raises(UsageError, check=coded("word-not-in-texts")):
        run(monkeypatch, embed, "--model", str(tiny_hugging_face), "--occurrences", "horse", stdin="the cat\n")


def test_attention_is_printed_as_numbers_that_are_the_models(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(tiny_hugging_face), "the cat sat")
    run(monkeypatch, show_attention, *arguments, "--numbers", "--head", "2")
    title, header, *rows, last = capsys.readouterr().out.splitlines()
    assert title == "layer 1, head 2" and not last and not list(Path().iterdir())
    tokens = header.split()
    assert tokens[0] == "[CLS]" and [row.split()[0] for row in rows] == tokens
    weights = attention_maps(tiny_hugging_face, "the cat sat").weights[0, 1]
    np.testing.assert_allclose([[float(cell) for cell in row.split()[1:]] for row in rows], weights, atol=0.0051)
    assert len({len(line) for line in (header, *rows)}) == 1, "columns line up"
    run(monkeypatch, show_attention, *arguments, "--numbers", "--output", "heads.png", "--dry-run")
    printed = capsys.readouterr().out
    assert "layer 1, head 1\n" in printed and "nothing was written" in printed and not Path("heads.png").exists()
    with pytest.raises(SystemExit):
        run(monkeypatch, show_attention, *arguments)


def test_pairs_come_from_the_command_line_or_line_by_line(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", str(tiny_hugging_face))
    run(monkeypatch, next_sentence, *model, "the cat sat", "it ran")
    label = capsys.readouterr().out.split()[0]
    assert label in ("IsNext", "NotNext")
    run(monkeypatch, next_sentence, *model, "--json", stdin="the cat sat\tit ran\n")
    value = json.loads(capsys.readouterr().out)
    assert value["label"] == label and 0.5 <= value["probability"] <= 1.0
    with pytest.raises(UsageError, match="line 1 ", check=coded("not-a-pair")):
        run(monkeypatch, next_sentence, *model, stdin="one sentence\n")
    with pytest.raises(UsageError, match="line 2 ", check=coded("not-a-pair")):
        run(monkeypatch, next_sentence, *model, stdin="the cat sat\tit ran\nthe dog\t\n")
    monkeypatch.setattr(sys, "argv", ["command.py", *model])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\tb\n\xe9t\xe9\tc\n"), encoding="utf-8"))
    with pytest.raises(UsageError, match="line 2 of standard input", check=coded("input-not-utf8")):
        next_sentence.main()
    with pytest.raises(UsageError, match="3 texts", check=coded("not-a-pair")):
        run(monkeypatch, next_sentence, *model, "a", "b", "c")


@pytest.mark.long
def test_heads_are_drawn_all_or_some(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", str(tiny_hugging_face), "--output", "heads.png", "the cat sat")
    run(monkeypatch, show_attention, *arguments)
    assert "1 layer x 2 heads over 5 tokens" in capsys.readouterr().out
    assert Path("heads.png").read_bytes().startswith(b"\x89PNG")
    run(monkeypatch, show_attention, *arguments, "--layer", "1", "--head", "2")
    assert "1 layer x 1 head over" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--head 3 does not exist"):
        run(monkeypatch, show_attention, *arguments, "--head", "3")


@pytest.mark.parametrize("arguments", [(), ("--output", "v.txt"), ("--input", "t.csv", "--output", "v.npy")])
def test_embed_without_what_it_needs_ends_with_status_two(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, embed, "--model", "m", *arguments)
    assert stopped.value.code == 2


def test_a_model_without_a_head_for_pairs_is_called_as_the_user_did(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text('{"model_type": "modernbert"}')
    monkeypatch.setattr("trainer.inference.pulled_model.hugging_face_folder", lambda *given: tmp_path / "exported")
    with pytest.raises(UsageError, match="^runs/tiny is ", check=coded("no-pair-head")):
        run(monkeypatch, next_sentence, "--model", "runs/tiny", "A cat.", "It ran.")
