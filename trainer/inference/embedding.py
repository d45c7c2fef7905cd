"""VectorRule of texts from an encoder, and the nearest words of a word: by the embedding table, and in context.

The vector of a text is the mean of the hidden states of its tokens without padding (Reimers and Gurevych 2019,
section 3), or the hidden state of [CLS]; a folder of sentence-transformers says which. The nearest words have the
greatest cosine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import regex
import torch

from data_prep.base.errors import UsageError
from data_prep.base.local_paths import home_in
from trainer.inference.fill_mask import BYTE_LEVEL_SPACE, WORDPIECE_CONTINUATION, word_start_of
from trainer.inference.preprocessor import Preprocessor, checked_texts, load_text_tokenizer, max_length
from trainer.inference.pulled_model import hugging_face_folder
from trainer.model.model_folder import VectorRule, read_vectors
from trainer.model.pretrained import load_pretrained, refuse_random_weights
from trainer.model.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Pooling = Literal["mean", "cls"]
WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}]+)*")


class Neighbor(NamedTuple):
    """A word and its cosine with the given word."""

    word: str
    cosine: float


@dataclass(frozen=True)
class Occurrence:
    """A word of a text: its characters from `start` to `stop` - 1, and its two vectors (hidden_size,) float32."""

    text: str
    start: int
    stop: int
    static: np.ndarray
    """Mean of the rows of the embedding table that belong to the word's tokens."""
    contextual: np.ndarray
    """Mean of the hidden states of the word's tokens."""

    @property
    def word(self) -> str:
        """In lower case."""
        return self.text[self.start : self.stop].casefold()


@dataclass(frozen=True)
class Embeddings:
    """VectorRule (num_texts, hidden_size) float32 in the order of the texts, and the number of truncated texts."""

    vectors: np.ndarray
    num_truncated: int


class Embedder:
    """Compute vectors of texts with an encoder, on the CPU.

        embedder = Embedder("models:/english@champion")
        embedder(["A cat.", "A dog."])  # float32 (2, hidden_size)
        embedder("A cat.")  # float32 (hidden_size,)

    Args:
        model: a run's output directory or a checkpoint (exported to a temporary directory first), an exported or other
            Hugging Face directory, `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `runs:/...`, or a name on the Hugging
            Face Hub; or a model in memory, with its `tokenizer`.
        tracking_uri: the MLflow server of an address; default MLFLOW_TRACKING_URI, else sqlite in ./mlflow.db.

    Raises:
        UserError: there is no such model, or it is not an encoder.
    """

    @home_in("model")
    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        tracking_uri: str | None = None,
    ) -> None:
        vectors = None
        if isinstance(model, str | Path):
            folder = hugging_face_folder(model, tracking_uri)
            vectors = read_vectors(folder)
            model, tokenizer = _load_encoder(folder)
        assert tokenizer is not None, "a model in memory comes with its tokenizer"
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.vectors = vectors or VectorRule("mean")
        longest = max_length(model.config, tokenizer)
        self.max_length = min(longest, self.vectors.max_length or longest)
        self._preprocessor = Preprocessor(tokenizer, self.max_length, has_token_types=False)

    @classmethod
    def load(cls, folder: Path) -> Embedder:
        """Load a Hugging Face directory."""
        return cls(folder)

    def __call__(self, texts: str | Sequence[str], pooling: Pooling | None = None) -> np.ndarray:
        """Return vectors (num_texts, hidden_size) float32, or the vector (hidden_size,) of a single string.

        The default of `pooling` is that of the model's folder, else mean.
        A text that is longer than the model's maximum length is truncated.

        Raises:
            UsageError: `texts` is neither a string nor a list of strings.
        """
        if isinstance(texts, str):
            vector: np.ndarray = self.embed([texts], pooling).vectors[0]
            return vector
        return self.embed(texts, pooling).vectors

    def embed(
        self, texts: Sequence[str], pooling: Pooling | None = None, layer: int = -1, batch_size: int = 32
    ) -> Embeddings:
        """Return one vector for each text, by default with the folder's pooling.

        `layer` 0 is the embeddings, 1 the first layer, and -1 the last one.

        Raises:
            UsageError: the model has no such layer, or `texts` is not a list of strings.
        """
        texts = checked_texts(texts)
        self._check_layer(layer)
        chosen = self.vectors.pooling if pooling is None else pooling
        rows, lengths = self._preprocessor.rows(texts)
        vectors = np.zeros((len(texts), self.model.config.hidden_size), np.float32)
        for indices, batch in self._preprocessor.collate.by_length(rows, batch_size, self.model.device):
            hidden = self._hidden_states(batch, layer)
            pooled = hidden[:, 0] if chosen == "cls" else _mean(hidden, batch["attention_mask"])
            vectors[indices] = pooled.cpu().numpy()
        if self.vectors.is_unit:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Embeddings(vectors, sum(length > self.max_length for length in lengths))

    def static_neighbors(self, word: str, top_k: int = 10) -> list[Neighbor]:
        """Return the nearest words of the embedding table; a word of several tokens is the mean of their rows."""
        table = self.model.get_input_embeddings().weight.detach().float().numpy()
        pieces = sorted((number, piece) for piece, number in self.tokenizer.get_vocab().items() if number < len(table))
        words = {number: text for number, piece in pieces if (text := self._as_word(piece)) is not None}
        ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        if not ids:
            raise UsageError(f"the word {word!r} has no tokens", fix="give a word", code="empty-text")
        return _nearest(table[ids].mean(axis=0), list(words.values()), table[list(words)], word, top_k)

    def contextual_neighbors(
        self, word: str, texts: Sequence[str], top_k: int = 10, layer: int = -1, batch_size: int = 32
    ) -> tuple[list[Neighbor], int]:
        """Return the words of `texts` that are used most similarly, and the number of occurrences of `word`.

        The vector of an occurrence is the mean of its tokens' hidden states, that of a word the mean over occurrences.

        Raises:
            UsageError: `word` is not in the texts, or the model has no such layer.
        """
        sums: dict[str, np.ndarray] = {}
        counts: dict[str, int] = {}
        for occurrence in self._all_words(texts, layer, batch_size):
            found = occurrence.word
            sums[found] = sums.get(found, 0.0) + occurrence.contextual
            counts[found] = counts.get(found, 0) + 1
        wanted = word.casefold()
        if wanted not in sums:
            raise _word_not_in_texts(word)
        means = np.stack([sums[occurrence] / counts[occurrence] for occurrence in sums])
        return _nearest(means[list(sums).index(wanted)], list(sums), means, word, top_k), counts[wanted]

    def occurrences(self, word: str, texts: Sequence[str], layer: int = -1, batch_size: int = 32) -> list[Occurrence]:
        """Return every occurrence of `word` in the texts, in their order, in upper or lower case.

        Raises:
            UsageError: `word` is not in the texts, or the model has no such layer.
        """
        wanted = word.casefold()
        found = [each for each in self._all_words(texts, layer, batch_size) if each.word == wanted]
        if not found:
            raise _word_not_in_texts(word)
        return found

    def _all_words(self, texts: Sequence[str], layer: int, batch_size: int) -> Iterator[Occurrence]:
        self._check_layer(layer)
        for start in range(0, len(texts), batch_size):
            yield from self._words(texts[start : start + batch_size], layer)

    def _words(self, texts: Sequence[str], layer: int) -> list[Occurrence]:
        """Return every word of the texts that was not truncated."""
        with quiet_transformers():
            encoded = self.tokenizer(
                list(texts), truncation=True, max_length=self.max_length, return_offsets_mapping=True
            )
        hidden = self._hidden_states(
            self._preprocessor.collate([{"input_ids": ids} for ids in encoded["input_ids"]]), layer
        )
        table = self.model.get_input_embeddings().weight.detach().float()
        words = []
        for number, text in enumerate(texts):
            spans = encoded["offset_mapping"][number]
            for match in WORD.finditer(text):
                inside = [
                    index for index, (begin, end) in enumerate(spans) if begin < match.end() and end > match.start()
                ]
                if inside:
                    ids = [encoded["input_ids"][number][index] for index in inside]
                    static, contextual = table[ids].mean(dim=0), hidden[number, inside].mean(dim=0)
                    words.append(Occurrence(text, match.start(), match.end(), static.numpy(), contextual.numpy()))
        return words

    def _hidden_states(self, batch: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
        """Return the hidden states (num_texts, length, hidden_size) of one padded batch."""
        last = layer in (-1, self.num_layers)
        with torch.inference_mode():
            outputs = self.model(**batch, output_hidden_states=not last)
        # ModernBERT normalizes after its last layer, so that `last_hidden_state` is not `hidden_states[-1]`.
        hidden: torch.Tensor = outputs.last_hidden_state if last else outputs.hidden_states[layer]
        return hidden

    @property
    def num_layers(self) -> int:
        layers: int = self.model.config.num_hidden_layers
        return layers

    def _check_layer(self, layer: int) -> None:
        if not -self.num_layers - 1 <= layer <= self.num_layers:
            raise UsageError(
                f"layer {layer} does not exist in a model of {self.num_layers} layers",
                fix=f"give a layer from 1 to {self.num_layers}, 0 for the embeddings, or -1 for the last layer",
                code="unknown-layer",
            )

    def _as_word(self, piece: str) -> str | None:
        """Return the text of a token that is a word or begins one; None for endings, bytes and punctuation."""
        if piece in self.tokenizer.all_special_tokens or piece.startswith(WORDPIECE_CONTINUATION):
            return None
        start = self._word_start
        if start is not None and not piece.startswith(start):
            return None
        is_bytes = start == BYTE_LEVEL_SPACE
        text = self.tokenizer.convert_tokens_to_string([piece]).strip() if is_bytes else piece.removeprefix(start or "")
        return text if WORD.fullmatch(text) else None

    @cached_property
    def _word_start(self) -> str | None:
        return word_start_of(self.tokenizer.get_vocab())


def _load_encoder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, missing = load_pretrained("AutoModel", folder, "an encoder")
    refuse_random_weights(missing, folder, "an encoder", but=("pooler.",))
    return model, load_text_tokenizer(folder)


def _word_not_in_texts(word: str) -> UsageError:
    return UsageError(
        f"the texts do not contain the word {word!r}",
        fix="give texts that contain it, or another word",
        code="word-not-in-texts",
    )


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(hidden.dtype)  # (num_texts, length, 1)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def cosines_with(vector: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the cosine of `vector` (hidden_size,) with each of `vectors` (n, hidden_size), (n,) float32."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(vector)
    cosines: np.ndarray = vectors @ vector / np.maximum(lengths, 1e-12)
    return cosines


def _nearest(vector: np.ndarray, words: Sequence[str], vectors: np.ndarray, but: str, top_k: int) -> list[Neighbor]:
    """Return the `top_k` words other than `but` whose `vectors` have the greatest cosine with `vector`."""
    cosines = cosines_with(vector, vectors)
    order = (number for number in np.argsort(-cosines, kind="stable") if words[number].casefold() != but.casefold())
    return [Neighbor(words[number], float(cosines[number])) for number, _ in zip(order, range(top_k), strict=False)]
