"""The processes that `jax.distributed` has joined, and the store of their coordinator."""

from __future__ import annotations

import importlib
import time
import zlib
from typing import Any

import jax

from shardplan.errors import AgreementError

_SLICE_S = 1.0
"""The longest wait in one call of JAX: an interrupt (Ctrl-C) is noticed between two calls."""


class SharedTexts:
    """Texts by key, which every process can set and wait for. Texts travel compressed. ``host`` is where process 0 runs.

    JAX's client has no public name; if it moves, ``jax.experimental.multihost_utils`` shows where JAX itself looks for it.

    Raises:
        AgreementError: if JAX runs several processes without a coordinator, or if the coordinator is gone.
    """

    def __init__(self) -> None:
        state = importlib.import_module("jax._src.distributed").global_state
        self._client, address = state.client, str(state.coordinator_address)
        self.host = address.rpartition(":")[0].strip("[]")
        if self._client is None:
            raise AgreementError("JAX's processes have no coordinator: call jax.distributed.initialize() in each of them first")

    def set(self, key: str, text: str) -> None:
        """Sets a key once."""
        try:
            self._client.key_value_set_bytes(key, zlib.compress(text.encode(), 1))
        except jax.errors.JaxRuntimeError as error:
            raise _gone(error) from error

    def get(self, key: str, limit_s: float | None) -> str | None:
        """The text of a key; None if no process sets it within ``limit_s`` seconds, which may be None where there is no limit."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
            try:
                return zlib.decompress(self._client.blocking_key_value_get_bytes(key, max(int(left * 1000), 50))).decode()
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _gone(error) from error
            if end is not None and time.monotonic() >= end:
                return None

    def delete(self, key: str) -> None:
        """Removes a key, whose text may be long."""
        self._client.key_value_delete(key)


def absent_array(shape: jax.ShapeDtypeStruct, sharding: Any) -> Any:
    """An array none of whose blocks belong to this process. It is strongly typed if JAX moves the constructor of its arrays."""
    array = jax.make_array_from_single_device_arrays(shape.shape, sharding, [], dtype=shape.dtype)
    if not shape.weak_type:
        return array
    try:
        return type(array)(array.aval.update(weak_type=True), sharding, [], committed=True)
    except (AttributeError, TypeError):
        return array


def recoverable() -> bool:
    """Whether the user has told JAX that the others run on where a process dies (``jax_enable_recoverability``)."""
    return bool(getattr(jax.config, "jax_enable_recoverability", False))


def _gone(error: RuntimeError) -> AgreementError:
    return AgreementError(
        f"the coordinator of jax.distributed, which runs in process 0, does not answer ({str(error).splitlines()[0]}): see the "
        "output of the processes that ended first, and start all of them again"
    )
