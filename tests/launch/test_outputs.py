"""What every command that writes to a local path does with a URL."""

from __future__ import annotations

from types import ModuleType

import pytest

from data_prep.base.errors import UsageError
from launch import benchmark, embed, evaluate, export, finetune, predict, show_attention

MODEL = ["--model", "m"]


@pytest.mark.parametrize(
    ("command", "option", "more"),
    [
        (benchmark, "--output", ["--config", "tiny_cpu"]),
        (benchmark, "--profile", ["--config", "tiny_cpu"]),
        (embed, "--output", MODEL),
        (evaluate, "--output", [*MODEL, "--minimal-pairs=d"]),
        (export, "--output", ["--checkpoint", "c"]),
        (finetune, "--output", [*MODEL, "--task=regression", "--train=t", "--text-column=a", "--label-column=b"]),
        (predict, "--output", [*MODEL, "--input", "t.tsv"]),
        (show_attention, "--output", [*MODEL, "text"]),
    ],
)
def test_a_url_is_refused_and_no_folder_is_made_of_its_scheme(
    command: ModuleType, option: str, more: list[str]
) -> None:
    with pytest.raises(UsageError, match=f"^{option} s3://bucket/out.npy is a URL, and "):
        command.parse_arguments([option, "s3://bucket/out.npy", *more])
