"""The files that a study of `ziggurat tune` leaves behind, and that a comparison reads.

    OUT/study.json        what was searched, on which data: a study goes on with the same, or is refused
    OUT/tuned.json        the best try of each model, and a digest of its recipe
    OUT/<model>.json      its recipe, a whole config.json: `ziggurat train --config`, `compare --tuned`, `scale --tuned`
    OUT/test_read.json    which comparison has read test data with which recipes
    OUT/calls.json        processor seconds of each call, in tries and beside them

Test data says how good what was chosen is only as long as nothing was chosen by it. So a comparison of tuned settings
writes down that it reads it, and another one is refused: in another folder, or with what further tries have found
since. `read_again=True` (`--read-test-again`) reads it all the same, and the comparison says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.commands import pasted
from ziggurat.config import override
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError, DataError, FileError, MissingFileError
from ziggurat.files import Format, writing_to
from ziggurat.models import ModelConfig
from ziggurat.recipes.protocols import Protocol
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.studies.compare_runs import content_of, digest_of
from ziggurat.studies.tune_study import asking

STUDY, TUNED, TEST_READ, CALLS = "study.json", "tuned.json", "test_read.json", "calls.json"
_OF_DATA = ("data.", "dataset.", "teacher.")
_WAYS = ("give the same `ziggurat tune` command again: it makes no try twice, and writes the file anew",)
STUDY_FORMAT = Format(name="ziggurat.tuning", what="what a study searches", ways_out=("begin anew: --out FOLDER",))
TUNED_FORMAT = Format(name="ziggurat.tuned", what="the best tries of a study", ways_out=_WAYS)
CALLS_FORMAT = Format(
    name="ziggurat.tuning_calls",
    what="processor seconds of the calls of a study",
    ways_out=("remove it: the report then leaves out what earlier calls have cost beside their tries",),
)
_TEST_READ = Format(
    name="ziggurat.test_read",
    what="which comparison has read test data",
    ways_out=("restore it from a copy", "read test data once more, which is said: --read-test-again"),
)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The recipes that a study has found.

    Args:
        folder: of the study.
        protocol: that all of them are trained by.
        metric: that they were chosen by.
        seeds: that tries were trained with; a comparison takes others.
        recipes: by model, in the order of tuning.
        content: digests of the rows that tries saw, by split.
        tries: by model: how many were made.
    """

    folder: Path
    protocol: Protocol
    metric: str
    seeds: tuple[int, ...]
    recipes: Mapping[str, RunConfig]
    content: Mapping[str, str]
    tries: Mapping[str, int]

    def applied(self, name: str, base: RunConfig) -> RunConfig:
        """Return a run on the data of another one as the recipe of a model trains it."""
        recipe = self.recipes[name]
        return dataclasses.replace(base, model=recipe.model, training=recipe.training, tables=recipe.tables)

    def refuse_settings(self, changes: Mapping[str, str]) -> None:
        """Refuse settings of the command line that recipes say otherwise: recipes are trained as they are.

        Args:
            changes: dotted path to text; those of data are looked at where data is read.

        Raises:
            ConfigError: some would have no effect.
        """
        idle = {path: text for path, text in changes.items() if not path.startswith(_OF_DATA)}
        idle = {path: text for path, text in idle.items() if any(map(_differs(path, text), self.recipes.values()))}
        if idle:
            name = next(iter(self.recipes))
            given = " ".join(f"--{path} {pasted(text)}" for path, text in idle.items())
            as_own = f"ziggurat compare {pasted(self.folder / f'{name}.json')} --models {name} {given}"
            raise ConfigError(
                expected="no other settings than those of data: recipes are trained as they were tuned",
                found=f"{given}, which recipes say otherwise",
                where=f"command line, beside --tuned {self.folder}",
                ways_out=(
                    "leave them out",
                    f"compare a recipe as settings of your own: {as_own}",
                    f"tune with them: ziggurat tune … {given} --out ANOTHER_FOLDER",
                ),
            )

    def refuse_fewer_epochs(self, max_epochs: int) -> None:
        """Refuse a limit that would cut recipes short: what was tuned is then not what is judged.

        Args:
            max_epochs: 0 for no limit.

        Raises:
            ConfigError: a recipe has more epochs.
        """
        longer = {name: recipe.training.epochs for name, recipe in self.recipes.items()}
        longer = {name: epochs for name, epochs in longer.items() if 0 < max_epochs < epochs}
        if longer:
            raise ConfigError(
                expected="recipes that are trained for as long as they were tuned for",
                found=f"max_epochs = {max_epochs}, of {', '.join(f'{name} {each}' for name, each in longer.items())}",
                where=f"settings of a comparison, tuned = {self.folder}",
                ways_out=("leave --max-epochs out", f"tune with --max-epochs {max_epochs}, into another --out FOLDER"),
            )

    def refuse_other_data(self, data: PreparedData) -> None:
        """Refuse to judge by rows that were not those of the tries.

        Raises:
            ConfigError: they are others.
        """
        now = content_of(data)
        changed = [name for name, digest in self.content.items() if now.get(name) != digest]
        if changed:
            raise ConfigError(
                expected=f"the data that {self.folder} was tuned on",
                found=f"other rows in {' and '.join(changed)}",
                where=str(self.folder / TUNED),
                ways_out=(
                    "compare on that data and split, by the same name, --source, files and --data.split.… as in tuning",
                    "tune on this data: ziggurat tune …, into another --out FOLDER",
                ),
            )

    def refuse_seeds(self, num_seeds: int) -> None:
        """Refuse seeds that tries were chosen with: their luck is in the choice.

        Raises:
            ConfigError: some are the same.
        """
        same = [seed for seed in self.seeds if seed < num_seeds]
        if same:
            raise ConfigError(
                expected=f"tries of other seeds than 0 … {num_seeds - 1}, which the comparison takes",
                found=f"tries of seed {', '.join(map(str, same))}",
                where=str(self.folder / TUNED),
                ways_out=(
                    *((f"--seeds {min(same)}",) if min(same) > 0 else ()),
                    "tune with a seed of its own: ziggurat tune … --seed 1000 --out ANOTHER_FOLDER",
                ),
            )

    def note_that_test_is_read(self, models: Sequence[str], *, out: Path, read_again: bool) -> str:
        """Write down that a comparison reads test data with these models; return what it has to say of it.

        Args:
            models: of the comparison.
            out: its folder.
            read_again: whether it may be, although it was read before.

        Raises:
            ConfigError: it was read before, by another comparison or with other recipes.
        """
        # Two comparisons at a time would both find that nobody has read it.
        with writing_to(self.folder / TEST_READ, FileError), asking(self.folder):
            return self._note_that_test_is_read(models, out=out, read_again=read_again)

    def _note_that_test_is_read(self, models: Sequence[str], *, out: Path, read_again: bool) -> str:
        path = self.folder / TEST_READ
        read: dict[str, dict[str, str]] = {}
        is_damaged = False
        try:
            read = _TEST_READ.read(path) if path.exists() else {}
        except DataError:
            if not read_again:
                raise
            is_damaged = True  # somebody has read it, and nobody knows who
        place = str(out.absolute())
        now = {name: {"recipe": digest_of(self.recipes[name]), "comparison": place} for name in models}
        others = [name for name in models if name in read and read[name] != now[name]]
        if others and not read_again:
            first = read[others[0]]
            elsewhere = first["comparison"] != place
            raise ConfigError(
                expected="test data read once with what one study has found",
                found=(
                    f"{', '.join(others)}: read before by the comparison in {first['comparison']}"
                    if elsewhere
                    else f"{', '.join(others)}: further tries have found other settings since it was read"
                ),
                where=str(path),
                ways_out=(
                    *((f"go on with that comparison: --out {pasted(Path(first['comparison']).parent)}",) * elsewhere),
                    "--read-test-again: the comparison then says that test data was read before",
                    "tune on another split, into a folder of its own",
                ),
            )
        _TEST_READ.write(path, {**read, **now})
        if is_damaged:
            return f"{path} could not be read: another comparison has read test data with settings of {self.folder}"
        if not others:
            return ""
        return f"test data was read before with settings of {self.folder} ({', '.join(others)}): it is not fresh"


def read_tuned(folder: str | Path, *, models: Sequence[str] = (), own: Sequence[type[ModelConfig]] = ()) -> Tuned:
    """Read the recipes of a study.

    Args:
        folder: of the study.
        models: that are wanted; none: all that there are.
        own: config classes of your own, which recipes may name.

    Raises:
        MissingFileError: no study, or none that has found anything.
        ConfigError: a model was not tuned, or its recipe is no longer the one that tuning wrote.
    """
    folder = Path(folder)
    if not (folder / TUNED).is_file():
        raise MissingFileError(
            expected="a folder of `ziggurat tune`, with what it has found",
            found="a study without a finished try" if (folder / STUDY).exists() else f"no {TUNED}",
            where=str(folder),
            ways_out=(
                f"ziggurat tune DATA --models A,B --budget 40 --out {pasted(folder)}",
                "name the folder that --out of `ziggurat tune` named",
            ),
        )
    content: dict[str, Any] = TUNED_FORMAT.read(folder / TUNED)
    found = content["models"]
    missing = [name for name in models if name not in found]
    if missing:
        raise ConfigError(
            expected=f"models that were tuned: {', '.join(found)}",
            found=", ".join(missing),
            where=str(folder / TUNED),
            ways_out=(
                f"--models {','.join(name for name in models if name in found) or next(iter(found))}",
                f"tune it too, with the settings of that study: ziggurat tune … --models {','.join(missing)} "
                f"--out {pasted(folder)}",
            ),
        )
    recipes = {name: _recipe(folder, name, digest=found[name]["digest"], own=own) for name in models or found}
    return Tuned(
        folder=folder,
        protocol=Protocol(content["protocol"]),
        metric=content["metric"],
        seeds=tuple(content["seeds"]),
        recipes=recipes,
        content=content["content"],
        tries={name: found[name]["tries"] for name in recipes},
    )


def _differs(path: str, text: str) -> Callable[[RunConfig], bool]:
    """Return a function that tells whether a recipe has another value of a setting."""

    def differs(recipe: RunConfig) -> bool:
        try:
            return override(recipe, {path: text}) != recipe
        except ConfigError:  # a setting of another model, or a value that it does not take
            return False

    return differs


def _recipe(folder: Path, name: str, *, digest: str, own: Sequence[type[ModelConfig]]) -> RunConfig:
    path = folder / f"{name}.json"
    if not path.is_file():
        raise MissingFileError(
            expected=f"the recipe of {name}, which tuning wrote",
            found="no such file",
            where=str(path),
            ways_out=_WAYS,
        )
    recipe = load_config(path, models=own)
    if digest_of(recipe) != digest:
        raise ConfigError(
            expected=f"the settings of {name} that tuning chose",
            found="others: the file was changed since",
            where=str(path),
            ways_out=(
                *_WAYS,
                f"compare it as settings of your own: ziggurat compare {pasted(path)} --models {name}",
            ),
        )
    return recipe
