"""Filters of items: their language, and the index that answers which items pass, exactly, as bits."""

from ziggurat.retrieval.filters.bloom import FalsePositives
from ziggurat.retrieval.filters.build import FilterConfig, Tail
from ziggurat.retrieval.filters.expression import Filter
from ziggurat.retrieval.filters.index import FilterIndex
from ziggurat.retrieval.filters.parser import parse_filter
from ziggurat.retrieval.filters.schema import Attribute, AttributeKind, FilterSchema

__all__ = [
    "Attribute",
    "AttributeKind",
    "FalsePositives",
    "Filter",
    "FilterConfig",
    "FilterIndex",
    "FilterSchema",
    "Tail",
    "parse_filter",
]
