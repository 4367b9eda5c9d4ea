"""Real data that is on every machine: the Python standard library's own source text, and scikit-learn's handwritten digits."""

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHARACTERS = 128  # ASCII; what is beyond it reads as "?"
_TEXT_BYTES = 4_000_000


@functools.cache
def standard_library_text() -> np.ndarray:
    """The first 4 MB of the standard library's modules, by name, as ASCII codes. uint8 [n]."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= _TEXT_BYTES:
            break
    codes = np.frombuffer(b"".join(parts)[:_TEXT_BYTES], dtype=np.uint8)
    return np.where(codes < CHARACTERS, codes, ord("?")).astype(np.uint8)


def char_batches(*, sequence: int, batch: int, seed: int = 0, vocabulary: int = CHARACTERS) -> Iterator[dict[str, np.ndarray]]:
    """Endless random excerpts: {"tokens", "targets"}, both int32 [batch, sequence], targets one character ahead.

    With a vocabulary under 128 the codes are taken modulo it, so that they stay in range.
    """
    text, rng = standard_library_text(), np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text) - sequence, size=(batch, 1))
        excerpt = text[starts + np.arange(sequence + 1)].astype(np.int32) % vocabulary
        yield {"tokens": excerpt[:, :-1], "targets": excerpt[:, 1:]}


@functools.cache
def largest_modules(count: int) -> tuple[np.ndarray, ...]:
    """The `count` largest modules of the standard library, largest first, as ASCII codes. Each uint8 [n]."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    codes = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in paths[:count]]
    return tuple(np.where(module < CHARACTERS, module, ord("?")).astype(np.uint8) for module in codes)


def module_batches(
    *, sequence: int, batch: int, modules: int, seed: int = 0, vocabulary: int = CHARACTERS
) -> Iterator[dict[str, np.ndarray]]:
    """Endless random excerpts of modules, labelled by theirs: {"tokens": int32 [batch, sequence], "label": int32 [batch]}.

    The modules are the largest ones. With a vocabulary under 128 the codes are taken modulo it, so that they stay in range.
    """
    texts, rng = largest_modules(modules), np.random.default_rng(seed)
    while True:
        labels = rng.integers(modules, size=batch, dtype=np.int32)
        starts = [rng.integers(len(texts[label]) - sequence + 1) for label in labels]
        excerpts = [texts[label][start : start + sequence] for label, start in zip(labels, starts, strict=True)]
        yield {"tokens": np.stack(excerpts).astype(np.int32) % vocabulary, "label": labels}


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """All 1797 digits: images float32 [1797, 8, 8] in [0, 1], labels int32 [1797]."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return (pixels.reshape(-1, 8, 8) / 16).astype(np.float32), labels.astype(np.int32)


def digit_batches(*, image: int = 8, channels: int = 1, batch: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless random digits: {"image": float32 [batch, image, image, channels], "label": int32 [batch]}.

    An image of another size than 8 takes the nearest pixels; the channels are equal.
    """
    images, labels = digits()
    nearest = np.arange(image) * images.shape[1] // image
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(len(labels), size=batch)
        pixels = images[chosen][:, nearest][:, :, nearest, None]
        yield {"image": np.repeat(pixels, channels, axis=-1), "label": labels[chosen]}
