r"""Add a loss of delayed labels: weights by a share of late positives that is known beforehand.

Who has logs of last month often knows one number: of all positives, the share s that comes later than a row is
observed. With the probability f that the model predicts, equation (5) of `ziggurat/training/delayed_feedback.py` needs
no network beside:

    d = s·f                    a positive that comes late
    r = (1 − f)/(1 − f + s·f)  an assumed negative is one
    loss  v·(1 + d)·ℓ1 + (1 − v)·(1 + d)·r·ℓ0

At s = 1 nothing is observed before a row is trained, and this is FNW, equation (3). A share that differs between kinds
of rows is what the losses that learn delays are for.

    ziggurat --extension late_share stream table_dlrm --data.train clicks/ --schema my.toml --delay correct \
        --label-time known_at --observe-s 3600 --delayed.loss late-40
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.training.delayed_losses import DelayedLoss, DelayedRows


class LateShare(DelayedLoss):
    """Weighs rows by a share of positives that come late.

    Args:
        percent: of all positives, those that come after a row was observed.
    """

    may_observe = True

    def __init__(self, *, percent: int) -> None:
        if not 0 < percent <= 100:
            raise ConfigError(
                expected="1 to 100 percent of all positives",
                found=str(percent),
                where="LateShare",
                ways_out=("LateShare(percent=40)",),
            )
        self.name = f"late_{percent}"
        self.share = percent / 100

    def of_rows(self, rows: DelayedRows) -> Float[Tensor, " B"]:
        """Return weighed cross-entropies."""
        served_B = rows.logits.detach().sigmoid()
        late_B = self.share * served_B
        real_B = (1.0 - served_B) / (1.0 - served_B + late_B)
        positive_B = (1.0 + late_B) * F.softplus(-rows.logits)
        negative_B = (1.0 + late_B) * real_B * F.softplus(rows.logits)
        return rows.weighed(positive_B, negative_B)


LATE_40 = DelayedLoss.add(LateShare(percent=40))
