"""The metrics that every evaluation has, in the order of its results; what each means stands in `accumulator.py`."""

from __future__ import annotations

from typing import ClassVar

from ziggurat.features.tasks import OF_NUMBERS
from ziggurat.training.metrics import functions
from ziggurat.training.metrics.calibration import curve_of, error_of
from ziggurat.training.metrics.metric import Judged, Metric, OverRows


class _Auc(Metric):
    name = "auc"
    shown = "AUC"
    in_few_bits = True
    decides = True
    is_plotted = True
    is_first_look = True
    beside = "log_loss"
    within_groups = "gauc"
    over_rows = OverRows.PLACEMENTS
    floor = 0.5
    below = "worse than chance"
    question = "is the label turned round, or does this split differ from the training rows?"

    def compute(self, judged: Judged) -> float:
        return functions.auc_of(judged.samples)

    def most_lost(self, value: float, *, tolerance: float) -> float:
        del value
        return tolerance


class _LogLoss(Metric):
    name = "log_loss"
    shown = "log loss"
    in_few_bits = True
    higher_is_better = False
    is_loss = True
    is_first_look = True
    beside = "auc"

    def compute(self, judged: Judged) -> float:
        return functions.log_loss_of(judged.samples)


class _NormalisedEntropy(Metric):
    name = "ne"
    shown = "NE"
    higher_is_better = False
    beside = "log_loss"

    def compute(self, judged: Judged) -> float:
        return functions.normalised_entropy_of(judged.samples)


class _Calibration(Metric):
    name = "calibration"
    in_few_bits = True
    higher_is_better = None
    is_best_at_one = True
    is_first_look = True

    def compute(self, judged: Judged) -> float:
        return functions.calibration_of(judged.samples)


class _CalibrationError(Metric):
    name = "ece"
    higher_is_better = False
    beside = "log_loss"

    def compute(self, judged: Judged) -> float:
        return error_of(curve_of(judged.samples))


class _Accuracy(Metric):
    name = "accuracy"
    beside = "log_loss"

    def compute(self, judged: Judged) -> float:
        return functions.accuracy_of(judged.samples)


class _GroupedAuc(Metric):
    name = "gauc"
    shown = "GAUC"
    needs_groups = True
    is_plotted = True
    is_first_look = True
    beside = "log_loss"

    def compute(self, judged: Judged) -> float:
        return functions.grouped_auc_of(judged.samples_of_groups, groups=judged.known_groups)


class _OfRanking(Metric):
    """A ranking inside each group; the three are computed together."""

    needs_groups = True
    beside = "log_loss"

    def compute(self, judged: Judged) -> float:
        return judged.ranking[self.name_at(judged.k)]


class _Ndcg(_OfRanking):
    name = "ndcg"
    has_places = True


class _Recall(_OfRanking):
    name = "recall"
    has_places = True


class _Mrr(_OfRanking):
    name = "mrr"


class _RootMeanSquaredError(Metric):
    name = "rmse"
    shown = "RMSE"
    in_few_bits = True
    task = OF_NUMBERS
    higher_is_better = False
    decides = True
    is_loss = True
    is_plotted = True
    is_first_look = True
    beside = "mae"
    over_rows = OverRows.SQUARED_ERRORS

    def compute(self, judged: Judged) -> float:
        return functions.rmse_of(judged.samples)

    def most_lost(self, value: float, *, tolerance: float) -> float:
        return tolerance * max(value, 1e-12)  # a share of 0 would allow nothing


class _MeanAbsoluteError(Metric):
    name = "mae"
    shown = "MAE"
    task = OF_NUMBERS
    higher_is_better = False
    is_plotted = True
    is_first_look = True

    def compute(self, judged: Judged) -> float:
        return functions.mae_of(judged.samples)


class _RSquared(Metric):
    name = "r2"
    task = OF_NUMBERS
    is_first_look = True
    floor = 0.0
    below = "worse than always saying the mean of these rows"
    question = "do they differ from the training rows?"

    def compute(self, judged: Judged) -> float:
        return functions.r2_of(judged.samples)


class _OfFullRanking(Metric):
    """A metric of `full_ranking.py`, which computes all of them in one pass over the items."""

    ranks_all: ClassVar[bool] = True

    def compute(self, judged: Judged) -> float:
        raise NotImplementedError(f"{self.name} is of a ranking of all items, not of scored samples")


class _FullRecall(_OfFullRanking):
    name = "full_recall"
    shown = "hit rate"
    decides = True
    has_places = True
    beside = "full_ndcg"


class _FullNdcg(_OfFullRanking):
    name = "full_ndcg"
    shown = "NDCG"
    in_few_bits = True
    has_places = True
    is_first_look = True


class _FullMrr(_OfFullRanking):
    name = "full_mrr"
    is_first_look = True


class _FullAnswered(_OfFullRanking):
    name = "full_answered"
    shown = "hit rate of answers"
    has_places = True


class _FullUserRecall(_OfFullRanking):
    name = "full_user_recall"
    shown = "recall of users"
    decides = True
    has_places = True
    beside = "full_user_ndcg"


class _FullUserNdcg(_OfFullRanking):
    name = "full_user_ndcg"
    shown = "NDCG of users"
    has_places = True


for _member in (
    _Auc(),
    _LogLoss(),
    _NormalisedEntropy(),
    _Calibration(),
    _CalibrationError(),
    _Accuracy(),
    _GroupedAuc(),
    _Ndcg(),
    _Recall(),
    _Mrr(),
    _RootMeanSquaredError(),
    _MeanAbsoluteError(),
    _RSquared(),
    _FullRecall(),
    _FullNdcg(),
    _FullMrr(),
    _FullAnswered(),
    _FullUserRecall(),
    _FullUserNdcg(),
):
    Metric.add(_member)
