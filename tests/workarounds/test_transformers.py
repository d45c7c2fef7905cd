"""What transformers and its companions do that `trainer` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import pytest

from tests.workarounds.new_process import run_python


def test_transformers_has_no_pipeline_for_question_answering() -> None:
    from transformers.pipelines import PIPELINE_REGISTRY

    assert "question-answering" not in PIPELINE_REGISTRY.get_supported_tasks(), (
        "PIPELINES of registry/served_model.py may name a pipeline for ForQuestionAnswering"
    )


def test_the_hub_is_asked_whatever_the_variable_says_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    before = huggingface_hub.is_offline_mode()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0" if before else "1")
    assert huggingface_hub.is_offline_mode() is before, "trainer/model/quiet_transformers.py may set the variable"


@pytest.mark.slow
@pytest.mark.spawn
def test_saving_imports_a_deepspeed_that_is_there() -> None:
    answer = run_python(
        "import sys, torch\nfrom accelerate.utils import extract_model_from_parallel\n"
        "extract_model_from_parallel(torch.nn.Linear(1, 1))\nprint('deepspeed' in sys.modules)",
        DS_ACCELERATOR="cpu",
    )
    assert answer.stdout.split()[-1] == "True", "trainer/model/quiet_transformers.py need not set DS_ACCELERATOR"
