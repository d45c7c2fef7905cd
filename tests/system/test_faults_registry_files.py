"""What people and files do to the commands downstream: odd texts, and files that were made to do harm."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from data_prep.base.errors import UsageError, UserError
from launch import embed, export, fill_mask, finetune, next_sentence, predict, show_attention
from tests.support.error_codes import coded
from tests.support.hostile_tars import Payload
from tests.support.launch_command import run
from tests.support.mlflow_servers import Server
from tests.support.toy_run import CONFIG, make_run
from trainer import load_config
from trainer.api import EXTENSIONS
from trainer.checkpoint.format import step_folder
from trainer.checkpoint.initial_weights import load_initial_weights
from trainer.checkpoint.writer import ALONE
from trainer.objectives.pretraining import PretrainingModel
from trainer.registry.registration import register
from trainer.tracking.mlflow_server import connect

BOMB = ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]


@pytest.fixture
def model_folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of the export to do harm to."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.mark.fault(row="41", fault="a text without a mask to fill", required="clear error")
def test_row_41_a_text_without_a_mask_is_told(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\[MASK\]"):
        run(monkeypatch, fill_mask, "--model", exported, "no mask here")


@pytest.mark.fault(row="41", fault="a mask in a text of 600 tokens", required="truncated around the mask")
def test_row_41_a_long_text_is_read_around_its_mask(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = "a city and " * 150, " and a river" * 150
    run(monkeypatch, fill_mask, "--model", exported, f"{before}[MASK]{after}")
    whole = capsys.readouterr().out.splitlines()[0]
    # What the model reads is 30 tokens around the mask: the same answer as for a shorter text of the same middle.
    run(monkeypatch, fill_mask, "--model", exported, f"{'a city and ' * 40}[MASK]{' and a river' * 40}")
    assert capsys.readouterr().out.splitlines()[0] == whole


@pytest.mark.fault(row="41", fault="a text in a script that the tokenizer never saw", required="works by byte fallback")
def test_row_41_an_unknown_script_is_read_as_bytes(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, fill_mask, "--model", exported, "ภาษาไทย [MASK] 語")
    assert "MODEL: ภาษาไทย" in capsys.readouterr().out
    run(monkeypatch, fill_mask, "--model", exported, "ລາວ [MASK] ລາວ")
    assert "[UNK]" not in capsys.readouterr().out


def users_of(folder: Path | str, desk: Path) -> list[tuple[ModuleType, list[str]]]:
    """Every command that loads a model, with arguments that would do."""
    (desk / "labeled.tsv").write_text("text\tlabel\n" + "a city\tx\na river\ty\n" * 20)
    fit = ["--task", "classification", "--train", "labeled.tsv", "--text-column", "text", "--label-column", "label"]
    return [
        (fill_mask, ["--model", str(folder), "a [MASK]"]),
        (embed, ["--model", str(folder), "--neighbors", "city"]),
        (next_sentence, ["--model", str(folder), "a city", "a river"]),
        (show_attention, ["--model", str(folder), "--output", "heads.png", "a city"]),
        (finetune, ["--model", str(folder), *fit, "--no-tracking", "--dry-run"]),
        (predict, ["--model", str(folder), "--input", "labeled.tsv", "--output", "predicted.tsv"]),
    ]


def begin_with(model: Path | str, tracking_uri: str | None = None) -> None:
    """What a training with `init_from` does with it."""
    trained = PretrainingModel(CONFIG.model)
    load_initial_weights(trained, str(model), lambda: EXTENSIONS.pull_model(str(model), tracking_uri), ALONE)


@pytest.mark.fault(
    row="43",
    fault="a pytorch_model.bin with a malicious pickle in place of the weights",
    required="never run; refused with the reason",
)
def test_row_43_a_pickle_of_weights_is_never_loaded(
    model_folder: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model_folder / "model.safetensors").unlink()
    (model_folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(desk / "ran")))
    for command, arguments in users_of(model_folder, desk):
        with pytest.raises(UserError, check=coded("weights-not-safetensors", "code-in-model")):
            run(monkeypatch, command, *arguments)
    with pytest.raises(UserError, check=coded("weights-not-safetensors", "code-in-model")):
        begin_with(model_folder)
    with pytest.raises(UserError, check=coded("weights-not-safetensors", "code-in-model")):
        register(model_folder, "pickled", None, f"sqlite:///{desk}/none.db")
    assert not (desk / "ran").exists() and not (desk / "none.db").exists()
    pickle.loads((model_folder / "pytorch_model.bin").read_bytes())
    assert (desk / "ran").exists(), "the pickle would have done harm"


@pytest.mark.fault(
    row="43", fault="a malicious pickle as a file of a checkpoint", required="never run; refused with the reason"
)
def test_row_43_a_pickle_in_a_checkpoint_is_never_loaded(
    tokenizer_folder: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir = make_run(desk / "run", tokenizer_folder)
    folder = step_folder(output_dir, 20)
    for name in ("rank-00001-of-00002.safetensors", "state.json", "checkpoint.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Payload(desk / "ran")))
        for command, arguments in (
            (export, ["--checkpoint", str(folder), "--output", "out"]),
            (fill_mask, ["--model", str(folder), "a [MASK]"]),
        ):
            with pytest.raises(UserError, match=re.escape(name)):
                run(monkeypatch, command, *arguments)
        (folder / name).write_bytes(kept)
    assert not (desk / "ran").exists() and not (desk / "out").exists()


@pytest.mark.fault(
    row="44",
    fault="YAML with !!python/object, with ${oc.env:...}, with anchors that explode",
    required="no code run; environment interpolation off by default",
)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("output_dir: !!python/object/apply:os.system ['touch ran']", "not valid YAML"),
        ("output_dir: !!python/name:os.system", "not valid YAML"),
        ("output_dir: ${oc.env:HOME}", "contains an interpolation, which is not supported"),
        ("output_dir: runs\ndata: {shards: '${oc.env:SECRET}'}", "contains an interpolation, which is not supported"),
        ("\n".join(BOMB), "not valid YAML.*aliases repeat"),
    ],
    ids=["object", "name", "environment", "nested", "bomb"],
)
def test_row_44_a_configuration_from_elsewhere_does_nothing(
    text: str, said: str, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "open-sesame")
    path = desk / "untrusted.yaml"
    path.write_text(text + "\n")
    with pytest.raises(UserError, match=said) as refused:
        load_config(path)
    assert "open-sesame" not in str(refused.value) and not (desk / "ran").exists()


@pytest.mark.fault(row="45", fault="a tokenizer.json that is crafted or truncated", required="clear error")
@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good[: len(good) // 2],
        lambda good: b"{}",
        lambda good: b"[]",
        lambda good: b"\xff\xfe\x00",
        lambda good: b"[" * 100_000,
        lambda good: good.replace(b'"BPE"', b'"Nonsense"'),
        lambda good: good.replace(b'"vocab"', b'"vocabulary"'),
        lambda good: good.replace(b'"id": 4', b'"id": -4'),
    ],
    ids=["truncated", "empty", "list", "bytes", "nested", "unknown model", "no vocabulary", "negative id"],
)
def test_row_45_a_crafted_tokenizer_json_is_told(
    damage: Callable[[bytes], bytes], model_folder: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_folder / "tokenizer.json"
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert path.read_bytes() != good
    for command, arguments in users_of(model_folder, desk):
        if command not in (next_sentence, predict):  # which first refuse a model without their head
            with pytest.raises(UserError, match="tokenizer", check=coded("model-not-loadable")):
                run(monkeypatch, command, *arguments)


def message(number: int, content: bytes) -> bytes:
    """A field of SentencePiece's ModelProto, as protobuf writes it; what is appended is read as if it stood there."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def replace(good: bytes) -> bytes:
        assert good.count(old) == 1
        return good.replace(old, new)

    return replace


PIECES, TRAINER_SPEC, NORMALIZER_SPEC = 1, 2, 3
MASK_PIECE = b"\n\x06[MASK]\x15\0\0\0\0\x18"  # piece, score 0 and, as the next byte, its type, which is 3 for control


@pytest.mark.fault(row="45", fault="a tokenizer.model that is crafted or truncated", required="clear error")
@pytest.mark.parametrize(
    "damage",
    [
        lambda good: b"",
        lambda good: good[:1],
        lambda good: good[:100],
        lambda good: good[:-1],
        lambda good: b"\x80\x04N.",
        lambda good: good + message(PIECES, MASK_PIECE + b"\x03"),
        lambda good: good + message(PIECES, b"\n\x03new\x15\0\0\0\0\x18\x01"),
        replaced(MASK_PIECE + b"\x03", MASK_PIECE + b"\x01"),
        replaced(MASK_PIECE + b"\x03", MASK_PIECE + b"\x63"),
        replaced(b"\n\x06[MASK]", b"\x08\x06[MASK]"),
        replaced(b"<0x41>", b"<0x4Z>"),
        lambda good: good + message(TRAINER_SPEC, b"\x18\x01"),
        lambda good: good + message(TRAINER_SPEC, b"\x18\x03"),
        lambda good: good + message(NORMALIZER_SPEC, b"\x18\x01"),
        lambda good: good + message(NORMALIZER_SPEC, b"\x12\x04\xff\xff\xff\x7f"),
        lambda good: good + b"\n\xff\xff\xff\xff\x07",
        lambda good: good + b"\n" + b"\xff" * 9 + b"\x01",
        lambda good: b"\n\xff\xff\xff\xff\x07" + good[2:],
    ],
    ids=[
        *("empty", "one byte", "100 bytes", "cut short", "pickle", "duplicate piece", "one piece more"),
        *("mask as a word", "unknown type", "number for a text", "byte that is none", "unigram", "words"),
        *("space of its own", "normalization that is none", "huge length at the end", "endless length", "huge length"),
    ],
)
def test_row_45_a_crafted_tokenizer_model_is_told(
    damage: Callable[[bytes], bytes], tokenizer_folder: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir = make_run(desk / "run", tokenizer_folder)
    path = output_dir / "tokenizer" / "tokenizer.model"
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert path.read_bytes() != good
    with pytest.raises(UserError, match=r"tokenizer\.model is "):
        run(monkeypatch, export, "--checkpoint", output_dir, "--output", "out")
    with pytest.raises(UserError, match=r"tokenizer\.model is "):
        run(monkeypatch, fill_mask, "--model", output_dir, "a [MASK]")
    assert not (desk / "out").exists()


@pytest.mark.fault(
    row="46", fault="a model in the registry that asks for trust_remote_code", required="never trusted by default"
)
@pytest.mark.parametrize("config", ["config.json", pytest.param("tokenizer_config.json", marks=pytest.mark.slow)])
def test_row_46_code_of_a_registered_model_is_never_run(
    config: str, model_folder: Path, server: Server, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    import mlflow

    values = json.loads((model_folder / config).read_text())
    entries = {"AutoModelForMaskedLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}
    (model_folder / config).write_text(json.dumps(values | {"auto_map": entries, "model_type": "evil"}))
    (model_folder / "evil.py").write_text(f"open({str(desk / 'ran')!r}, 'w')\nclass Evil: pass\n")
    # Logged by hand, past our own register, as somebody else's would be.
    client = connect(server.uri)
    experiment = client.create_experiment(f"evil-{config}")
    run_id = client.create_run(experiment).info.run_id
    client.log_artifacts(run_id, str(model_folder), "model")
    name = f"evil-{config.split('.')[0]}"
    client.create_registered_model(name)
    client.create_model_version(name, f"{client.get_run(run_id).info.artifact_uri}/model", run_id)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    for command, arguments in users_of(f"models:/{name}/1", desk):
        with pytest.raises(UserError, check=coded("code-in-model")):
            run(monkeypatch, command, *arguments)
    with pytest.raises(UserError, check=coded("code-in-model")):
        begin_with(f"models:/{name}/1", server.uri)
    with pytest.raises(UserError, check=coded("code-in-model")):
        register(model_folder, "ours", None, server.uri)
    assert not (desk / "ran").exists()
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
