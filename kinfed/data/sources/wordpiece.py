"""Texts as tokens: WordPiece with the vocabulary of a pretrained model.

    WordPiece.load(folder).encode(["a good book"], 8)      [[101, 1037, 2204, 2338, 102, 0, 0, 0]]

A text becomes [CLS], its first pieces and [SEP], `length` tokens at most; a shorter one is padded behind with token 0,
which models do not attend to. The folder is that of a model on the hub, with tokenizer.json, or with vocab.txt (a piece
per line) for BERT's rules: lower case without accents unless tokenizer_config.json says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.errors import ConfigError, DataError

PADDING, FIRST, LAST, UNKNOWN = "[PAD]", "[CLS]", "[SEP]", "[UNK]"
TEXT_COLUMN = "text"
_BLOCK = 4096  # texts that are cut at once


@dataclass(frozen=True)
class TextInput:
    """The way of a column of texts to tokens: what a model for texts must be fed."""

    column: str
    tokenizer: str  # folder
    length: int

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> TextInput | None:
        """Read the options of a data set of texts, else None. One without a text_column among them calls it `text`."""
        column = options.get("text_column", TEXT_COLUMN)
        if "tokenizer" not in options or not column:
            return None
        if not (tokenizer := options["tokenizer"]):
            raise ConfigError(
                f"the texts of column {column} need a tokenizer: set dataset.tokenizer to a folder with tokenizer.json "
                "or vocab.txt, such as that of the weights of model minilm"
            )
        return cls(column, tokenizer, options["length"])

    def fingerprint(self) -> str:
        """Equal for all folders whose files cut texts alike; names of files and columns do not matter."""
        contents = [file.name.encode() + b"\0" + file.read_bytes() for file in WordPiece.load(self.tokenizer).files]
        return hashlib.sha256(b"\0".join([str(self.length).encode(), *contents])).hexdigest()[:16]

    def encode(self, texts: Sequence[str | None]) -> Tensor:
        """int64 [N, length]; a missing text is an empty one."""
        return WordPiece.load(self.tokenizer).encode([text or "" for text in texts], self.length)


@dataclass(frozen=True)
class WordPiece:
    tokenizer: Any  # tokenizers.Tokenizer
    files: tuple[Path, ...]  # that it was read from

    @classmethod
    def load(cls, folder: Path | str) -> WordPiece:
        place = Path(folder).expanduser()
        whole, vocabulary, settings = place / "tokenizer.json", place / "vocab.txt", place / "tokenizer_config.json"
        if whole.is_file():
            return cls._checked(_from_json(whole), (whole,))
        if vocabulary.is_file():
            files = tuple(file for file in (vocabulary, settings) if file.is_file())
            return cls._checked(_from_vocabulary(vocabulary, settings), files)
        raise DataError(
            f"there is no tokenizer in {place}: it should hold tokenizer.json or vocab.txt, as the folder of a "
            "pretrained model does; model minilm says where to get one"
        )

    @classmethod
    def _checked(cls, tokenizer: Any, files: tuple[Path, ...]) -> WordPiece:
        """Refuse what is cut by other rules than those that `encode` and models rely on."""
        kind = type(tokenizer.model).__name__
        if kind != "WordPiece" or tokenizer.token_to_id(PADDING) != 0:
            raise DataError(
                f"{files[0]} should hold a WordPiece tokenizer whose token 0 is {PADDING}, as BERT has it; it holds "
                f"{kind} with {PADDING} as {tokenizer.token_to_id(PADDING)}"
            )
        return cls(tokenizer, files)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """int64 [N, length]."""
        if length < 3:
            raise ConfigError(f"length must leave room for a word between {FIRST} and {LAST}, at least 3; got {length}")
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(pad_id=0, pad_token=PADDING, length=length)
        tokens = np.empty((len(texts), length), np.int64)
        for start in range(0, len(texts), _BLOCK):
            whole = texts[start : start + _BLOCK]
            block = tokens[start : start + len(whole)]
            block[:] = self._numbers([_first_words(text, length) for text in whole])
            # Words that vanish (of control characters) leave room for later ones: such texts are cut as a whole.
            for row in np.flatnonzero(block[:, -1] == 0).tolist():
                if len(whole[row]) > len(_first_words(whole[row], length)):
                    block[row] = self._numbers([whole[row]])
        return torch.from_numpy(tokens)

    def _numbers(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]


def _first_words(text: str, count: int) -> str:
    """The text up to its first `count` words. A word is at least one token, so that the rest need not be cut into
    tokens: reviews have many times as many words as models read."""
    words = text.split(None, count)
    return text if len(words) <= count else " ".join(words[:count])


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError("texts are cut into tokens with tokenizers: pip install 'kinfed[text]'") from error
    return tokenizers


def _from_json(file: Path) -> Any:
    library = _tokenizers()
    try:
        return library.Tokenizer.from_file(str(file))
    except Exception as error:  # of Rust, of no class of its own
        raise DataError(f"{file} is no tokenizer: {error}") from None


def _from_vocabulary(file: Path, settings: Path) -> Any:
    """BERT's rules for a list of pieces."""
    library = _tokenizers()
    pieces = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    numbers = {piece: number for number, piece in enumerate(pieces)}
    if lacking := [piece for piece in (PADDING, FIRST, LAST, UNKNOWN) if piece not in numbers]:
        raise DataError(f"{file} lacks {', '.join(lacking)}; is it the vocabulary of a BERT?")
    lower = bool(json.loads(settings.read_bytes()).get("do_lower_case", True)) if settings.is_file() else True
    tokenizer = library.Tokenizer(library.models.WordPiece(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = library.processors.BertProcessing((LAST, numbers[LAST]), (FIRST, numbers[FIRST]))
    return tokenizer
