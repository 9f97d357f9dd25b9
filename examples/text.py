"""Text as bytes: what the example reads, how it is split, and which windows make up a batch."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
from options import UsageError

HELDOUT_PART = 10  # one byte in so many is held out


@dataclasses.dataclass(frozen=True)
class Text:
    """A text whose last tenth is held out.

    Attributes:
      name: where it comes from.
      train, heldout: uint8 bytes.
      sequence: length of a training example in bytes.
    """

    name: str
    train: np.ndarray
    heldout: np.ndarray
    sequence: int

    @property
    def unigram_entropy(self) -> float:
        """Nats a byte: the loss of a model that knows how often each byte occurs in the text, and no more."""
        counts = np.bincount(np.concatenate([self.train, self.heldout]), minlength=256)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    @property
    def fingerprint(self) -> str:
        """Tells whether two texts are the same."""
        data = self.train.tobytes() + self.heldout.tobytes()
        return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:12]}"

    def batch(self, seed: int, step: int, size: int) -> np.ndarray:
        """[size, sequence + 1] int32: the random windows of a step.

        They depend on seed and step alone, so a run that is resumed goes on with the very same data.
        """
        last = len(self.train) - self.sequence - 1
        starts = np.random.default_rng([seed, step]).integers(0, last, size, endpoint=True)
        return _windows(self.train, starts, self.sequence)

    def heldout_batches(self, count: int, size: int) -> list[np.ndarray]:
        """`count` batches like those of `batch`, always the same, spread evenly over the held-out part."""
        last = len(self.heldout) - self.sequence - 1
        starts = np.linspace(0, last, count * size).astype(np.int64)
        return np.split(_windows(self.heldout, starts, self.sequence), count)


def _windows(data: np.ndarray, starts: np.ndarray, sequence: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)


def load(path: Path | None, sequence: int) -> Text:
    """The file's bytes, or without a file the documentation topics that come with Python.

    Raises:
      UsageError: it is missing, not UTF-8, or too short for sequences of that length.
    """
    name, data = ("Python documentation topics", _python_topics()) if path is None else _read(path)
    least = (sequence + 1) * HELDOUT_PART
    if len(data) < least:
        raise UsageError(
            f"--text: expected at least {least} bytes for --sequence {sequence}, since a tenth is held out, "
            f"got {len(data)} in {name}; pass a longer text, or a smaller --sequence"
        )
    split = len(data) - len(data) // HELDOUT_PART
    array = np.frombuffer(data, np.uint8)
    if array.min() == array.max():
        raise UsageError(f"--text: expected more than one kind of byte, got one in {name}; pass another text")
    return Text(name, array[:split], array[split:], sequence)


def _read(path: Path) -> tuple[str, bytes]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--text: expected a readable file, got {path} ({error.strerror}); check the path, or leave "
            "--text out to train on Python's own documentation"
        ) from error
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--text: expected UTF-8 text, got {path}, which is none at byte {error.start}; unpack an "
            "archive, convert another encoding (iconv -f ENCODING -t UTF-8 FILE), or pass another file"
        ) from error
    return str(path), data


def _python_topics() -> bytes:
    """The topics by name, each paragraph once.

    Some topics are parts of others, and what is held out must not have been trained on.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            "--text: expected Python's documentation topics (module pydoc_data.topics), which this Python "
            "lacks; pass a text of your own: --text FILE"
        ) from error
    paragraphs = (paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()
