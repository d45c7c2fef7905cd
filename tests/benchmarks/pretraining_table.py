"""The table and the curves of `pretraining.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from pretraining_rows import FORMS

from trainer.tracking.figures import Curve, draw_curves

OURS, PEER = "ours", "transformers"


def table_lines(report: dict[str, Any]) -> Iterator[str]:
    """Every point of both sides by tokens; then what our side needed for the peer's last loss."""
    sides = report["sides"]
    yield ""
    yield f"{'':12}{'ours':>42}{'transformers':>42}"
    columns = f"{'seconds':>10}" + "".join(f"{form:>16}" for form in FORMS)
    runs = f"medians of {len(sides[OURS]['seeds'])} seeds"
    yield f"{'tokens':<12}{columns}{columns}   (valid MLM loss on both kinds of rows, {runs})"
    for ours, theirs in zip(sides[OURS]["points"], sides[PEER]["points"], strict=True):
        yield f"{ours['tokens']:<12,}{_cells(ours)}{_cells(theirs)}"
    yield ""
    for name, side in sides.items():
        yield (
            f"{name}: {side['tokens_per_second']:,.0f} tokens/s; {side['training_seconds']:,.0f} s of training, "
            f"{side['whole_command_seconds']:,.0f} s the whole command"
        )
    for form in FORMS:
        for name, side in sides.items():
            last = side["points"][-1][form]
            span = f"{last['lowest']:.4f} to {last['highest']:.4f}"
            yield f"{form}, {name}: {last['mlm_loss']:.4f} at the end, the seeds from {span}"
        yield f"{form}: {reached_line(report, form)}"


def median_points(seeds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The medians of several seeds at each point, and of the losses the lowest and the highest too."""
    found = []
    for points in zip(*seeds, strict=True):
        entry = {"step": points[0]["step"], "tokens": points[0]["tokens"]}
        entry["seconds"] = round(statistics.median(point["seconds"] for point in points), 2)
        for form in FORMS:
            losses = [point[form]["mlm_loss"] for point in points]
            accuracy = statistics.median(point[form]["mlm_accuracy"] for point in points)
            entry[form] = {"mlm_loss": statistics.median(losses), "lowest": min(losses), "highest": max(losses)}
            entry[form] |= {"mlm_accuracy": accuracy, "predictions": points[0][form]["predictions"]}
        found.append(entry)
    return found


def reached(sides: dict[str, Any], form: str) -> dict[str, float] | None:
    """When ours was where the peer ended; None where it never was."""
    found = time_to_loss(sides[OURS]["points"], form, sides[PEER]["points"][-1][form]["mlm_loss"])
    return None if found is None else {"tokens": found[0], "seconds": found[1]}


def reached_line(report: dict[str, Any], form: str) -> str:
    """The same in words."""
    theirs, found = report["sides"][PEER]["points"][-1], report["reached"][form]
    wanted = theirs[form]["mlm_loss"]
    if found is None:
        return f"ours did not come to the peer's last loss of {wanted:.4f}"
    return (
        f"the peer's last loss of {wanted:.4f} is reached by ours after {found['tokens']:,.0f} tokens and "
        f"{found['seconds']:,.0f} s (the peer: {theirs['tokens']:,} and {theirs['seconds']:,.0f} s)"
    )


def time_to_loss(points: list[dict[str, Any]], form: str, wanted: float) -> tuple[float, float] | None:
    """Tokens and seconds at which the curve is first at `wanted` or below; None where it never is."""
    before = None
    for point in points:
        loss = point[form]["mlm_loss"]
        if loss <= wanted:
            if before is None:
                return float(point["tokens"]), float(point["seconds"])
            share = (before[form]["mlm_loss"] - wanted) / (before[form]["mlm_loss"] - loss)
            tokens, seconds = (before[name] + share * (point[name] - before[name]) for name in ("tokens", "seconds"))
            return tokens, seconds
        before = point
    return None


def draw(report: dict[str, Any]) -> bytes:
    """Valid MLM loss of both sides by tokens and by seconds on each kind of rows, as PNG."""
    panels = []
    for form in FORMS:
        for unit, told, scale in (("tokens", "million tokens", 1e6), ("seconds", "minutes", 60.0)):
            curves = {
                name: {"valid": _curve(side["points"], form, unit, scale)} for name, side in report["sides"].items()
            }
            panels.append((f"valid MLM loss on {form} by {told}", curves))
    return draw_curves(panels, "", f"{report['preset']}, {report['device']}")


def _curve(points: list[dict[str, Any]], form: str, unit: str, scale: float) -> Curve:
    """The median between the lowest and the highest of the seeds."""
    x = [point[unit] / scale for point in points]
    median, lowest, highest = ([point[form][name] for point in points] for name in ("mlm_loss", "lowest", "highest"))
    return Curve(x, median, (lowest, highest))


def _cells(point: dict[str, Any]) -> str:
    return f"{point['seconds']:>10,.1f}" + "".join(f"{point[form]['mlm_loss']:>16.4f}" for form in FORMS)
