"""The table of all commands: `clozeworks --help`, the dispatch and the index in launch/README.md are made of it."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand of `clozeworks`; the module has a function `main()` that reads `sys.argv`."""

    name: str
    summary: str
    module: str
    extra: str | None = None
    """The extra of pyproject.toml that installs what the command needs; None: the core dependencies are enough."""


DATA_PREP = "data_prep.__main__"

GROUPS: dict[str, tuple[Command, ...]] = {
    "prepare": (
        Command("tokenizer", "train a SentencePiece BPE tokenizer on text files", DATA_PREP),
        Command("shards", "make a data set (shards and a manifest) of text files", DATA_PREP),
        Command("merge", "finish a data set that several jobs prepared (--shard-range)", DATA_PREP),
        Command("verify", "check every byte and count of a data set", DATA_PREP),
        Command("inspect", "print documents of a data set, or the tokens of a text", DATA_PREP),
        Command("stats", "report counts, lengths and frequencies of a data set", DATA_PREP),
        Command("remove", "remove a source or documents from a data set (takedown)", DATA_PREP),
    ),
    "train": (
        Command("pretrain", "pretrain an encoder, or resume a run", "launch.pretrain", "train"),
        Command("finetune", "fine-tune a model on labeled data", "launch.finetune", "finetune"),
    ),
    "inspect": (
        Command("status", "report the state of a run", "launch.status"),
        Command("show-batch", "print training rows as text, with masks and labels", "launch.show_batch", "train"),
        Command("attention", "draw the attention maps of a text", "launch.show_attention", "registry"),
        Command("evaluate", "score a model on minimal pairs, or on a suite of tasks", "launch.evaluate", "registry"),
        Command("compare", "compare runs and models over seeds", "launch.compare", "finetune"),
    ),
    "use": (
        Command("export", "export a checkpoint as a Hugging Face folder", "launch.export", "registry"),
        Command("average", "average a run's last checkpoints and export the mean", "launch.average", "registry"),
        Command("register", "register a model, compare versions, move aliases", "launch.register", "registry"),
        Command("push", "send models to the Hugging Face Hub", "launch.push", "registry"),
        Command("fill-mask", "fill the masks of a text", "launch.fill_mask", "registry"),
        Command("next-sentence", "say whether sentence B follows sentence A", "launch.next_sentence", "registry"),
        Command("embed", "write sentence vectors, or list nearest words", "launch.embed", "registry"),
        Command("predict", "label texts with a fine-tuned model", "launch.predict", "finetune"),
    ),
    "operate": (
        Command("doctor", "check data, memory, disk, services and hosts before a run", "launch.doctor", "train"),
        Command("benchmark", "measure training throughput", "launch.benchmark", "train"),
        Command("nodes", "start pretraining on the hosts of a hostfile", "launch.nodes", "train"),
        Command("ranks", "start the ranks of this node with torchrun", "launch.ranks", "train"),
        Command("follow", "score and register the checkpoints of a run", "launch.follow", "registry"),
        Command("sync-tracking", "send the metrics of a run to MLflow from here", "launch.sync_tracking", "registry"),
    ),
}  # fmt: skip

REMOVED = {
    "docstrings": "run python launch/demo/collect_docstrings.py in the checkout, as the demo does",
    "train-job": "edit a copy of launch/kubernetes/train_job.yaml, then kubectl apply -f it",
    "held-out": "see documents of a data set with 'clozeworks inspect'",
}
"""Commands of earlier releases, and what to do instead."""

COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
