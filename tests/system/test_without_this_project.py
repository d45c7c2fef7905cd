"""What was registered, used by people who have nothing of this project: MLflow's own server, and a plain venv."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.support.free_ports import free_port
from trainer.inference.pulled_model import pull
from trainer.registry.registration import register

PLAIN = """
import importlib.util, sys
assert not any(importlib.util.find_spec(name) for name in ("trainer", "data_prep", "mlflow", "deepspeed")), sys.path
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, pipeline
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
hidden = AutoModel.from_pretrained(folder)(**tokenizer("a river", return_tensors="pt")).last_hidden_state
masked = AutoModelForMaskedLM.from_pretrained(folder)
answers = pipeline("fill-mask", model=folder)("a [MASK] and a city")
vectors = SentenceTransformer(folder).encode(["a river", "a city"])
print(hidden.shape[-1], masked.config.hidden_size, len(answers), vectors.shape)
"""


@pytest.mark.slow  # MLflow's own command; what it serves is tested in tests/trainer/registry/test_served_model.py
def test_mlflow_models_serve_fills_masks_over_http(tiny_hugging_face: Path, database: str, tmp_path: Path) -> None:
    folder = always_answers("▁cat", tiny_hugging_face, tmp_path / "model")
    answer = served(folder, {"inputs": ["the cat [MASK] on the mat", "[MASK] sat"]}, database, tmp_path)
    assert answer == ["▁cat", "▁cat"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tags", "answer", "number"])
def test_mlflow_models_serve_answers_a_task_over_http(
    kind: str, tiny_hugging_face: Path, database: str, tmp_path: Path
) -> None:
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(tiny_hugging_face, folder)
    classes = {"tags": "TokenClassification", "answer": "QuestionAnswering", "number": "SequenceClassification"}
    options = {"num_labels": 1} if kind == "number" else {}
    getattr(transformers, f"AutoModelFor{classes[kind]}").from_pretrained(folder, **options).save_pretrained(folder)
    rows: list[object] = ["the cat sat", "", "a  dog\nran"]
    if kind == "answer":
        rows = [{"question": "it was", "context": row} for row in rows]
    given = {"dataframe_records": rows} if kind == "answer" else {"inputs": rows}
    first, second, third = served(folder, given, database, tmp_path)
    assert second is None
    if kind == "tags":
        assert [(word["word"], word["start"], word["end"]) for word in third] == [
            ("a", 0, 1),
            ("dog", 3, 6),
            ("ran", 7, 10),
        ]
    elif kind == "answer":
        assert isinstance(third["start"], int)
        assert third["answer"] == "a  dog\nran"[third["start"] : third["end"]]
    else:
        assert isinstance(first, float) and isinstance(third, float)


def served(folder: Path, given: object, database: str, tmp_path: Path) -> list:
    """Register a folder, serve the version by MLflow's command, and return the predictions."""
    registration = register(folder, "birds", "champion", database)
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", registration.model_uri]
    command += ["--env-manager", "local", "--port", str(port), "--workers", "1"]
    environment = os.environ | {"MLFLOW_TRACKING_URI": database, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it calls uvicorn
    with open(tmp_path / "serve.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        return ask(port, given, process, tmp_path / "serve.log")["predictions"]
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def always_answers(piece: str, folder: Path, copy: Path) -> Path:
    """A copy of a model that fills every mask with this piece, where random weights might choose a special token."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    biases = [name for name in weights if name.endswith(("predictions.bias", "decoder.bias"))]
    assert biases
    for name in biases:
        weights[name][AutoTokenizer.from_pretrained(copy).convert_tokens_to_ids(piece)] = 100.0
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def ask(port: int, value: object, process: subprocess.Popen[bytes], log: Path) -> dict:
    """POST to the server once it listens."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations", json.dumps(value).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode() + log.read_text()) from None
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.spawn
def test_a_plain_environment_loads_the_pulled_folder(exported: Path, database: str, tmp_path: Path) -> None:
    """A venv with transformers and sentence-transformers only, installed at the versions that are here."""
    from importlib.metadata import version

    register(exported, "birds", "champion", database)
    folder = pull("models:/birds@champion", tmp_path / "model", database)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    python = tmp_path / "venv" / "bin" / "python"
    pins = [f"{name}=={version(name).partition('+')[0]}" for name in ("transformers", "tokenizers", "numpy")]
    pins.append(f"torch=={version('torch')}")  # with its +cpu, or gigabytes of CUDA would come
    install = [python, "-m", "pip", "install", "--quiet", *pins, "sentence-transformers"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=1800)
    if installed.returncode:
        pytest.skip(f"no package index to install from: {installed.stderr.strip()[-300:]}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        [python, "-c", PLAIN, folder],
        cwd=tmp_path,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split("\n")[-2] == "16 16 5 (2, 16)"
