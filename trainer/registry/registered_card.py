"""The page of a registered version: the model card with the version's own name, and code that runs as it stands.

The code of the exported folder names the folder; on a page of the registry it names the version, or the alias that
points to it. Everything else of the card stays as it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from trainer.inference.pulled_model import EXPORT_FOLDER
from trainer.model.model_folder import read_card
from trainer.registry.served_model import ServedModel

MAX_LENGTH = 5000
"""Characters of a description that MLflow keeps."""
_TITLE = re.compile(r"\A# [^\n]*\n*")
_USE = re.compile(r"^## Use\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_FIRST_SECTION = re.compile(r"^## ", re.MULTILINE)


def registered_card(folder: Path, name: str, version: str, served: ServedModel) -> str:
    """Return the card of a folder as the description of version `version` of `name`, at most `MAX_LENGTH` characters.

    A card that is too long ends where the space does, with a note; title and code come first.
    """
    card = _TITLE.sub("", read_card(folder))
    card = _USE.sub("", card)
    use = usage(f"models:/{name}/{version}", served)
    first = _FIRST_SECTION.search(card)
    at = first.start() if first else len(card)
    text = f"# {name}\n\n{card[:at].strip()}\n\n{use}\n\n{card[at:].strip()}".strip()
    if len(text) <= MAX_LENGTH:
        return text
    ending = f"\n\n(the card is longer; all of it is {EXPORT_FOLDER}/README.md of the version)"
    return text[: MAX_LENGTH - len(ending)] + ending


def with_alias(card: str, name: str, version: str, alias: str) -> str:
    """Return the page of a version with the address of its alias in place of its number."""
    return re.sub(rf"models:/{re.escape(name)}/{re.escape(version)}(?!\d)", f"models:/{name}@{alias}", card)


def usage(address: str, served: ServedModel) -> str:
    """Return the section "Use": code without this project, serving, and commands of this project."""
    quoted, example = json.dumps(address), json.dumps(served.example, ensure_ascii=False)
    load = "mlflow.transformers" if served.function is None else "mlflow.pyfunc"
    call = f"model({example})" if served.function is None else f"model.predict([{example}])"
    request = json.dumps({"inputs": [served.example]}, ensure_ascii=False).replace("'", "\\u0027")
    return (
        "## Use\n\nWith the registry's address in `MLFLOW_TRACKING_URI`, without clozeworks:\n\n"
        f"```python\nimport mlflow\n\nmodel = {load}.load_model({quoted})\nprint({call})\n"
        f'folder = mlflow.artifacts.download_artifacts({quoted}) + "/{EXPORT_FOLDER}"  # of transformers\n```\n\n'
        f"```bash\nmlflow models serve -m {address} --env-manager local --port 5001\n"
        "curl http://127.0.0.1:5001/invocations -H 'Content-Type: application/json' \\\n"
        f"    -d '{request}'\n```\n\nWith clozeworks:\n\n```bash\n{_command(address, served)}\n```"
    )


def _command(address: str, served: ServedModel) -> str:
    if served.function is None:
        text = json.dumps(served.example, ensure_ascii=False)
        return (
            f"clozeworks fill-mask --model {address} {text}\n"
            f"clozeworks finetune --model {address} --task classification --train labeled.tsv \\\n"
            "    --text-column text --label-column label --output fitted"
        )
    if served.function == "embedding":
        return f"clozeworks embed --model {address} --input texts.txt --output vectors.npy"
    return f"clozeworks predict --model {address} --input new.tsv --output predicted.tsv"
