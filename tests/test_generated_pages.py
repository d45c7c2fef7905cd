"""The generated parts of the pages are those of the current presets, settings and packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from data_prep.base.load_settings import load_settings
from data_prep.base.settings import flatten
from tests import generated_pages
from tests.support.settings import names_of, settings_of
from trainer.config.run_config import RunConfig
from trainer.config.synonyms import synonyms

CONFIGS = (generated_pages.REPOSITORY / "configs" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", generated_pages.PAGES, ids=lambda path: path.parent.name)
def test_a_page_has_what_the_code_says(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert generated_pages.rewritten(page) == page, "run python -m tests.generated_pages"


def test_every_block_is_on_a_page() -> None:
    pages = [path.read_text(encoding="utf-8") for path in generated_pages.PAGES]
    assert {name for page in pages for name in generated_pages.names_in(page)} == generated_pages.BLOCKS.keys()


def test_every_setting_is_on_the_page_at_its_default(tmp_path: Path) -> None:
    block = CONFIGS.partition("<!-- generated: training_settings -->\n```yaml\n")[2].partition("```")[0]
    least = ["output_dir=out", "data.shards=in", "training.duration=1"]
    least += ["training.micro_batch_tokens=512", "training.global_batch_tokens=512"]
    (tmp_path / "page.yaml").write_text(block, encoding="utf-8")
    assert load_settings(RunConfig, tmp_path / "page.yaml", least) == settings_of(RunConfig, *least)
    uncommented = yaml.safe_load(
        re.sub(r"^( *)# (?=\w+:)", r"\1", block.replace(": null # or:", ":"), flags=re.MULTILINE)
    )
    names = {name for name, _ in generated_pages.descriptions_of(RunConfig)}
    assert {name for name, _ in flatten(uncommented)} == names
    assert {"training.batch_warmup.duration", "registry.only_if", "deepspeed"} <= names
    assert "training.stages.steps" not in names, "a list is one setting"
    assert names <= set(names_of(RunConfig))
    assert [name for name, meaning in generated_pages.descriptions_of(RunConfig) if not meaning] == []


@pytest.mark.parametrize(
    ("meaning", "short"),
    [
        ("steps between log lines", "steps between log lines"),
        ("rate (of a row); 0: none", "rate"),
        ("MLM head: dense or linear", "MLM head"),
        ("options such as {'s3://a': {profile: b}}. More", "options such as {'s3://a': {profile: b}}"),
        ("at valid/mlm_loss, as 0.15 says", "at valid/mlm_loss, as 0.15 says"),
    ],
)
def test_a_setting_has_what_its_description_says_first(meaning: str, short: str) -> None:
    assert generated_pages.in_short(meaning) == short


def test_names_of_other_projects_are_mapped_to_settings_that_exist() -> None:
    section = CONFIGS.partition("\n## Names from Hugging Face and Megatron\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[3] for line in section.splitlines() if line.count("|") == 4 and "`" in line]
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)*)`", " ".join(cells)))
    assert len(cells) > 20 and len(named) > 18
    assert named - set(names_of(RunConfig)) == set()
    every = {setting for synonym in synonyms() for setting in synonym.setting.split(", ")} - {"none"}
    assert {setting for setting in every if not setting.startswith("--")} - set(names_of(RunConfig)) == set()


def test_the_purpose_of_a_preset_is_its_first_sentence(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text("# BERT (Devlin et al. 2018) for\n# one GPU. More text: here.\nmodel: {}\n")
    assert generated_pages.purpose(file) == "BERT (Devlin et al. 2018) for one GPU"
    file.write_text("# BERT (Devlin et al. 2018, arXiv 1810.04805; 110M parameters): more.\n")
    assert generated_pages.purpose(file) == "BERT (Devlin et al. 2018)"
    file.write_text("# A small one: 4 layers.\n")
    assert generated_pages.purpose(file) == "A small one"
