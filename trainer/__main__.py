"""`python -m trainer`: what the package is, its functions and the commands that use them."""

from __future__ import annotations

import sys

from data_prep.base.errors import UsageError, run_command

OVERVIEW = """\
trainer pretrains BERT-style encoders on shards that data_prep wrote. It is a library;
`clozeworks --help` lists all commands.

Commands (each has --help):
  deepspeed launch/pretrain.py --config FILE   pretrain, or resume the run of its output_dir
  clozeworks export                            write a checkpoint as a Hugging Face directory
  clozeworks register                          register a model in MLflow, compare versions, move an alias
  clozeworks fill-mask                         fill masks in texts
  clozeworks embed                             write vectors of texts
  clozeworks finetune                          fine-tune an encoder on a labeled table
  clozeworks evaluate                          evaluate an encoder on minimal pairs
  clozeworks tokenizer, clozeworks shards      make a tokenizer and shards

Functions (from trainer import NAME; help(NAME) has the arguments):
  load_config(path, overrides)                 the configuration of a run, from a YAML file or a preset
  train(config)                                pretrain in this process; returns the result
  open_loader(config)                          the global batches of a run, without a model
  export(checkpoint, output)                   write a checkpoint as a Hugging Face directory
  register(model, name)                        register a model in MLflow
  FillMask(model)(text)                        the likeliest tokens of each mask; .generate(text, N) writes new ones
  Embedder(model)(texts)                       vectors of texts
  finetune(model, train)                       fine-tune an encoder on a labeled table

A model is a run's output directory, a checkpoint, an export, models:/NAME@ALIAS, or a name on the Hugging Face Hub.
"""


def main() -> None:
    if unknown := [argument for argument in sys.argv[1:] if argument not in ("-h", "--help")]:
        raise UsageError(
            f"python -m trainer takes no arguments, got {' '.join(unknown)}",
            fix="run `python -m trainer` for the list of commands",
            code="unexpected-arguments",
        )
    print(OVERVIEW, end="")


if __name__ == "__main__":
    run_command(main)
