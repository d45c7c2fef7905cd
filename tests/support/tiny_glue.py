"""GLUE's files as they are distributed, with a few rows of our own: columns, quotation marks, byte order marks."""

from __future__ import annotations

from pathlib import Path

TEXTS = ("the cat sat", 'the "dog" ran', "it was a day", 'the house" was in the garden', "and it slept", "a mat")


def write(folder: Path) -> Path:
    """Write train and dev files of the eight tasks; quotation marks are unpaired, as they are in GLUE."""

    def table(name: str, header: list[str] | None, rows: list[list[str]], bom: bool = False) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ["\t".join(cells) for cells in ([header] if header else []) + rows]
        path.write_text(("\ufeff" if bom else "") + "\n".join(lines) + "\n", encoding="utf-8", newline="")

    numbers = range(12)
    text = [TEXTS[number % 6] for number in numbers]
    other = [TEXTS[(number * 5 + 1) % 6] for number in numbers]
    binary = [str(number % 2) for number in numbers]
    entails = [("not_entailment", "entailment")[number % 2] for number in numbers]
    three = [("neutral", "entailment", "contradiction")[number % 3] for number in numbers]

    for part in ("train", "dev"):
        table(f"CoLA/{part}.tsv", None, [["gj04", binary[n], "" if n % 2 else "*", text[n]] for n in numbers])
        table(f"SST-2/{part}.tsv", ["sentence", "label"], [[text[n], binary[n]] for n in numbers])
        strings = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
        rows = [[binary[n], f"70{n}", f"71{n}", text[n], other[n]] for n in numbers]
        table(f"MRPC/{part}.tsv", strings, rows, bom=True)
        header = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]
        rows = [
            [str(n), "main", "news", "2012", "1", "none", "none", text[n], other[n], f"{n / 3:.3f}"] for n in numbers
        ]
        table(f"STS-B/{part}.tsv", [*header, "score"], rows)
        header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
        rows = [[str(n), "1", "2", text[n], other[n], binary[n]] for n in numbers]
        if part == "train":  # the published file has broken rows
            rows.insert(3, ["99", "1", "2", "a row that breaks off"])
            rows.insert(5, ["98", "1", "2", "", "the first question is empty", "0"])
        table(f"QQP/{part}.tsv", header, rows)
        rows = [[str(n), text[n], other[n], entails[n]] for n in numbers]
        table(f"QNLI/{part}.tsv", ["index", "question", "sentence", "label"], rows)
        table(f"RTE/{part}.tsv", ["index", "sentence1", "sentence2", "label"], rows)

    parses = ["sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"]
    start = ["index", "promptID", "pairID", "genre", *parses, "sentence1", "sentence2", "label1"]
    annotations = {"train": 0, "dev_matched": 4, "dev_mismatched": 4}
    for part, num_more in annotations.items():
        header = [*start, *(f"label{number}" for number in range(2, 2 + num_more)), "gold_label"]
        rows = []
        for n in numbers:
            parse = [f"( {text[n]} )", f"( {other[n]} )", "(ROOT)", "(ROOT)"]
            rows.append(
                [str(n), "1", "1e", "fiction", *parse, text[n], other[n], *[three[n]] * (1 + num_more), three[n]]
            )
        table(f"MNLI/{part}.tsv", header, rows)
    return folder
