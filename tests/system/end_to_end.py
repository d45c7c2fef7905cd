"""From text to filled masks in Python: a tokenizer, shards, a short training run, an export.

`python tests/system/end_to_end.py TEXT.txt OUTPUT` prints the guesses. The README shows `main`.
"""

import sys
from pathlib import Path

from data_prep import prepare, train_tokenizer
from trainer import FillMask, export, load_config, train


def main(text: str, output: str) -> None:
    folder = Path(output)
    tokenizer = train_tokenizer(text, output=folder / "tokenizer", vocab_size=1000)
    dataset = prepare(text, tokenizer=tokenizer, output=folder / "shards")
    print(f"{dataset.num_tokens:,} tokens")

    config = load_config(
        "tiny_cpu",
        {
            "data.shards": str(folder / "shards"),
            "output_dir": str(folder / "run"),
            "tracking.uri": f"sqlite:///{folder.absolute()}/mlflow.db",
            "model.vocab_size": tokenizer.vocab_size,
            "training.max_steps": 20,
        },
    )
    result = train(config)
    print(f"step {result.step}, valid loss {result.metrics['valid/mlm_loss']:.2f}")

    export(folder / "run", folder / "encoder")
    fill_mask = FillMask(folder / "encoder")
    for candidate in fill_mask("The capital of France is [MASK].", top_k=3)[0]:
        print(f"{candidate.token} {candidate.probability:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
