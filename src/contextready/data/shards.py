"""Prepared data: memory-mapped token shards with a manifest, read as one long array of ids.

DATA/manifest.json         the source, token counts, and the size and SHA-256 of every file
DATA/tokenizer.json        the tokenizer (absent if token files came without one)
DATA/train-00000.bin …     little-endian uint16, or uint32 for vocabularies above 65,536
DATA/val-00000.bin …
DATA/train-00000.mask …    only for conversations: a byte per token, 1 if the loss counts it (an answer), else 0
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from contextready.data.tokenizer import FILE, Tokenizer
from contextready.errors import ContextReadyError
from contextready.files import MANIFEST, Manifest, check_sums, describe_file, read_manifest
from contextready.formats.record import LARGEST_INT, Count, FileName, Sha256

FORMAT = "contextready-data"
SPLITS = ("train", "val")
LARGEST_VOCABULARY = (1 << 31) - 1
IGNORED = -100
"""The target at a position whose prediction does not count. It is the default of torch's cross-entropy."""
TOKENIZER_FILES = (FILE, "tokenizer_config.json")

Ids = np.ndarray[Any, np.dtype[Any]]
Positive = Annotated[int, range(1, LARGEST_INT)]


@dataclass(frozen=True)
class SplitEntry:
    """A split in the manifest."""

    tokens: Positive
    documents: Count
    bytes: Count
    shards: list[FileName]
    masks: list[FileName] = field(default_factory=list)
    """One for every shard of conversations."""


@dataclass(frozen=True)
class SplitEntries:
    """Both splits in the manifest."""

    train: SplitEntry
    val: SplitEntry


@dataclass(frozen=True)
class DataManifest(Manifest):
    """The manifest of prepared data. What it says must agree with itself before any file is read."""

    source: str
    vocab_size: Annotated[int, range(1, LARGEST_VOCABULARY + 1)]
    end_id: Count
    dtype: Literal["<u2", "<u4"]
    tokenizer_sha256: Sha256 | None
    splits: SplitEntries
    val_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.dtype != dtype_for(self.vocab_size).str:
            raise ContextReadyError(
                f"dtype must be {dtype_for(self.vocab_size).str} for a vocabulary of {self.vocab_size:,}, but is "
                f"{self.dtype}; prepare the data again."
            )
        if self.end_id >= self.vocab_size:
            raise ContextReadyError(
                f"end_id must be below the vocabulary size of {self.vocab_size:,}, but is {self.end_id}; prepare the "
                "data again."
            )
        for name, split in (("train", self.splits.train), ("val", self.splits.val)):
            self._check_split(name, split)
        shards = [name for split in (self.splits.train, self.splits.val) for name in (*split.shards, *split.masks)]
        if len(set(shards)) < len(shards):
            raise ContextReadyError("a shard is listed twice; prepare the data again.")
        other = self.files.keys() - {*shards, *TOKENIZER_FILES}
        if other:
            raise ContextReadyError(f"files lists {min(other)}, which belongs to no split; prepare the data again.")
        if (FILE in self.files) != (self.tokenizer_sha256 is not None):
            raise ContextReadyError(
                f"{FILE} and tokenizer_sha256 must be both there or both absent; prepare the data again."
            )

    def _check_split(self, name: str, split: SplitEntry) -> None:
        sizes = []
        for shard in split.shards:
            entry = self.files.get(shard)
            if entry is None:
                raise ContextReadyError(f"files does not list {shard}, a shard of {name}; prepare the data again.")
            sizes.append(entry.bytes)
        itemsize = np.dtype(self.dtype).itemsize
        lengths = [size // itemsize for size in sizes]
        if split.masks and [self.files[mask].bytes if mask in self.files else None for mask in split.masks] != lengths:
            raise ContextReadyError(f"the masks of {name} do not match its shards; prepare the data again.")
        if not all(sizes) or any(size % itemsize for size in sizes) or sum(sizes) != split.tokens * itemsize:
            raise ContextReadyError(
                f"the shards of {name} have {sum(sizes):,} bytes, which does not match {split.tokens:,} tokens of "
                f"{itemsize} bytes; prepare the data again."
            )


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The type of the ids in shards: 16 bits if the vocabulary allows it, otherwise 32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def map_ids(path: Path, dtype: np.dtype[Any]) -> Ids:
    """The ids in a file, which are read when they are needed."""
    try:
        return np.memmap(path, dtype, "r")
    except OSError as error:
        raise ContextReadyError(f"{path} cannot be read: {error}.") from error


class ShardWriter:
    """Appends documents to the shards of one split, and starts a new shard when the last is full."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.tokens = self.documents = self.bytes = 0
        self.names: list[str] = []
        self.masks: list[str] = []
        self._left = 0
        self._file: Any = None
        self._mask: Any = None

    def add(self, ids: Sequence[int] | Ids, end_id: int, size: int, counted: Sequence[bool] | None = None) -> None:
        """Write one document, whose text has `size` bytes, and its end token.

        `counted` says which tokens of a conversation the loss counts. Its end token is never one of them.
        """
        document = np.empty(len(ids) + 1, self.dtype)
        document[:-1] = ids
        document[-1] = end_id
        mask = None if counted is None else np.append(np.asarray(counted, np.uint8), np.uint8(0))
        self.documents += 1
        self.bytes += size
        self.tokens += len(document)
        while len(document):
            if not self._left:
                self.close()
                self.names.append(f"{self.split}-{len(self.names):05d}.bin")
                self._file, self._left = (self.folder / self.names[-1]).open("wb"), self.shard_tokens
                if mask is not None:
                    self.masks.append(self.names[-1].replace(".bin", ".mask"))
                    self._mask = (self.folder / self.masks[-1]).open("wb")
            part, document = document[: self._left], document[self._left :]
            self._file.write(part.tobytes())
            if mask is not None:
                self._mask.write(mask[: len(part)].tobytes())
                mask = mask[len(part) :]
            self._left -= len(part)

    def close(self) -> None:
        """Close the last shard."""
        for file in (self._file, self._mask):
            if file is not None:
                file.close()
        self._file = self._mask = None

    def summary(self) -> dict[str, Any]:
        """Return the manifest's entry for this split."""
        entry = {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "shards": self.names}
        return entry | ({"masks": self.masks} if self.masks else {})


class TokenArray:
    """The shards of one split as one array of ids; only the parts that are read are loaded."""

    def __init__(
        self,
        shards: Sequence[Ids],
        vocab_size: int | None = None,
        where: str = "The data",
        counted: "TokenArray | None" = None,
    ) -> None:
        """Join shards. If the vocabulary size is given, ids that are not in the vocabulary are refused when read.

        `counted` has a 1 for every token that the loss counts, and is none if it counts all.
        """
        self._shards, self._vocab_size, self._where, self.counted = shards, vocab_size, where, counted
        self._ends = np.cumsum([len(shard) for shard in shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> Ids:
        """Return `count` ids from `start` on, across shards."""
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while count > 0:
            begin = start - (int(self._ends[shard - 1]) if shard else 0)
            part = self._shards[shard][begin : begin + count]
            parts.append(part)
            start, count, shard = start + len(part), count - len(part), shard + 1
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._vocab_size is not None and len(ids) and int(ids.max()) >= self._vocab_size:
            raise ContextReadyError(
                f"{self._where} contains the id {int(ids.max())}, but its vocabulary has only 0 to "
                f"{self._vocab_size - 1}; prepare the data again."
            )
        return ids


class Data:
    """A folder of prepared data, checked when it is opened."""

    def __init__(self, folder: Path, verify: Iterable[str] = SPLITS) -> None:
        """Open the folder and check the size of every file, and the checksums of the splits in `verify`."""
        if not folder.is_dir():
            raise ContextReadyError(
                f"No prepared data exists at {folder}. Prepare it with crt data prepare, or pass another folder."
            )
        self.folder = folder
        what = "prepared data (the output of crt data prepare)"
        self.manifest = read_manifest(folder, FORMAT, what, DataManifest)
        if self.tokenizer_sha256 is None and (folder / FILE).exists():
            raise ContextReadyError(
                f"{folder / MANIFEST} does not list {FILE}, so it is unknown whether the ids were created with it; "
                "remove the file or prepare the data again."
            )
        for split in verify:
            check_sums(folder, self.manifest, [*self._shards(split), *self._masks(split)])
        self.dtype = np.dtype(self.manifest["dtype"])
        self.vocab_size: int = self.manifest["vocab_size"]
        self.end_id: int = self.manifest["end_id"]

    @property
    def identity(self) -> str:
        """A hash over the checksums of the shards, which identifies this data."""
        names = [name for split in SPLITS for name in (*self._shards(split), *self._masks(split))]
        sums = [self.manifest["files"][name]["sha256"] for name in names]
        return hashlib.sha256(" ".join(sums).encode()).hexdigest()

    def _shards(self, split: str) -> list[str]:
        names: list[str] = self.manifest["splits"][split]["shards"]
        return names

    def _masks(self, split: str) -> list[str]:
        names: list[str] = self.manifest["splits"][split].get("masks", [])
        return names

    @property
    def tokenizer_sha256(self) -> str | None:
        """The hash of the tokenizer that the ids were created with, if it is known."""
        sha256: str | None = self.manifest["tokenizer_sha256"]
        return sha256

    def tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer that the ids were created with; it is an error if the file was replaced."""
        if self.tokenizer_sha256 is None:
            return None
        file = self.folder / FILE
        # The checksum comes first, so that a damaged file is not even parsed.
        is_same = describe_file(file) == self.manifest["files"][FILE]
        tokenizer = Tokenizer.load(file) if is_same else None
        if tokenizer is None or tokenizer.sha256 != self.tokenizer_sha256:
            raise ContextReadyError(
                f"{file} is not the tokenizer that these shards were created with; restore the original or prepare the "
                "data again."
            )
        return tokenizer

    def tokens(self, split: str) -> TokenArray:
        """Return all tokens of `train` or `val`."""
        if split not in SPLITS:
            raise ContextReadyError(f"There is no split '{split}'; choose train or val.")
        shards = [map_ids(self.folder / name, self.dtype) for name in self._shards(split)]
        masks = [map_ids(self.folder / name, np.dtype(np.uint8)) for name in self._masks(split)]
        counted = TokenArray(masks, 2, f"{self.folder}") if masks else None
        return TokenArray(shards, self.vocab_size, f"{self.folder}", counted)

    def bytes_per_token(self, split: str) -> float | None:
        """Return the average number of bytes of text per token of this split, if the text is known."""
        counts = self.manifest["splits"][split]
        return counts["bytes"] / counts["tokens"] if counts["bytes"] and counts["tokens"] else None
