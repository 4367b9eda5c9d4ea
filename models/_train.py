"""`python -m models.NAME`: trains the model on real data and prints its loss."""

import argparse
import ast
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax


def train(train_step: Callable, batches: Callable[..., Iterator], *, steps: int, options: dict[str, Any]) -> Iterator[float]:
    """The loss of each of `steps` steps from seeded parameters, over the model's own batches."""
    step, (state, _) = train_step(**options, concrete=True)
    step = jax.jit(step, donate_argnums=0)
    for _, batch in zip(range(steps), batches(**options), strict=False):
        state, loss = step(state, batch)
        yield float(loss)


def main(train_step: Callable, batches: Callable[..., Iterator], argv: Sequence[str] | None = None) -> None:
    """The command line of a model: --steps, and --set name=value for each option of its factory; ``argv`` as for argparse."""
    parser = argparse.ArgumentParser(description="Train on real data and print the loss of each step.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of train_step")
    given = parser.parse_args(argv)
    try:
        options = dict(_pair(text) for text in given.set)
        start = time.perf_counter()
        for number, loss in enumerate(train(train_step, batches, steps=given.steps, options=options), 1):
            print(f"step {number:4d}   loss {loss:8.4f}   {time.perf_counter() - start:7.1f} s", flush=True)
    except ValueError as error:
        parser.error(str(error))


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: write it as NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
