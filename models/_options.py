"""Options of a model: a frozen dataclass whose fields say what values they take, and the factory decorator over it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax


@dataclasses.dataclass(frozen=True)
class Rule:
    """What values an option takes: in words, and as a test."""

    wants: str
    holds: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


COUNT = Rule("a positive integer", lambda v: _is_int(v) and v > 0)
COUNT_OR_NONE = Rule("a positive integer or None", lambda v: v is None or (_is_int(v) and v > 0))
SWITCH = Rule("True or False", lambda v: isinstance(v, bool))
FRACTION = Rule("a number in [0, 1)", lambda v: _is_number(v) and 0 <= v < 1)
POSITIVE = Rule("a positive number", lambda v: _is_number(v) and 0 < v < float("inf"))


def one_of(*values: Any) -> Rule:
    return Rule("one of " + ", ".join(map(repr, values)), lambda v: v in values)


DTYPE = one_of("float32", "bfloat16", "float16")
REMAT = one_of(False, True, "products")
BOUNDARY = Rule(
    "None, or a tuple of mesh axes (a name, a tuple of names or None for each dim)",
    lambda v: v is None or (isinstance(v, tuple) and all(e is None or isinstance(e, str | tuple) for e in v)),
)
"""Where activations [batch, sequence, width] lie between blocks, over the axes of the mesh that is set (`jax.set_mesh`)."""
REMAT_POLICIES: dict[bool | str, Callable[..., bool]] = {"products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
"""What `jax.checkpoint` keeps beside each layer's input. Products with weights are those without batch dims: scores of attention
are computed again, as in Megatron's selective recomputation (Korthikanti et al. 2022, section 5)."""


def option(default: Any, rule: Rule) -> Any:
    """A dataclass field with this default that `Options` holds to `rule`."""
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of every model's options. Raises ValueError that names the first option with a value outside its rule."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            rule, value = field.metadata["rule"], getattr(self, field.name)
            require(rule.holds(value), f"{field.name}={value!r}: {field.name} is to be {rule.wants}")


T = TypeVar("T", bound=Options)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def read(options_type: type[T], given: dict[str, Any]) -> T:
    """Options from keyword arguments. Raises ValueError for a name that is not among them."""
    names = [field.name for field in dataclasses.fields(options_type)]
    for name in given:
        require(name in names, f"{name}={given[name]!r}: no such option; there are {', '.join(names)}")
    return options_type(**given)


def takes(options_type: type[Options]):
    """Decorator: `f(options, **rest)` becomes `f(**rest, **options)`, its signature that of the fields, with their defaults."""

    def decorate(function: Callable) -> Callable[..., Any]:
        rest = [p for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]

        def wrapper(**given: Any):
            others = {parameter.name: given.pop(parameter.name) for parameter in rest if parameter.name in given}
            return function(read(options_type, given), **others)

        signature = inspect.Signature(
            [
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
                for f in dataclasses.fields(options_type)
            ]
            + rest
        )
        functools.update_wrapper(wrapper, function)
        setattr(wrapper, "__signature__", signature)  # noqa: B010 - pyright knows no such attribute of a function
        return wrapper

    return decorate
