"""cuDNN's fused attention, as `jax.nn.dot_product_attention` with ``implementation="cudnn"`` calls it.

It may be cut along the batch and the heads. Heads that share keys and values stay together. Without a built-in mask (causal,
window, sequence lengths) it may also be cut along the queries; keys and values are then whole. A bias or a mask array is cut
alike.

In the backward pass, the gradient of an operand that several queries, heads or examples read is a sum over these. So a cut along
the queries splits their gradient, and makes the gradients of keys and values partial sums.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Grouped, Named, Opaque, Scalar, Sum, TensorRef
from shardplan.tdl.rules.attention import pairs

_ALL = slice(None)
_HEADS_FIRST = 1
"""JAX's number of the layout [batch, heads, sequence, head]; the other is [batch, sequence, heads, head]."""
_MASKS = ("NO_MASK", "PADDING", "CAUSAL", "PADDING_CAUSAL")


@dataclass(frozen=True, slots=True)
class _Attention:
    """The shapes and options of a call.

    The queries have ``heads`` heads, keys and values ``key_heads``. ``bias`` is the shape of the bias, [1 or batch, 1 or heads,
    queries, keys], or None. ``lengths`` says whether the call takes the lengths of the sequences. ``head`` is the size of a head,
    the mean of those of queries and values. ``window`` is the number of keys that a query sees, or None for all.
    """

    heads_first: bool
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head: int
    bias: tuple[int, ...] | None
    lengths: bool
    causal: bool
    window: int | None

    @property
    def free(self) -> bool:
        """Whether a query's result does not depend on its place in the sequence."""
        return not (self.causal or self.lengths or self.window is not None)

    @property
    def group(self) -> int:
        """The number of heads that share keys and values; 1 if all heads share them, as heads are then cut one by one."""
        return self.heads // self.key_heads if self.key_heads > 1 else 1

    @property
    def shares_keys(self) -> bool:
        """Whether all heads read the same keys and values."""
        return self.key_heads == 1 < self.heads

    def flops(self, products: int) -> float:
        """The flops of ``products`` matrix products over the (query, key) pairs.

        Pairs that a causal mask or a window leaves out do not count. Pairs that a padding mask leaves out count: their number is
        not known.
        """
        found = pairs(self.queries, self.keys, causal=self.causal or self.window is not None, window=self.window)
        return 2.0 * products * self.batch * self.heads * found * self.head

    def at(self, batch: Any, place: Any, head: Any, within: Any) -> tuple[Any, ...]:
        """The indices of an operand's four dims, in the order of the layout (``place``: in the sequence)."""
        return (batch, head, place, within) if self.heads_first else (batch, place, head, within)

    def key_head(self, head: Any) -> Any:
        """The head of keys and values that this head of the queries reads."""
        return 0 if self.shares_keys else head // self.group

    @property
    def head_name(self) -> str | Grouped:
        """The name of the loop over the heads of queries; it is cut in whole groups."""
        return Grouped("n", self.group) if self.group > 1 else "n"

    def query_reads(self, refs: Sequence[TensorRef], batch: Any, place: Any, heads: Sequence[Any]) -> list[Scalar]:
        """The accesses to operands that have a row for each query."""
        return [x[self.at(batch, place, head, _ALL)] for x in refs for head in heads]

    def side_reads(self, refs: Sequence[TensorRef], batch: Any, place: Any, heads: Sequence[Any]) -> list[Scalar]:
        """The accesses to the bias and to the sequence lengths."""
        bias, *lengths = refs[3:6]
        reads: list[Scalar] = [x[batch] for x in lengths] if self.lengths else []
        if self.bias is not None:
            first = batch if self.bias[0] == self.batch else 0
            reads += [bias[first, head if self.bias[1] == self.heads else 0, place, _ALL] for head in heads]
        return reads


def _read(call: Call) -> _Attention:
    """The shapes and options of a call of cuDNN's kernel."""
    heads_first = call.params["layout"] == _HEADS_FIRST
    q, k = call.operands[:2]
    (queries, heads), (keys, key_heads) = ((s[2], s[1]) if heads_first else (s[1], s[2]) for s in (q, k))
    mask, window = call.params["mask_type"].name, call.params["sliding_window_length"]
    bias = call.operands[3] if call.params["variadic_args"][0] else None
    head = (q[3] + call.operands[2][3]) // 2
    return _Attention(heads_first, q[0], heads, key_heads, queries, keys, head, bias, "PADDING" in mask, "CAUSAL" in mask, window)


def _is_plain(call: Call) -> bool:
    """Whether none of these is asked for: dropout (its bits depend on the whole shape), packed sequences, pages, other masks, or
    a function of the scores (``score_mod``, which JAX has since 0.12).
    """
    p = call.params
    rest = all(len(shape) == 1 for shape in call.operands[6:10])
    return rest and not p["dropout_rate"] and p["mask_type"].name in _MASKS and p.get("score_mod") is None


@rule("dot_product_attention_fwd_wrapper", only=_is_plain)
def _forward(call: Call, *x: TensorRef) -> tuple[Lambda, ...]:
    """The attention's result, and in training the logarithms of the softmax's sums."""
    own = _read(call)

    def element(flops: float, batch: Any, place: Any, head: Any, hidden: tuple[Any, ...]) -> Scalar:
        """An opaque function of all that one query of one head reads; ``hidden`` are the indices inside it."""
        here = place if own.free else _ALL
        keys = [ref[own.at(batch, _ALL, own.key_head(head), _ALL)] for ref in x[1:3]]
        reads = [*own.query_reads(x[:1], batch, here, [head]), *keys, *own.side_reads(x, batch, here, [head])]
        return Opaque(flops, attention=True)(*reads)[(*hidden, *(() if own.free else (place,)))]

    def result(*i: Any) -> Scalar:
        """An element of the result, [batch, queries, heads, head] or with the heads before the queries."""
        batch, place, head, within = own.at(*i)  # the order of the layout undoes itself
        return element(own.flops(2), batch, place, head, (within,))

    def sums(batch: Any, head: Any, place: Any) -> Scalar:
        """The logarithm of one softmax's sum."""
        return element(0.0, batch, place, head, ())

    named = Named(own.at("b", "t", own.head_name, "d"), result)
    return (named, Named(("b", own.head_name, "t"), sums))[: len(call.results)]


@rule("dot_product_attention_bwd_wrapper", only=_is_plain)
def _backward(call: Call, *x: TensorRef) -> tuple[Lambda, ...]:
    """The gradients of queries, keys, values, and of the bias if there is one."""
    own = _read(call)
    by_query, sums = [x[0], *x[11:]], x[10]

    def opaque(flops: float, batch: Any, place: Any, heads: Sequence[Any], key_head: Any, hidden: tuple[Any, ...]) -> Scalar:
        """An opaque function of the elements at these queries and one head of keys; ``hidden`` are the indices inside it."""
        keys = [ref[own.at(batch, _ALL, key_head, _ALL)] for ref in x[1:3]]
        rows = [sums[batch, head, place] for head in heads]
        reads = [*own.query_reads(by_query, batch, place, heads), *rows, *keys, *own.side_reads(x, batch, place, heads)]
        return Opaque(flops, attention=True)(*reads)[hidden]

    def of_queries(*i: Any) -> Scalar:
        """An element of the queries' gradient."""
        batch, place, head, within = own.at(*i)
        here, hidden = (place, (within,)) if own.free else (_ALL, (within, place))
        return opaque(own.flops(5), batch, here, [head], own.key_head(head), hidden)

    def of_keys(*i: Any) -> Scalar:
        """An element of the keys' or values' gradient: a sum over the queries if these are cut, and over heads that share it."""
        batch, place, key_head, within = own.at(*i)

        def term(at: dict[str, Any]) -> Scalar:
            first = at["n"] if own.shares_keys else key_head * own.group
            heads = [first] if own.group == 1 else [first, first + own.group - 1]
            return opaque(0.0, batch, at.get("t", _ALL), heads, 0 if own.shares_keys else key_head, (place, within))

        return _summed((["t"] if own.free else []) + (["n"] if own.shares_keys else []), term)

    def of_bias(batch: Any, head: Any, place: Any, key: Any) -> Scalar:
        """An element of the bias's gradient: a sum over the examples and heads that share the bias."""
        assert own.bias is not None
        over = [n for n, kept in (("b", own.bias[0] == own.batch), ("n", own.bias[1] == own.heads)) if not kept]

        def term(at: dict[str, Any]) -> Scalar:
            first = at["n"] * own.group if "n" in at else head
            heads = [first, first + own.group - 1] if "n" in at and own.group > 1 else [first]
            hidden = (key,) if own.free else (key, place)
            return opaque(0.0, at.get("b", batch), place if own.free else _ALL, heads, own.key_head(first), hidden)

        return _summed(over, term)

    key_names = own.at("b", "s", "one" if own.shares_keys else "n", "d")
    value_names = own.at("b", "s", "one" if own.shares_keys else "n", "e")
    results = [
        Named(own.at("b", "t", own.head_name, "d"), of_queries), Named(key_names, of_keys), Named(value_names, of_keys)
    ]  # fmt: skip
    if own.bias is not None:
        names = ("b" if own.bias[0] == own.batch else "b1", own.head_name if own.bias[1] == own.heads else "n1", "t", "s")
        results.append(Named(names, of_bias))
    return tuple(results[: len(call.results)])


def _summed(over: Sequence[str], term: Callable[[dict[str, Any]], Scalar]) -> Scalar:
    """The sum of terms over these loops of other results; the term itself where there are none."""
    if not over:
        return term({})
    return Sum(Named(tuple(over), lambda *i: term(dict(zip(over, i, strict=True)))), shared=True)
