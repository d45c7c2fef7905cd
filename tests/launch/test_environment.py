"""The installer, run with stand-ins for Python, pip and nvidia-smi: what it installs and what it says."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = "bash cat cut date dirname du flock grep id ls mkdir mv sed tail timeout uname".split()

# Stands in for the environment's Python: pip writes its arguments to a file and answers as the test wants.
PYTHON = """#!{bash}
case "$*" in
    "-m pip --version") exit 0 ;;
    "-m pip install"*)
        echo "$*" >>{calls}
        if [[ "$*" == *"+cpu"* && -n "{cpu_answer}" ]]; then echo "{cpu_answer}"; exit 1; fi
        if [[ "$*" == *" -e "* && -n "{project_answer}" ]]; then echo "{project_answer}"; exit 1; fi
        exit 0 ;;
    *) exec {python} "$@" ;;
esac
"""


class Machine:
    """A repository, the folder of commands that is the whole PATH, an environment with a stand-in Python."""

    def __init__(self, folder: Path) -> None:
        self.root, self.commands, self.venv = folder / "repository", folder / "commands", folder / "venv"
        self.calls = folder / "pip-calls"
        for path in (self.root / "launch", self.commands, self.venv / "bin"):
            path.mkdir(parents=True)
        shutil.copy(REPOSITORY / "launch" / "environment.sh", self.root / "launch")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.root)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.commands / tool).symlink_to(found)
        self.write_python()

    def write_python(self, cpu_answer: str = "", project_answer: str = "") -> None:
        text = PYTHON.format(
            bash=shutil.which("bash"),
            python=sys.executable,
            calls=self.calls,
            cpu_answer=cpu_answer,
            project_answer=project_answer,
        )
        self.add_command("python", text, self.venv / "bin")

    def add_command(self, name: str, text: str, folder: Path | None = None) -> None:
        path = (folder or self.commands) / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.commands),
            "CLOZEWORKS_VENV": str(self.venv),
            "CLOZEWORKS_INSTALLER": "pip",
            "LC_ALL": "C",
        } | more
        command = [str(self.commands / "bash"), "launch/environment.sh", *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=60)

    def pip_calls(self, constraints: str = "constraints.txt") -> list[str]:
        """What pip was told to install since the last look, call by call."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        prefix = f"-m pip install -c {self.root}/{constraints} --no-compile "
        assert all(call.startswith(prefix) for call in calls)
        return [call.removeprefix(prefix) for call in calls]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def torch_version() -> str:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    (version,) = (line.removeprefix("torch==") for line in lines if line.startswith("torch=="))
    return version


def test_without_a_gpu_the_cpu_build_of_torch_comes_first(machine: Machine, torch_version: str) -> None:
    result = machine.run("test")
    assert result.returncode == 0, result.stderr
    assert machine.pip_calls() == [f"torch=={torch_version}+cpu", f"-e {machine.root}[test]"]


def test_with_a_gpu_torch_is_the_ordinary_build(machine: Machine, torch_version: str) -> None:
    machine.add_command("nvidia-smi", f"#!{shutil.which('bash')}\necho 'GPU 0: H200 (UUID: GPU-1)'\n")
    assert machine.run().returncode == 0
    assert machine.pip_calls() == [f"torch=={torch_version}", f"-e {machine.root}[all]"]


@pytest.mark.parametrize(
    ("extras", "project"),
    [("core", ""), ("core,dask", "[dask]"), ("s3,core", "[s3]"), ("plots", "[plots]"), ("datatrove", "[datatrove]")],
)
def test_preparation_is_installed_without_torch(machine: Machine, extras: str, project: str) -> None:
    assert machine.run(extras).returncode == 0
    assert machine.pip_calls() == [f"-e {machine.root}{project}"]


def test_the_script_knows_the_extras_of_the_project_and_refuses_others(machine: Machine) -> None:
    result = machine.run("train,finetuning")
    assert result.returncode == 2 and "[unknown-extra]" in result.stderr and machine.pip_calls() == []
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(f" {name}," in result.stderr for name in ("core", *extras))


@pytest.mark.long
def test_extras_that_are_installed_already_are_not_installed_again(machine: Machine) -> None:
    assert machine.run("test").returncode == 0
    assert len(machine.pip_calls()) == 2
    for extras in ("core", "plots", "all", "train", "train,registry"):
        assert machine.run(*([extras] if extras != "all" else [])).returncode == 0
        assert machine.pip_calls() == [], extras
    for extras in ("gcs", "language"):
        assert machine.run(extras).returncode == 0
        assert machine.pip_calls() == [f"-e {machine.root}[{extras}]"]


UV = """#!{bash}
echo "uv $*" >>{calls}
exit {status}
"""


@pytest.mark.long
@pytest.mark.parametrize("status", [0, 1])
def test_uv_installs_the_project_with_pips_settings_and_pip_follows_if_it_fails(
    machine: Machine, torch_version: str, status: int
) -> None:
    machine.add_command("uv", UV.format(bash=shutil.which("bash"), calls=machine.calls, status=status))
    (machine.root / "pip.conf").write_text(
        "[global]\nindex-url = https://third\nextra-index-url = https://second\n[list]\nformat = columns\n"
        "[install]\nindex-url = https://second\nextra-index-url = https://more\nfind-links = /z\n"
    )
    settings = {"PIP_CONFIG_FILE": "pip.conf", "PIP_INDEX_URL": "https://mirror/simple", "PIP_FIND_LINKS": "/a /b"}
    result = machine.run("train", CLOZEWORKS_INSTALLER="uv", **settings)
    assert result.returncode == 0, result.stderr
    torch, uv, *rest = machine.calls.read_text().splitlines()
    assert torch.endswith(f" torch=={torch_version}+cpu")
    assert uv.startswith(f"uv pip install --python {machine.venv}/bin/python -c {machine.root}/constraints.txt ")
    assert " --default-index https://mirror/simple " in uv and " --find-links /a --find-links /b " in uv
    assert " --index https://more " in uv and "second" not in uv and "third" not in uv and "/z" not in uv
    assert uv.endswith(f" -e {machine.root}[train]")
    assert len(rest) == status and all(line.endswith(f" -e {machine.root}[train]") for line in rest)


@pytest.mark.long
def test_settings_of_pip_that_uv_does_not_have_keep_uv_away(machine: Machine) -> None:
    machine.add_command("uv", UV.format(bash=shutil.which("bash"), calls=machine.calls, status=0))
    result = machine.run("train", CLOZEWORKS_INSTALLER="uv", PIP_CONFIG_FILE="/dev/null", PIP_REQUIRE_HASHES="1")
    assert result.returncode == 0, result.stderr
    assert not any(line.startswith("uv ") for line in machine.calls.read_text().splitlines())


def test_without_uv_pip_brings_it(machine: Machine) -> None:
    assert machine.run("train", CLOZEWORKS_INSTALLER="uv").returncode == 0
    _, uv, project = machine.pip_calls()
    assert uv == "uv" and project == f"-e {machine.root}[train]", "this pip brings none, so pip does it all"


def test_an_unknown_installer_is_refused(machine: Machine) -> None:
    result = machine.run(CLOZEWORKS_INSTALLER="conda")
    assert result.returncode == 1 and "[unknown-installer]" in result.stderr
    assert machine.pip_calls() == []


@pytest.mark.parametrize("answer", ["No matching distribution found for torch", "ResolutionImpossible"])
def test_the_ordinary_build_is_installed_with_a_warning_where_no_cpu_build_exists(
    machine: Machine, torch_version: str, answer: str
) -> None:
    machine.write_python(cpu_answer=answer)
    result = machine.run()
    assert result.returncode == 0
    assert machine.pip_calls()[:2] == [f"torch=={torch_version}+cpu", f"torch=={torch_version}"]
    assert "several GB" in result.stdout and "PIP_EXTRA_INDEX_URL" in result.stdout


def test_a_failing_network_does_not_draw_the_ordinary_build(machine: Machine) -> None:
    machine.write_python(cpu_answer="after connection broken by a reset: ResolutionImpossible")
    result = machine.run()
    assert result.returncode == 1
    assert len(machine.pip_calls()) == 1
    assert "connection broken" in result.stderr and "install.log" in result.stderr


@pytest.mark.long
def test_it_installs_once_and_again_when_a_pin_changes(machine: Machine) -> None:
    assert machine.run("test").returncode == 0
    assert len(machine.pip_calls()) == 2
    assert machine.run("test").returncode == 0
    assert machine.pip_calls() == []
    with open(machine.root / "constraints.txt", "a") as file:
        file.write("another==1\n")
    assert machine.run("test").returncode == 0
    assert len(machine.pip_calls()) == 2


@pytest.mark.long
def test_it_installs_again_where_a_package_is_gone_or_has_another_version(machine: Machine) -> None:
    packages = machine.venv / "lib" / "python3.12" / "site-packages"
    for name in ("numpy-2.4.0", "torch-2.13.0", "pip-26.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    assert machine.run("test").returncode == 0 and len(machine.pip_calls()) == 1, "torch is there"
    (packages / "ipython-9.0.0.dist-info").mkdir()  # which is nobody's business
    (packages / "pip-26.0.dist-info").rename(packages / "pip-26.1.dist-info")
    for extras in ("test", "core", "train"):
        assert machine.run(extras).returncode == 0 and machine.pip_calls() == []
    (packages / "numpy-2.4.0.dist-info").rename(packages / "numpy-1.26.0.dist-info")
    assert machine.run("core").returncode == 0
    assert machine.pip_calls() == [f"-e {machine.root}"], "the stamp of [test] says no more what is there"


def test_other_versions_are_installed_by_a_file_of_ones_own(machine: Machine) -> None:
    (machine.root / "older.txt").write_text("torch==2.11.0\n")
    assert machine.run("test", CLOZEWORKS_CONSTRAINTS="older.txt").returncode == 0
    assert machine.pip_calls("older.txt") == ["torch==2.11.0+cpu", f"-e {machine.root}[test]"]


@pytest.mark.parametrize(
    ("text", "message"), [(None, "missing-constraints"), ("numpy==2.0.0\n", "missing-torch-version")]
)
def test_a_missing_or_unfit_file_of_versions_is_named(machine: Machine, text: str | None, message: str) -> None:
    if text is not None:
        (machine.root / "other.txt").write_text(text)
    result = machine.run(CLOZEWORKS_CONSTRAINTS="other.txt")
    assert result.returncode == 1 and message in result.stderr and "other.txt" in result.stderr
    assert machine.pip_calls() == []


def test_a_failed_installation_is_not_taken_for_done(machine: Machine) -> None:
    machine.write_python(project_answer="ERROR: disk full")
    result = machine.run()
    assert result.returncode == 1 and "disk full" in result.stderr
    machine.pip_calls()
    machine.write_python()
    assert machine.run().returncode == 0
    assert len(machine.pip_calls()) == 2


@pytest.mark.parametrize("name", ["a b", f"{'long' * 40}/{'er' * 60}"])
def test_a_packages_own_script_runs_where_the_environments_path_is_no_word(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path / name)
    script, other = machine.venv / "bin" / "deepspeed", machine.venv / "bin" / "activate"
    machine.add_command("deepspeed", f"#!{machine.venv}/bin/python\nimport sys\nprint(sys.argv[1:])\n", script.parent)
    other.write_text("deactivate () {\n")
    assert machine.run().returncode == 0
    done = subprocess.run([script, "x y", "$z"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['x y', '$z']\n", "")
    assert other.read_text() == "deactivate () {\n" and not list(script.parent.glob("*.new"))


def test_an_old_python_is_reported_with_the_version_to_install(machine: Machine) -> None:
    shutil.rmtree(machine.venv)
    machine.add_command("python3", f"#!{shutil.which('bash')}\nexit 1\n")
    result = machine.run()
    assert result.returncode == 1
    assert "[python-too-old]" in result.stderr and "apt-get install" in result.stderr


def test_a_python_without_ensurepip_names_the_debian_package(machine: Machine) -> None:
    shutil.rmtree(machine.venv)
    cases = f'*ensurepip*) exit 1 ;;\n*) exec {sys.executable} "$@" ;;'
    machine.add_command("python3", f'#!{shutil.which("bash")}\ncase "$*" in\n{cases}\nesac\n')
    result = machine.run()
    assert result.returncode == 1
    assert "apt-get install python3-venv" in result.stderr
    assert f"python3.{sys.version_info.minor}-venv" in result.stderr


def test_a_folder_of_something_else_is_not_cleared(machine: Machine) -> None:
    shutil.rmtree(machine.venv)
    machine.venv.mkdir()
    (machine.venv / "thesis.txt").write_text("mine")
    result = machine.run()
    assert result.returncode == 1 and "[not-an-environment]" in result.stderr
    assert (machine.venv / "thesis.txt").read_text() == "mine"


def test_an_unknown_argument_is_wrong_usage(machine: Machine) -> None:
    assert machine.run("--nonsense").returncode == 2
    assert machine.run("--help").returncode == 0


@pytest.mark.parametrize("script", ["launch/demo.sh", "launch/environment.sh", "tests/run.sh", ".ci/run"])
def test_every_script_parses(script: str) -> None:
    subprocess.run(["bash", "-n", REPOSITORY / script], check=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--corpus"], ["--output", "s3://bucket/demo"]])
def test_the_demo_refuses_a_wrong_command_line_before_it_begins(tmp_path: Path, arguments: list[str]) -> None:
    command = ["bash", REPOSITORY / "launch" / "demo.sh", *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and "error:" in result.stderr
    assert list(tmp_path.iterdir()) == []
