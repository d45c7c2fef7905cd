"""Code of the user's own, which settings name as `module:function`: its import, and its part in a run's identity.

Each kind of such code is one `CustomCode` here: an optimizer, an objective, a masking, a metric. `code_of` lists what a
run names. The version of a function is its attribute `version`, or the sha256 of its file when it was imported. Ranks
compare the versions before the first step. A checkpoint records the versions of all code that the numbers of a run
depend on (`versions_of`), and a resume with another version is refused as a change of the run.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UsageError, UserError
from data_prep.base.source_digest import check_module_unchanged, module_digest

if TYPE_CHECKING:
    from trainer.config.run_config import RunConfig

_NAME = re.compile(r"\w+(\.\w+)*:\w+")


def is_custom(name: str) -> bool:
    """Return whether a setting names code of the user's own, rather than something of this project."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class CustomCode:
    """One kind of code that users bring.

    Attributes:
        kind: such as "optimizer"; codes of errors contain it.
        setting: the setting that names it.
        form: what it must be, for the fix of errors.
        decides_numbers: whether the numbers of a run depend on it, so that another version makes another run.
        is_single: whether a run has at most one.
        called_at_start: whether it is called before the first step alone, so that its failure refuses the run.
    """

    kind: str
    setting: str
    form: str
    decides_numbers: bool = True
    is_single: bool = False
    called_at_start: bool = False

    def find(self, name: str) -> Callable[..., Any]:
        """Return the function or class at the start of work with it.

        Raises:
            UsageError: it cannot be imported (`KIND-not-importable`) or called (`not-a-KIND`).
            UserError: its file changed after it was imported (`module-changed`).
        """
        found = self.load(name)
        check_module_unchanged(found)
        return found

    def load(self, name: str) -> Callable[..., Any]:
        """Return what `find` returns, in the middle of a run: imported code stays in use if its file has changed."""
        from data_prep.base.registries import Registry

        registry = Registry(
            where=f"{self.setting}={{name}}",
            import_fix="correct the name, and put the directory of your module on PYTHONPATH",
            import_code=f"{self.kind}-not-importable",
            callable_fix=f"name {self.form}",
            callable_code=self._wrong_code,
        )
        return registry.find(name).value

    def version(self, name: str) -> str:
        """Return the version: the attribute `version`, or the sha256 of the file.

        Raises:
            UsageError: it cannot be imported, or has neither (`KIND-without-version`).
        """
        found = self.load(name)
        version = getattr(found, "version", None) or module_digest(found)
        if version is None:
            raise UsageError(
                f"the source of {self.setting}={name} cannot be read",
                fix="give it an attribute `version`",
                code=f"{self.kind}-without-version",
            )
        return str(version)

    def failed(self, name: str, error: Exception) -> UserError:
        """Return the error about an exception, with the last line of the user's file; raise it from `error`."""
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename == _file_of(name)), frames[-1])
        return self._error(
            f"{self.setting}={name} failed at {frame.filename}:{frame.lineno} ({type(error).__name__}: {error})",
            fix=f"correct the code, or name {self.form}",
            code=f"{self.kind}-failed",
        )

    def is_in_traceback(self, name: str, error: Exception) -> bool:
        """Return whether an exception passed through the user's file."""
        return any(frame.filename == _file_of(name) for frame in traceback.extract_tb(error.__traceback__))

    def wrong(self, name: str, problem: str, fix: str) -> UserError:
        """Return the error about what the user's code returned, such as "returned int" (`not-a-KIND`)."""
        return self._error(f"{self.setting}={name} {problem}", fix=fix, code=self._wrong_code)

    @property
    def _error(self) -> type[UserError]:
        return UsageError if self.called_at_start else UserError

    def key(self, name: str) -> str:
        """Return the name of the code's version in a checkpoint and among the facts that ranks compare."""
        return self.kind if self.is_single else f"{self.kind} {name}"

    @property
    def _wrong_code(self) -> str:
        return f"not-a{'n' if self.kind[0] in 'aeiou' else ''}-{self.kind}"


def _file_of(name: str) -> str | None:
    return getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)


OPTIMIZER = CustomCode(
    "optimizer",
    "optimizer.name",
    "a function of parameter groups and settings (the section `optimizer`) that returns a torch.optim.Optimizer",
    is_single=True,
    called_at_start=True,
)
MASKING = CustomCode(
    "masking",
    "data.masking",
    "a function of rows, keys, rates and the masking settings that returns (input_ids, labels)",
)
METRIC = CustomCode(
    "metric",
    "logging.metrics",
    "a function of step, metrics and model that returns {name: float}",
    decides_numbers=False,
)
OBJECTIVE = CustomCode(
    "objective",
    "objectives",
    "a subclass of trainer.objectives.objective.Objective, with the settings that it takes",
)
KINDS = (OPTIMIZER, OBJECTIVE, MASKING, METRIC)


def code_of(config: RunConfig) -> Iterator[tuple[CustomCode, str]]:
    """Yield the kind and name of all code of the user's own that a run names, each once."""
    maskings = [data.masking for stage in config.stages for data in (stage.data, stage.evaluation_data)]
    named: tuple[tuple[CustomCode, Iterable[str | None]], ...] = (
        (OPTIMIZER, [config.optimizer.name]),
        (OBJECTIVE, [each.name for each in config.all_objectives]),
        (MASKING, maskings),
        (METRIC, config.logging.metrics),
    )
    for kind, names in named:
        for name in dict.fromkeys(names):
            if name is not None and is_custom(name):
                yield kind, name


def check_code(config: RunConfig) -> None:
    """Check at the start of a run that its own code can be imported, has a version, and is the code in its file.

    Raises:
        UsageError: this is not so (`CustomCode.find`, `CustomCode.version`).
        UserError: a file changed after it was imported.
    """
    for kind, name in code_of(config):
        kind.find(name)
        kind.version(name)


def versions_of(config: RunConfig) -> dict[str, str]:
    """Return the versions of the code that the numbers of a run depend on, as a checkpoint records them."""
    return {kind.key(name): kind.version(name) for kind, name in code_of(config) if kind.decides_numbers}


def is_version_of_code(name: str) -> bool:
    """Return whether a version in a checkpoint is that of code of a user's own, rather than of a package."""
    return any(name == each.kind if each.is_single else name.startswith(f"{each.kind} ") for each in KINDS)
