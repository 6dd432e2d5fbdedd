"""Training data that is larger than memory: tokens in files, of which a run reads its rows.

The first run tokenizes a file once, into HF_HOME. Then only one line of a JSONL file, or one
document of a text, is in memory; afterwards only the places of the documents are. The files have
checksums; damaged ones are written again. Rows are packed as in `packing`, but not across files,
and the best fit is looked for among 65536 documents at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from huggingface_hub import constants

from ligermodels.converters.files import OpenFile, is_int, read_json
from ligermodels.errors import DataError, LigerError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training import data, formats
from ligermodels.training.checkpoints import fingerprint
from ligermodels.training.data import Document, file_hash, iter_documents
from ligermodels.training.files import writing
from ligermodels.training.inputs import file_hashes
from ligermodels.training.packing import PackedRows, best_fit, generator, row_order

_WINDOW = 2**16  # documents that are packed together
_BLOCK = 2**24  # tokens whose targets are counted at once
_CYCLE = 1000  # rows in which the sources have their shares
_FACTS = "facts.json"
# The file NAME.bin holds numbers of this type.
_DTYPES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "ends": np.int64,
    "divisible": np.bool_,
}


class _Column:
    """The numbers in a file. A slice of them is read when it is asked for."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._file = OpenFile(path, DataError)  # stays open: another file may take its name
        self._identity = self._file.identity()

    def __len__(self) -> int:
        return self._identity[2] // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        first, last, _ = part.indices(len(self))
        found: np.ndarray = np.empty(max(0, last - first), self.dtype)
        rest, offset = memoryview(found.view(np.uint8).data), first * self.dtype.itemsize
        try:
            while rest and (count := self._file.read_at(offset, rest)):
                rest, offset = rest[count:], offset + count
            changed = bool(rest) or self._file.identity() != self._identity
        except OSError as error:
            raise DataError(f"{self.path}: the file cannot be read: {error.strerror}") from None
        if changed:
            raise DataError(
                f"{self.path}: the file was changed while a run was using it; start the run again "
                "with --resume, which makes the file anew"
            )
        return found


class Spans(NamedTuple):
    """Parts of the documents of a store.

    Attributes:
        starts, stops: (n,) int64, the places in the store's tokens where each begins and ends.
        divisible: (n,) bool, as in `Document`.
    """

    starts: np.ndarray
    stops: np.ndarray
    divisible: np.ndarray

    def where(self, chosen: np.ndarray) -> Spans:
        """Return the parts that a mask (n,) chooses."""
        return Spans(*(each[chosen] for each in self))


class TokenStore:
    """The documents of a file, as tokens on the disk.

    Attributes:
        ids, loss_mask: of all documents, one after the other; int32 and bool, slices of which are
            read from the disk.
        spans: where each document lies.
        digest: a hash of all of these.
        max_id: the largest token id.
    Raises:
        DataError: the folder does not hold what `token_store` has written there.
    """

    def __init__(self, folder: Path) -> None:
        facts = read_json(folder / _FACTS, DataError)
        digests = {name: file_hash(folder / f"{name}.bin") for name in _DTYPES}
        if facts.get("digests") != digests or not is_int(facts.get("max_id")):
            raise DataError(f"{folder}: the files do not match their checksums")
        self.digest = fingerprint(digests)
        self.max_id: int = facts["max_id"]
        columns = {name: _Column(folder / f"{name}.bin", _DTYPES[name]) for name in _DTYPES}
        self.ids, self.loss_mask = columns["ids"], columns["loss_mask"]
        ends = columns["ends"][:]
        self.spans = Spans(np.append(0, ends[:-1]), ends, columns["divisible"][:])

    def targets_before(self, places: np.ndarray) -> np.ndarray:
        """Return how many targets come before each place in the tokens, in one pass over them.

        Args: places: int64, of any shape. The counts have its shape and dtype.
        """
        order = np.argsort(places, axis=None)
        ordered = places.ravel()[order]
        counts = np.zeros_like(ordered)
        done = total = 0
        for first in range(0, len(self.loss_mask), _BLOCK):
            block = self.loss_mask[first : first + _BLOCK]
            sums: np.ndarray = np.append(0, np.cumsum(block, dtype=np.int64))
            until = int(np.searchsorted(ordered, first + len(sums)))
            counts[done:until] = total + sums[ordered[done:until] - first]
            done, total = until, total + int(sums[-1])
        found = np.empty_like(counts)
        found[order] = counts
        return found.reshape(places.shape)


def _code_files() -> list[Path]:
    """Return the files of the code that turns a data file into tokens."""
    training = [Path(str(module.__file__)) for module in (data, formats)]
    return training + sorted((training[0].parent.parent / "text").glob("*.py"))


def token_store(
    file: Path, tokenizer: Tokenizer, source: Path, *, separator: str | None = None
) -> TokenStore:
    """Return the documents of a file as tokens on the disk, written if they are not there yet.

    Args: source: the folder of the tokenizer.
    Raises:
        DataError: the file cannot be read, a line is wrong, or no document has a target.
        SaveError: the tokens cannot be written.
    """
    facts = {"file": file_hash(file), "suffix": file.suffix.lower(), "separator": separator}
    # Other versions of this code, or of the libraries it uses, may make other tokens of the file.
    code = [file_hash(file) for file in _code_files()]
    code += [version(name) for name in ("jinja2", "sentencepiece", "tokenizers")]
    key = fingerprint(facts | {"tokenizer": file_hashes(source), "code": code})
    folder = Path(constants.HF_HOME) / "ligermodels" / "tokens" / key
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        try:
            return TokenStore(folder)
        except DataError:  # There is none yet, or it is damaged.
            _write(folder, iter_documents(file, tokenizer, separator), file)
        return TokenStore(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let other processes wait until this one has written the tokens."""
    # Never through a link, and without waiting for the reader of a pipe.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with writing(path):
        descriptor = os.open(path, flags, 0o666)
    with open(descriptor, "rb", buffering=0) as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        except ImportError:  # Windows has no such lock.
            pass
        yield


def _write(folder: Path, documents: Iterator[Document], file: Path) -> None:
    aside = folder.with_suffix(".part")
    shutil.rmtree(aside, ignore_errors=True)
    digests = {name: hashlib.sha256() for name in _DTYPES}
    end, max_id, targets = 0, -1, 0
    try:
        with contextlib.ExitStack() as stack, writing(folder):
            aside.mkdir()
            files = {n: stack.enter_context(open(aside / f"{n}.bin", "wb")) for n in _DTYPES}
            for document in documents:
                end += len(document)
                max_id = max(max_id, int(document.ids.max(initial=-1)))
                targets += document.num_targets
                values = (document.ids, document.loss_mask, [end], [document.divisible])
                for name, value in zip(_DTYPES, values):
                    raw = np.ascontiguousarray(value, dtype=_DTYPES[name]).tobytes()
                    files[name].write(raw)
                    digests[name].update(raw)
        if not targets:
            raise DataError(f"{file}: there is no text, or no document has a target")
        with writing(folder):
            facts = {"digests": {n: each.hexdigest() for n, each in digests.items()}}
            (aside / _FACTS).write_text(json.dumps(facts | {"max_id": max_id}), encoding="utf-8")
            _remove(folder)
            os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove what has this name, if anything has."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def held_out(
    spans: Spans, fraction: float, seed: int, number: int, *, alone: bool
) -> tuple[Spans, Spans]:
    """Split off the documents for evaluation, as `packing.hold_out`: (training, held out).

    If the plain texts are too few, the end of each is held out. If the examples are too few, one of
    them is held out if the store is the only one; otherwise none is.

    Args: number: the index of the store; alone: whether it is the only store.
    """
    starts, stops, divisible = spans
    count = len(stops) * fraction
    if 0 < count < 1 and divisible.all():
        lengths = stops - starts
        left = lengths - np.maximum(2, np.round(lengths * fraction)).astype(np.int64)
        long = left >= 2
        ends = np.where(long, starts + left, stops)
        # The two parts share one token, so that each token is still predicted once.
        return Spans(starts, ends, divisible), Spans(ends - 1, stops, divisible).where(long)
    chosen: np.ndarray = np.zeros(len(stops), dtype=np.bool_)
    if count >= 1 or (count and alone):
        # The first store has the choice of a run that holds its data in memory.
        order = generator(seed, 1, *([number] if number else [])).permutation(len(stops))
        chosen[order[: max(1, round(count))]] = True
    return spans.where(~chosen), spans.where(chosen)


class StoredRows(PackedRows):
    """Documents on the disk packed into rows; see `PackedRows`.

    Args:
        stores: the sources of the documents.
        spans: for each store, the documents that are taken, or parts of them.
        seq_len: tokens per row.
        multiple: the width of rows is a multiple of this.
    Raises:
        DataError: no document has a target within a row.

    Attributes:
        sources: how many rows each store has. They follow one another.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        spans: Sequence[Spans],
        seq_len: int,
        multiple: int = 1,
    ) -> None:
        self.stores = stores
        self.num_truncated = self.num_dropped = self.num_untargeted = 0
        self._pieces: list[np.ndarray] = []  # of each store: (pieces, 2), in the order of the rows
        self._ends: list[np.ndarray] = []  # of each store: where each row ends in the pieces
        self.num_targets = 0
        for store, each in zip(stores, spans):
            pieces = self._cut(store, each, seq_len)
            rows: list[list[int]] = []
            for start in range(0, len(pieces), _WINDOW):
                lengths = np.diff(pieces[start : start + _WINDOW]).ravel().tolist()
                rows += [[start + i for i in row] for row in best_fit(lengths, seq_len)]
            order = np.fromiter(chain.from_iterable(rows), np.int64)
            self._pieces.append(pieces[order])
            self._ends.append(np.cumsum([len(row) for row in rows], dtype=np.int64))
        self.sources = [len(ends) for ends in self._ends]
        if not sum(self.sources):
            raise DataError(
                f"no document has a target within the first {seq_len} tokens; use longer rows "
                "(--seq-len)"
            )
        lengths = [np.diff(pieces).ravel() for pieces in self._pieces]
        longest = max(
            int(np.add.reduceat(each, [0, *ends[:-1]]).max())
            for each, ends in zip(lengths, self._ends)
            if len(ends)
        )
        self.width = -(-longest // multiple) * multiple
        self.num_tokens = sum(int(each.sum()) for each in lengths)

    def _cut(self, store: TokenStore, spans: Spans, seq_len: int) -> np.ndarray:
        """Return (start, stop) of the pieces of documents, as `packing.cut` makes them."""
        starts, stops = np.minimum(spans.starts + 1, spans.stops), spans.stops
        targets = np.diff(store.targets_before(np.stack([starts, stops], axis=1))).ravel()
        self.num_untargeted += int((targets == 0).sum())
        spans = spans.where(targets > 0)
        cuts = spans.divisible | (spans.stops - spans.starts <= seq_len)
        counts = np.maximum(1, -(-(spans.stops - 1 - spans.starts) // (seq_len - 1)))
        counts = np.where(cuts, counts, 1)
        owner: np.ndarray = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = spans.starts[owner] + number * (seq_len - 1)
        stops = np.minimum(starts + seq_len, spans.stops[owner])
        targets = np.diff(store.targets_before(np.stack([starts + 1, stops], axis=1))).ravel()
        self.num_targets += int(targets.sum())
        self.num_truncated += int((~cuts).sum())
        self.num_dropped += int((~cuts[owner] & (targets == 0)).sum())
        return np.stack([starts, stops], axis=1)[targets > 0]

    def __len__(self) -> int:
        return sum(self.sources)

    @property
    def max_id(self) -> int:
        """The largest token id in the stores."""
        return max(store.max_id for store in self.stores)

    def fingerprint(self) -> str:
        """Return a hash of the tokens and targets of all rows, in order."""
        digest = hashlib.sha256()
        for store, pieces, ends in zip(self.stores, self._pieces, self._ends):
            digest.update(store.digest.encode())
            digest.update(pieces.tobytes())
            digest.update(ends.tobytes())
        return digest.hexdigest()

    def documents(self, index: int) -> list[Document]:
        """Return the documents of a row."""
        source = 0
        while index >= self.sources[source]:
            index -= self.sources[source]
            source += 1
        ends, store = self._ends[source], self.stores[source]
        found = []
        for start, stop in self._pieces[source][ends[index - 1] if index else 0 : ends[index]]:
            loss_mask = store.loss_mask[start:stop]
            loss_mask[0] = False
            found.append(Document(store.ids[start:stop], loss_mask))
        return found


class MixedOrder:
    """The index of the row for a running count, when sources are mixed by weights.

    Of every 1000 consecutive rows, each source has its share, in a random order. Each source goes
    through its rows in epochs, as `row_order` does. The index depends only on the seed and the
    count, so that a resumed run goes on with the same rows.

    Args: sizes: the rows of each source; weights: their shares, in any unit.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        shares = np.array(weights) / sum(weights) * _CYCLE
        self._counts = np.maximum(1, shares.round()).astype(np.int64)
        self._offsets = np.cumsum([0, *sizes])
        self._orders = [row_order(size, seed, number) for number, size in enumerate(sizes)]
        self._seed = seed
        self._cycle = lru_cache(maxsize=2)(self._new_cycle)

    def _new_cycle(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each count of a cycle, and how often it came before in the cycle."""
        sources: np.ndarray = np.repeat(np.arange(len(self._counts)), self._counts)
        sources = generator(self._seed, 2, number).permutation(sources)
        before = np.zeros_like(sources)
        for source, count in enumerate(self._counts):
            before[sources == source] = np.arange(count)
        return sources, before

    def __call__(self, count: int) -> int:
        """Return the index of a row."""
        cycle, at = divmod(count, int(self._counts.sum()))
        sources, before = self._cycle(cycle)
        source = int(sources[at])
        within = cycle * int(self._counts[source]) + int(before[at])
        return int(self._offsets[source]) + self._orders[source](within)


def stored_rows(
    files: Sequence[Path],
    eval_files: Sequence[Path],
    tokenizer: Tokenizer,
    source: Path,
    *,
    separator: str | None,
    seq_len: int,
    eval_fraction: float,
    seed: int,
    multiple: int = 1,
) -> tuple[StoredRows, StoredRows | None]:
    """Return the rows for training, and for evaluation if there are any.

    Args: source: the folder of the tokenizer; multiple: as in `StoredRows`; the others are options
        of a run.
    Raises:
        DataError: a file or a line is wrong, or a file has too little data.
    """
    stores = [token_store(file, tokenizer, source, separator=separator) for file in files]
    spans = [store.spans for store in stores]
    held: StoredRows | None = None
    if eval_files:
        others = [token_store(file, tokenizer, source, separator=separator) for file in eval_files]
        held = StoredRows(others, [each.spans for each in others], seq_len, multiple)
    elif eval_fraction:
        alone = len(stores) == 1
        parts = [
            held_out(each, eval_fraction, seed, i, alone=alone) for i, each in enumerate(spans)
        ]
        spans, ends = [train for train, _ in parts], [end for _, end in parts]
        if not any(len(each.stops) for each in ends) or not any(len(s.stops) for s in spans):
            raise DataError(
                "the training data is too small to hold out a part of it for evaluation; give "
                "evaluation files (--eval-files), or hold out nothing (--eval-fraction 0)"
            )
        held = StoredRows(stores, ends, seq_len, multiple)
    rows = StoredRows(stores, spans, seq_len, multiple)
    if empty := [str(file) for file, size in zip(files, rows.sources) if not size]:
        raise LigerError(f"{empty[0]}: no row is left to train on; leave the file out")
    return rows, held
