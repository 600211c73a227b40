"""Made sessions in the shape of KuaiRand: feeds of short videos, window after window, whose truth is known.

    user      taste (3 numbers), which walks slowly; comes again by an activity of its own
    video     tag ─► author ─► the video itself: each is a vector around that of the one before; lives some windows
    session   one user, one tab, 4 to 20 videos one after the other; a mood that ends with it
    row       click ~ Bernoulli(σ(bias + tab + quality + (taste + mood)·video))

    columns   user, video, author, tag, tab, duration, position, recent (tags of the last clicks of the user, the latest
              first, those of this session too), at (order in time), click, truth (its probability)

Of the videos that are shown half are the best of three for the user's taste, as a feed chooses, and all are drawn by a
popularity of their own. So a row says more than its ids: `recent` is all that tells of a mood. Rows are drawn in order
of time, since `recent` depends on the clicks before; position by position, for all sessions at once.

No row of KuaiRand is in it: what is taken over is the kind of columns (Gao et al., "KuaiRand: An Unbiased Sequential
Recommendation Dataset with Randomly Exposed Videos", CIKM 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

_DIM = 3
_PARTS = 4  # times of day; a user has one session in each at most
_SHORTEST = 4
_LONGEST = 20
_NO_TAG = -1

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SessionsConfig:
    """Settings of the made sessions.

    Args:
        windows: that are drawn.
        window_rows: rows of a window.
        users: people.
        alive: videos at a time.
        lifetime: windows that a video lives.
        authors: of videos.
        tags: of videos.
        tabs: places where a feed is shown.
        recent: most tags of earlier clicks.
        walk: share of the variance of a taste that is drawn anew in each window.
        bias: of the logit.
        seed: everything follows from it.
    """

    windows: int
    window_rows: int
    users: int = 1_000
    alive: int = 500
    lifetime: int = 20
    authors: int = 200
    tags: int = 30
    tabs: int = 4
    recent: int = 8
    walk: float = 0.02
    bias: float = -1.9
    seed: int = 0

    @property
    def videos(self) -> int:
        """Return how many videos there are in all windows together."""
        return self.alive + self.windows * self.changed

    @property
    def changed(self) -> int:
        """Return how many videos are replaced from window to window."""
        return self.alive // self.lifetime


class MadeSessions:
    """Draws windows, one after the other.

    Args:
        config: of all of them.
    """

    def __init__(self, config: SessionsConfig) -> None:
        self.config = config
        self._rng = rng = np.random.default_rng((config.seed, 35))
        self._taste = rng.normal(size=(config.users, _DIM))
        self._activity = _shares(rng.lognormal(sigma=1.0, size=config.users))
        tags = rng.normal(size=(config.tags, _DIM))
        tag_of_author = rng.integers(0, config.tags, config.authors)
        authors = 0.8 * tags[tag_of_author] + 0.6 * rng.normal(size=(config.authors, _DIM))
        self._author = rng.integers(0, config.authors, config.videos)
        # An author leaves the own tag now and then.
        keeps = rng.random(config.videos) < 0.8
        self._tag = np.where(keeps, tag_of_author[self._author], rng.integers(0, config.tags, config.videos))
        self._video = (
            0.5 * tags[self._tag] + 0.6 * authors[self._author] + 0.5 * rng.normal(size=(config.videos, _DIM))
        ) / np.sqrt(_DIM)
        self._quality = 0.7 * rng.normal(size=config.videos)
        self._popularity = rng.lognormal(sigma=1.0, size=config.videos)
        self._duration = np.exp(rng.normal(3.0, 0.7, config.videos))
        self._of_tab = np.linspace(0.4, -0.4, config.tabs)
        self._alive = np.arange(config.alive)
        self._next_video = config.alive
        self._recent = np.full((config.users, config.recent), _NO_TAG)
        self._rows_before = 0

    def frames(self) -> list[pl.DataFrame]:
        """Return all windows, in order of time."""
        return [self._window() for _ in range(self.config.windows)]

    def _window(self) -> pl.DataFrame:
        config = self.config
        mean_length = (_SHORTEST + _LONGEST) / 2
        sessions = 1 + int(1.1 * config.window_rows / mean_length / _PARTS)
        parts = [self._part(min(sessions, config.users)) for _ in range(_PARTS)]
        frame = pl.concat(parts)
        # Sessions beyond the size are seen by nobody; clicks of them may still be among `recent`.
        frame = frame[: config.window_rows].with_columns(at=self._rows_before + pl.int_range(pl.len()))
        self._rows_before += frame.height
        self._pass_on()
        return frame

    def _pass_on(self) -> None:
        """Let tastes walk, and replace the oldest videos."""
        config = self.config
        drawn = self._rng.normal(size=self._taste.shape)
        self._taste = np.sqrt(1.0 - config.walk) * self._taste + np.sqrt(config.walk) * drawn
        fresh = np.arange(self._next_video, self._next_video + config.changed)
        self._alive = np.concatenate([self._alive[config.changed :], fresh])
        self._next_video += config.changed

    def _part(self, sessions: int) -> pl.DataFrame:
        """Return the rows of sessions of different users, position by position."""
        config = self.config
        rng = self._rng
        user = rng.choice(config.users, size=sessions, replace=False, p=self._activity)
        mood = 0.8 * rng.normal(size=(sessions, _DIM))
        tab = rng.integers(0, config.tabs + 1, sessions) % config.tabs  # the first one has twice as many as others
        length = rng.integers(_SHORTEST, _LONGEST + 1, sessions)
        shares = _shares(self._popularity[self._alive])
        found: list[pl.DataFrame] = []
        for position in range(_LONGEST):
            on = np.flatnonzero(length > position)
            video = self._shown(user[on], shares)
            logit = config.bias + self._of_tab[tab[on]] + self._quality[video]
            logit += 1.3 * ((self._taste[user[on]] + mood[on]) * self._video[video]).sum(axis=1)
            truth = 1.0 / (1.0 + np.exp(-logit))
            click = rng.random(len(on)) < truth
            found.append(
                pl.DataFrame(
                    {
                        "session": on,
                        "user": user[on],
                        "video": video,
                        "author": self._author[video],
                        "tag": self._tag[video],
                        "tab": tab[on],
                        "duration": self._duration[video],
                        "position": np.full(len(on), position),
                        "recent": _lists(self._recent[user[on]]),
                        "click": click.astype(np.int64),
                        "truth": truth,
                    }
                )
            )
            self._remember(user[on][click], self._tag[video[click]])
        # No user has two sessions in a part, so their order is free.
        return pl.concat(found).sort("session", maintain_order=True).drop("session")

    def _shown(self, user: _Ints, shares: _Floats) -> _Ints:
        """Return a video for each user: of every second one the best of three for its taste."""
        drawn = self._rng.choice(self._alive, size=(len(user), 3), p=shares)
        liking = (self._taste[user][:, None] * self._video[drawn]).sum(axis=2)
        is_chosen = self._rng.random(len(user)) < 0.5
        place = np.where(is_chosen, liking.argmax(axis=1), 0)
        return drawn[np.arange(len(user)), place]

    def _remember(self, user: _Ints, tag: _Ints) -> None:
        """Put the tags of clicks before those of earlier ones."""
        self._recent[user, 1:] = self._recent[user, :-1]
        self._recent[user, 0] = tag


def _shares(weights: _Floats) -> _Floats:
    return weights / weights.sum()


def _lists(tags: _Ints) -> pl.Series:
    """Return lists without what is not there; it is always at the end."""
    return pl.Series([[tag for tag in row if tag != _NO_TAG] for row in tags.tolist()], dtype=pl.List(pl.Int64))
