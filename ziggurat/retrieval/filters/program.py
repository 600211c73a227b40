"""From the meaning of a filter to sets of items: negation normal form, and how many items to expect."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ziggurat.ops.mask_program import ConstantLeaf, ListLeaf, Literal, PlaneLeaf, Tree, conjunction, disjunction
from ziggurat.retrieval.filters.attribute_index import AttributeIndex, ascending
from ziggurat.retrieval.filters.expression import And, Expression, Missing, Not, Or, Term


def tree_of(expression: Expression, attributes: Mapping[str, AttributeIndex], *, negated: bool = False) -> Tree:
    """The sets in which an expression is true, or false if `negated`.

    NOT moves down to the predicates: NOT (a AND b) is NOT a OR NOT b, also in three values.
    """
    if isinstance(expression, Not):
        return tree_of(expression.child, attributes, negated=not negated)
    if isinstance(expression, And | Or):
        children = [tree_of(child, attributes, negated=negated) for child in expression.children]
        is_all = isinstance(expression, And) != negated
        children = _with_joined_lists(children, negated=is_all)
        return conjunction(children) if is_all else disjunction(children)
    return _term_tree(expression, attributes[expression.attribute], negated=negated)


def _with_joined_lists(trees: list[Tree], *, negated: bool) -> list[Tree]:
    """Make one list of many: a OR b, or NOT a AND NOT b, of lists is one; a long IN runs as fast as a short one."""
    lists: dict[int, list[Tensor]] = {}
    others: list[Tree] = []
    for tree in trees:
        if isinstance(tree, Literal) and isinstance(tree.leaf, ListLeaf) and tree.negated == negated:
            lists.setdefault(tree.present, []).append(tree.leaf.rows)
        else:
            others.append(tree)
    joined = [
        Literal(ListLeaf(ascending(torch.cat(rows)) if len(rows) > 1 else rows[0]), negated=negated, present=present)
        for present, rows in lists.items()
    ]
    return [*others, *joined]


def _term_tree(term: Term, attribute: AttributeIndex, *, negated: bool) -> Tree:
    present = attribute.stored.present
    if isinstance(term, Missing):
        if present < 0:
            return Literal(ConstantLeaf(negated))
        return Literal(PlaneLeaf(present), negated=not negated)
    leaves = attribute.leaves(term)
    if not negated:
        return disjunction([Literal(leaf) for leaf in leaves])
    if not leaves:  # false wherever there is a value
        return Literal(ConstantLeaf(True) if present < 0 else PlaneLeaf(present))
    return conjunction([Literal(leaf, negated=True, present=present) for leaf in leaves])


def estimate(expression: Expression, attributes: Mapping[str, AttributeIndex], *, negated: bool = False) -> float:
    """The share of items to expect if predicates had nothing to do with each other; exact for one predicate.

    Args:
        expression: of a filter.
        attributes: with the counts of their values.
        negated: whether the items are counted for which it is false.
    """
    if isinstance(expression, Not):
        return estimate(expression.child, attributes, negated=not negated)
    if isinstance(expression, And | Or):
        shares = [estimate(child, attributes, negated=negated) for child in expression.children]
        if isinstance(expression, And) != negated:
            return math.prod(shares)
        return 1 - math.prod(1 - share for share in shares)
    attribute = attributes[expression.attribute]
    present = attribute.stored.num_present / max(attribute.n, 1)
    if isinstance(expression, Missing):
        return present if negated else 1 - present
    share = attribute.share(expression)
    # Of an item without a value, a predicate is neither true nor false.
    return present - share if negated else share
