"""Push models to the Hugging Face Hub.

    clozeworks push --hub OWNER/NAME --model runs/bert

Each checkpoint of a run is exported and sent as the revision step-N, and the newest as main. An exported or fitted
folder, a checkpoint or a registered model is sent alone. A model is refused unless it passed the parity gate of the
export, or is the fitted model that was scored, and no file changed since. After an outage the same command sends what
is missing. The token is that of HF_TOKEN, or of `hf auth login`; HF_ENDPOINT names another server.
Exit status: 0 everything is on the Hub, 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from data_prep.base.errors import run_command
from launch.options import add_dry_run, add_model, add_tracking_uri, command_parser

if TYPE_CHECKING:
    from trainer.registry.push import Pushed


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("push.py", __doc__)
    parser.add_argument("--hub", required=True, metavar="OWNER/NAME", help="repository; it is created if missing")
    add_model(parser)
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument(
        "--main",
        choices=("newest", "best", "none"),
        default="newest",
        help="checkpoint that becomes main: the newest (default), the best by checkpoint.best_metric, or none",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace revisions that hold another model")
    add_tracking_uri(parser)
    add_dry_run(parser, "export and check, and list files, bytes and revisions, but contact no Hub")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.registry.hub_repository import check_repository_name, hub_address
    from trainer.registry.push import plan_push, push

    check_repository_name(arguments.hub)
    address = f"{hub_address()}/{arguments.hub}"
    if arguments.dry_run:
        total = 0
        for planned in plan_push(arguments.model, arguments.hub, arguments.main, arguments.tracking_uri):
            print(line_of(planned, "would send"), flush=True)
            total += planned.num_bytes
        print(f"dry run: {total:,} bytes for {address}, before the Hub compares them; nothing was sent")
        return
    sent = push(
        arguments.model, arguments.hub, arguments.private, arguments.main, arguments.overwrite, arguments.tracking_uri
    )
    for pushed in sent:
        print(line_of(pushed, "sent"), flush=True)
    print(address)


def line_of(pushed: Pushed, verb: str) -> str:
    """Return what happened to a revision, or would."""
    what = f"{pushed.branch}: {pushed.note}" if pushed.note else f"{pushed.branch}: {verb} {pushed.source.name}"
    files = f", {pushed.num_files} files, {pushed.num_bytes:,} bytes" if pushed.num_files else ""
    proof = f"; {pushed.proof}" if pushed.proof else ""
    return f"{what}{files}{f', commit {pushed.commit[:8]}' if pushed.commit else ''}{proof}"


if __name__ == "__main__":
    run_command(main)
