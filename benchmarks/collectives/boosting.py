"""LightGBM."""


def why_not() -> str:
    """Return why it cannot be measured."""
    return "not yet"
