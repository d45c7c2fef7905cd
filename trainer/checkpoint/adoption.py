"""Adopt trained weights of another tokenizer, size or number of positions: `init_from` with `adopt`.

Everything here is a function of settings, vocabularies and dicts of fp32 tensors by our names. What stays the same is
copied bit by bit: a map of equal tokenizers, layers or widths is the identity.

- tokenizer: the row of a token that both vocabularies have is copied. The row of a new token is the mean of the rows of
  the old tokens that its text has (Gee et al. 2022, Fast Vocabulary Transfer). The decoder's bias likewise, moved by
  the log of how much more or less often the token occurs than these (`bias_shifts`).
- size: layers are repeated (`layer_map`). Widths are tiled from the middle (`tile_map`; Warner et al. 2024, section
  2.1, for ModernBERT-large). A column of a matrix is divided by the number of its copies (Chen et al. 2016, Net2Net),
  so the wider layer computes what the layer did. The copies also get the new model's random weights, less their mean
  over the copies: the noise cancels in the output, and without it the copies would learn the same for ever.
- positions: learned positions beyond the old ones repeat them (Beltagy et al. 2020, Longformer, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.model_settings import ModelSettings

WORDS = "encoder.embeddings.word_embeddings.weight"
POSITIONS = "encoder.embeddings.position_embeddings.weight"
_DECODER, _BIAS = "mlm_head.decoder.weight", "mlm_head.bias"
OF_VOCABULARY = {WORDS, _BIAS, _DECODER}
"""Parameters with a row for each token."""
FOLLOWS_COUNTS = "the biases of the decoder follow how often each token occurs in the training data"
"""What the log says where `adopt_tokens` has counts."""
_ROLES = ("pad", "unk", "cls", "sep", "mask")
_WIDTHS = ("hidden_size", "num_attention_heads", "intermediate_size")
SIZES = (*_WIDTHS, "num_hidden_layers")

Weights = Mapping[str, torch.Tensor]


class Adoption(NamedTuple):
    """How weights become those of another model."""

    old: ModelSettings
    """The settings of the new model with the sizes and positions of the weights."""
    new: ModelSettings
    tokens: TokenMap | None = None
    """None where the vocabulary stays."""
    token_counts: np.ndarray | None = None
    """(vocab_size,) how often each new token occurs in the training data; None: unknown."""

    def names(self, fresh: Weights) -> list[str]:
        """Return the names of the old model's parameters: those of `fresh`, with its own number of layers."""
        layers, last = self.old.num_hidden_layers, self.new.num_hidden_layers - 1
        names = [name for name in fresh if _layer_of(name) is None or _layer_of(name) in range(layers)]
        of_last = [name.split(".", 3)[3] for name in fresh if _layer_of(name) == last and layers > last + 1]
        return names + [f"encoder.layers.{number}.{name}" for number in range(last + 1, layers) for name in of_last]

    def apply(self, weights: Weights, fresh: Weights) -> dict[str, torch.Tensor]:
        """Return the weights of the new model, perhaps with fewer vocabulary rows.

        Args:
            weights: those of the old one, perhaps without heads.
            fresh: the random weights of the new one by name.
        """
        adopted = dict(weights) if self.tokens is None else adopt_tokens(weights, self.tokens, self.token_counts)
        if self.old.max_position_embeddings != self.new.max_position_embeddings and POSITIONS in fresh:
            adopted = adopt_positions(adopted, len(fresh[POSITIONS]))
        if any(getattr(self.old, name) != getattr(self.new, name) for name in SIZES):
            adopted = adopt_size(adopted, fresh, self.old, self.new)
        random = [] if self.tokens is None else list(self.tokens.random)
        made = OF_VOCABULARY - ({_BIAS} if self.token_counts is not None else set())
        for name in made & adopted.keys() if random else ():
            adopted[name][random] = fresh[name][random]
        return adopted

    def rows(self, weights: Weights, fresh: Weights) -> dict[str, int]:
        """Return the number of rows of each parameter that `apply` returns; neither argument needs memory."""
        layers = layer_map(self.old.num_hidden_layers, self.new.num_hidden_layers)
        found = (name for name in fresh if _source_of(name, layers, weights) is not None)
        num_tokens = None if self.tokens is None else len(self.tokens.copied)
        return {
            name: (num_tokens or len(weights[name])) if name in OF_VOCABULARY else len(fresh[name]) for name in found
        }


class TokenMap(NamedTuple):
    """Where the rows of a new vocabulary come from."""

    copied: np.ndarray
    """(vocab_size,) int64: the old id whose row is copied, or -1."""
    averaged: dict[int, tuple[int, ...]]
    """The old ids whose rows are averaged, by new id."""
    random: tuple[int, ...]
    """New ids that no old token stands for."""
    dropped: int
    """Old tokens whose row is not copied."""

    def describe(self) -> str:
        """Return the counts of rows."""
        return (
            f"{int((self.copied >= 0).sum()):,} rows are copied, {len(self.averaged):,} are the mean of the old tokens "
            f"of their text, {len(self.random):,} stay random, and {self.dropped:,} old tokens are dropped"
        )


def token_map(old: Tokenizer, new: Tokenizer) -> TokenMap:
    """Compare two vocabularies by the text that each token stands for, and special tokens by their role.

    SentencePiece's "▁a", a byte-level "Ġa" and WordPiece's "a" are one text, and so are "a" and "##a".
    """
    old_keys, new_keys = _keys(old), _keys(new)
    by_key: dict[tuple[str, int, bytes], int] = {key: number for number, key in enumerate(old_keys)}
    by_text: dict[bytes, int] = {}
    for number, (kind, _, text) in reversed(list(enumerate(old_keys))):
        if kind in ("text", "byte") and text and (kind == "text" or text not in by_text):
            by_text[text] = number
    copied = np.full(new.vocab_size, -1, np.int64)
    averaged: dict[int, tuple[int, ...]] = {}
    for number, key in enumerate(new_keys):
        kind, _, text = key
        same = by_key.get(key)
        if same is None and kind in ("text", "byte"):
            same = by_text.get(text)
        if same is not None:
            copied[number] = same
        elif kind == "text" and (ids := _ids_of(old, text, by_text)):
            averaged[number] = ids
    random = tuple(number for number in range(new.vocab_size) if copied[number] < 0 and number not in averaged)
    return TokenMap(copied, averaged, random, old.vocab_size - len(np.unique(copied[copied >= 0])))


def _keys(tokenizer: Tokenizer) -> list[tuple[str, int, bytes]]:
    """Return what each id stands for: kind, number among those of this kind and text, and text with its space."""
    special = tokenizer.special_tokens
    roles = {getattr(special, role): role for role in _ROLES}
    seen: dict[tuple[str, bytes], int] = {}
    keys = []
    texts = tokenizer.bytes_of(range(tokenizer.vocab_size))
    for number, (piece, text) in enumerate(zip(tokenizer.vocabulary, texts, strict=True)):
        if number in roles:
            key = ("special", roles[number].encode())
        elif number in special.others or piece.kind in ("unknown", "control"):
            key = ("other", piece.text.encode())
        elif piece.kind == "byte":
            key = ("byte", text)
        else:
            key = ("text", text)
        seen[key] = seen.get(key, -1) + 1
        keys.append((key[0], seen[key], key[1]))
    return keys


def _ids_of(tokenizer: Tokenizer, text: bytes, by_text: Mapping[bytes, int]) -> tuple[int, ...]:
    """Return the known ids that a text has; a part of a word does not begin with a token that begins one.

    Bytes that are not text alone have the ids of these bytes, as far as the vocabulary has them.
    """
    try:
        ids = tokenizer.encode_text(text.decode()).tolist()
    except UnicodeDecodeError:
        return tuple(by_text[byte] for byte in (text[i : i + 1] for i in range(len(text))) if byte in by_text)
    if ids and not text.startswith(b" "):
        (first,) = tokenizer.bytes_of(ids[:1])
        ids[0] = by_text.get(first[1:], ids[0]) if first.startswith(b" ") else ids[0]
    return tuple(number for number in ids if number not in tokenizer.special_tokens.ids)


def adopt_tokens(weights: Weights, tokens: TokenMap, token_counts: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    """Return the weights with the rows of the new vocabulary; those of `tokens.random` are zeros.

    Args:
        token_counts: (vocab_size,) how often each new token occurs; the decoder's bias follows it (`bias_shifts`).
    """
    adopted = dict(weights)
    copied = torch.from_numpy(tokens.copied)
    kept = copied >= 0
    for name in OF_VOCABULARY & weights.keys():
        old = weights[name]
        rows = old.new_zeros(len(copied), *old.shape[1:])
        rows[kept] = old[copied[kept]]
        for number, ids in tokens.averaged.items():
            rows[number] = old[list(ids)].mean(0)
        adopted[name] = rows
    if _BIAS in adopted and token_counts is not None:
        adopted[_BIAS] += torch.from_numpy(bias_shifts(tokens, token_counts, weights[_BIAS].numpy())).to(torch.float32)
    return adopted


def bias_shifts(tokens: TokenMap, token_counts: np.ndarray, old_bias: np.ndarray) -> np.ndarray:
    """Return (vocab_size,) float64: what is added to the decoder's bias of each new token, copied or the mean.

    A bias has the log of its token's frequency in it, and the other tokenizer changes frequencies. An old token occurs
    in the data as often as the new tokens that it is a part of. So a token gets the log of its own count less the mean
    log of the counts of the old tokens that it is made of: 0 for a token that occurs as often as before, less for one
    whose occurrences longer tokens take over. A random row gets the log of its count at the level of all others. Every
    count is taken as larger by a half.
    """
    counts = token_counts.astype(np.float64)
    kept = np.flatnonzero(tokens.copied >= 0)
    numbers = [kept, *(np.full(len(ids), number) for number, ids in tokens.averaged.items())]
    sources = [tokens.copied[kept], *(np.asarray(ids) for ids in tokens.averaged.values())]
    new, old = np.concatenate(numbers), np.concatenate(sources)
    old_counts = np.bincount(old, counts[new], minlength=len(old_bias))
    logs, old_logs = np.log(counts + 0.5), np.log(old_counts + 0.5)
    pieces = np.maximum(np.bincount(new, minlength=len(counts)), 1)
    shifts = logs - np.bincount(new, old_logs[old], minlength=len(counts)) / pieces
    used = np.unique(old)
    random = list(tokens.random)
    shifts[random] = logs[random] + (np.mean(old_bias[used] - old_logs[used]) if len(used) else 0.0)
    return shifts


def layer_map(old: int, new: int) -> list[int]:
    """Return for each of `new` layers the number of the old layer that it takes.

    A multiple repeats the whole stack: 0, 1, 0, 1 (Gong et al. 2019). Other larger numbers repeat layers where they
    are, layer i taking layer i * old / new, rounded: 0, 1, 1 (Rae et al. 2021, Gopher; Warner et al. 2024).
    Fewer are spaced evenly from the first to the last (Sanh et al. 2019, DistilBERT).
    """
    if new % old == 0:
        return [number % old for number in range(new)]
    if new > old:
        return [min(round(number * old / new), old - 1) for number in range(new)]
    return [round(number * (old - 1) / max(new - 1, 1)) for number in range(new)]


def tile_map(old: int, new: int) -> torch.Tensor:
    """Return (new,) int64: the old index that each new one takes. The old ones are in the middle, in their order, and
    repeat to both sides."""
    return (torch.arange(new) - (new - old) // 2) % old


def tiling_obstacles(old: ModelSettings, new: ModelSettings) -> list[str]:
    """Return the reasons why the width of `new` is not a tiling of the width of `old`."""
    reasons = [
        f"model.{name} is {getattr(new, name)}, less than {getattr(old, name)}"
        for name in _WIDTHS
        if getattr(new, name) < getattr(old, name)
    ]
    if old.hidden_size % old.num_attention_heads or old.head_size != new.head_size:
        reasons.append(
            f"heads have {new.head_size} numbers and there {old.hidden_size / old.num_attention_heads:g} "
            "(model.hidden_size / model.num_attention_heads), and a head is copied as a whole"
        )
    elif _query_heads_per_key_head(old) != _query_heads_per_key_head(new):
        reasons.append(
            f"{_query_heads_per_key_head(new):g} query heads share a key head and there "
            f"{_query_heads_per_key_head(old):g}, and such a group is copied as a whole"
        )
    return reasons


def describe_size(old: ModelSettings, new: ModelSettings) -> list[str]:
    """Return what `adopt_size` does, in a line each for layers and width; empty if both are the same."""
    lines = []
    layers = layer_map(old.num_hidden_layers, new.num_hidden_layers)
    if old.num_hidden_layers != new.num_hidden_layers:
        line = f"layers {', '.join(map(str, layers))} of {old.num_hidden_layers} become 0 to {len(layers) - 1}"
        if left := old.num_hidden_layers - len({*layers}):
            line += f", {left} are dropped"
        kinds = [old.attention_kinds[number] for number in layers]
        changed = sum(before != after for before, after in zip(kinds, new.attention_kinds, strict=True))
        lines.append(line + (f", and {changed} change between local and global attention" if changed else ""))
    widths = [
        f"model.{name} from {getattr(old, name):,} to {getattr(new, name):,}"
        for name in _WIDTHS
        if getattr(old, name) != getattr(new, name)
    ]
    return lines + ([f"tiled from the middle: {', '.join(widths)}"] if widths else [])


def adopt_size(weights: Weights, fresh: Weights, old: ModelSettings, new: ModelSettings) -> dict[str, torch.Tensor]:
    """Return weights of the layers and widths of `new`, made of those of `old`.

    Args:
        weights: those of `old`, perhaps without heads.
        fresh: the random weights of `new` by name, (rows, columns) or (rows,).
    """
    maps = _Maps(old, new)
    is_linear = getattr(new, "mlm_head", "dense") == "linear"
    before_decoder = "encoder.final_norm." if is_linear else "mlm_head.norm."
    layers = layer_map(old.num_hidden_layers, new.num_hidden_layers)
    adopted = {}
    for name, random in fresh.items():
        source = _source_of(name, layers, weights)
        if source is None:
            continue
        weight = _tiled(weights[source], maps, _module_of(name), random)
        if _DECODER not in fresh and name.startswith(before_decoder):
            weight = weight / maps.copies("hidden")  # the decoder's columns are those of the word matrix
        adopted[name] = weight
    return adopted


def _source_of(name: str, layers: Sequence[int], weights: Weights) -> str | None:
    """Return the name of the old weight that becomes `name`; None if there is none."""
    parts = name.split(".")
    if parts[:2] != ["encoder", "layers"]:
        return name if name in weights else None
    old = ".".join([*parts[:2], str(layers[int(parts[2])]), *parts[3:]])
    if old not in weights and parts[3] == "attention_norm":
        old = f"encoder.embeddings.norm.{parts[4]}"  # which normalizes the input of the first layer
    return old if old in weights else None


def _layer_of(name: str) -> int | None:
    """Return the number of a parameter's layer."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["encoder", "layers"] else None


def _module_of(name: str) -> str:
    """Return the name of a parameter's module, within its layer, without the parameter's own name."""
    parts = name.split(".")
    return ".".join(parts[3 if parts[:2] == ["encoder", "layers"] else 0 : -1])


class _Maps:
    """The tiling of every axis, by its kind."""

    def __init__(self, old: ModelSettings, new: ModelSettings) -> None:
        size, group = new.head_size, round(_query_heads_per_key_head(new))
        old_groups, new_groups = old.num_attention_heads // group, new.num_attention_heads // group
        self._sizes = {
            "hidden": old.hidden_size,
            "intermediate": old.intermediate_size,
            "queries": old.hidden_size,
            "keys": old_groups * size,
        }
        self._maps = {
            "hidden": tile_map(old.hidden_size, new.hidden_size),
            "intermediate": tile_map(old.intermediate_size, new.intermediate_size),
            "queries": _in_blocks(tile_map(old_groups, new_groups), group * size),
            "keys": _in_blocks(tile_map(old_groups, new_groups), size),
        }

    def __getitem__(self, kind: str) -> torch.Tensor:
        return self._maps[kind]

    def copies(self, kind: str) -> torch.Tensor:
        """(new size,) int64: how many copies the old index of each new one has."""
        counts = torch.bincount(self._maps[kind], minlength=self._sizes[kind])
        return counts[self._maps[kind]]

    def rows(self, module: str, num_rows: int) -> torch.Tensor | None:
        """Return the tiling of the rows of a module's weight, which may be stacked; None for rows that stay."""
        if module == "attention.qkv":
            stacked = ["queries", "keys", "keys"]
        elif module == "feed_forward.intermediate":
            stacked = ["intermediate"] * (num_rows // self._sizes["intermediate"])  # with a gate two
        elif module in _ROWS_STAY:
            return None
        else:
            stacked = ["hidden"]
        starts = np.cumsum([0, *(self._sizes[kind] for kind in stacked)]).tolist()
        return torch.cat([self._maps[kind] + start for kind, start in zip(stacked, starts, strict=False)])


_ROWS_STAY = {
    *(f"encoder.embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")),
    *("mlm_head", "mlm_head.decoder", "next_sentence_head.dense"),
}
"""Modules whose rows are tokens, positions or classes."""
_COLUMNS = {"attention.output": "queries", "feed_forward.output": "intermediate"}
"""The kind of the columns of a module's matrix; the others have the width of the hidden states."""


def _tiled(weight: torch.Tensor, maps: _Maps, module: str, random: torch.Tensor) -> torch.Tensor:
    """Return `weight` in the shape of `random`; columns that are copies of one share it, and differ by noise."""
    rows = maps.rows(module, len(weight))
    weight = weight if rows is None else weight[rows]
    if weight.ndim == 1:
        return weight
    kind = _COLUMNS.get(module, "hidden")
    columns = maps[kind]
    if len(columns) == weight.shape[1]:
        return weight
    if module.startswith("encoder.embeddings."):  # looked up, so the columns are outputs
        return weight[:, columns]
    noise = random[: len(weight)]
    copies = maps.copies(kind)
    sums = noise.new_zeros(weight.shape).index_add_(1, columns, noise)
    return weight[:, columns] / copies + noise - sums[:, columns] / copies


def _in_blocks(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices in blocks of `size` of the blocks of these numbers."""
    return (numbers[:, None] * size + torch.arange(size)).flatten()


def _query_heads_per_key_head(model: ModelSettings) -> float:
    keys = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    return float(model.num_attention_heads / keys)


def describe_positions(old: ModelSettings, new: ModelSettings) -> str:
    """Return what becomes of the positions."""
    before, after = old.max_position_embeddings, new.max_position_embeddings
    if new.position_embedding != "learned":
        return f"up to {after:,} positions instead of {before:,}; no weight depends on them"
    if after < before:
        return f"the first {after:,} of {before:,} rows are copied, {before - after:,} are dropped"
    return f"{before:,} rows are copied, and rows {before:,} to {after - 1:,} repeat them"


def adopt_positions(weights: Weights, num_rows: int) -> dict[str, torch.Tensor]:
    """Return the weights with `num_rows` learned positions: the old ones in their order, again and again."""
    rows = weights[POSITIONS]
    return {**weights, POSITIONS: rows[torch.arange(num_rows) % len(rows)]}
