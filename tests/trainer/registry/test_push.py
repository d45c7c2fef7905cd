"""Pushes of runs and folders to a server that stands in for the Hub, with huggingface_hub's client over a socket."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from tests.support.hub_server import ModelHub
from trainer.hf_export.export import export_checkpoint
from trainer.model.model_folder import FILES_SHA256, file_digests, folder_digest
from trainer.registry import push as module
from trainer.registry.hub_repository import HubRepository, check_repository_name
from trainer.registry.push import Pushed, check_pushable, is_document, plan_push, push

NAME = "owner/tiny"
PUTS, COMMITS = "PUT /lfs-storage/", "POST /api/models/owner/tiny/commit/"


@pytest.fixture(scope="module")
def exported(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of step 10; not to be changed."""
    from tests.support.toy_run import make_run

    folder = tmp_path_factory.mktemp("exported")
    return export_checkpoint(
        make_run(folder / "run", tokenizer_folder) / "checkpoints/step-00000010", folder / "m"
    ).output


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"folder": tmp_path_factory.mktemp("exports")}


@pytest.fixture(autouse=True)
def each_checkpoint_is_exported_once(exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of all tests have the same checkpoints: later exports are copies of the first one."""

    def export(checkpoint: Path, output: Path) -> Any:
        key = f"{folder_digest(checkpoint)}-{output.name}"
        if key not in exports:
            exports[key] = export_checkpoint(checkpoint, exports["folder"] / key[:16] / output.name).output
        shutil.copytree(exports[key], output)
        return SimpleNamespace(output=output)

    monkeypatch.setattr(module, "export_checkpoint", export)


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


def pushed(*arguments: Any, **options: Any) -> dict[str, Pushed]:
    return {each.branch: each for each in push(*arguments, **options)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_checkpoint_of_a_run_is_a_revision_and_the_newest_is_main(
    hub: ModelHub, run_folder: Path, tmp_path: Path
) -> None:
    done = pushed(run_folder, NAME)
    assert [*done] == ["step-10", "step-20", "main"]
    repository = hub.repositories[NAME]
    assert repository.branches.keys() == {"main", "step-10", "step-20"} and not repository.private
    for step in (10, 20):
        expected = contents(
            export_checkpoint(run_folder / f"checkpoints/step-000000{step}", tmp_path / f"{step}" / "tiny").output
        )
        sent = repository.contents(f"step-{step}")
        assert sent.keys() == expected.keys()
        assert {name for name in expected if sent[name] != expected[name]} == {"README.md"}
        assert b'model="owner/tiny"' in sent["README.md"]  # where the model is now
    assert repository.contents("main") == repository.contents("step-20") != repository.contents("step-10")
    assert done["main"].commit == repository.branches["main"] and done["step-10"].num_files == 13
    assert hub.count(PUTS) == 2, "the weights of main are on the Hub already"
    assert not (run_folder / "push/exports").exists()


def test_the_same_push_again_sends_nothing(hub: ModelHub, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pushed(run_folder, NAME)
    commits, hub.requests = hub.count(COMMITS), []
    monkeypatch.setattr(module, "export_checkpoint", pytest.fail)
    again = pushed(run_folder, NAME)
    assert commits == 3 and {each.note for each in again.values()} == {"sent before"}
    assert {name: each.commit for name, each in again.items()} == {name: each.commit for name, each in first.items()}
    assert not [request for request in hub.requests if not request.startswith("GET ")]


def test_a_later_checkpoint_is_added_and_moves_main(hub: ModelHub, run_folder: Path, tmp_path: Path) -> None:
    later = run_folder / "checkpoints/step-00000020"
    later.rename(tmp_path / "later")
    assert [*pushed(run_folder, NAME)] == ["step-10", "main"]
    (tmp_path / "later").rename(later)
    done = pushed(run_folder, NAME)
    assert (done["step-10"].note, done["step-20"].note, done["main"].note) == ("sent before", "", "")
    repository = hub.repositories[NAME]
    assert repository.contents("main") == repository.contents("step-20")
    back = pushed(run_folder / "checkpoints/step-00000010", NAME)
    assert back["main"].note == "stays at the later step-20"
    assert repository.contents("main") == repository.contents("step-20")


def test_a_lost_journal_sends_nothing_twice(hub: ModelHub, run_folder: Path) -> None:
    pushed(run_folder, NAME)
    shutil.rmtree(run_folder / "push")
    puts, commits = hub.count(PUTS), hub.count(COMMITS)
    assert {each.note for each in pushed(run_folder, NAME).values()} == {"was there"}
    assert (hub.count(PUTS), hub.count(COMMITS)) == (puts, commits)


def test_a_journal_that_cannot_be_read_is_a_lost_one(hub: ModelHub, run_folder: Path) -> None:
    pushed(run_folder, NAME)
    (journal,) = (run_folder / "push").glob("*.json")
    journal.write_bytes(b'{"torn')
    assert {each.note for each in pushed(run_folder, NAME).values()} == {"was there"}


def test_a_repository_that_was_removed_gets_everything_again(hub: ModelHub, run_folder: Path) -> None:
    pushed(run_folder, NAME)
    del hub.repositories[NAME]
    assert {each.note for each in pushed(run_folder, NAME).values()} == {""}
    assert hub.repositories[NAME].branches.keys() == {"main", "step-10", "step-20"}


@pytest.mark.fault(
    row="76", fault="the Hub fails each request of a push once (500, closed connection)", required="tried again"
)
def test_a_put_and_requests_that_fail_in_between_are_tried_again(hub: ModelHub, run_folder: Path) -> None:
    failed: list[str] = []

    def each_once(method: str, path: str) -> int | None:
        if f"{method} {path}" in failed:
            return None
        failed.append(f"{method} {path}")
        return 500 if method == "PUT" else 0

    hub.fault = each_once
    assert [*pushed(run_folder, NAME)] == ["step-10", "step-20", "main"]
    assert any(request.startswith(PUTS) for request in failed) and any(each.startswith(COMMITS) for each in failed)
    assert len(hub.objects) == 2 and hub.count(PUTS) == 4, "each weight once in vain"
    assert len(hub.repositories[NAME].commits) == 4, "the first commit of the Hub, and one for each branch"


@pytest.mark.fault(row="76", fault="the Hub's answers to a push are lost", required="no second commit")
def test_an_answer_that_is_lost_makes_no_second_commit(hub: ModelHub, run_folder: Path) -> None:
    lost: list[str] = []

    def loses(method: str, path: str) -> bool:
        if f"{method} {path}" in lost or method == "GET":
            return False
        lost.append(f"{method} {path}")
        return True

    hub.loses_answer = loses
    assert [*pushed(run_folder, NAME)] == ["step-10", "step-20", "main"]
    assert any(each.startswith(COMMITS) for each in lost) and "POST /api/repos/create" in lost
    assert len(hub.repositories[NAME].commits) == 4


@pytest.mark.fault(
    row="76",
    fault="an outage of the Hub begins after a request of a push",
    required="the same command sends the rest, and nothing twice",
)
@pytest.mark.parametrize("after", [f"{COMMITS}step-10", f"{COMMITS}step-20", PUTS, f"{COMMITS}main"])
def test_after_an_outage_the_same_command_sends_the_rest(hub: ModelHub, run_folder: Path, after: str) -> None:
    """The Hub is gone after this request was answered: no connection is accepted any more."""
    is_gone = False

    def gone(method: str, path: str) -> int | None:
        nonlocal is_gone
        if is_gone:
            return 0
        is_gone = f"{method} {path}".startswith(after)
        return None

    hub.fault = gone
    try:
        for each in push(run_folder, NAME):
            assert each.branch != "main" or after.endswith("main")
    except UserError as error:
        assert error.code == "hub-unavailable" and "rerun the same command" in error.fix
    hub.fault = lambda method, path: None
    assert [*pushed(run_folder, NAME)] == ["step-10", "step-20", "main"]
    assert hub.count(PUTS) == 2 and len(hub.repositories[NAME].commits) == 4
    assert not (run_folder / "push/exports").exists()


def test_a_hub_that_is_not_there_is_an_error_and_the_export_is_kept(hub: ModelHub, run_folder: Path) -> None:
    pushing = push(run_folder, NAME)
    next(pushing)
    port = hub.port
    hub.stop()
    with pytest.raises(UserError, check=coded("hub-unavailable")):
        next(pushing)
    assert len(list((run_folder / "push/exports").iterdir())) == 1
    hub.start(port)
    assert [each.note for each in push(run_folder, NAME)] == ["sent before", "", ""]


def test_a_damaged_export_of_before_is_made_again(hub: ModelHub, run_folder: Path) -> None:
    hub.fault = lambda method, path: 503 if path.endswith("/commit/step-10") else None
    with pytest.raises(UserError, check=coded("hub-unavailable")):
        pushed(run_folder, NAME)
    (weights,) = (run_folder / "push/exports").rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    hub.fault = lambda method, path: None
    assert [*pushed(run_folder, NAME)] == ["step-10", "step-20", "main"]


@pytest.mark.parametrize(
    ("status", "said"), [(403, "may write"), (401, "HF_TOKEN"), (413, "storage"), (400, "correct"), (404, "see")]
)
def test_a_refusal_is_not_tried_again(hub: ModelHub, folder: Path, status: int, said: str) -> None:
    hub.fault = lambda method, path: status if path.endswith("/branch/step-10") else None
    with pytest.raises(UserError, check=coded("hub-refuses")) as refused:
        pushed(folder, NAME)
    assert said in refused.value.fix and f"status {status}" in refused.value.problem
    assert hub.count("POST /api/models/owner/tiny/branch/") == 1


def test_a_wrong_token_is_a_refusal(hub: ModelHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another-one")
    with pytest.raises(UserError, check=coded("hub-refuses")) as refused:
        pushed(folder, NAME)
    assert "hf_another-one" not in str(refused.value) and "401" in str(refused.value)


def test_without_a_token_nothing_is_sent(hub: ModelHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UsageError, check=coded("missing-hub-token")):
        pushed(folder, NAME)
    assert not hub.requests


def test_offline_is_said(hub: ModelHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, check=coded("hub-offline")):
        pushed(folder, NAME)


def test_an_exported_folder_is_its_step_and_main(hub: ModelHub, folder: Path) -> None:
    assert [*pushed(folder, NAME)] == ["step-10", "main"]
    assert hub.repositories[NAME].contents("main") == contents(folder)
    assert [*pushed(folder, "owner/second", main="none")] == ["step-10"]
    assert hub.repositories["owner/second"].contents("main") == {}
    assert sorted(path.name for path in folder.parent.iterdir() if path.name != "run") == ["model"]


def test_documents_may_be_added_and_changed(hub: ModelHub, folder: Path) -> None:
    (folder / "README.md").write_text("# Mine\n")
    (folder / "LICENSE").write_text("Apache\n")
    (folder / "curves.png").write_bytes(b"png")
    pushed(folder, NAME)
    hub.repositories[NAME].add("main", {**hub.repositories[NAME].files("main"), "NOTES.md": _text("by hand")}, "edit")
    (folder / "curves.png").unlink()
    done = pushed(folder, NAME, overwrite=True)
    assert done["main"].num_changes == 0, "documents of main stay"
    assert hub.repositories[NAME].contents("main")["NOTES.md"] == b"by hand"
    assert "curves.png" not in hub.repositories[NAME].contents("step-10"), "a step is what the folder is"


def _text(text: str) -> Any:
    from tests.support.hub_server import Stored

    return Stored(text.encode(), False)


def test_a_revision_holds_no_other_model_until_its_own_is_sent(hub: ModelHub, run_folder: Path, tmp_path: Path) -> None:
    """It is made from the first commit: a command that ends here leaves no step 10 under the name step-20."""
    later = run_folder / "checkpoints/step-00000020"
    later.rename(tmp_path / "later")
    pushed(run_folder, NAME)
    (tmp_path / "later").rename(later)
    hub.fault = lambda method, path: 403 if path.endswith("/commit/step-20") else None
    with pytest.raises(UserError, check=coded("hub-refuses")):
        pushed(run_folder, NAME)
    assert hub.repositories[NAME].contents("main") and hub.repositories[NAME].contents("step-20") == {}
    shutil.rmtree(run_folder / "push")
    hub.fault = lambda method, path: None
    assert pushed(run_folder, NAME)["step-20"].num_changes == 13, "also without the journal"


@pytest.mark.parametrize("with_journal", [True, False])
def test_another_model_is_not_replaced(
    hub: ModelHub, folder: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_journal: bool
) -> None:
    """Step 10 of another run, on the same machine or on another one."""
    other = export_checkpoint(run_folder / "checkpoints/step-00000020", tmp_path / "other").output
    path = other / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 10, "mlflow_run_id": "xyz"}))
    pushed(folder, NAME)
    if not with_journal:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    before = dict(hub.repositories[NAME].branches)
    with pytest.raises(UserError, match="step-10 of", check=coded("hub-holds-another-model")):
        pushed(other, NAME)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 30}))
    with pytest.raises(UserError, match="main of", check=coded("hub-holds-another-model")):
        pushed(other, NAME)
    assert hub.repositories[NAME].branches["main"] == before["main"]
    assert hub.repositories[NAME].branches["step-10"] == before["step-10"]
    assert pushed(other, NAME, overwrite=True)["main"].num_changes > 0
    assert hub.repositories[NAME].contents("main") == contents(other)


def test_a_model_of_others_on_main_is_not_replaced(hub: ModelHub, run_folder: Path) -> None:
    from tests.support.hub_server import Repository

    repository = hub.repositories[NAME] = Repository(private=False)
    repository.add("main", {"config.json": _text("{}"), "pytorch_model.bin": _text("x")}, "theirs")
    with pytest.raises(UserError, match="main of", check=coded("hub-holds-another-model")):
        pushed(run_folder, NAME)
    assert repository.contents("main").keys() == {"config.json", "pytorch_model.bin"}
    assert "config.json" in repository.contents("step-20"), "its own branch"
    assert "pytorch_model.bin" not in repository.contents("step-20"), "which has nothing of main"
    pushed(run_folder, NAME, overwrite=True)
    assert repository.contents("main") == repository.contents("step-20")


def test_private_repositories_are_created_and_public_ones_refused(hub: ModelHub, folder: Path) -> None:
    pushed(folder, NAME, private=True)
    assert hub.repositories[NAME].private
    pushed(folder, "owner/public")
    with pytest.raises(UserError, check=coded("hub-repository-is-public")):
        pushed(folder, "owner/public", private=True)
    assert pushed(folder, NAME)["main"].note == "sent before"


def test_the_best_checkpoint_is_main(hub: ModelHub, run_folder: Path) -> None:
    for step, loss in ((10, 2.0), (20, 3.0)):
        path = run_folder / f"checkpoints/step-000000{step}/evaluation.json"
        path.write_text(json.dumps({"state": "done", "metrics": {"valid/mlm_loss": loss}}))
    pushed(run_folder, NAME, main="best")
    assert hub.repositories[NAME].contents("main") == hub.repositories[NAME].contents("step-10")


def test_a_best_checkpoint_without_scores_is_refused(run_folder: Path) -> None:
    with pytest.raises(UserError, check=coded("no-best-checkpoint")):
        pushed(run_folder, NAME, main="best")


def test_a_dry_run_contacts_nobody_and_writes_nothing(hub: ModelHub, run_folder: Path, folder: Path) -> None:
    before = sorted(run_folder.rglob("*"))
    planned = list(plan_push(run_folder, NAME))
    assert [each.branch for each in planned] == ["step-10", "step-20", "main"] and not hub.requests
    assert all(each.num_files == 13 and each.num_bytes > 10_000 and "parity" in each.proof for each in planned)
    assert sorted(run_folder.rglob("*")) == before
    pushed(run_folder, NAME)
    assert [(each.branch, each.note) for each in plan_push(run_folder, NAME)][:1] == [("step-10", "sent before")]
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, check=coded("changed-after-gate")):
        list(plan_push(folder, NAME))


def edit(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "1_Pooling/config.json"])
def test_a_file_that_was_edited_after_the_gate_is_refused(hub: ModelHub, folder: Path, name: str) -> None:
    edit(folder, name)
    with pytest.raises(UserError, check=lambda error: error.code in ("changed-after-gate", "damaged-model")):
        pushed(folder, NAME)
    assert not hub.requests


@pytest.mark.parametrize("name", ["extra.safetensors", "special_tokens_map.json", ".env", "1_Pooling/more.json"])
def test_a_file_that_was_added_after_the_gate_is_refused(hub: ModelHub, folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    with pytest.raises(UserError, check=coded("changed-after-gate")) as refused:
        pushed(folder, NAME)
    assert "remove what was added" in refused.value.fix and not hub.requests


def test_a_file_that_was_removed_or_a_linked_document_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "NOTES.md").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, check=coded("changed-after-gate")):
        check_pushable(folder)
    (folder / "NOTES.md").unlink()
    (folder / "tokenizer.model").unlink()
    with pytest.raises(UserError, match="removed", check=coded("changed-after-gate")):
        check_pushable(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "modeling.py"])
def test_pickles_and_code_are_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps({}))
    with pytest.raises(UserError, check=coded("code-in-model")):
        check_pushable(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"parity": None},
        {"parity": {"num_texts": 3}},
        {"parity": "passed"},
        {"max_logit_difference": 1.0},
        {"max_logit_difference": float("nan")},
        {"max_logit": float("inf")},
        {"num_logits": 0},
        {FILES_SHA256: None},
        {FILES_SHA256: {"config.json": 3}},
        {FILES_SHA256: {}},
    ],
)
def test_without_a_record_of_a_passed_gate_nothing_is_sent(hub: ModelHub, folder: Path, change: dict[str, Any]) -> None:
    path = folder / "provenance.json"
    record = json.loads(path.read_text())
    if change.keys() <= record["parity"].keys():
        record["parity"] |= change
    else:
        record |= change
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, check=lambda error: error.code in ("push-without-gate", "changed-after-gate")):
        pushed(folder, NAME)
    assert not hub.requests


@pytest.fixture
def fitted(tiny_hugging_face: Path, tmp_path: Path) -> Path:
    """A fitted model, as `clozeworks finetune` saves it."""
    from transformers import AutoModelForSequenceClassification

    from trainer.finetuning.fitted_card import FitFacts
    from trainer.finetuning.fitted_model import save_fitted_model

    model = AutoModelForSequenceClassification.from_pretrained(tiny_hugging_face, num_labels=2)
    facts = FitFacts(
        *("classification", "models:/base@champion", "full", "text", None, "label", 20, 1e-3, 0, 1),
        *({"train": 2}, {"f1": 0.5}, {"f1": 0.5}, "valid", "d", "e"),
    )
    save_fitted_model(model, tiny_hugging_face, tmp_path / "fitted", facts, None)
    return tmp_path / "fitted"


def test_a_fitted_model_is_main_with_its_scores(hub: ModelHub, fitted: Path) -> None:
    done = pushed(fitted, "owner/films")
    assert [*done] == ["main"] and done["main"].proof == "valid/f1 0.5"
    assert hub.repositories["owner/films"].contents("main") == contents(fitted)
    assert pushed(fitted, "owner/films")["main"].note == "sent before"


@pytest.mark.parametrize("name", ["finetune.json", "model.safetensors", "config.json"])
def test_a_fitted_model_that_is_not_what_was_scored_is_refused(fitted: Path, name: str) -> None:
    text = (fitted / name).read_bytes()
    (fitted / name).write_bytes(text.replace(b"0.5", b"0.9") if name == "finetune.json" else text + b" ")
    with pytest.raises(UserError, check=coded("changed-after-gate")):
        check_pushable(fitted)


@pytest.mark.parametrize("change", [{"scores": {}}, {FILES_SHA256: None}])
def test_a_fitted_model_without_scores_or_digests_is_refused(fitted: Path, change: dict[str, Any]) -> None:
    path = fitted / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, check=coded("push-without-gate")):
        check_pushable(fitted)


def test_another_fit_replaces_none_without_overwrite(hub: ModelHub, fitted: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    pushed(fitted, "owner/films")
    weights = load_file(fitted / "model.safetensors")
    save_file({name: weight + torch.ones(()) for name, weight in weights.items()}, fitted / "model.safetensors")
    path = fitted / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {FILES_SHA256: file_digests(fitted)}))
    with pytest.raises(UserError, check=coded("hub-holds-another-model")):
        pushed(fitted, "owner/films")
    assert pushed(fitted, "owner/films", overwrite=True)["main"].num_changes == 2


def test_a_model_from_elsewhere_has_no_record(hub: ModelHub, tiny_hugging_face: Path) -> None:
    with pytest.raises(UserError, match="no record of the parity gate", check=coded("push-without-gate")):
        pushed(tiny_hugging_face, NAME)


def test_a_checkpoint_that_is_damaged_is_refused(hub: ModelHub, run_folder: Path) -> None:
    edit(run_folder / "checkpoints/step-00000010", "rank-00000-of-00002.safetensors")
    with pytest.raises(UserError, check=coded("damaged-checkpoint")):
        pushed(run_folder, NAME)
    assert not hub.count(COMMITS)


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, check=coded("missing-checkpoint")):
        pushed(tmp_path / "run", NAME)


@pytest.mark.parametrize(
    "name", ["tiny", "owner/", "/tiny", "a/b/c", "owner/ti ny", "owner/tiny.git", "o--w/x", "owner/..", "öwner/x y", "",
             "owner/tiny\n", "https://hub/owner/tiny", "owner/" + "x" * 100]
)  # fmt: skip
def test_names_that_the_hub_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(UsageError, check=coded("invalid-hub-name")):
        check_repository_name(name)


@pytest.mark.parametrize("name", ["owner/tiny", "a/b", "Org-1/my_model.v2", "öwner/x"])
def test_names_of_repositories(name: str) -> None:
    if name.isascii():
        check_repository_name(name)
    else:
        with pytest.raises(UsageError):
            check_repository_name(name)


def test_one_push_at_a_time(hub: ModelHub, run_folder: Path) -> None:
    first = push(run_folder, NAME)
    next(first)
    with pytest.raises(UserError, check=coded("folder-locked")):
        next(push(run_folder, NAME))
    assert len(list(first)) == 2


@pytest.mark.long
def test_what_was_pushed_loads_from_the_hub(hub: ModelHub, run_folder: Path, tmp_path: Path) -> None:
    import torch
    from huggingface_hub import HfApi
    from transformers import AutoModelForMaskedLM

    pushed(run_folder, NAME)
    api = HfApi(endpoint=hub.url, token=hub.token)
    models = []
    for revision in ("step-10", "step-20", "main"):
        folder = api.snapshot_download(NAME, revision=revision, cache_dir=tmp_path / "cache")
        models.append(AutoModelForMaskedLM.from_pretrained(folder).state_dict())
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(models[1][name], models[2][name]) and not torch.equal(models[0][name], models[1][name])


def test_documents_are_what_no_program_reads_with_the_model() -> None:
    assert all(map(is_document, ("README.md", "docs/NOTES.MD", "LICENSE", "a.png")))
    assert not any(map(is_document, ("vocab.txt", "config.json", "x.safetensors", "merges.txt", ".env", "a.md.json")))


@pytest.mark.parametrize("bug", [KeyError("oid"), TypeError("no number"), ValueError("ours"), RuntimeError("ours")])
def test_a_mistake_of_this_project_is_no_outage(hub: ModelHub, monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise bug

    repository = HubRepository("owner/tiny")
    monkeypatch.setattr(repository._api, "list_repo_refs", fail)
    with pytest.raises(type(bug)) as raised:
        repository.branches()
    assert raised.value is bug
