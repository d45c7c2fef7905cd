"""The generated parts of the pages are those of the current presets, settings and packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data_prep.config.preparation_config import PreparationConfig
from tests import generated_pages
from tests.support.settings import names_of
from trainer.config.run_config import RunConfig

CONFIGS = (generated_pages.REPOSITORY / "configs" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", generated_pages.PAGES, ids=lambda path: path.parent.name)
def test_a_page_has_what_the_code_says(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert generated_pages.rewritten(page) == page, "run python -m tests.generated_pages"


def test_every_block_is_on_a_page() -> None:
    pages = [path.read_text(encoding="utf-8") for path in generated_pages.PAGES]
    assert {name for page in pages for name in generated_pages.names_in(page)} == generated_pages.BLOCKS.keys()


def test_every_setting_is_listed_with_its_default_and_meaning() -> None:
    rows = {name: (default, meaning) for name, default, meaning in generated_pages.settings_of(RunConfig)}
    assert rows["schedule.name"][0].startswith('`"linear"` (or `"cosine"`')
    assert rows["data.shards"][0] == "required"
    assert {"training.batch_warmup.duration", "registry.only_if", "deepspeed"} <= rows.keys()
    assert "training.stages.steps" not in rows, "a list is one setting"
    for schema in (RunConfig, PreparationConfig):
        rows = {name: meaning for name, _, meaning in generated_pages.settings_of(schema)}
        assert rows.keys() <= set(names_of(schema))
        assert [name for name, meaning in rows.items() if not meaning] == []


def test_names_of_other_projects_are_mapped_to_settings_that_exist() -> None:
    section = CONFIGS.partition("\n## Names from Hugging Face and Megatron\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)*)`", " ".join(cells)))
    assert len(named) > 30
    assert named - set(names_of(RunConfig)) == set()


def test_the_purpose_of_a_preset_is_its_first_sentence(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text("# BERT (Devlin et al. 2018) for\n# one GPU. More text: here.\nmodel: {}\n")
    assert generated_pages.purpose(file) == "BERT (Devlin et al. 2018) for one GPU"
    file.write_text("# A small one: 4 layers.\n")
    assert generated_pages.purpose(file) == "A small one"
