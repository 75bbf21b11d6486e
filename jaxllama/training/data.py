"""Token files: from text to a memory-mapped array of ids, and batches of it.

    file = tokenize([Path("book.txt")], "data/book", tokenizer)
    inputs = file.batch(step, batch_size=8, length=512, seed=0)          # int32 [8, 513]

A token file is a folder. ``tokens.npy`` is one array of uint16, or uint32 for larger vocabularies,
which training maps and never loads. ``meta.json`` has the number of tokens, the tokenizer, and the
SHA-256. The tokenizer's own files are there too, and a trained model takes them along. Every text
file is one document, followed by the tokenizer's end-of-text token.

Batches are windows of ``length + 1`` tokens. Each window overlaps the next by one token, so every
token is predicted once an epoch. A seed shuffles their order again for every epoch. A batch depends
on (seed, step) only, so there is no position to save. Left out: masks at the borders of documents,
mixtures of files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.files import whole_folder
from jaxllama.progress import working
from jaxllama.text.tokenizer import Tokenizer

TOKENS, META = "tokens.npy", "meta.json"
# Characters that are encoded at once; the memory of a text is a small multiple of this.
PIECE = 1 << 20


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """An open token file; ``ids`` is the mapped array, or a part of it."""

    directory: Path
    ids: np.ndarray
    vocab_size: int
    sha256: str

    @classmethod
    def open(cls, directory: str | Path) -> TokenFile:
        """Open a token file. Raises JaxLlamaError naming a folder that is not one."""
        directory = Path(directory)
        try:
            meta = json.loads((directory / META).read_text(encoding="utf-8"))
            ids = np.load(directory / TOKENS, mmap_mode="r")
            file = cls(directory, ids, int(meta["vocab_size"]), str(meta["sha256"]))
        except OSError as error:
            remedy = f"`jaxllama tokenize TEXT --out {directory}` makes it"
            raise JaxLlamaError(
                f"{error.filename or directory}: {error.strerror or error}; {remedy}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise JaxLlamaError(f"{directory}: not a token file: {error}") from None
        if ids.ndim != 1 or ids.dtype.kind != "u" or len(ids) != meta.get("tokens"):
            raise JaxLlamaError(
                f"{directory}: {TOKENS} holds {ids.dtype}{list(ids.shape)}, "
                f"and {META} says {meta.get('tokens')} tokens"
            )
        return file

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def density(self) -> float:
        """Share of the batches' places that hold tokens."""
        return 1.0

    @property
    def tokenizer_files(self) -> list[Path]:
        """The files that a model's folder needs beside its weights."""
        return [
            path for path in sorted(self.directory.iterdir()) if path.name not in (TOKENS, META)
        ]

    def save_tokenizer(self, directory: Path) -> list[Path]:
        """Return the tokenizer's files; ``directory`` is not used, since they exist already."""
        del directory
        return self.tokenizer_files

    def split(self, last: int) -> tuple[TokenFile, TokenFile]:
        """Return (all but the last ``last`` tokens, the last ones)."""
        cut = len(self) - last
        first, rest = self.ids[:cut], self.ids[cut:]
        return dataclasses.replace(self, ids=first), dataclasses.replace(self, ids=rest)

    def windows(self, length: int) -> int:
        """Return the number of windows of ``length`` predictions."""
        return (len(self) - 1) // length

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> np.ndarray:
        """Return the windows of step ``step`` (from 0), int32 ``[batch_size, length + 1]``."""
        count = self.windows(length)
        first = step * batch_size
        rows = []
        for number in range(first, first + batch_size):
            epoch, place = divmod(number, count)
            rows.append(self.window(int(epoch_order(seed, epoch, count)[place]), length))
        return np.stack(rows)

    def validation(self, size: int, length: int, devices: int = 1) -> Iterator[np.ndarray]:
        """Yield all windows in whole batches of ``size``, or of as many as ``devices`` share."""
        count = self.windows(length)
        size = min(size, count)
        size -= size % devices
        for first in range(0, count - size + 1, size):
            yield np.stack([self.window(first + row, length) for row in range(size)])

    def window(self, index: int, length: int) -> np.ndarray:
        """Return one window, int32 ``[length + 1]``."""
        return self.ids[index * length : (index + 1) * length + 1].astype(np.int32)


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of ``count`` rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def tokenize(
    texts: Sequence[str | Path],
    directory: str | Path,
    tokenizer: Tokenizer,
    *,
    progress: bool = False,
) -> TokenFile:
    """Make a token file of UTF-8 text files.

    Parameters
    ----------
    texts : sequence of paths
        The text files, one document each.
    directory : str or Path
        Folder that must not exist; it appears complete or not at all.
    tokenizer : Tokenizer
        The tokenizer.
    progress : bool
        Whether to show a bar on stderr.

    Raises
    ------
    JaxLlamaError
        Naming a file that is missing, empty or not UTF-8.
    """
    directory = Path(directory)
    if directory.exists():
        raise JaxLlamaError(f"{directory}: exists already")
    paths = [Path(path) for path in texts]
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    try:
        with whole_folder(directory) as scratch:
            count, digest = 0, hashlib.sha256()
            raw = scratch / "raw"
            total = sum(path.stat().st_size for path in paths)
            with open(raw, "wb") as out, working("tokenizing", total, progress) as advance:
                for text in map(_read, paths):
                    for piece in _encoded(text, tokenizer, advance):
                        data = np.asarray(piece, dtype).tobytes()
                        out.write(data)
                        digest.update(data)
                        count += len(piece)
            _as_npy(raw, scratch / TOKENS, dtype, count)
            tokenizer.save(scratch)
            meta = {
                "tokens": count,
                "vocab_size": tokenizer.vocab_size,
                "tokenizer": tokenizer.source,
                "texts": [str(path) for path in paths],
                "sha256": digest.hexdigest(),
            }
            (scratch / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise JaxLlamaError(f"{error.filename or directory}: {error.strerror or error}") from None
    return TokenFile.open(directory)


def run_tokenizer(named: str | None, init_from: str | None) -> Tokenizer:
    """Return the tokenizer of conversations or prompts: their own, or the first model's.

    Raises JaxLlamaError naming the key of the file.
    """
    key, name = ("init_from", init_from) if named is None else ("data.tokenizer", named)
    assert name is not None
    with naming(key, name):
        return load_tokenizer(name)


@contextlib.contextmanager
def naming(key: str, value: str) -> Generator[None]:
    """Begin the JaxLlamaErrors of a block with the key of the run's file."""
    try:
        yield
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{key} = {value!r}: {error}") from None


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a model, whose weights are not read, or "bytes"."""
    from jaxllama.checkpoints import hub

    if name == "bytes":
        return Tokenizer.byte_level()
    path = hub.resolve(name, progress=True)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(path)
    if not (path / "tokenizer.json").is_file():
        raise JaxLlamaError(f"{name}: no tokenizer.json; --tokenizer takes a model's name or bytes")
    return Tokenizer.from_file(path)


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None
    if not text:
        raise JaxLlamaError(f"{path}: empty")
    return text


def _encoded(
    text: str, tokenizer: Tokenizer, advance: Callable[[int], None]
) -> Iterator[list[int]]:
    """Yield the ids of one document, a piece at a time, and then the end-of-text token."""
    for piece in pieces(text, PIECE):
        yield tokenizer.encode(piece, add_special=False)
        advance(len(piece.encode()))
    if tokenizer.eos_ids:
        yield [tokenizer.eos_ids[0]]


def pieces(text: str, size: int) -> Iterator[str]:
    """Yield ``text`` in pieces of ``size`` characters or more.

    Pieces end before line ends that follow a visible character. Byte-level tokenizers split there
    too, so the ids equal the ids of the whole text. (A SentencePiece tokenizer treats each piece as
    a separate text.)
    """
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + size)
        while end > 0 and text[end - 1].isspace():
            end = text.find("\n", end + 1)
        end = len(text) if end < 0 else end
        yield text[begin:end]
        begin = end


def _as_npy(raw: Path, out: Path, dtype: np.dtype, count: int) -> None:
    """Put numpy's header before the ids, and remove the file without it."""
    with open(raw, "rb") as source, open(out, "wb") as target:
        header = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(target, header)
        shutil.copyfileobj(source, target, PIECE)
    raw.unlink()
