"""The sections of a Job: what may be asked, in which unit, and what it does. `stretto keys` prints the descriptions.

A plain value in a section's place sets its `main` key: `zero = 3` is `[zero] stage = 3`. A field whose default is None has
no fixed default (what it becomes is said in its description), and "auto" is how to ask for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stretto.anatomy import DECODERS
from stretto.keys import nearest, show

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]

#: The four dtypes, and how torch, Lightning and Accelerate also spell them.
DTYPES: Mapping[Dtype, tuple[str, ...]] = MappingProxyType(
    {
        "fp64": ("float64", "double", "64", "64-true"),
        "fp32": ("float32", "float", "single", "full", "32", "32-true"),
        "bf16": ("bfloat16", "bf16-mixed"),
        "fp16": ("float16", "half", "16", "16-mixed", "fp16-mixed"),
    }
)

#: Widest first; a narrower master copy would lose what compute has.
DTYPE_BYTES: Mapping[Dtype, int] = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2})

DATA_KINDS = ("text:PATH_OR_GLOB", "tokens:FILES", "hf:NAME_OR_FOLDER", "python:pkg.mod:function")

PIPELINES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "bfs", "none")


# Python's true is 1; a request's is not.
def _whole(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "true and false are no numbers")
    return value


def _real(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "true and false are no numbers")
    return value


def _dtype(value: object) -> object:
    if not isinstance(value, str | int) or isinstance(value, bool):
        return value
    name = str(value).lower().removeprefix("torch.")
    return next((dtype for dtype, names in DTYPES.items() if name in names), name)


def _steps_or_share(value: object) -> object:
    """10 -> 10 steps; 0.1 -> a share; text as the command line gives it, either."""
    if isinstance(value, str):
        try:
            value = float(value) if "." in value or "e" in value else int(value)
        except ValueError:
            raise ValueError("is neither steps nor a share of them; write steps as 100, or a share as 0.1") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is neither steps nor a share of them; write steps as 100, or a share as 0.1")
    if value < 0 or (isinstance(value, float) and not value <= 1):
        raise ValueError("is not possible: a share is a number from 0.0 to 1.0, steps a whole number; write 100 or 0.1")
    return value


def _model_name(value: str) -> str:
    if value in DECODERS:
        return value
    kind, _, rest = value.partition(":")
    if kind in ("hf", "python") and rest and (kind == "hf" or ":" in rest):
        return value
    near = nearest(value, DECODERS)
    known = f"the built-in models are {', '.join(DECODERS)}; others are hf:FOLDER_OR_ID and python:package.module:function"
    likely = near or (f"hf:{value}" if "/" in value and kind == value else "tiny")
    raise ValueError(f"is not a model; {known}; write model={show(likely)}")


def _one(value: object) -> object:
    if isinstance(value, list | tuple):
        raise ValueError('is a list, and mixing sources is not in this version yet; write one, as data="text:corpus.txt"')
    return value


def _source(value: str) -> str:
    if value in ("topics", "random"):
        return value
    kind, _, rest = value.partition(":")
    if kind in ("text", "tokens", "hf", "python") and rest and (kind != "python" or ":" in rest):
        return value
    kinds = f"topics, random, {', '.join(DATA_KINDS)}"
    likely = nearest(value, ("topics", "random")) or next(
        (k for k in DATA_KINDS if k.startswith(f"{kind}:")), f"text:{value or 'corpus.txt'}"
    )
    raise ValueError(f"is not a source of data; the kinds are {kinds}; write data={show(likely)}")


def _pipeline(value: str) -> str:
    if value in PIPELINES or value.startswith("file:"):
        return value
    likely = nearest(value, PIPELINES) or "1f1b"
    raise ValueError(f'is not a pipeline schedule; they are {", ".join(PIPELINES)} and file:PATH; write pipeline="{likely}"')


def _split(value: object) -> object:
    """0.05 or "0.05" -> a share; other text is the name of a split."""
    try:
        share = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        return value
    if not 0 <= share < 1:
        raise ValueError(
            'is not possible: the share held out is from 0.0 to below 1.0; write data.split=0.05, or a split\'s name as "train"'
        )
    return share


def _several(value: object) -> object:
    """A single item stands for a list of one."""
    return (value,) if isinstance(value, str | int) and not isinstance(value, bool) else value


Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_real)]
Nonnegative = Annotated[float, Field(ge=0), BeforeValidator(_real)]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(_real)]
Decay = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_real)]
Names = Annotated[tuple[str, ...], BeforeValidator(_several)]
Numbers = Annotated[tuple[Natural, ...], BeforeValidator(_several)]
Source = Annotated[str, BeforeValidator(_one), AfterValidator(_source)]
Precise = Annotated[Dtype, BeforeValidator(_dtype)]
Warmup = Annotated[int | float, BeforeValidator(_steps_or_share)]


class Section(BaseModel):
    """Frozen; unknown keys are refused; a plain value sets the key named by `main`."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
    main: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _keys_of(cls, values: object) -> object:
        if isinstance(values, Section):
            return values
        keyed = values if isinstance(values, Mapping) else {cls.main: values}
        open_ = {name for name, field in cls.model_fields.items() if field.default is None}
        return {key: None if value == "auto" and key in open_ else value for key, value in keyed.items()}


class Model(Section):
    main: ClassVar[str] = "name"
    name: Annotated[str, AfterValidator(_model_name)] = Field(
        default="tiny",
        description="a built-in name, hf:FOLDER_OR_ID or python:package.module:function (not read where a module is handed to Engine)",
    )
    weights: Literal["auto", "pretrained", "random"] = Field(
        default="auto", description="pretrained = the folder's own; random = from the seed; auto = pretrained where there are any"
    )
    blocks: Count | None = Field(
        default=None, description="decoder blocks (auto: the model's own; built-in models only, as all shape keys)"
    )
    hidden: Count | None = Field(default=None, description="width of the residual stream, elements")
    heads: Count | None = Field(default=None, description="attention heads of the queries")
    kv_heads: Count | None = Field(default=None, description="attention heads of keys and values; divides heads")
    ffn: Count | None = Field(default=None, description="width inside the MLP, elements")
    head_dim: Count | None = Field(default=None, description="width of one head, elements (auto: hidden / heads)")
    vocab: Count | None = Field(default=None, description="number of token ids")
    positions: Count | None = Field(default=None, description="tokens that learned positions can number")
    tied: bool | None = Field(default=None, description="whether the head is the embedding's own weight")
    dropout: Decay | None = Field(
        default=None, description="share dropped of the embedding and of what each block adds to the residual stream (auto: 0.0)"
    )
    attention_dropout: Decay | None = Field(default=None, description="share dropped of attention's probabilities (auto: 0.0)")

    def sizes(self) -> dict[str, int | float | bool]:
        """The shape keys that were given, by the anatomy's own names."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name not in ("name", "weights")}
        return {name: value for name, value in given.items() if value is not None}


class Data(Section):
    main: ClassVar[str] = "source"
    source: Source = Field(
        default="topics", description=f"topics (text that ships with Python), random (seeded tokens), {', '.join(DATA_KINDS)}"
    )
    split: Annotated[float | str, BeforeValidator(_split)] | None = Field(
        default=None, description="share of the samples held out for evaluation (0.0 to 1.0), or the name of a split (auto: none, or train)"
    )
    column: str | None = Field(default=None, description="column of a table that holds the text or the tokens (auto: text, or input_ids)")
    tokenizer: str | None = Field(default=None, description="folder or id of a Hugging Face tokenizer (auto: bytes, or the model's own)")
    seed: Natural | None = Field(default=None, description="seed of the order of samples (auto: seed)")


class Zero(Section):
    main: ClassVar[str] = "stage"
    stage: Annotated[int, Field(ge=0, le=3), BeforeValidator(_whole)] = Field(
        default=1,
        description="what each dp rank keeps only its part of: 0 = nothing (as DDP), 1 = optimizer, 2 = and gradients, 3 = and parameters",
    )
    gradients: Literal["each", "end"] | None = Field(
        default=None,
        description="each = reduce after each microbatch (less memory), end = once a step (less traffic); auto: each in stages 2 and 3",
    )
    params: Literal["microbatch", "step"] = Field(
        default="microbatch",
        description="stage 3 gathers parameters anew for each microbatch, or once and keeps them for the step (less traffic)",
    )
    granularity: Literal["element", "row", "matrix"] = Field(
        default="element", description="where a group may be cut: anywhere, between rows, or between whole matrices (as Muon needs)"
    )
    keep: Names = Field(default=(), description="module name patterns whose parameters stay gathered in stage 3 (layers.0.*)")


class Tensor(Section):
    main: ClassVar[str] = "sequence"
    sequence: bool | None = Field(
        default=None,
        description="whether tp ranks also share the tokens of what runs between cut layers (norms, sums, dropout): less memory, the same "
        "traffic (auto: where no code of the model's own sees their shape, as with all models that bring their plan)",
    )


class Batch(Section):
    main: ClassVar[str] = "size"
    size: Count = Field(default=8, description="rows (sequences or samples) a step, of the whole job")
    micro_size: Count | None = Field(default=None, description="rows a forward, of one dp rank (auto: all its rows at once)")
    seq_len: Count = Field(default=128, description="tokens a row")


class Pipeline(Section):
    main: ClassVar[str] = "schedule"
    schedule: Annotated[str, AfterValidator(_pipeline)] = Field(
        default="1f1b", description=f"order of microbatches over stages: {' '.join(PIPELINES)}, or file:PATH; one stage has but one order"
    )
    chunks: Count | None = Field(
        default=None,
        description="stages a pipeline rank holds, one after the other (auto: 2 in interleaved, bfs, zb-v and dualpipe-v, else 1)",
    )
    split: Names = Field(default=(), description="first module of each later stage (empty: cut as balance says)")
    balance: Literal["work", "memory", "both"] = Field(
        default="work", description="what the cut leaves even: the busiest rank's work, the fullest rank's bytes, or both as well as can be"
    )
    measured: str = Field(default="", description="file of `stretto measure JOB --parts FILE`: seconds and bytes in place of counted ones")


class Precision(Section):
    main: ClassVar[str] = "compute"
    compute: Precise | None = Field(
        default=None, description="dtype of forward and backward: fp64 fp32 bf16 fp16 (auto: bf16 on a GPU, fp32 on a CPU)"
    )
    master: Precise | None = Field(
        default=None, description="dtype of the weights the optimizer updates, and of its state (auto: fp32, or fp64 with fp64)"
    )
    reduce: Precise | None = Field(
        default=None, description="dtype in which gradients are added over ranks and microbatches (auto: as master)"
    )
    max_skips: Count = Field(default=20, description="steps in a row with a gradient that is not finite before the run stops")
    initial_scale: Positive = Field(default=65536.0, description="first loss scale with fp16; halved at each overflow")
    scale_window: Count = Field(default=2000, description="good steps after which the loss scale of fp16 doubles")


class Optimizer(Section):
    main: ClassVar[str] = "name"
    name: Literal["adamw", "sgd"] = Field(default="adamw", description="adamw or sgd")
    lr: Positive = Field(default=3e-4, description="learning rate at the top of the schedule")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="decay of the two moments a step (adamw)")
    eps: Positive = Field(default=1e-8, description="added to the root of the second moment (adamw)")
    weight_decay: Nonnegative = Field(
        default=0.1, description="share of a weight taken off a step, times lr; only tensors of 2 or more dims"
    )
    momentum: Decay = Field(default=0.0, description="decay of the velocity a step (sgd)")


class Schedule(Section):
    main: ClassVar[str] = "shape"
    shape: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how lr falls after warm-up: cosine, linear, constant (not at all)"
    )
    warmup: Warmup = Field(default=0, description="steps in which lr rises from 0: a whole number, or a share of the schedule as 0.02")
    min_ratio: Share = Field(default=0.1, description="lr at the end, as a share of optimizer.lr")
    steps: Count | None = Field(default=None, description="steps the schedule is laid over (auto: the steps of the job)")

    def warmup_steps(self, total: int) -> int:
        """Steps of warm-up where the schedule is laid over `total` steps."""
        return self.warmup if isinstance(self.warmup, int) else round(self.warmup * total)


class Compile(Section):
    main: ClassVar[str] = "mode"
    mode: Literal["none", "block"] = Field(default="none", description="block = torch.compile each decoder block once")
    backend: str = Field(default="inductor", description="torch.compile's backend; inductor needs a C++ compiler, aot_eager none")


class Eval(Section):
    main: ClassVar[str] = "every"
    data: Source | None = Field(default=None, description="source to evaluate on, written as data's (auto: the share data.split holds out)")
    every: Natural = Field(default=0, description="steps between evaluations; 0 = none")
    batches: Count | None = Field(default=None, description="batches of batch.size rows an evaluation (auto: all there are)")


class Checkpoint(Section):
    main: ClassVar[str] = "every"
    every: Natural = Field(default=0, description="steps between checkpoints, and one after the last step; 0 = only where a run is stopped")
    keep: Count = Field(default=3, description="checkpoints kept, newest first; older ones go when a newer one is complete")
    keep_every: Natural = Field(default=0, description="keep also those of steps that this divides; 0 = none")
    best: bool = Field(default=False, description="save at the lowest evaluation loss so far, and keep that one")
    folder: str | None = Field(
        default=None, description="folder or fsspec URL (s3://bucket/run) that holds them (auto: checkpoints in the run folder)"
    )
    weights: Literal["all", "trained"] = Field(
        default="all", description="trained = leave frozen parameters out; the model that training began with has them"
    )
    background: bool = Field(default=True, description="write while training goes on: a step waits only for a copy in memory")
    busy: Literal["wait", "skip"] = Field(
        default="wait", description="when one is due and the last is still being written: wait for it, or skip the one that is due"
    )
    memory: Natural = Field(
        default=0,
        description="steps between copies of the state in two ranks' memory, which are saved where a rank is lost; 0 = none",
    )
    max_failures: Natural = Field(default=3, description="checkpoints in a row that may fail to be written before the run stops")
    export: Literal["none", "huggingface"] = Field(default="none", description="huggingface = also write the final model as such a folder")


class Log(Section):
    main: ClassVar[str] = "every"
    every: Count = Field(default=10, description="steps between progress lines where output is no terminal")


class Profile(Section):
    main: ClassVar[str] = "steps"
    steps: Numbers = Field(default=(), description="steps written to timeline.json, as [10, 11]; the first is 1")
    ranks: Numbers = Field(default=(), description="ranks whose timelines are written (empty: one of each pipeline stage)")


class Comm(Section):
    main: ClassVar[str] = "transport"
    transport: Literal["auto", "nccl", "gloo", "shm"] = Field(
        default="auto",
        description="what carries messages between ranks (auto: nccl on GPUs; on CPUs shared memory inside a machine, else gloo)",
    )
    init_timeout: Positive = Field(default=120.0, description="seconds to wait for all ranks to meet at the start")
    step_timeout: Positive = Field(default=600.0, description="seconds a collective may wait for another rank before it counts as lost")
