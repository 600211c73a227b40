"""Make an export of trained runs: models, catalogue, index, value model; checked against the runs, then published.

    runs/X (a ranking model)                     ──► ranker                     rank, scores
    runs/two_tower [+ --ranker runs/X]           ──► encoder, index [, ranker]  recommend, rank

    read runs ─► catalogue, users (raw data) ─► write models, index ─► read back ─► compare 100,000 rows
              ─► choose the formula (validation likes) ─► golden answers ─► seal ─► rename

The export is written into a temporary folder and read back from there as a server would read it; it appears under its
name only if it scores as the run does. A failed export leaves an older one as it was.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ziggurat.arguments import check_arguments
from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.errors import ConfigError, FileError
from ziggurat.features.items import Items
from ziggurat.features.schema import Schema
from ziggurat.files import write_bytes
from ziggurat.models.build import ModelConfig
from ziggurat.models.packed import packed_format
from ziggurat.models.scoring_plan import ScoringPlan
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.linear import is_packed_format
from ziggurat.parallel.device import Device
from ziggurat.precision import PLAIN, Precision
from ziggurat.runs.data_paths import located
from ziggurat.runs.execute import raw_files
from ziggurat.runs.export.answering_model import answering
from ziggurat.runs.export.data import RunData, make_catalogue, make_users
from ziggurat.runs.export.event_data import EventsWanted, event_data, known_items
from ziggurat.runs.export.export_config import ExportConfig
from ziggurat.runs.export.first_look import check_asked, look_at_runs
from ziggurat.runs.export.golden_requests import golden_requests
from ziggurat.runs.export.histories import age_of_histories, missing_histories, write_histories
from ziggurat.runs.export.index_files import Found, write_index
from ziggurat.runs.export.known_ids import known_shares, named_ranker, refuse_blind, refuse_stranger
from ziggurat.runs.export.made_from import source_of, versions
from ziggurat.runs.export.parity import compare, refuse_difference
from ziggurat.runs.export.value_choice import ValueAsked, chosen_value
from ziggurat.runs.export.vector_parity import compare_vectors, packed_of, refuse_other_vectors
from ziggurat.runs.load import Run, load_run
from ziggurat.runs.packed_run import read_products
from ziggurat.runs.teachers.rows import history_join_of
from ziggurat.serving.answering.chain import CHAIN_FILE, ChainSettings
from ziggurat.serving.answering.item_catalogue import ItemCatalogue, KnownUsers
from ziggurat.serving.answering.vector_encoder import VectorModel
from ziggurat.serving.export.dense_program import (
    COMPILED_FILE,
    PROGRAM_FILE,
    compile_program,
    export_program,
    program_bytes,
)
from ziggurat.serving.export.export_folder import ExportFolder, Source, open_export, replacing_export, seal_export
from ziggurat.serving.export.packed_model import save_model
from ziggurat.serving.golden import GOLDEN_FILE, write_golden
from ziggurat.serving.load_parts import ENCODER, RANKER
from ziggurat.serving.recommender import Recommender
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.report.progress import NoProgress, Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """The runs of an export.

    Args:
        main: whose data the export is made of.
        encoder: gives vectors, or None.
        ranker: scores, or None.
    """

    main: Run
    encoder: Run | None
    ranker: Run | None

    @property
    def parts(self) -> dict[str, Run]:
        """Those that there are, by part."""
        named = {ENCODER: self.encoder, RANKER: self.ranker}
        return {part: run for part, run in named.items() if run is not None}

    @property
    def tables(self) -> list[str]:
        """Names of the tables of all of them."""
        return sorted({table.name for run in self.parts.values() for table in run.model.inputs.tables})

    @property
    def schemas(self) -> list[Schema]:
        """The schemas of the runs that there are."""
        return [run.preprocessing.schema for run in self.parts.values()]


@check_arguments
def export_run(
    run: str | Path,
    *,
    out: str | Path,
    ranker: str | Path | None = None,
    config: ExportConfig | None = None,
    models: Sequence[type[ModelConfig]] = (),
    progress: Progress | None = None,
) -> ExportFolder:
    """Make an export of a run, or of one that retrieves and one that ranks.

    Args:
        run: folder of the run: of a ranking model, or of one that gives vectors (`two_tower`).
        out: folder of the export; an older export there is replaced.
        ranker: folder of a ranking run that scores the candidates of the first.
        config: everything else.
        models: config classes of your own that the runs may name.
        progress: shows phases, and what was found.

    Raises:
        ConfigError: runs that do not go together, or a value model that cannot be.
        ExportError: the export scores differently; says by how much.
        MissingFileError, DataError, SchemaError: as loading a run and reading its data.
    """
    config = config or ExportConfig()
    progress = progress or NoProgress()
    with ExitStack() as stack:
        folder = stack.enter_context(replacing_export(out))  # refused before anything is loaded, as all that can be
        seen = look_at_runs(run, ranker=ranker, models=models, progress=progress)
        check_asked(seen, value=config.value, keep=config.keep, items=config.items)
        runs = _load(run, ranker, models=models)
        products = _products_to_pack(runs, config, progress)
        config.kept.check_names(runs.tables)
        asked = ValueAsked(value=config.value, num_likes=config.value_likes, encoder=runs.encoder, ranker=runs.ranker)
        formula = asked.first()
        # Bad rows of the runs' data were reported in training; here they are only kept out of the export.
        bad_rows = stack.enter_context(
            BadRows(BadRowPolicy.QUARANTINE, folder=stack.enter_context(tempfile.TemporaryDirectory()))
        )
        data = {part: _data_of(each, runs, config, stack, bad_rows, progress) for part, each in runs.parts.items()}
        facts: dict[str, object] = {"tables": config.tables.value, "by_table": to_json(config.by_table)}
        facts |= _write_models(folder, runs, config, products, models, progress)
        for part, each in data.items():
            progress.begin("histories", total=None)
            facts |= write_histories(each.join, folder / part, schema=each.schema)
            progress.end()
            for line in (*missing_histories(each.join, each.schema), *age_of_histories(each.join, each.schema)):
                progress.say(line)
        catalogue, users = _write_catalogue(folder, runs, data, config, progress)
        facts |= _check_ranker(runs, catalogue, users, config, progress)
        asked.check(formula, catalogue=catalogue)
        # Without known users no request can name one, so the column says nothing.
        user_id = runs.main.preprocessing.schema.group if (folder / "users").exists() else ""
        sizes = {"num_candidates": config.num_candidates, "num_over_arch": config.num_over_arch}
        items = runs.main.preprocessing.schema.items
        repeats = Items.repeats if items is None else items.repeats
        # Of two runs the first decides, whose files are read.
        own = {each.column: each for schema in reversed(seen.schemas) for each in schema.numbers}
        settings = ChainSettings(
            formula=formula,
            user_id=user_id,
            repeats=repeats,
            written=seen.raw.text.numbers,
            number_columns=tuple(own.values()),
            **sizes,
        )
        if runs.encoder is not None:
            progress.say(f"{repeats.of_answers} (repeats = {repeats.value}); a request may say otherwise: exclude_seen")
        settings.write(folder / CHAIN_FILE)
        made = {"sources": _sources(runs), "made_with": versions()}
        # Sealed before it is whole, since the index is made by the encoder as the export has it.
        seal_export(folder, facts=facts, **made)
        if runs.encoder is not None and catalogue is not None:
            wanted = Found(
                num_candidates=config.num_candidates, num_over_arch=config.num_over_arch, recall=config.recall
            )
            progress.begin("index", total=None)
            facts["index"] = write_index(folder, catalogue=catalogue, wanted=wanted, models=models)
            progress.end()
            # Sealed again, for the index has added files and facts.
            seal_export(folder, facts=facts, **made)
        loaded = _read_back(folder, runs, models)
        if runs.encoder is not None:
            facts |= _compare_vectors(runs.encoder, loaded, data[ENCODER], config, progress)
        if runs.ranker is not None:
            facts |= _compare(runs.ranker, loaded, data[RANKER], config, progress)
            if config.program:
                facts["program"] = _write_program(folder, loaded, data[RANKER], config, progress)
        value = chosen_value(asked, chain=loaded.chain, data=data.get(ENCODER), progress=progress)
        facts["value"] = value.facts
        # Written anew only where it differs, since each seal reads all files.
        if value.formula != formula:
            replace(settings, formula=value.formula).write(folder / CHAIN_FILE)
            seal_export(folder, facts=facts, **made)
            # Answers that are kept for comparison are those of the chosen formula.
            loaded = _read_back(folder, runs, models)
        # Last: the golden answers have to be those of exactly what is sealed.
        write_golden(loaded, golden_requests(loaded, data, number=config.golden), folder / GOLDEN_FILE)
        seal_export(folder, facts=facts, **made)
    return open_export(out)


def _load(run: str | Path, ranker: str | Path | None, *, models: Sequence[type[ModelConfig]]) -> _Runs:
    main = _loaded(run, models=models)
    if not isinstance(main.model, VectorModel):
        if ranker is not None:
            raise ConfigError(
                expected="a run that gives users and items vectors (two_tower), for a ranker to score its candidates",
                found=f"{run}, whose model {main.config.model.kind!r} scores itself",
                where="ziggurat export, --ranker",
                ways_out=(
                    f"ziggurat export {pasted(run)}",
                    f"ziggurat export RUN_THAT_FINDS_ITEMS --ranker {pasted(run)}",
                ),
            )
        return _Runs(main=main, encoder=None, ranker=main)
    second = None if ranker is None else _loaded(ranker, models=models)
    if second is not None and isinstance(second.model, VectorModel):
        raise ConfigError(
            expected="a ranking run",
            found=f"{ranker}, whose scores are inner products",
            where="ziggurat export, --ranker",
            ways_out="name the run of a ranking model: dlrm, dcn_v2, …",
        )
    return _Runs(main=main, encoder=main, ranker=second)


def _loaded(folder: str | Path, *, models: Sequence[type[ModelConfig]]) -> Run:
    """Load a run on the device where its export is served.

    FP32 is asked for by name, so that nothing is said here of what the run was trained in: its products may be packed
    on the way, and `_say_other_products` knows what is served.
    """
    packed = read_products(RunFolder(Path(folder)))
    return load_run(folder, models=models, device=Device.CPU, precision=PLAIN if packed is None else None)


_Products = dict[str, BlockFormat | Mapping[str, BlockFormat]]  # by part


def _products_to_pack(runs: _Runs, config: ExportConfig, progress: Progress) -> _Products:
    """Return the formats that products of the runs are packed in on the way.

    Raises:
        ConfigError: a run has packed products already, or the dispatch is of another model or machine.
        MissingFileError: there is no such dispatch.
    """
    if not config.products and not config.dispatch:
        return {}
    wanted = config.products or f"the formats of {config.dispatch}"
    for run in runs.parts.values():
        if run.packed is not None and run.packed.format_name != config.products:
            flag = "--products" if config.products else "--dispatch"
            raise ConfigError(
                expected=f"a run with FP32 weights, to pack in {wanted}",
                found=f"one whose products are in {run.packed.format_name} already",
                where=f"{run.folder}, {flag}",
                ways_out=(
                    f"leave {flag} out: the export keeps {run.packed.format_name}",
                    "export the run that it was made of; products.json names it",
                ),
            )
    unpacked = {part: run for part, run in runs.parts.items() if run.packed is None}
    if config.products:
        return dict.fromkeys(unpacked, packed_format(config.products, where="ExportConfig.products"))
    planned = ScoringPlan.model_of(config.dispatch)
    meant = {part: run for part, run in unpacked.items() if type(run.model).__name__ == planned} or unpacked
    for part in unpacked.keys() - meant.keys():
        progress.say(f"{part}: dense products in FP32; {config.dispatch} is of {planned}")
    plans = {part: ScoringPlan.read(config.dispatch, model=run.model) for part, run in meant.items()}
    if any(plan.settings is None for plan in plans.values()):
        progress.say(f"{config.dispatch} does not say for which settings of the network it holds")
    return {part: plan.formats for part, plan in plans.items()}


def _data_of(
    run: Run, runs: _Runs, config: ExportConfig, stack: ExitStack, bad_rows: BadRows, progress: Progress
) -> RunData:
    raw = raw_files(located(run.config, folder=run.folder), progress=progress)
    if run.config.table_schema.events is None:
        join = history_join_of(run)
        return RunData(config=raw, schema=run.preprocessing.schema, bad_rows=bad_rows, join=join)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    # As many rows as any of the later steps asks for, so that histories are made once.
    num_rows = max(config.parity_rows, 64 * config.golden)
    other = runs.ranker.config.table_schema if run is runs.encoder and runs.ranker is not None else None
    ranker = other if other is not None and other.events is not None else None
    wanted = EventsWanted(folder=folder, keep=() if config.items else config.keep, num_rows=num_rows, ranker=ranker)
    progress.begin("histories", total=None)
    found = event_data(run, config=raw, bad_rows=bad_rows, wanted=wanted)
    progress.end()
    return found


def _write_models(
    folder: Path,
    runs: _Runs,
    config: ExportConfig,
    products: _Products,
    models: Sequence[type[ModelConfig]],
    progress: Progress,
) -> dict[str, object]:
    """Write the models of the runs; return which of their products are packed, by part."""
    said: dict[str, dict[str, object]] = {}
    for part, run in runs.parts.items():
        progress.begin(f"write {part}", total=None)
        written = run
        if part in products:
            # Packed in a copy: the export is compared with the run as it is.
            formats = products[part]
            written = load_run(run.folder, step=run.step, models=models, device=Device.CPU, products=formats)
        save_model(answering(packed_of(written)), folder / part, tables=config.kept)
        progress.end()
        if written.packed is not None:
            progress.say(f"{part}: {written.packed.line()}")
            said[part] = {"format_of_weights": written.packed.format_name, "left": written.packed.left}
            if by_module := written.packed.by_module:
                said[part]["by_module"] = by_module
        served = None if written.packed is None else written.packed.format_name
        _say_other_products(run.folder.absolute(), run.config.training.precision, served)
    return {"products": said} if said else {}


@functools.cache  # a stream exports window after window of one run, and one line is enough
def _say_other_products(folder: Path, trained: Precision, served: str | None) -> None:
    """Say that an export multiplies otherwise than the training of its run did.

    Args:
        folder: of the run.
        trained: precision of the training.
        served: formats of the packed weights; None: FP32.
    """
    if (trained.arithmetic is None and not trained.is_dispatched) or str(trained) == served:
        return
    way_out = ""
    if served is None:
        packable = [each.name for each in BlockFormat.listed() if is_packed_format(each)]
        format = str(trained) if str(trained) in packable else "mx9"
        way_out = f" (--products {format} packs its weights; in Python ExportConfig(products={format!r}))"
    _log.warning(
        "%s: the export multiplies %s; the run was trained with products in %s%s",
        folder.name,
        "FP32 numbers" if served is None else f"by weights packed in {served}",
        trained,
        way_out,
    )


def _write_catalogue(
    folder: Path, runs: _Runs, data: dict[str, RunData], config: ExportConfig, progress: Progress
) -> tuple[ItemCatalogue | None, KnownUsers | None]:
    with_items = [part for part, run in runs.parts.items() if run.preprocessing.schema.items is not None]
    if not with_items:
        if config.items or config.keep:
            raise ConfigError(
                expected="a schema that says which features describe the item, for a catalogue",
                found=f"none, and {'--items' if config.items else '--keep'}",
                where=f"{runs.main.folder}, schema",
                ways_out=('in the schema: [items], and below it id = "…", features = ["…"]; then train again',),
            )
        return None, None
    chosen = data[with_items[0]]
    progress.begin("catalogue", total=None)
    catalogue = make_catalogue(chosen, schemas=runs.schemas, keep=config.keep, items=config.items)
    catalogue = _only_known(catalogue, runs.encoder, progress)
    users = make_users(chosen, schemas=runs.schemas, catalogue=catalogue, finds_items=runs.encoder is not None)
    catalogue.save(folder)
    if config.users and users is not None:
        users.save(folder)
    progress.end()
    known = f", {_counted(users.frame.height, 'known user')}" if config.users and users is not None else ""
    progress.say(f"catalogue: {_counted(len(catalogue), 'item')}{known}")
    return catalogue, users


def _only_known(catalogue: ItemCatalogue, encoder: Run | None, progress: Progress) -> ItemCatalogue:
    """The catalogue without items that a next-item model never met: they would all have one vector."""
    known = None if encoder is None else known_items(encoder)
    if known is None:
        return catalogue
    kept = catalogue.ids.is_in(known.implode())
    if not kept.all():
        left_out = int((~kept).sum())
        verb = "is" if left_out == 1 else "are"
        progress.say(f"{_counted(left_out, 'item')} that the training data did not have {verb} left out")
    return ItemCatalogue(catalogue.frame.filter(kept), columns=catalogue.columns)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _check_ranker(
    runs: _Runs,
    catalogue: ItemCatalogue | None,
    users: KnownUsers | None,
    config: ExportConfig,
    progress: Progress,
) -> dict[str, object]:
    """Check whether a ranker goes with the run that retrieves, by what it knows of the items and users."""
    if runs.encoder is None or runs.ranker is None or catalogue is None:
        return {}
    fitted = runs.ranker.preprocessing
    folder = str(runs.ranker.folder)
    refuse_blind(fitted, catalogue=catalogue, folder=folder)
    shares = known_shares(fitted, encoder=runs.encoder.preprocessing, catalogue=catalogue, users=users)
    refuse_stranger(shares, ranker=folder, allow=config.allow)
    for share in shares:
        progress.say(share.line())
    if not shares:
        progress.say("the ranker has no vocabulary of the items' ids, so nobody can count how many of them it knows")
    return {"known_by_ranker": {share.what: share.to_json() for share in shares}}


def _read_back(folder: Path, runs: _Runs, models: Sequence[type[ModelConfig]]) -> Recommender:
    """The export as a server would read it."""
    with ExitStack() as stack:
        if runs.encoder is not None and runs.ranker is not None:
            # Errors of a ranker then name its run, and not the folder of the export.
            stack.enter_context(named_ranker(str(runs.ranker.folder), main=str(runs.main.folder)))
        return Recommender.load(folder, models=models, check=False)


def _compare(
    run: Run, loaded: Recommender, data: RunData, config: ExportConfig, progress: Progress
) -> dict[str, object]:
    ranker = loaded.chain.needed_ranker
    progress.begin("compare with the run", total=None)
    parity = compare(run, ranker, data=data, num_rows=config.parity_rows)
    progress.end()
    progress.say(parity.line())
    refuse_difference(parity, config=config, where=str(run.folder))
    return {"parity": parity.to_json()}


def _compare_vectors(
    run: Run, loaded: Recommender, data: RunData, config: ExportConfig, progress: Progress
) -> dict[str, object]:
    progress.begin("compare vectors with the run", total=None)
    parity = compare_vectors(run, loaded.chain, data=data, num_rows=config.parity_rows)
    progress.end()
    progress.say(parity.line())
    refuse_other_vectors(parity, config=config, where=str(run.folder))
    return {"vectors": parity.to_json()}


def _write_program(folder: Path, loaded: Recommender, data: RunData, config: ExportConfig, progress: Progress) -> str:
    """The dense network as a program; where torch cannot trace it, why not."""
    ranker = loaded.chain.needed_ranker
    if data.events is not None:
        why = "which candidates share a history is found in each batch"
        progress.say(f"no {PROGRAM_FILE}: {why}, which no program of torch.export can do")
        return f"not written: {why}"
    if ranker.packed.products is not None:
        why = f"its dense products are packed in {ranker.packed.products_format}"
        progress.say(f"no {PROGRAM_FILE}: {why}, for which other programs have no operation")
        return f"not written: {why}"
    chunk = next(iter(data.samples(num_rows=64)))
    batch = table_to_batch(
        ranker.packed.preprocessing.encode(chunk, bad_rows=data.bad_rows, needs_extras=False), ranker.inputs
    )
    half = batch.batch_size // 2
    if half < 2:
        return "not written: too few rows"
    try:
        # Two batches of other sizes, or torch takes the size of the first for a constant.
        program = export_program(ranker.packed.model, (batch, batch.rows(0, half + 1)))
        content = program_bytes(program)
    except Exception as error:  # torch raises whatever it likes; the export is whole without the program
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        progress.say(f"no {PROGRAM_FILE}: torch.export cannot trace this model ({why})")
        return f"not written: {why}"
    write_bytes(folder / RANKER / PROGRAM_FILE, content)  # what a disk refuses is no fault of the model's
    if not config.compiled:
        return "written"
    path = folder / RANKER / COMPILED_FILE
    progress.begin(f"compile {COMPILED_FILE}", total=None)
    try:
        compile_program(program, path, model=ranker.packed.model, batch=batch.rows(0, half + 1))
    except FileError:
        raise
    except Exception as error:  # as above; the export is whole without it
        # What was written of it so far is no program.
        path.unlink(missing_ok=True)
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        progress.say(f"no {COMPILED_FILE}: AOTInductor cannot compile this program here ({why})")
        return f"written; not compiled: {why}"
    finally:
        progress.end()
    return "written, compiled"


def _sources(runs: _Runs) -> tuple[Source, ...]:
    return tuple(
        source_of(part, folder=run.folder, config=run.config, preprocessing=run.preprocessing, step=run.step)
        for part, run in runs.parts.items()
    )
