"""Formulas of the value model compute what Python would, and everything else is refused at its column."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from ziggurat.errors import ConfigError
from ziggurat.serving.value_model.formula import LOWEST, MAX_DEPTH, MAX_LENGTH, ValueModel

NAMES = ("like", "buy", "price", "long view")
SCORES = {
    "like": torch.tensor([0.9, 0.1, 0.5, 0.0]),
    "buy": torch.tensor([0.2, 0.3, 0.0, 1.0]),
    "price": torch.tensor([1.0, 10.0, 0.0, -3.0]),
    "long view": torch.tensor([0.5, 0.5, 0.25, 1.0]),
}
PYTHON = {
    "min": min,
    "max": max,
    "pow": lambda x, y: x**y,
    "clamp": lambda x, low, high: min(max(x, low), high),
    "abs": abs,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


def value(formula: str) -> list[float]:
    return ValueModel(formula, names=NAMES)(SCORES).tolist()


def test_formulas_compute() -> None:
    assert value("like + 2 * buy") == pytest.approx([1.3, 0.7, 0.5, 2.0])
    assert value('"long view" ** 2 if like > 0.3 and not buy == 0 else -1') == pytest.approx([0.25, -1, -1, -1])
    assert value("clamp(price, 0, 5) - -1") == pytest.approx([2, 6, 1, 1])
    assert value("1 if 0.1 <= like <= 0.5 else 0") == [0.0, 1.0, 1.0, 0.0]
    assert value("-2 ** 2") == [-4.0] * 4
    assert value("2 ** 3 ** 2") == [512.0] * 4
    assert value("7") == [7.0] * 4


def test_what_is_no_number_comes_last() -> None:
    model = ValueModel("log(price)", names=NAMES)
    assert model(SCORES).tolist() == pytest.approx([0.0, math.log(10), LOWEST, LOWEST])
    assert value("log(price) if price > 0 else 0") == pytest.approx([0.0, math.log(10), 0.0, 0.0])
    assert value("exp(10000 * price)")[1] == LOWEST


@pytest.mark.parametrize(
    ("formula", "column", "said"),
    [
        ("", 1, "a number"),
        ("like +", 7, "the end"),
        ("likes", 1, "like"),
        ("like * * 2", 8, "'*'"),
        ("(like", 6, "parenthesis"),
        ("like)", 5, "operator"),
        ("like buy", 6, "operator"),
        ("lag(like)", 1, "log"),
        ("log(like, 2)", 1, "1 arguments"),
        ("clamp(like)", 1, "3 arguments"),
        ("min(like)", 1, "2 to 20"),
        ("like > 0.5", 1, "if C"),
        ("1 + (like > 0.5)", 5, "if C"),
        ("1 if like else 2", 6, "condition"),
        ("1 if like > 1", 14, "else"),
        ("like and buy", 1, "condition"),
        ("not like", 5, "condition"),
        ('"long view', 1, "quote"),
        ("like; buy", 5, "';"),
        ("like.__class__", 5, "'."),
        ("__import__(os)", 1, "functions"),
        ("like('os')", 6, "\"'os'"),
        ("lambda: 1", 7, "':"),
        ("1e999", 1, "size"),
        ("like = 1", 6, "'="),
        ("price[0]", 6, "'["),
        ("if", 1, "'if'"),
    ],
)
def test_mistakes_are_refused_at_their_column(formula: str, column: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ValueModel(formula, names=NAMES)
    assert f"column {column}:" in f"{caught.value.where}:", caught.value
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "formula",
    [
        "(" * 5000 + "like" + ")" * 5000,
        "-" * 3999 + "1",
        "not " * 900 + "like > 1",
        "like" + "**like" * 600,
        "like" + "+like" * 700,
        "1 if like > 1 else " * 200 + "1",
        "min(" * 900 + "1",
        "1" * (MAX_LENGTH + 1),
        "1" * MAX_LENGTH,
        "((((((((((" * 3 + "like" + "))))))))))" * 3,
    ],
)
def test_long_and_deep_formulas_are_refused(formula: str) -> None:
    assert MAX_DEPTH <= 30
    with pytest.raises(ConfigError):
        ValueModel(formula, names=NAMES)


def expression(draw: random.Random, depth: int) -> str:
    """A random formula that Python reads in the same way."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(["like", "buy", "price", f"{draw.uniform(0, 3):.3f}", "2"])

    def below() -> str:
        return expression(draw, depth - 1)

    kind = draw.randrange(7)
    if kind <= 2:
        sign = draw.choice(["+", "-", "*", "+", "-", "*", "/"])
        left, right = below(), below()
        return f"({left} {sign} {right})" if draw.random() < 0.5 else f"{left} {sign} {right}"
    if kind == 3:
        return f"-{below()}" if draw.random() < 0.5 else f"({below()}) ** 2"
    if kind == 4:
        name = draw.choice(["min", "max", "abs", "clamp", "sigmoid"])
        count = {"abs": 1, "sigmoid": 1, "clamp": 3}.get(name, draw.randint(2, 4))
        return f"{name}({', '.join(below() for _ in range(count))})"
    return f"({below()} if {condition(draw, depth - 1)} else {below()})"


def condition(draw: random.Random, depth: int) -> str:
    def compared() -> str:
        return f"{expression(draw, depth)} {draw.choice(['<', '<=', '>', '>=', '==', '!='])} {expression(draw, depth)}"

    text = draw.choice(["", "not "]) + compared()
    for _ in range(draw.randrange(3)):
        text += f" {draw.choice(['and', 'or'])} {draw.choice(['', 'not '])}{compared()}"
    return text


def compare_with_python(number: int, seed: int) -> int:
    draw = random.Random(seed)
    compared = 0
    for _ in range(number):
        formula = expression(draw, 3)
        found = value(formula)
        for index, mine in enumerate(found):
            names = {name: float(SCORES[name][index].double()) for name in ("like", "buy", "price")}
            try:
                expected = eval(formula, {"__builtins__": {}}, PYTHON | names)  # noqa: S307  the judge, on our own text
            except (ZeroDivisionError, OverflowError):
                continue
            if isinstance(expected, complex) or not math.isfinite(expected):
                continue
            np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-9, err_msg=formula)
            compared += 1
    return compared


def test_random_formulas_equal_python() -> None:
    assert compare_with_python(300, seed=0) > 800


@pytest.mark.slow
def test_many_random_formulas_equal_python() -> None:
    assert compare_with_python(20_000, seed=1) > 50_000
