"""The table of `encoder.py`: every contestant, and the ratio of the best of ours to the best of the peer's."""

from __future__ import annotations

from typing import Any

PEER = "transformers"
HEADING = f"{'tokens/s':>10}  {'ms a batch':>10}  {'filled':>7}  {'MFU':>6}  {'of matmul':>9}  ratio"


def print_table(report: dict[str, Any]) -> None:
    """Every comparison; then, by model, precision and workload, each side's best over modes and micro-batches."""
    for comparison in report["comparisons"]:
        print(f"\n{_title(comparison)}, micro-batches of {comparison['micro_batch_tokens']:,} places")
        for workload, found in comparison["workloads"].items():
            print(f"  {workload}: {_lengths(comparison['lengths'][workload])}")
            print(
                f"    {'':22}  {'tokens/s':>10}  {'ms a batch':>10}  {'filled':>7}  {'MFU':>6}  {'of matmul':>9}  ratio"
            )
            for name, entry in found.items():
                print(f"    {name:22}  {_row(entry, found[name.replace('ours', PEER)])}")
    print()
    for line in best_lines(report):
        print(line)


def best_lines(report: dict[str, Any]) -> list[str]:
    """One line a model, precision and workload: our best over the peer's best."""
    lines = []
    for (title, workload), entries in _by_workload(report).items():
        ours, theirs = (_best(entries, side) for side in ("ours", PEER))
        if ours is None or theirs is None:
            lines.append(f"{title}, {workload}: no ratio, memory ran out on one side")
            continue
        ratio = ours[0] / theirs[0]
        lines.append(
            f"{title}, {workload}: {ratio:.2f} x ({ours[0]:,.0f} tokens/s, {ours[1]}; {PEER}' best {theirs[0]:,.0f}, "
            f"{theirs[1]})"
        )
    return lines


def _by_workload(report: dict[str, Any]) -> dict[tuple[str, str], list[tuple[str, int, dict[str, Any]]]]:
    found: dict[tuple[str, str], list[tuple[str, int, dict[str, Any]]]] = {}
    for comparison in report["comparisons"]:
        for workload, entries in comparison["workloads"].items():
            rows = found.setdefault((_title(comparison), workload), [])
            rows += [(name, comparison["micro_batch_tokens"], entry) for name, entry in entries.items() if entry]
    return found


def _best(entries: list[tuple[str, int, dict[str, Any]]], side: str) -> tuple[float, str] | None:
    speeds = [
        (entry["tokens_per_second"], f"{name.removeprefix(side).strip()} at {tokens:,} places")
        for name, tokens, entry in entries
        if name.startswith(side)
    ]
    return max(speeds, default=None)


def _title(comparison: dict[str, Any]) -> str:
    return f"{comparison['preset']} {comparison['precision']}"


def _lengths(lengths: dict[str, Any]) -> str:
    percentiles = ", ".join(f"{value:,.0f}" for value in lengths["p10, p25, p50, p75, p90"])
    return (
        f"{lengths['documents']:,} documents, mean {lengths['mean']:,.0f} tokens, p10 to p90 {percentiles}; "
        f"{lengths['share_longer_than_a_row']:.0%} longer than a row"
    )


def _row(entry: dict[str, Any] | None, peer: dict[str, Any] | None) -> str:
    if entry is None:
        return "memory ran out"
    mfu = "-" if entry["mfu"] is None else f"{entry['mfu']:.1%}"
    ratio = "-" if peer is None else f"{entry['tokens_per_second'] / peer['tokens_per_second']:.2f}"
    return (
        f"{entry['tokens_per_second']:>10,.0f}  {entry['milliseconds_per_batch']:>10,.1f}  "
        f"{entry['filled_share']:>7.1%}  {mfu:>6}  {entry['share_of_matmul']:>9.1%}  {ratio:>5}"
    )
