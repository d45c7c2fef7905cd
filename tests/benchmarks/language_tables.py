"""The tables of tests/benchmarks/README.md about what encoders learn: speed run, proof table, masks and ablations.

Their results grow run by run. A planned run without a result is shown as missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks.reports import CONTESTANTS, Report, Row, measured, short_name

MISSING = "missing"
_SCORING = "scoring_cpu_seconds"


def speedrun_rows(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """CPU seconds to the goal over all corpora on which ours, with its newest recipe, and the other reached it.

    Of the machine that measured last.
    """
    runs = [run for run in runs if run["cpu"] == runs[-1]["cpu"]]
    names = {"run_mlm": "Trainer, run_mlm's recipe", FIRST_COMMIT: "this project at c025165"}
    best: dict[str, dict[str, Mapping[str, Any]]] = {"ours": {}, **{name: {} for name in names}}
    for corpus in dict.fromkeys(run["corpus"] for run in runs):
        for run in best_recipes(runs, corpus):
            side = run["commit"] if run["commit"] in names else run["side"]
            kept = best[side].get(corpus)
            if kept is None or side == "ours" or run["cpu_seconds"] < kept["cpu_seconds"]:
                best[side][corpus] = run
    rows = []
    for side, peer in names.items():
        if both := [corpus for corpus in best["ours"] if corpus in best[side]]:
            ours, theirs = ([best[name][corpus]["cpu_seconds"] for corpus in both] for name in ("ours", side))
            ratios = {corpus: other / one for corpus, one, other in zip(both, ours, theirs, strict=True)}
            num_runs = min(len(best["ours"][corpus]["losses"]) for corpus in both)
            title = "training to the goal of the speed run"
            rows.append(Row(title, sum(ours), sum(theirs), peer, "CPU s", "less", num_runs, ratios))
    return rows


def best_recipes(runs: Sequence[Mapping[str, Any]], corpus: str) -> list[Mapping[str, Any]]:
    """Of each machine, side, commit and settings, the fewest steps that reached the goal; the oldest first."""
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for run in runs:
        key = (run["cpu"], run["side"], run["commit"], tuple(run["settings"]))
        if run["corpus"] == corpus and run["reached"] and (key not in best or run["steps"] < best[key]["steps"]):
            best[key] = run
    return list(best.values())


def speedrun(report: Report) -> Iterator[str]:
    """The smallest number of steps of each recipe that reaches the goal; then the next smaller one that was tried."""
    runs = report["details"]["runs"]
    yield f"Means of the losses and medians of the CPU seconds. {_commands(runs)}"
    yield ""
    yield "| corpus, goal | machine | side, commit, tokens per step | steps | CPU s | share | loss | too few steps |"
    yield "|---|---|---|---|---|---|---|---|"
    shown: tuple[str, str] | None = None
    for corpus in dict.fromkeys([*(run["corpus"] for run in runs), "pack_medium_third"]):
        reached = best_recipes(runs, corpus)
        first = {run["cpu"]: run for run in reached if run["commit"] == FIRST_COMMIT}
        for run in reached:
            before = first.get(run["cpu"])
            share = f"{run['cpu_seconds'] / before['cpu_seconds']:.2f}" if before else ""
            place = f"{corpus}, {run['goal_nats']:.3f}", short_name(run["cpu"])
            yield (
                f"| {' | '.join(('', '') if place == shown else place)} | {run['side']}, {run['commit']}, "
                f"{_settings(run)} | {run['steps']} | {_seconds(run)} | {share} | {run['mean_loss']:.3f} | "
                f"{_too_few(run, runs)} |"
            )
            shown = place
        for name, found in (
            (f"ours, {FIRST_COMMIT}", first),
            ("ours, later", any(run["side"] == "ours" and run["commit"] != FIRST_COMMIT for run in reached)),
            ("run_mlm", any(run["side"] == "run_mlm" for run in reached)),
        ):
            if not found:
                yield f"| {corpus} | | {name} |" + f" {MISSING} |" * 5


def _seconds(run: Mapping[str, Any]) -> str:
    """The median of the seeds, with the lowest and the highest."""
    low, middle, high = (f"{pick(run['all_cpu_seconds']):.0f}" for pick in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def _too_few(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The most steps below those of a recipe that were tried and did not reach the goal, with their loss."""
    same = ("corpus", "cpu", "side", "commit", "settings")
    fewer = [
        each
        for each in runs
        if all(each[name] == run[name] for name in same) and not each["reached"] and each["steps"] < run["steps"]
    ]
    most = max(fewer, key=lambda each: each["steps"], default=None)
    return f"{most['steps']} ({most['mean_loss']:.3f})" if most else ""


FIRST_COMMIT = "c025165"


def _settings(run: Mapping[str, Any]) -> str:
    """The settings of a recipe without those that follow from the batch."""
    values = dict(setting.split("=", 1) for setting in run["settings"])
    values.pop("training.micro_batch_tokens", None)
    batch = int(values.pop("training.global_batch_tokens", 4096))
    return ", ".join([f"{batch:,}", *(f"{name.rpartition('.')[2]}={value}" for name, value in values.items())])


def proof(report: Report) -> Iterator[str]:
    """Loss and accuracies of every contestant and budget, means over the seeds with their range."""
    details = report["details"]
    runs, corpus = details["runs"], details["corpus"]
    yield (
        f"{corpus['words']:,} whitespace words in {corpus['documents']:,} documents of pack_medium"
        f"; {_parameters(runs)} parameters. {_commands(runs)}"
    )
    yield ""
    yield "| contestant | epochs | seeds | valid loss | pairs | BLiMP |"
    yield "|---|---|---|---|---|---|"
    absent: dict[str, list[str]] = {}
    for shape, side, epochs in dict.fromkeys(
        (run["shape"], run["side"], run["epochs"]) for run in (*runs, *details["planned"])
    ):
        found = [run for run in runs if (run["shape"], run["side"], run["epochs"]) == (shape, side, epochs)]
        planned = sum((run["shape"], run["side"], run["epochs"]) == (shape, side, epochs) for run in details["planned"])
        name = f"{CONTESTANTS[side]}, {shape}"
        if not found:
            absent.setdefault(name, []).append(f"{epochs:g}")
            continue
        yield (
            f"| {name} | {epochs:g} | {len(found)} of {max(planned, len(found))} | "
            f"{_spread([run['loss'] for run in found], 3)} | {found[0]['pairs']:,} | "
            f"{_spread([100.0 * run['overall'] for run in found], 1)} |"
        )
    yield ""
    if absent:
        budgets = (f"{name} after {', '.join(epochs)} epochs" for name, epochs in absent.items())
        yield f"Planned and {MISSING}: {'; '.join(budgets)}."
        yield ""
    all_pairs = max((run["pairs"] for run in runs), default=0)
    # Rows of earlier versions have no time.
    if seconds := [run[_SCORING] for run in runs if run["pairs"] == all_pairs and _SCORING in run]:
        yield (
            f"Scoring {all_pairs:,} pairs takes {min(seconds):.0f} to {max(seconds):.0f} CPU seconds "
            f"({len(seconds)} encoders)."
        )
        yield ""
    published = (f"{name} {accuracy}" for name, accuracy in details["published"].items())
    yield f"Published, on 10 million words of other text: {'; '.join(published)}. Chance: 50."
    if any(run["epochs"] >= 1 for run in details["planned"]):  # the shape is decided, so there is a picture
        yield ""
        yield "![BLiMP by tokens](results/proof.png)"


def _parameters(runs: Sequence[Mapping[str, Any]]) -> str:
    """The smallest and the largest number of parameters, in millions."""
    numbers = [run["parameters"] / 1e6 for run in runs]
    return " to ".join(dict.fromkeys(f"{pick(numbers):.2f}M" for pick in (min, max)))


def fills(report: Report) -> Iterator[str]:
    """Hit rates, and what both encoders fill in."""
    found = report["details"]["fills"]
    if found is None:
        yield f"Hit rates and guesses: {MISSING} (they need an encoder of each side after one epoch)."
        return
    yield (
        f"Encoders of the proof table after {_epochs(found['epochs'])}, seed {found['seed']}. Hits on {found['masks']} "
        f"held-out masks, one word in a sentence each; results/proof.json has {len(found['shown'])} of these:"
    )
    yield ""
    yield "| | right word first | among the five likeliest |"
    yield "|---|---|---|"
    for name, rates in found["hits"].items():
        yield f"| {CONTESTANTS.get(name, _UNIGRAM)} | {rates['top_1']:.1%} | {rates['top_5']:.1%} |"
    yield ""
    yield from _guesses("sentence", found["sentences"][:NUM_SENTENCES])


def _guesses(title: str, found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table of masked texts: the word that was there, and what both encoders guess."""
    yield f"| {title} | word | ours | run_mlm |"
    yield "|---|---|---|---|"
    for each in found:
        text, word = _cell(_around_mask(each["masked"])), _cell(each["word"])
        yield f"| {text} | {word} | {_words(each['ours'])} | {_words(each['run_mlm'])} |"


def language(report: Report) -> Iterator[str]:
    """An excerpt of the proof table for README.md: its picture, accuracies at one epoch, and a few guesses."""
    details = report["details"]
    found = details["fills"]
    if found is None:
        return
    accuracies = []
    for side, name in CONTESTANTS.items():
        runs = [run for run in details["runs"] if run["side"] == side and run["epochs"] == 1]
        if runs:
            accuracies.append(f"{name} {_spread([100.0 * run['overall'] for run in runs], 1)}")
    hits = (f"{CONTESTANTS.get(name, _UNIGRAM)} {rates['top_1']:.0%}" for name, rates in found["hits"].items())
    yield "![BLiMP by tokens](tests/benchmarks/results/proof.png)"
    yield ""
    yield (
        f"BLiMP after one epoch of {details['corpus']['words'] / 1e6:.0f} million words: {', '.join(accuracies)}. "
        f"Held-out words guessed: {', '.join(hits)}. The five likeliest words:"
    )
    yield ""
    yield from _guesses("sentence", found["sentences"][:NUM_FRONT_SENTENCES])
    yield ""
    yield "[More](tests/benchmarks/README.md#what-encoders-fill-in)."


NUM_FRONT_SENTENCES, NUM_SENTENCES = 2, 5
_UNIGRAM = "the most frequent words"


def _epochs(number: float) -> str:
    return f"{number:g} epoch{'' if number == 1 else 's'}"


def _around_mask(text: str, num_words: int = 9) -> str:
    """The text, cut to so many words on each side of the mask."""
    before, after = text.split("[MASK]")
    left, right = before.split(" "), after.split(" ")
    start = "" if len(left) <= num_words + 1 else "… "
    end = "" if len(right) <= num_words + 1 else " …"
    return start + " ".join(left[-num_words - 1 :]) + "[MASK]" + " ".join(right[: num_words + 1]) + end


def _words(words: Sequence[str]) -> str:
    return _cell(", ".join(words))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def ablations(report: Report) -> Iterator[str]:
    """Loss of each variant beside the default, by corpus; then the optimizers at equal time."""
    details = report["details"]
    epoch = [run for run in details["runs"] if run["corpus"] == EPOCH]
    runs, planned = ([run for run in details[name] if run["corpus"] != EPOCH] for name in ("runs", "planned"))
    corpora = list(dict.fromkeys(run["corpus"] for run in planned))
    yield (
        f"Valid loss after equal tokens: mean and range of {NUM_SEEDS} seeds at the best learning rate. The difference "
        f"from the default is the mean over the seeds of both. {_commands(runs)}"
    )
    yield ""
    yield f"| variant | {' | '.join(f'{corpus} | difference' for corpus in corpora)} |"
    yield "|---" * (1 + 2 * len(corpora)) + "|"
    later = [(name, "tokens") for name in details.get("variants", ())]  # planned once the default's rate is known
    for variant, equal in dict.fromkeys([*((run["variant"], run["equal"]) for run in planned), *later]):
        cells = []
        for corpus in corpora:
            best = _at_best_rate(runs, variant, equal, corpus)
            if not best:
                cells += [MISSING, ""]
                continue
            default = {run["seed"]: run["loss"] for run in _at_best_rate(runs, "default", "tokens", corpus)}
            differences = [run["loss"] - default[run["seed"]] for run in best if run["seed"] in default]
            is_other = variant != "default" and bool(differences)
            cells += [
                _spread([run["loss"] for run in best], 3)
                + (f" ({len(best)} of {NUM_SEEDS} seeds)" if len(best) < NUM_SEEDS else ""),
                f"{statistics.mean(differences):+.3f}" if is_other else "",
            ]
        yield f"| {variant}{', equal time' if equal == 'time' else ''} | {' | '.join(cells)} |"
    yield ""
    better = ", ".join(_better_than_default(runs, corpora)) or "none"
    yield f"Below the default on every corpus by more than the range of the default's seeds: {better}."
    yield ""
    yield from _epoch(epoch)


def _epoch(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The default, and all that lowers the mean loss on both corpora, after one epoch of the proof table's corpus."""
    if not runs:
        yield f"The combination of what lowers the mean loss, beside the default for {EPOCH}: {MISSING}."
        return
    yield f"After {EPOCH}, at the preset's rate. {_commands(runs)}"
    yield ""
    yield "| recipe | seeds | valid loss | CPU s |"
    yield "|---|---|---|---|"
    for variant in dict.fromkeys(run["variant"] for run in runs):
        found = [run for run in runs if run["variant"] == variant]
        seconds = statistics.median(run["cpu_seconds"] for run in found)
        yield f"| {variant} | {len(found)} of 3 | {_spread([run['loss'] for run in found], 3)} | {seconds:.0f} |"
    default, other = ([run["loss"] for run in runs if (run["variant"] == "default") is side] for side in (True, False))
    if default and other:
        difference, width = statistics.mean(other) - statistics.mean(default), max(default) - min(default)
        yield ""
        yield f"Difference: {difference:+.3f} nats. The default's seeds have a range of {width:.3f}."


def masking(report: Report) -> Iterator[str]:
    """Loss, minimal pairs and fine-tuning of each variant, by the length of training; then what beats the default."""
    details = report["details"]
    runs = details["runs"]
    yield f"Means over the seeds (lowest to highest). {_commands(runs)}"
    yield ""
    scored = {name: title for name, title in _SCORES.items() if any(name in run for run in runs)}
    yield f"| length | masked | seeds | valid loss | {''.join(f'{title} | ' for title in scored.values())}CPU s |"
    yield "|---" * (5 + len(scored)) + "|"
    better = []
    for length in dict.fromkeys(run["length"] for run in [*details["planned"], *runs]):
        of_length = [run for run in runs if run["length"] == length]
        default = [run["loss"] for run in of_length if run["variant"] == details["variants"][0]]
        for variant in details["variants"]:
            found = [run for run in of_length if run["variant"] == variant]
            if not found:
                continue
            scores = [_spread([100 * run[name] for run in found], 1) if name in found[0] else "" for name in scored]
            losses = [run["loss"] for run in found]
            seconds = statistics.median(run["cpu_seconds"] for run in found)
            cells = [length, variant, f"{len(found)} of 3", _spread(losses, 3), *scores, f"{seconds:.0f}"]
            yield f"| {' | '.join(cells)} |"
            if len(found) == len(default) == 3:
                gain = statistics.mean(default) - statistics.mean(losses)
                if gain > max(default) - min(default):
                    better.append(f"{variant} ({length}, {-gain:+.3f})")
    yield ""
    yield f"Loss below the default's by more than the range of its seeds: {', '.join(better) or 'none'}."


_SCORES = {"overall": "minimal pairs, %", "accuracy": "SST-2, %"}


def adoption(report: Report) -> Iterator[str]:
    """The loss at the start of each adopted model; then the tokens after which it has the loss of one from nothing."""
    details = report["details"]
    runs, goals = details["runs"], details.get("goals", {})
    yield (
        "Start: the valid loss minus that of the adopted encoder; the aim allows 0.15 more. Then the loss of training "
        "from nothing, and that of the adopted model after fewer tokens, which should not be higher. "
        f"Means (lowest to highest seed). {_commands(runs)}"
    )
    yield ""
    yield "| adopted | start | aim | reached | from nothing | adopted, after | reached |"
    yield "|---|---|---|---|---|---|---|"
    reached = {run["name"] for run in details["planned"] if run["kind"] == "reach"}
    for name in details["variants"]:
        starts, reaches = (
            [run for run in runs if (run["name"], run["kind"]) == (name, kind)] for kind in ("start", "reach")
        )
        aim = goals.get(name)
        differences = [run["difference"] for run in starts]
        cells = [_spread(differences, 2, "+") if starts else MISSING]
        cells += ["", ""] if aim is None else [f"{aim:+.2f}", _number(each <= aim + 0.15 for each in differences)]
        if reaches:
            share = reaches[0]["tokens"] / reaches[0]["tokens_of_nothing"]
            cells += [_spread([run["loss_of_nothing"] for run in reaches], 3)]
            cells += [f"{_spread([run['loss'] for run in reaches], 3)}, {share:.0%} of the tokens"]
            cells += [_number(run["loss"] <= run["loss_of_nothing"] for run in reaches)]
        else:
            cells += [MISSING if name in reached else "", "", ""]
        shared = f" ({starts[0]['shared']:.0%} shared)" if starts and "shared" in starts[0] else ""
        yield f"| {name}{shared} | {' | '.join(cells)} |"


def _number(of_seeds: Iterable[bool]) -> str:
    """For how many of the seeds it is true, as "2 of 3"; empty without any."""
    found = [*of_seeds]
    return f"{sum(found)} of {len(found)}" if found else ""


def causal(report: Report) -> Iterator[str]:
    """The loss of masked tokens by the way that a model was trained, of each seed; then the mean difference."""
    means = yield from _by_seed(report, "")
    if len(means) == 2:
        first, second = means.values()
        yield ""
        yield f"Difference: {first - second:+.3f} nats."


def distillation(report: Report) -> Iterator[str]:
    """The loss of each way and seed; then whether each teacher is worth more than the spread of the seeds."""
    runs = report["details"]["runs"]
    losses = " and ".join(f"{loss:.3f}" for loss in dict.fromkeys(run["teacher_loss"] for run in runs))
    means = yield from _by_seed(report, f"; the teacher's is {losses}")
    alone = [run["loss"] for run in runs if run["way"] == "labels"]
    yield ""
    if "labels" not in means or len(means) == 1:
        yield "Whether a teacher is worth more than the spread of the seeds is open: seeds are missing."
        return
    spread = max(alone) - min(alone)
    told = (
        f"`{way}` {mean - means['labels']:+.3f} ({'reached' if means['labels'] - mean > spread else 'not reached'})"
        for way, mean in means.items()
        if way != "labels"
    )
    yield f"Against `labels`, whose seeds are {spread:.3f} nats apart: {', '.join(told)}."


def _by_seed(report: Report, more: str) -> Generator[str, None, dict[str, float]]:
    """A row of losses for each way; returns the mean of each way that has every planned seed."""
    details = report["details"]
    runs, planned = details["runs"], details["planned"]
    entropy = runs[0]["unigram_entropy"]
    yield f"Valid loss of masked tokens (unigram entropy {entropy:.3f}{more}), by seed. {_commands(runs)}"
    yield ""
    seeds = sorted({run["seed"] for run in planned})
    yield f"| trained with | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | CPU s |"
    yield "|---" * (len(seeds) + 3) + "|"
    means = {}
    for way in dict.fromkeys(run["way"] for run in planned):
        found = {run["seed"]: run for run in runs if run["way"] == way}
        cells = [f"{found[seed]['loss']:.3f}" if seed in found else MISSING for seed in seeds]
        if len(found) == len(seeds):
            means[way] = statistics.mean(run["loss"] for run in found.values())
        mean = f"{means[way]:.3f}" if way in means else MISSING
        seconds = f"{statistics.median(run['cpu_seconds'] for run in found.values()):.0f}" if found else MISSING
        yield f"| {way} | {' | '.join(cells)} | {mean} | {seconds} |"
    return means


def domain(report: Report) -> Iterator[str]:
    """Both losses and the accuracy of the encoder before and after it was continued, as means of the seeds."""
    details = report["details"]
    runs, planned = details["runs"], details["planned"]
    counts = f"{runs[0].get('train texts', 0)} labeled texts, scored on {runs[0].get('test texts', 0):,} others"
    yield f"Valid losses on law and on general text, and accuracy after fine-tuning on {counts}. {_commands(runs)}"
    yield ""
    yield "| encoder | law | general text | accuracy | seeds |"
    yield "|---|---|---|---|---|"
    for rate, replay in dict.fromkeys((run["rate"], run["replay"]) for run in planned):
        found, wanted = ([r for r in each if (r["rate"], r["replay"]) == (rate, replay)] for each in (runs, planned))
        name = f"continued at {rate:g}" + (f", {replay:.0%} general text" if replay else "") if rate else "before"
        cells = [MISSING] * 3
        if found:
            cells = [f"{statistics.mean(run[key] for run in found):.3f}" for key in ("law_loss", "general_loss")]
            cells.append(_accuracy(found))
        yield f"| {name} | {' | '.join(cells)} | {len(found)} of {len(wanted)} |"


def domain_few(report: Report) -> Iterator[str]:
    """The accuracy with few labels before and after an encoder was continued, as means of seeds and draws."""
    details = report["details"]
    runs, planned = details["runs"], details["planned"]
    seeds = sorted({run["seed"] for run in planned})
    pairs = [
        (before["accuracies"], after["accuracies"])
        for seed in seeds
        for before in runs
        for after in runs
        if before["seed"] == after["seed"] == seed and not before["rate"] and after["rate"]
    ]
    yield (
        f"Accuracy with few labels of each title, scored on {runs[0].get('test texts', 0):,} others: means over the "
        f"seeds of the means over the draws. The gain has the lowest and highest seed. {_commands(runs)}"
    )
    yield ""
    yield "| fitted, labels of each title | before | continued | gain | better | seeds |"
    yield "|---|---|---|---|---|---|"
    for name in dict.fromkeys(name for run in runs for name in run["accuracies"]):
        means = [[statistics.mean(each[name]) for each in pair] for pair in pairs]
        gains = [after - before for before, after in means]
        cells = [MISSING] * 4
        if means:
            cells = [f"{statistics.mean(each):.1f}%" for each in zip(*means, strict=True)]
            cells += [_spread(gains, 1, "+"), _number(gain > 0 for gain in gains)]
        yield f"| {name} | {' | '.join(cells)} | {len(means)} of {len(seeds)} |"
    if not any(run["accuracies"] for run in runs):
        yield f"| {MISSING} | | | | | |"


def extension(report: Report) -> Iterator[str]:
    """The loss in short and long rows of the encoder of short ones, of the extended one, and of one of long ones."""
    details = report["details"]
    runs, planned = details["runs"], details["planned"]
    yield f"Valid losses in rows of 128 and of 512 tokens: means (lowest to highest seed). {_commands(runs)}"
    yield ""
    yield "| encoder | tokens | rows of 128 | rows of 512 | seeds |"
    yield "|---|---|---|---|---|"
    for way in dict.fromkeys(run["way"] for run in planned):
        found, wanted = ([run for run in each if run["way"] == way] for each in (runs, planned))
        cells = [MISSING] * 3
        if found:
            cells = [f"{found[0]['tokens']:,}", *(_spread([run[f"loss_{n}"] for run in found], 3) for n in (128, 512))]
        yield f"| {way} | {' | '.join(cells)} | {len(found)} of {len(wanted)} |"


def retrieval(report: Report) -> Iterator[str]:
    """Scores of the encoder before the fits (seed 0), as means of the fits, and of the words in common."""
    details = report["details"]
    runs, planned = details["runs"], details["planned"]
    pairs, fits = runs[0]["pairs"], [run for run in runs if run["seed"]]
    wanted = sum(run["seed"] > 0 for run in planned)
    seconds = sum(run["fit_seconds"] for run in fits)
    yield (
        f"{pairs['test']:,} titles, each among {pairs['test']:,} abstracts; fitted on {pairs['train']:,} other pairs. "
        f"The {len(fits)} fits took {seconds:.0f} s in all. {_commands(runs)}"
    )
    yield ""
    yield "| vectors | nDCG@10 | MRR@10 | first | cosine of unrelated texts | seeds |"
    yield "|---|---|---|---|---|---|"
    keys = ("ndcg_at_10", "mrr_at_10", "accuracy", "unrelated_cosine")
    for name, found, count in (("before", [run for run in runs if not run["seed"]], 1), ("fitted", fits, wanted)):
        cells = [_spread([run[key] for run in found], 3) if found else MISSING for key in keys]
        yield f"| {name} | {' | '.join(cells)} | {len(found)} of {count} |"
    yield f"| words in common (tf-idf) | {runs[0]['tf_idf']:.3f} | | | | |"


def downstream(report: Report) -> Iterator[str]:
    """Accuracy by task and labeled rows: from scratch, frozen and in full, each with the range of its seeds."""
    yield f"Accuracy in %: the mean of the seeds (lowest to highest). {measured(report)}"
    yield ""
    yield f"| task | {' | '.join(_WAYS.values())} |"
    yield "|---" * (1 + len(_WAYS)) + "|"
    for task, found in report["details"]["tasks"].items():
        cells = (
            _spread([100.0 * fit["scores"]["accuracy"] for fit in found["variants"][way]["fits"]], 1) for way in _WAYS
        )
        yield f"| {task} | {' | '.join(cells)} |"


_WAYS = {"scratch": "from scratch", "frozen": "pretrained, frozen", "full": "pretrained, in full"}


def _accuracy(runs: Sequence[Mapping[str, Any]]) -> str:
    """Mean and standard deviation over the seeds; text without sections of a code of law has no labels."""
    scores = [run["accuracy"] for run in runs if run["accuracy"] is not None]
    if not scores:
        return MISSING
    return f"{statistics.mean(scores):.1f}%" + (f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else "")


NUM_SEEDS = 3
EPOCH = "one epoch of 10 million words"
"""Corpus of the rows of `ablations.py` that train for an epoch."""


def _better_than_default(runs: Sequence[Mapping[str, Any]], corpora: Sequence[str]) -> Iterator[str]:
    """The variants that win on every corpus, at equal tokens, by more than chance makes of one recipe."""
    for variant in dict.fromkeys(run["variant"] for run in runs if run["variant"] != "default"):
        gains = []
        for corpus in corpora:
            losses, default = (
                [run["loss"] for run in _at_best_rate(runs, name, "tokens", corpus)] for name in (variant, "default")
            )
            if not losses or not default:
                break
            gains.append(statistics.mean(default) - statistics.mean(losses) - (max(default) - min(default)))
        else:
            if min(gains) > 0:
                yield variant


def _at_best_rate(
    runs: Sequence[Mapping[str, Any]], variant: str, equal: str, corpus: str
) -> Sequence[Mapping[str, Any]]:
    """The runs of a variant at the learning rate with the most seeds, and the lowest loss of the first one."""
    groups: dict[float, list[Mapping[str, Any]]] = {}
    for run in runs:
        if (run["variant"], run["equal"], run["corpus"]) == (variant, equal, corpus):
            groups.setdefault(run["learning_rate"], []).append(run)
    return max(groups.values(), key=lambda group: (len(group), -group[0]["loss"]), default=[])


def _spread(values: Sequence[float], digits: int, sign: str = "-") -> str:
    """The mean, with the range of several values; with the sign "+" each has one."""
    mean, low, high = (f"{each:{sign}.{digits}f}" for each in (statistics.mean(values), min(values), max(values)))
    return mean if len(values) < 2 else f"{mean} ({low} to {high})"


def _commands(runs: Sequence[Mapping[str, Any]]) -> str:
    """Machine, dates, loads and commits of several runs."""
    dates = sorted({run["date"] for run in runs})
    loads = [run["load_average"] for run in runs]
    commits = list(dict.fromkeys(run["commit"] for run in runs))
    named = ", ".join(commits) if len(commits) <= 3 else f"{commits[0]} to {commits[-1]}"
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    load = f"{min(loads):.1f}" if min(loads) == max(loads) else f"{min(loads):.1f} to {max(loads):.1f}"
    cpus = ", ".join(dict.fromkeys(short_name(run["cpu"]) for run in runs))
    threads = ", ".join("one thread" if each == 1 else f"{each} threads" for each in _threads(runs))
    return f"{cpus}, {threads}, {when}, load average {load}, commit {named}."


def _threads(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of threads of the runs; a row that does not say had one."""
    return sorted({run.get("threads", 1) for run in runs})
