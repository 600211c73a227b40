"""The start-up report: what a run is going to do on this machine, and everything that is not as one might think.

Which kernel looks up embeddings, why, and why not a faster one; which precision and why; what was compiled; how many
threads; what was asked for and does not apply. `ziggurat doctor` prints the machine's half of it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ziggurat.cache import compiled_code_line
from ziggurat.embeddings import PooledDtype
from ziggurat.embeddings.room import TableSize
from ziggurat.models import Model, flops_per_sample, num_parameters
from ziggurat.models.blocks.dot import PairwiseDot
from ziggurat.models.blocks.fieldwise import FieldMix
from ziggurat.models.costs.model_cost import ParameterCount
from ziggurat.ops.interactions.dot import dot_kernel
from ziggurat.ops.interactions.fields import fields_kernel
from ziggurat.ops.machine.memory import host_memory
from ziggurat.ops.machine.tested_torch import untested_torch_section
from ziggurat.precision.choice import cpu_name
from ziggurat.training.config import Compile, StepGraphs
from ziggurat.training.records.log import why_no_events
from ziggurat.training.report.ranks import rank_sections
from ziggurat.training.step.compiled import why_no_graphs
from ziggurat.training.step.train_step import TrainStep

PACKAGES = ("torch", "numpy", "polars", "pyarrow", "safetensors", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec")


@dataclass(frozen=True, kw_only=True)
class StartupReport:
    """Sections of (name, value) lines, for people and for startup.json.

    Args:
        sections: everything.
        brief: data, model, machine and kernel in a line each, and what is unusual about the data.
    """

    sections: dict[str, dict[str, str]]
    brief: tuple[str, ...] = ()

    def text(self) -> str:
        """A plain table."""
        width = max(len(name) for lines in self.sections.values() for name in lines)
        parts: list[str] = []
        for title, lines in self.sections.items():
            parts.append(title)
            parts += [f"  {name:<{width}}  {value}" for name, value in lines.items()]
        return "\n".join(parts)


def machine_lines() -> dict[str, str]:
    """Describe this machine in words."""
    memory_gib = host_memory().total_bytes / 2**30
    lines = {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()}",
        "python": platform.python_version(),
        "cpu kernels": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "c++ compiler": shutil.which("g++") or "none: no C++ kernel, no torch.compile on CPU",
    }
    if torch.cuda.is_available():
        lines["device"] = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    else:
        lines["device"] = "cpu (no CUDA device)"
    return lines


def version_lines() -> dict[str, str]:
    """Versions of what matters for numbers and speed."""
    lines: dict[str, str] = {}
    for name in PACKAGES:
        try:
            lines[name] = importlib.metadata.version(name)
        # Packages of kernels are optional, so that absent ones are no news.
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts that the report gives of a model as a whole; after `parallelize` no rank knows them any more.

    Args:
        parameters: of tables, and of everything else.
        tables: what their rows take in memory and are kept as, in words.
        flops: of one training step, a sample.
        towers: the section on towers; empty for a flat model.
        has_dots: whether it multiplies vectors pairwise.
        has_mixes: whether it combines fields linearly.
    """

    parameters: ParameterCount
    tables: str
    flops: int
    towers: dict[str, dict[str, str]]
    has_dots: bool
    has_mixes: bool

    @staticmethod
    def of(model: Model) -> ModelFacts:
        """The facts of a model that is not parallel yet."""
        return ModelFacts(
            parameters=num_parameters(model),
            tables=_tables_text(model.embeddings.tables.sizes.values()),
            flops=flops_per_sample(model).total,
            towers=tower_section(model),
            has_dots=any(isinstance(module, PairwiseDot) for module in model.modules()),
            has_mixes=any(isinstance(module, FieldMix) for module in model.modules()),
        )


def _waiting_line(step: TrainStep) -> dict[str, str]:
    """Say whether the host waits for the steps of a GPU, and why; and when the rows of its updates are sorted."""
    if step.device.type == "cpu":
        return {}
    if step.late is None:
        return {"steps": f"the host waits for each: {step.waits}", "rows of updates": "sorted in each update"}
    in_updates = step.late.ahead.in_updates().items()
    others = "".join(f"; in the update those of {names}: {why}" for names, why in in_updates)
    ahead = f"sorted while the step before computes{others}"
    return {"steps": "the host does not wait for them", "one graph a step": _graph_line(step), "rows of updates": ahead}


def _graph_line(step: TrainStep) -> str:
    """Say whether whole steps are started as one CUDA graph, and why not."""
    if step.no_graph:
        return f"no: {step.no_graph}"
    choice = "" if step.config.step_graph is StepGraphs.ON else ", if that is faster in the first steps"
    return f"full batches{choice}; others eagerly, as the first steps are"


def startup_report(
    step: TrainStep,
    *,
    data: dict[str, str],
    facts: ModelFacts | None = None,
    decision: Mapping[str, str] | None = None,
) -> StartupReport:
    """The report of a run that is about to start.

    Args:
        step: the training step, with model and optimizers.
        data: lines about the data (rows, splits, quarantine), from whoever prepared it.
        facts: of the model before it was made parallel; needed if it was.
        decision: what decides about checkpoints and the end; see `early_stop.decision_lines`.
    """
    model = step.model
    config = step.config
    facts = facts or ModelFacts.of(model)
    tables = model.inputs.tables
    kernels = {str(name): str(value) for name, value in flat_lines(model.embeddings.report())}
    training = {
        "dense network": f"{facts.parameters.dense:,} weights, {facts.flops / 1e6:.2f} MFLOP a sample and step, "
        f"{config.optimizer.value}",
        "tables": f"{len(tables)}, {sum(table.num_rows for table in tables):,} rows, {facts.tables}",
        "precision": f"{step.precision.value} ({step.precision_reason}); weights and optimizer state FP32",
        **({"dense products": step.products} if step.products else {}),
        **_waiting_line(step),
        "torch.compile": _compile_line(step),
        "memory": step.memory,
        "batch": _batch_line(step),
    }
    if config.compile is not Compile.OFF or step.device.type == "cuda":
        training["compiled code is kept"] = compiled_code_line()
    if reason := why_no_events():
        training["TensorBoard"] = f"no event files: {reason}; metrics.jsonl has every number"
    pooled = model.embeddings.config.pooled
    # On a CPU `auto` changes nothing that a reader could miss.
    if pooled is PooledDtype.COMPUTED or (pooled is PooledDtype.AUTO and step.device.type != "cpu"):
        training["pooled fields"] = _pooled_line(step)
    if facts.has_dots:
        training["pairwise dot products"] = dot_kernel()
    if facts.has_mixes:
        training["combinations of fields"] = fields_kernel()
    sections = {
        "Machine": machine_lines() | version_lines(),
        **untested_torch_section(),
        "Data": data,
        "Training": training | dict(decision or {}),
        **facts.towers,
        **_rank_sections(step),
        "Embedding kernels": kernels,
    }
    return StartupReport(
        sections=sections,
        brief=(
            *_brief_data(data),
            f"model    {_brief_model(step, facts)}",
            f"machine  {_brief_machine(step)}",
            f"kernel   {_brief_kernel(kernels)}",
            *_slower_than_asked(sections),
            *(f"         versions: {lines['found']}" for lines in untested_torch_section().values()),
        ),
    )


_ORDINARY_DATA = ("rows", "split", "bad rows", "tables", "text kernel", "encoded", "negatives")
_ORDINARY_STARTS = (
    "reading",
    "unknown in",
    "missing in",
    "truncated in",
    "warning",
    "repeats",
)  # warnings are said, unknown ids shown with metrics


_SLOWER = ("slower", "without C++", "does nothing")


def _slower_than_asked(sections: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Repeat what says that something is slower than it could be here, or that a setting does nothing."""
    return [
        f"         {name}: {text}"
        for title, lines in sections.items()
        for name, text in lines.items()
        if title not in ("Machine", "Data") and any(word in text for word in _SLOWER)
    ]


def _brief_data(data: Mapping[str, str]) -> list[str]:
    """Say which rows there are, and below it whatever of the data is worth a look."""
    parts = [data[name] for name in ("rows", "split") if name in data]
    lines = [f"data     {'; '.join(parts)}"] if parts else []
    if data.get("bad rows", "none") != "none":
        lines.append(f"         bad rows: {data['bad rows']}")
    for name, text in data.items():
        if name not in _ORDINARY_DATA and not name.startswith(_ORDINARY_STARTS):
            lines.append(f"         {name}: {text}")
    return lines


def _brief_model(step: TrainStep, facts: ModelFacts) -> str:
    tables = step.model.inputs.tables
    kind = type(step.model).__name__
    rows = sum(table.num_rows for table in tables)
    text = f"{kind}: {rows:,} rows in {len(tables)} table{'' if len(tables) == 1 else 's'} ({facts.tables})"
    text += f", {facts.parameters.dense:,} weights beside them"
    return text + (f", {facts.towers['Towers']['grouping'].partition(',')[0]}" if facts.towers else "")


def _brief_machine(step: TrainStep) -> str:
    lines = machine_lines()
    if step.device.type != "cpu":
        lines["machine"] = f"{torch.cuda.get_device_name(step.device)}; {lines['machine']}"
    threads = torch.get_num_threads()
    text = f"{lines['machine']}; {step.precision.value}, {threads} thread{'' if threads == 1 else 's'}"
    return text if step.parallel is None else f"{text}; {step.parallel.topology.describe()}"


def _brief_kernel(kernels: Mapping[str, str]) -> str:
    """Say which kernel looks rows up and why, without where that was kept."""
    why = kernels.get("why", "").partition(" (/")[0]
    name = kernels.get("kernel", "none")
    return f"{name}: {why}" if why else name


def _pooled_line(step: TrainStep) -> str:
    """Say what pooled fields are written as, and why not BF16 where it was asked for, or would be taken."""
    if not step.model.rounds_pooled:
        return "fp32: on many ranks the formats of wires say what travels (--wire bf16)"
    if step.activations.dtype is torch.bfloat16:
        return "bf16"
    return f"fp32: the network computes in {step.precision.value}"


def _tables_text(sizes: Collection[TableSize]) -> str:
    in_format = dict[str, int]()
    for size in sizes:
        in_format[size.row_format.value] = in_format.get(size.row_format.value, 0) + size.weight_bytes
    parts = [f"{size / 2**20:,.1f} MiB in {name}" for name, size in in_format.items()]
    return " + ".join(parts) or "0.0 MiB in a storage of their own"


def _rank_sections(step: TrainStep) -> dict[str, dict[str, str]]:
    if step.parallel is None:
        return {}
    sections = rank_sections(step.parallel, overlaps=step.overlaps(), compute=step.activations.dtype)
    sections["Ranks"] |= {} if step.exchange is None else step.exchange.lines()
    return sections


def tower_section(model: Model) -> dict[str, dict[str, str]]:
    """The section on towers: their module, and for each its features and compression; none for a flat model."""
    if model.towers is None:
        return {}
    layer = model.towers
    config = model.towers.config
    numbers = f"{layer.input_dim} numbers in, {layer.output_dim} out"
    lines = {
        "grouping": f"{len(layer.towers)} towers, strategy {layer.towers.strategy or 'not named'}",
        "module": f"{config.kind.value}, compression N / D = {config.compression:g}, c = {config.c}, p = {config.p}",
        "all towers": f"{numbers}, compression {layer.compression_ratio:.2f}",
    }
    return {"Towers": lines | {f"tower {each.tower}": each.text() for each in layer.report()}}


def _batch_line(step: TrainStep) -> str:
    config = step.config
    rows = f"{config.loader.batch_size:,} rows" + (" a rank" if step.parallel is not None else "")
    return f"{config.token_budget:,} events of all lists, at most {rows}" if config.token_budget else rows


def _compile_line(step: TrainStep) -> str:
    mode = step.config.compile
    words = [] if mode is Compile.OFF or step.model.towers is None else ["the interaction; tower modules run eagerly"]
    if mode is Compile.CUDA_GRAPHS and not step.no_graph:
        words.append("whole steps as CUDA graphs: see below")
    elif mode is Compile.CUDA_GRAPHS:
        reason = why_no_graphs(mode, device=step.device)
        words.append(f"without CUDA graphs: {reason}" if reason else "full batches as CUDA graphs, others eagerly")
    return f"{mode.value} ({'; '.join(words)})" if words else mode.value


def flat_lines(value: object, *, prefix: str = "") -> list[tuple[str, str]]:
    """Nested plain data as (dotted name, text) lines."""
    if isinstance(value, dict):
        return [line for name, item in value.items() for line in flat_lines(item, prefix=f"{prefix}{name} ")]
    return [(prefix.strip(), ", ".join(map(_words, value)) if isinstance(value, list | tuple) else str(value))]


def _words(value: object) -> str:
    return " ".join(f"{name} {item}" for name, item in value.items()) if isinstance(value, dict) else str(value)
