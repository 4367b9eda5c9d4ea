"""The warnings of XLA's compiler on stderr, from native code, on arrays that its partitioner replicates as a last resort."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardplan.hlo.text import dtype_bits


@dataclass(frozen=True, slots=True)
class LastResort:
    """An array that XLA replicates to partition it in another way ("involuntary full rematerialization").

    ``dtype`` and ``dims`` are those of a device's part before it, which is one of ``parts``; ``op_name`` and ``frame`` are the
    name and stack frame of its op.
    """

    dtype: str
    dims: tuple[int, ...]
    parts: int
    before: str
    after: str
    op_name: str
    frame: int

    @property
    def gathered_bytes(self) -> float:
        """The bytes that a device receives of the other parts, once."""
        return math.prod(self.dims) * (dtype_bits(self.dtype) or 0) / 8 * (self.parts - 1)


_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding (?P<before>\{.*?\}) "
    r"(?:to|to sharding) (?P<after>\{.*?\}) (?:efficiently|without)"
    r"[^%\n]*%?[\w.\-]+ = (?P<dtype>\w+)\[(?P<dims>[\d,]*)\](?P<rest>[^\n]*)"
)
_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")


_FORWARDER = Path(__file__).with_name("stderr_forwarder.py")


@contextlib.contextmanager
def caught() -> Iterator[list[LastResort]]:
    """Catches what native code writes to stderr while this lasts. Then the list has its warnings of a last resort, each once.
    All other lines go to stderr at once.

    A process of its own reads them, so that the last words of a compiler that ends this process are not lost.
    """
    log: list[LastResort] = []
    mark = os.urandom(16).hex()
    command = [sys.executable, "-I", "-S", str(_FORWARDER), mark]
    with contextlib.ExitStack() as stack:
        try:
            before = os.dup(2)
            stack.callback(os.close, before)
            # in a session of its own, Ctrl-C does not reach it
            forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except OSError:  # stderr is closed, or Python has no program of its own
            yield log
            return
        assert forwarder.stdin is not None
        assert forwarder.stdout is not None
        stack.enter_context(forwarder)
        sys.stderr.flush()
        os.dup2(forwarder.stdin.fileno(), 2)
        forwarder.stdin.close()
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.write(2, mark.encode())
            os.dup2(before, 2)
            text = forwarder.stdout.read().decode(errors="replace")
            log += dict.fromkeys(_read(m) for m in _WARNING.finditer(text))


def _read(found: re.Match[str]) -> LastResort:
    name, frame = _NAME.search(found["rest"]), _FRAME.search(found["rest"])
    dims = tuple(int(n) for n in found["dims"].split(",") if n)
    own = name[1] if name else "", int(frame[1]) if frame else 0
    before, after = found["before"], found["after"]
    return LastResort(found["dtype"], dims, _parts(before), _spec(before), _spec(after), *own)


def _parts(sharding: str) -> int:
    """Into how many parts a sharding cuts an array.

    >>> _parts("{mesh['node'=2,'gpu'=4], [{'gpu'}, {}]}"), _parts("{devices=[4,1,2]<=[8] last_tile_dim_replicate}")
    (4, 4)
    """
    if tiles := re.search(r"devices=\[([\d,]+)\]", sharding):
        counts = [int(n) for n in tiles[1].split(",")]
        return math.prod(counts[:-1] if "last_tile_dim" in sharding else counts)
    mesh, _, dims = sharding.partition("], [")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    own = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", dims.partition("]")[0])
    return math.prod(int(part) if part else sizes.get(name, 1) for name, part in own)


def _spec(sharding: str) -> str:
    """``{mesh['node'=2,'gpu'=4], [{'node', 'gpu'}, {}]}`` -> ``P(('node', 'gpu'), None)``; other forms as they are."""
    dims = re.search(r"\], \[(.*)\]", sharding)
    if dims is None:
        return sharding
    entries = [re.findall(r"'([^']+)'", dim) for dim in re.findall(r"\{([^}]*)\}", dims[1])]
    texts = ["None" if not e else repr(e[0]) if len(e) == 1 else repr(tuple(e)) for e in entries]
    return f"P({', '.join(texts)})"
