"""What the libraries do that this project works around, each shown with the library alone.

A test that fails here is good news: the library has changed, and its message names the code that may be simpler now.
"""

from __future__ import annotations

import bz2
import gzip
import http.server
import importlib
import inspect
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *arguments: str, timeout: int = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


# --- SentencePiece ---

_LINES = [" the old cat crossed the river", " a quiet dog slept near the bridge", " it rained on the wooden ship"] * 20
_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 60,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "minloglevel": 2,
}


def sentencepiece_model(lines: list[str], **options: Any) -> tuple[bytes, list[str]]:
    import sentencepiece

    model = io.BytesIO()
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(lines), model_writer=model, **{**_OPTIONS, **options})
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return model.getvalue(), [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


def test_sentencepiece_writes_the_number_of_its_threads_into_the_model() -> None:
    one, four = sentencepiece_model(_LINES, num_threads=1), sentencepiece_model(_LINES, num_threads=4)
    assert one[1] == four[1]
    assert one[0] != four[0], "_TRAINING_THREADS of tokenizing/sentencepiece_model.py need no longer be pinned"


def test_sentencepiece_drops_long_lines_in_silence() -> None:
    lines = [*_LINES, " " + "zzzzxxxx " * 60]
    pieces = sentencepiece_model(lines, max_sentence_length=200, vocab_size=40)[1]
    assert not any("z" in piece or "x" in piece for piece in pieces), (
        "max_line_bytes of tokenizing/sentencepiece_model.py and the cutting of lines before it may be taken out"
    )


def test_sentencepiece_leaves_the_space_out_of_the_vocabulary_where_text_hardly_has_any() -> None:
    lines = [" " + "\u6cb3\u6751\u5e08\u6848\u56ed" * 40] * 40
    pieces = sentencepiece_model(lines, vocab_size=12, character_coverage=0.98)[1]
    assert "\u2581" not in pieces, "required_chars of tokenizing/sentencepiece_model.py may be taken out"


def test_sentencepiece_does_not_tell_which_pieces_are_user_defined() -> None:
    import sentencepiece

    names = [name.lower() for name in dir(sentencepiece.SentencePieceProcessor)]
    assert not any("user" in name and "defined" in name for name in names), (
        "vocabulary_of of tokenizing/sentencepiece_model.py can ask the library instead of being given user_symbols"
    )


# --- tokenizers ---


def test_tokenizers_raises_bare_exceptions() -> None:
    import tokenizers

    with pytest.raises(Exception, match="EOF|line 1") as caught:
        tokenizers.Tokenizer.from_str("{")
    assert caught.type is Exception, "foreign_tokenizer.py and hugging_face.py can catch the library's own exception"


def metaspace_tokenizer(normalizer: Any, pre_tokenizer: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, models

    pieces = ["\u2581", "a", ".", "\u2581a"]
    result = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [("\u2581", "a")]))
    result.normalizer, result.pre_tokenizer = normalizer, pre_tokenizer
    result.add_special_tokens([AddedToken("[MASK]", special=True, normalized=False)])
    return result


def test_the_prepend_normaliser_puts_a_space_after_every_special_token() -> None:
    from tokenizers import normalizers, pre_tokenizers

    prepend = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokens = metaspace_tokenizer(prepend, pre_tokenizers.Metaspace(prepend_scheme="never")).encode("a [MASK].").tokens
    assert tokens[-2:] == ["\u2581", "."], "build of tokenizing/hugging_face.py may put the first space by Prepend"


def test_a_text_whose_first_character_is_removed_gets_no_space() -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    remove = normalizers.Replace(Regex("\u200b"), "")
    first = metaspace_tokenizer(remove, pre_tokenizers.Metaspace(prepend_scheme="first"))
    assert first.encode("a").tokens == ["\u2581a"]
    assert first.encode("\u200ba").tokens == ["a"], "the \\A replacement in _remove of hugging_face.py may be taken out"


def test_an_added_token_parts_a_text_before_its_first_space_is_known() -> None:
    from tokenizers import AddedToken, pre_tokenizers

    tokenizer = metaspace_tokenizer(None, pre_tokenizers.Metaspace(prepend_scheme="first"))
    tokenizer.add_tokens([AddedToken(".", normalized=False)])
    assert "\u2581" not in tokenizer.encode(".a").tokens[0], (
        "user symbols may be added tokens: tokenizing/user_symbols.py may be taken out"
    )


# --- sentencex ---


def test_sentencex_takes_an_unknown_language_for_english() -> None:
    import sentencex

    text = "Dr. Who came. He left."
    assert sentencex.segment("qqq", text) == sentencex.segment("en", text), (
        "check_language of text/sentences.py and its lists of languages may be taken out"
    )


def test_sentencex_takes_time_in_the_square_of_a_text_without_spaces() -> None:
    import sentencex

    def seconds(num_sentences: int) -> float:
        text = "\u6cb3\u6d41\u7a7f\u8fc7\u6751\u5e84\u3002" * num_sentences
        times = []
        for _ in range(3):
            started_at = time.thread_time()
            sentencex.segment("zh", text)
            times.append(time.thread_time() - started_at)
        return min(times)

    assert seconds(4_000) > 8 * seconds(1_000), "_split_in_windows of text/sentences.py may be taken out"


# --- WebDataset, tarfile and compression ---


def shard(folder: Path, num_records: int = 20) -> Path:
    path = folder / "train-000000.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(num_records):
            info = tarfile.TarInfo(f"{number:06d}.bin")
            info.size = 600
            tar.addfile(info, io.BytesIO(bytes(600)))
    return path


def test_webdataset_and_tarfile_end_in_silence_at_a_damaged_header(tmp_path: Path) -> None:
    import webdataset

    path = shard(tmp_path)
    data = bytearray(path.read_bytes())
    data[10 * 1536 : 10 * 1536 + 200] = b"\xff" * 200  # a record takes 512 + 1024 bytes
    path.write_bytes(data)
    with tarfile.open(path) as tar:
        in_tar = len(tar.getnames())
    in_web_data_set = len(list(webdataset.WebDataset(str(path), shardshuffle=False)))
    assert in_tar < 20, "read_records of data_set/shards.py need no longer be compared with the index to find the end"
    assert in_web_data_set < 20, "shards may be read by webdataset: their counts need no longer come from the manifest"


def test_webdataset_unpickles_members_named_so(tmp_path: Path) -> None:
    import webdataset

    path, mark = tmp_path / "evil.tar", tmp_path / "ran"
    data = f"cos\nmkdir\n(S'{mark}'\ntR.".encode()
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("0.pyd")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
    assert mark.exists(), "shards may be decoded by webdataset: _read_array of data_set/shards.py may be taken out"


@pytest.mark.spawn
def test_importing_webdataset_imports_torch() -> None:
    answer = run_python("import sys, webdataset; print('torch' in sys.modules)")
    assert answer.stdout.strip() == "True", "_write_records of data_set/shards.py may use webdataset.TarWriter"


def test_zstandard_gives_no_error_where_the_last_frame_is_cut_short() -> None:
    import zstandard

    data = zstandard.ZstdCompressor().compress(os.urandom(100_000))
    cut = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data[:-50_000]), read_across_frames=True).read()
    assert len(cut) < 100_000, "_FrameReader of files/compression.py may be zstandard's stream_reader"
    with pytest.raises(EOFError):
        gzip.decompress(gzip.compress(os.urandom(1_000))[:-500])


def test_bz2_takes_what_follows_a_stream_for_its_end() -> None:
    data = bz2.compress(b"first") + b"what is no stream"
    with bz2.open(io.BytesIO(data)) as file:
        assert file.read() == b"first", "_FrameReader of files/compression.py may be Python's bz2 and lzma files"


# --- safetensors, PyYAML, OmegaConf ---


def tensor_file(dtype: str) -> bytes:
    header = json.dumps({"x": {"dtype": dtype, "shape": [2], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def test_safetensors_raises_key_errors_where_numpy_has_no_such_type() -> None:
    import safetensors.numpy

    assert len(safetensors.numpy.load(tensor_file("I16"))["x"]) == 2
    with pytest.raises(Exception, match=".") as caught:
        safetensors.numpy.load(tensor_file("BF16"))
    assert not isinstance(caught.value, safetensors.SafetensorError), (
        "TENSOR_FAULTS of data_set/shards.py may be SafetensorError alone"
    )


@pytest.mark.parametrize("text", ["a: !!timestamp x", "a: !!bool x", "a: !!int ''"])
def test_pyyaml_lets_the_errors_of_its_constructors_pass(text: str) -> None:
    import yaml

    with pytest.raises(Exception, match=".") as caught:
        yaml.safe_load(text)
    assert not isinstance(caught.value, yaml.YAMLError), "_YAML_FAULTS of data_prep/settings.py may be shorter"


@pytest.mark.spawn
def test_libyaml_ends_the_process_on_a_deeply_nested_document() -> None:
    answer = run_python("import yaml; yaml.load('[' * 60_000 + ']' * 60_000, Loader=yaml.CSafeLoader)")
    assert answer.returncode < 0, "_refuse_depth of data_prep/settings.py may be taken out"


# --- fsspec and s3fs ---


class _Refusing(http.server.BaseHTTPRequestHandler):
    """Answers /403 with 403, and all else with the whole file, whatever range is asked for."""

    def do_GET(self) -> None:
        self.send_response(403 if self.path == "/403" else 200)
        data = b"" if self.path == "/403" else bytes(range(256)) * 40
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def web() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_fsspec_says_of_a_forbidden_web_file_that_it_is_missing(web: str) -> None:
    import fsspec

    with pytest.raises(FileNotFoundError):
        fsspec.filesystem("http", skip_instance_cache=True).info(f"{web}/403")
        pytest.fail("_raise_if_elsewhere of files/remote_files.py need not look for 401 and 403")


def test_fsspec_cannot_read_ranges_of_a_server_that_gives_whole_files(web: str) -> None:
    import fsspec

    file = fsspec.filesystem("http", skip_instance_cache=True).open(f"{web}/file", "rb", cache_type="none")
    with pytest.raises(ValueError, match=r"(?i)range"):
        file.seek(5)
        file.read(1)
        pytest.fail("_spooled of files/remote_reader.py may be taken out")


def test_open_files_of_the_memory_filesystem_share_one_position() -> None:
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/workarounds/file", b"0123456789")
    first, second = filesystem.open("/workarounds/file"), filesystem.open("/workarounds/file")
    second.seek(5)
    assert first.read(1) == b"5", "_range_fetcher of files/remote_reader.py need not treat memory:// by itself"


def test_the_glob_of_fsspec_takes_a_folder_that_cannot_be_listed_for_an_empty_one() -> None:
    from fsspec.spec import AbstractFileSystem

    class Failing(AbstractFileSystem):
        cachable = False

        def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
            if path.strip("/") != "top":
                raise PermissionError("the store is busy")
            folder = {"name": "top/a", "size": 0, "type": "directory"}
            return [folder] if detail else ["top/a"]

    assert Failing().glob("top/*/x") == [], "_walk of files/remote_files.py may be fsspec's glob"


def test_fsspec_remembers_listings_that_others_have_changed(s3_bucket: Any) -> None:
    import fsspec

    name = s3_bucket.url.removeprefix("s3://")
    options = {"skip_instance_cache": True, **s3_bucket.storage_options[s3_bucket.url]}
    reader, writer = fsspec.filesystem("s3", **options), fsspec.filesystem("s3", **options)
    writer.pipe_file(f"{name}/folder/first", b"1")
    assert len(reader.ls(f"{name}/folder")) == 1
    writer.pipe_file(f"{name}/folder/second", b"2")
    assert len(reader.ls(f"{name}/folder")) == 1, "use_listings_cache in files/remote_files.py may be taken out"


# --- torch ---


def test_variable_length_attention_has_no_kernel_for_the_cpu() -> None:
    from torch.nn.attention.varlen import varlen_attn

    query = torch.zeros(4, 1, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        varlen_attn(query, query, query, offsets, offsets, 4, 4)
        pytest.fail("trainer/model/cpu_attention.py may be taken out")


@pytest.mark.spawn
def test_new_groups_have_not_the_timeout_of_the_first_one() -> None:
    code = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=7))
seconds = lambda group: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
print(seconds(dist.group.WORLD), seconds(dist.new_group([0])))
dist.destroy_process_group()
"""
    answer = run_python(code)
    first, second = map(float, answer.stdout.split())
    assert first == 7
    assert second != 7, "set_timeout_on_all_groups of ranks/distributed.py may be taken out"


# --- transformers ---


def test_transformers_has_no_pipeline_for_question_answering() -> None:
    from transformers.pipelines import PIPELINE_REGISTRY

    assert "question-answering" not in PIPELINE_REGISTRY.get_supported_tasks(), (
        "WITHOUT_PIPELINE of registry/served_model.py may be an entry of PIPELINES"
    )


# --- MLflow ---


def test_mlflow_waits_for_minutes_for_a_server_that_is_down() -> None:
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

    retries, seconds = MLFLOW_HTTP_REQUEST_MAX_RETRIES.default, MLFLOW_HTTP_REQUEST_TIMEOUT.default
    assert (retries, seconds) == (7, 120), "look at request_limits of tracking/mlflow_server.py again"


def test_mlflow_takes_its_variable_away_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from mlflow.tracking import _tracking_service

    before = _tracking_service.utils._tracking_uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    try:
        mlflow.set_tracking_uri("sqlite:///another.db")
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
        assert "MLFLOW_TRACKING_URI" not in os.environ, "registry_client of mlflow_server.py need not put it back"
    finally:
        _tracking_service.utils._tracking_uri = before


def test_mlflow_refuses_a_whole_digest_of_a_data_set(database: str) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput
    from mlflow.exceptions import MlflowException

    client = MlflowClient(database)
    run_id = client.create_run("0").info.run_id
    for digest in ("a" * 36, "b" * 64):
        dataset = DatasetInput(Dataset("name", digest, "uri", "{}"), [])
        if len(digest) == 36:
            client.log_inputs(run_id, datasets=[dataset])
            continue
        with pytest.raises(MlflowException):
            client.log_inputs(run_id, datasets=[dataset])
            pytest.fail("MAX_DIGEST_LENGTH of tracking/delivery.py may be taken out")


def test_mlflow_cuts_a_long_parameter(database: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(database)
    run_id = client.create_run("0").info.run_id
    client.log_param(run_id, "long", "a" * 6_001)
    assert len(client.get_run(run_id).data.params["long"]) == 6_000, "look at MAX_PARAM_LENGTH of tracking.py again"


def test_mlflow_loads_a_registered_model_from_the_global_address_alone() -> None:
    from mlflow.transformers import load_model

    assert "tracking_uri" not in inspect.signature(load_model).parameters, (
        "registry_client of tracking/mlflow_server.py need not set the global address"
    )


# --- DeepSpeed ---


def test_deepspeed_trains_on_one_node_where_the_hostfile_is_missing(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import _parse_hostfile, fetch_hostfile

    remedy = "read_hostfile of preflight/hostfile.py may leave it to the launcher"
    assert fetch_hostfile(str(tmp_path / "none")) is None, remedy
    assert _parse_hostfile(["node slots=2 slots=8\n"]) == {"node": 2}, remedy


def test_the_launcher_of_deepspeed_fails_on_a_blank_line_of_its_environment_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.launcher import runner

    (tmp_path / "hostfile").write_text("one slots=1\ntwo slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n\n# of this cluster\n")
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_PATHS", [str(tmp_path)])
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *_, **__: pytest.fail("the launcher started"))
    options = ["--hostfile", "hostfile", "--no_ssh_check", "--master_addr", "192.0.2.1", "train.py"]
    with pytest.raises(ValueError, match="unpack"):
        runner.main(options)
        pytest.fail("the look at the lines of .deepspeed_env in preflight/host_checks.py may be taken out")


def test_deepspeed_ignores_an_unknown_setting_in_silence() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "zero_optimisation": {"stage": 3}}
    found = DeepSpeedConfig(settings)
    assert found.zero_config.stage == 0, "_unknown of trainer/deepspeed_config.py may be left to DeepSpeed"


def test_deepspeed_makes_groups_without_a_timeout() -> None:
    import deepspeed.comm

    assert "timeout" not in inspect.signature(deepspeed.comm.new_group).parameters, (
        "set_timeout_on_all_groups of ranks/distributed.py may give it to DeepSpeed"
    )


def test_deepspeed_would_compile_its_shared_memory_op_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.ops
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    built: list[str] = []
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda self, *_: built.append(self.NAME))
    importlib.import_module("deepspeed.comm.torch").build_shm_op()
    assert built == ["deepspeed_shm_comm"], "initialize_distributed need not turn it off in __compatible_ops__"


_ENGINE = """
import json, os, sys, warnings, contextlib, io
import torch
warnings.filterwarnings("ignore")
sys.path.insert(0, os.getcwd())
from trainer.ranks.distributed import initialize_distributed
from trainer.settings.training import DistributedSettings
initialize_distributed(DistributedSettings())
import deepspeed
from deepspeed.utils import safe_set_full_optimizer_state

def engine_of(stage, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    settings = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "steps_per_print": None, **more}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine, model, optimizer, told.getvalue()

found = {}
engine, model, optimizer, _ = engine_of(0)
engine.backward(engine(torch.full((1, 4), float("nan"))).sum())
engine.step()
found["norm at stage 0"] = engine.get_global_grad_norm() is None
moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
found["nan in moments"] = any(bool(moment.isnan().any()) for moment in moments)

engine, model, *_ , told = engine_of(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
found["prints its memory"] = bool(told.strip())
weight = next(model.parameters())
try:
    safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
    found["state before the first step"] = True
except Exception as error:
    found["state before the first step"] = False

engine, model, *_ = engine_of(1, data_types={"grad_accum_dtype": "fp32"})
before = [p.detach().clone() for p in model.parameters()]
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def engine_findings() -> dict[str, bool]:
    answer = run_python(_ENGINE, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    assert answer.returncode == 0, answer.stderr[-3000:]
    findings: dict[str, bool] = json.loads(answer.stdout.strip().splitlines()[-1])
    return findings


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("name", "as_known", "remedy"),
    [
        ("norm at stage 0", True, "Engine.step of trainer/engine.py need not compute the norm at stage 0"),
        ("nan in moments", True, "Engine.step of trainer/engine.py need not keep NaN from the moments at stage 0"),
        ("prints its memory", True, "build_engine of trainer/engine.py need not catch what is printed"),
        ("state before the first step", False, "Engine.prepare of trainer/engine.py needs no rehearsal for the state"),
    ],
)
def test_what_the_engine_of_deepspeed_does(
    engine_findings: dict[str, bool], name: str, as_known: bool, remedy: str
) -> None:
    assert engine_findings[name] is as_known, remedy


_SLEEPER = "import os, sys, time\nopen(sys.argv[-1], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"


@pytest.mark.slow
@pytest.mark.launcher
def test_the_launcher_of_deepspeed_leaves_its_ranks_alone_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(_SLEEPER)
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "1", "--master_port", "29873"]
    launcher = subprocess.Popen(
        [*command, str(tmp_path / "rank.py"), str(tmp_path / "pid")],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    rank = int((tmp_path / "pid").read_text())
    launcher.kill()
    launcher.wait()
    time.sleep(5)
    try:
        os.kill(rank, 0)
    except ProcessLookupError:
        pytest.fail("watch_launcher of ranks/launcher.py may be taken out")
    os.kill(rank, 9)
