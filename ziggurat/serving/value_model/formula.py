"""The value model: one number to order items by, as a formula over the scores of the tasks. Data, never code.

    like + 2 * buy * price
    clamp(click, 0.01, 1) ** 0.5 * finish if click > 0.02 else 0
    "long view" * 3 + log(1 + retrieval)

    number     12  0.5  1e-3                          name       a task's label, retrieval, or a number of the item;
    arithmetic + - * / ** and unary -                            in double quotes where it is no plain word
    functions  min max (2 or more), pow(x, y), clamp(x, low, high), log exp sqrt abs sigmoid (1)
    compare    < <= > >= == !=, chained as in Python  condition  A if C else B, and or not

`**` binds from the right and before the unary minus, as in Python. A comparison is a condition and no number: `like >
0.5` cannot be added to anything, and `if 1` is refused. All of this is checked when the formula is read: names, numbers
of arguments, conditions where conditions belong, length and depth; an error points at the column of the text.

Reading makes a tree of a few node classes; there is no `eval`, and a formula can do nothing but compute. It is computed
on float64 tensors for all candidates at once; both branches of an `if` are computed and one is chosen, so that log(0)
in the branch that is not taken does no harm. What is no finite number in the end counts as the lowest there is: such
items come last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.serving.value_model.nodes import (
    COMPARISONS,
    ONE_ARGUMENT,
    Call,
    Choice,
    Comparison,
    Logic,
    Name,
    Node,
    Number,
)
from ziggurat.typed import nearest

MAX_LENGTH = 4_000
MAX_DEPTH = 30
MAX_TOKENS = 500
LOWEST = -3.0e38  # in the place of what is no finite number; JSON has no infinity

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)|(?P<name>[^\W\d]\w*)|\"(?P<quoted>[^\"]*)\""
    r"|(?P<sign>\*\*|<=|>=|==|!=|[-+*/<>(),]))"
)
_WORDS = frozenset({"if", "else", "and", "or", "not"})
# By name: the fewest and the most arguments.
_FUNCTIONS = {**dict.fromkeys(ONE_ARGUMENT, (1, 1)), "min": (2, 20), "max": (2, 20), "pow": (2, 2), "clamp": (3, 3)}


@dataclass(frozen=True)
class _Token:
    kind: str  # number, name, quoted, sign, end
    text: str
    at: int


class ValueModel:
    """A formula over scores, read and checked.

    Args:
        formula: see the module's docstring.
        names: what may be named in it.
        where: opens the place in errors.

    Raises:
        ConfigError: the formula cannot be read, or names something else; points at the column.
    """

    def __init__(self, formula: str, *, names: Collection[str], where: str = "value model") -> None:
        self.formula = formula
        reader = _FormulaReader(formula, names=names, where=where)
        self._tree = reader.read()
        # Known once the text was read: only these names must be computed.
        self.names = frozenset(reader.used)

    def __call__(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The value of each candidate, float64; what is no finite number is `LOWEST`.

        Args:
            scores: a tensor for each name, all of one shape.
        """
        # In 64 bits: products of scores of many tasks soon leave the range and the digits of FP32.
        given = {name: scores[name].double() for name in self.names}
        if not given:
            given = {"": next(iter(scores.values())).double()}  # a constant, of the candidates' shape
        found = self._tree.compute(given)
        # An order needs numbers that compare: with NaN, sorting would put items anywhere.
        return torch.where(found.isfinite(), found, LOWEST).clamp(LOWEST, -LOWEST)


class _FormulaReader:
    """Recursive descent; one method for each line of the grammar, from the loosest binding to the tightest."""

    def __init__(self, text: str, *, names: Collection[str], where: str) -> None:
        self._text = text
        self._names = tuple(names)
        self._where = where
        self.used: set[str] = set()
        if not isinstance(text, str) or len(text) > MAX_LENGTH:
            found = f"{len(text):,} characters" if isinstance(text, str) else type(text).__name__
            raise self._wrong(0, f"a formula of at most {MAX_LENGTH:,} characters", found)
        self._tokens = list(self._split())
        self._next = 0
        self._depth = 0

    def read(self) -> Node:
        node = self._number(self._choice, "a formula that gives a number")
        if self._token.kind != "end":
            raise self._wrong(self._token.at, "the end of the formula, or an operator", self._shown())
        return node

    def _split(self) -> list[_Token]:
        tokens = []
        position = 0
        # Spaces at the end are no token that the pattern knows.
        end = len(self._text.rstrip())
        while position < end:
            found = _TOKEN.match(self._text, position)
            if not found:
                # Point at what cannot be read, not at the spaces before it.
                at = position + len(self._text[position:]) - len(self._text[position:].lstrip())
                what = "a closing quote" if self._text[at] == '"' else "numbers, names and operators"
                raise self._wrong(at, what, repr(self._text[at : at + 20]))
            kind = found.lastgroup or ""
            at = found.start(kind)
            if kind == "quoted":
                at -= 1  # its opening quote
            tokens.append(_Token(kind, found[kind], at))
            position = found.end()
            if len(tokens) > MAX_TOKENS:
                raise self._wrong(position, f"at most {MAX_TOKENS} numbers, names and operators", "more")
        return [*tokens, _Token("end", "", end)]

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(self._token.at, f"a formula nested at most {MAX_DEPTH} deep", "a deeper one")
        yield
        self._depth -= 1

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, *texts: str) -> str:
        """The next token, if it is a sign or word among these; else ""."""
        token = self._token
        # A quoted name may be called like a word, and is none.
        if token.text in texts and token.kind in ("sign", "name"):
            self._next += 1
            return token.text
        return ""

    def _choice(self) -> Node:
        with self._deeper():
            return self._number_or_condition()

    def _number_or_condition(self) -> Node:
        start = self._token.at
        then = self._either()
        if self._take("if"):
            self._require(then, start, "a number before `if`", condition=False)
            condition = self._condition(self._either, "a condition after `if`, such as like > 0.5")
            if not self._take("else"):
                raise self._wrong(self._token.at, "`else` with the number of the other case", self._shown())
            then = Choice(condition, then, self._number(self._choice, "a number after `else`"))
        return then

    def _either(self) -> Node:
        return self._logic("or", self._both)

    def _both(self) -> Node:
        return self._logic("and", self._opposite)

    def _logic(self, word: str, below: Callable[[], Node]) -> Node:
        start = self._token.at
        parts = [below()]
        while self._take(word):
            # Only where the word follows: a number alone may pass through this level.
            self._require(parts[0], start, f"a condition before `{word}`", condition=True)
            parts.append(self._condition(below, f"a condition after `{word}`"))
        return parts[0] if len(parts) == 1 else Logic(word, tuple(parts))

    def _opposite(self) -> Node:
        if self._take("not"):
            with self._deeper():
                return Logic("not", (self._condition(self._opposite, "a condition after `not`"),))
        return self._comparison()

    def _comparison(self) -> Node:
        start = self._token.at
        parts = [self._sum()]
        signs = []
        while sign := self._take(*COMPARISONS):
            self._require(parts[0], start, f"a number before {sign}", condition=False)
            signs.append(sign)
            parts.append(self._number(self._sum, f"a number after {sign}"))
        return Comparison(tuple(signs), tuple(parts)) if signs else parts[0]

    def _sum(self) -> Node:
        return self._arithmetic(("+", "-"), self._product)

    def _product(self) -> Node:
        return self._arithmetic(("*", "/"), self._signed)

    def _arithmetic(self, signs: tuple[str, ...], below: Callable[[], Node]) -> Node:
        start = self._token.at
        node = below()
        while sign := self._take(*signs):
            self._require(node, start, f"a number before {sign}", condition=False)
            # From the left: a - b - c is (a - b) - c.
            node = Call(sign, (node, self._number(below, f"a number after {sign}")))
        return node

    def _signed(self) -> Node:
        if self._take("-"):
            with self._deeper():
                return Call("negate", (self._number(self._signed, "a number after -"),))
        return self._power()

    def _power(self) -> Node:
        start = self._token.at
        base = self._atom()
        if self._take("**"):
            self._require(base, start, "a number before **", condition=False)
            with self._deeper():
                # `_signed`, since ** binds from the right and takes 2 ** -1.
                return Call("**", (base, self._number(self._signed, "a number after **")))
        return base

    def _atom(self) -> Node:
        token = self._token
        # Taken first, and given back below where it begins nothing.
        self._next += 1
        if token.kind == "number":
            value = float(token.text)
            if value > -LOWEST:
                raise self._wrong(token.at, "a number of a size that can be computed with", token.text[:40])
            return Number(value)
        if token.kind == "quoted":
            return self._named(token)
        if token.kind == "name" and token.text not in _WORDS:
            # A name in front of a parenthesis is a function, and a quoted one never is.
            if self._token.text == "(" and self._token.kind == "sign":
                return self._call(token)
            return self._named(token)
        if token.text == "(" and token.kind == "sign":
            node = self._choice()
            if not self._take(")"):
                raise self._wrong(self._token.at, "a closing parenthesis", self._shown())
            return node
        self._next -= 1  # so that the error shows this token
        raise self._wrong(token.at, "a number, a name or a parenthesis", self._shown())

    def _named(self, token: _Token) -> Node:
        if token.text not in self._names:
            names = ", ".join(name if name.isidentifier() else f'"{name}"' for name in self._names)
            raise self._wrong(
                token.at,
                f"one of the names {names}",
                repr(token.text[:60]),
                *nearest(token.text, self._names, instead="correct the name"),
            )
        self.used.add(token.text)
        return Name(token.text)

    def _call(self, token: _Token) -> Node:
        if token.text not in _FUNCTIONS:
            near = nearest(token.text, _FUNCTIONS, instead="write * for a product")
            raise self._wrong(token.at, f"one of the functions {', '.join(_FUNCTIONS)}", f"{token.text[:60]}(", *near)
        # Its parenthesis was seen before the call.
        self._take("(")
        arguments = [self._number(self._choice, f"a number in {token.text}(…)")]
        while self._take(","):
            arguments.append(self._number(self._choice, f"a number in {token.text}(…)"))
        if not self._take(")"):
            raise self._wrong(self._token.at, "a comma or a closing parenthesis", self._shown())
        least, most = _FUNCTIONS[token.text]
        if not least <= len(arguments) <= most:
            number = f"{least}" if least == most else f"{least} to {most}"
            raise self._wrong(token.at, f"{number} arguments of {token.text}", f"{len(arguments)}")
        return Call(token.text, tuple(arguments))

    def _number(self, read: Callable[[], Node], expected: str) -> Node:
        start = self._token.at
        node = read()
        self._require(node, start, expected, condition=False)
        return node

    def _condition(self, read: Callable[[], Node], expected: str) -> Node:
        start = self._token.at
        node = read()
        self._require(node, start, expected, condition=True)
        return node

    def _require(self, node: Node, at: int, expected: str, *, condition: bool) -> None:
        if node.is_condition != condition:
            what = "a condition; write A if C else B" if node.is_condition else "a number"
            raise self._wrong(at, expected, what)

    def _shown(self) -> str:
        return "the end" if self._token.kind == "end" else repr(self._token.text[:40])

    def _wrong(self, at: int, expected: str, found: str, *ways_out: str) -> ConfigError:
        text = self._text if isinstance(self._text, str) else ""
        # A window around the mistake: formulas may have thousands of characters.
        first = max(0, at - 30)
        # A line break would move the mark that points at the mistake.
        shown = text[first : first + 70].replace("\n", " ")
        marked = f"{shown}\n{' ' * (at - first)}^" if text else ""
        return ConfigError(
            expected=expected,
            found=found,
            where=f"{self._where}, column {at + 1}"
            + (f":\n  {marked.replace(chr(10), chr(10) + '  ')}" if marked else ""),
            ways_out=ways_out or ("correct the formula: like + 2 * buy, log(price), like if like > 0.1 else 0",),
        )
