"""Settings of a model that what was measured in its products holds for.

Shapes of weights (`precision/products.py`) do not tell ReLU from hard swish, a norm of a batch from that of a sample,
or a network with dropout from one without. Operands and gradients of products are drawn from other distributions
behind them, and the time of a whole network is another, so a plan of products keeps these settings beside the shapes.

Left out are the settings of tables: how rows are stored and learn is no part of the dense network.
"""

from __future__ import annotations

from ziggurat.config import settings
from ziggurat.models.contract.model import Model
from ziggurat.precision.products import Settings

_TABLES = "model.embedding."
_TOWERS = "model.tower-module."


def network_settings(model: Model) -> Settings | None:
    """Return the settings of a model's network, by flag; None for a model that `build_model` did not make."""
    config = model.built_from
    if config is None:
        return None
    # What tower modules are like counts where there are some.
    passed_over = (_TABLES,) if model.towers is not None else (_TABLES, _TOWERS)
    return {name: value for name, _, value in settings(config, prefix="model.") if not name.startswith(passed_over)}
