"""The block about an encoder of over 300M parameters that was trained on a CPU, and its picture.

`tests/system/bert_large_for_real.py` measures for hours and writes what it has so far: what has not been measured is
left out or called so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks import plots
from tests.benchmarks.reports import Report, machine_of

PICTURE = "large.svg"
_WINDOW = 20
_NOT_YET = "not measured yet"
_LAST = ("export", "evaluate", "register", "pull", "fine-tune")


def large(report: Report) -> Iterator[str]:
    """What is done, the losses beside the other encoders', memory by start, and the steps after training."""
    details = report["details"]
    runs, planned = _runs(details), details["steps_planned"]
    done, steps = runs[0]["step"], details["steps"]
    is_done = "All" if done >= planned else f"{done:,} of"
    plan = steps["plan"]
    yield (
        f"{is_done} {planned:,} steps are done. {plan['parameters']:,} parameters, ZeRO 2, two ranks, batches of "
        f"{details['batch_tokens']:,} tokens in rows of {details['sequence_length']}. Settings besides the preset's: "
        f"{', '.join(f'`{each}`' for each in plan['settings'])}. {machine_of(report)}, {report['date']}, load average "
        f"{report['machine']['load_average']:.1f}, commit {report['commit']}. `{report['command']}`"
    )
    yield ""
    yield f"![training losses by step](results/{PICTURE})"
    yield ""
    yield from _losses(runs, steps["data"]["unigram_entropy"])
    yield ""
    yield from _starts(runs[0]["starts"], plan)
    yield ""
    yield from _way(steps)


def picture(report: Report) -> str:
    """The training losses, each point the mean of so many steps around it, and the unigram entropy."""
    details = report["details"]
    curves = {_name(run): _smoothed(run["train_loss"]) for run in _runs(details) if run["train_loss"]}
    levels = {"unigram entropy": details["steps"]["data"]["unigram_entropy"]}
    unit = f"MLM loss in training, nats, mean of {_WINDOW} steps; other masking rates give other losses"
    return plots.draw_curves("An encoder of over 300M parameters on two CPU cores", curves, levels, unit)


def worst_estimate(report: Report) -> float:
    """The estimate of memory divided by the measured one, of the start in which they differ most."""
    plan = report["details"]["steps"]["plan"]
    starts = [each for each in report["details"]["large"]["starts"] if _took_steps(each)]
    return max((_estimate(each, plan) / max(each["pss_gib"]) for each in starts), key=lambda ratio: abs(ratio - 1))


def _runs(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The large run, and those beside it that have begun."""
    runs = [details[name] for name in ("large", "small", "medium")]
    return [runs[0], *(run for run in runs[1:] if run["train_loss"])]


def _name(run: Mapping[str, Any]) -> str:
    size = f"{run['parameters'] / 1e6:,.1f}M, " if run["parameters"] else ""  # known once it is planned
    return f"{size}{run['preset']}"


def _losses(runs: Sequence[Mapping[str, Any]], entropy: float) -> Iterator[str]:
    yield f"| (unigram entropy of the valid split: {entropy:.3f} nats) | {' | '.join(map(_name, runs))} |"
    yield f"|---|{'---|' * len(runs)}"
    yield _row("steps", [f"{run['step']:,} of {run['planned']:,}" for run in runs])
    yield _row(f"training loss, mean of the last {_WINDOW} steps", [_mean_of_last(run["train_loss"]) for run in runs])
    yield _row("valid loss", [_last_valid(run["valid_loss"]) for run in runs])
    yield _row("seconds per step, median", [_seconds(run, "median") for run in runs])
    yield _row("seconds per step, fastest tenth", [_seconds(run, "fastest_tenth") for run in runs])


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _mean_of_last(curve: Sequence[Sequence[float]]) -> str:
    return f"{statistics.mean(loss for _, loss in curve[-_WINDOW:]):.3f}" if curve else _NOT_YET


def _last_valid(curve: Sequence[Sequence[float]]) -> str:
    return f"{curve[-1][1]:.3f} at step {curve[-1][0]:,}" if curve else _NOT_YET


def _seconds(run: Mapping[str, Any], key: str) -> str:
    return f"{run['seconds_per_step'][key]:.2f}" if run["seconds_per_step"] else _NOT_YET


def _took_steps(start: Mapping[str, Any]) -> bool:
    return bool(start["to"] > start["from"] and start["pss_gib"])


def _estimate(start: Mapping[str, Any], plan: Mapping[str, Any]) -> float:
    """GiB of a rank by the dry run, with its allowance for the process."""
    return float(plan[f"ranks_{start['ranks']}"]["total"] + plan["process_gib"])


def _starts(starts: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Iterator[str]:
    yield "| start | ranks | steps | PSS of each rank, GiB | estimate, GiB | estimate / largest | GiB written |"
    yield "|---|---|---|---|---|---|---|"
    for start in filter(_took_steps, starts):
        estimate, most = _estimate(start, plan), max(start["pss_gib"])
        each = ", ".join(f"{size:.2f}" for size in start["pss_gib"])
        steps = f"{start['from'] + 1:,} to {start['to']:,}"
        cells = (start["leg"], str(start["ranks"]), steps, each, f"{estimate:.2f}", f"{estimate / most:.2f}")
        yield _row(cells[0], [*cells[1:], f"{start['written_gib']:.1f}"])


def _way(steps: Mapping[str, Any]) -> Iterator[str]:
    yield "| what was done | result |"
    yield "|---|---|"
    for name, found in steps.items():
        if not name.startswith("train, ") or not found:
            continue
        end = found.get("end")
        if end and end != "finished":
            gone = f"{found['state']}, all processes gone after {found['seconds_to_end']:.0f} s"
            yield _row(f"{end} after step {found['ended_at_step']:,}", [gone])
    for name in _LAST:
        found = steps.get(name)
        size = f", {found['bytes'] / 1e9:.2f} GB" if found and "bytes" in found else ""
        yield _row(name, [f"done in {found['seconds']:.0f} s{size}" if found else _NOT_YET])


def _smoothed(curve: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """At most 100 points, each the mean of the `_WINDOW` steps that end with it (of fewer at the beginning)."""
    points, stride = [], max(1, len(curve) // 100)
    for end in range(stride, len(curve) + 1, stride):
        part = curve[max(0, end - _WINDOW) : end]
        points.append((int(curve[end - 1][0]), round(statistics.mean(loss for _, loss in part), 3)))
    return points
