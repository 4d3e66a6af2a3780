"""`EngineArgs`: every option of an engine once, with its type, default, help, and what it excludes.

`LLM`'s keywords, the options of `forge generate`, `forge serve` and the other commands, and the chapters' come from
these fields. A new option is one field here, and its use in `LLM`. Importing this module loads no engine, so that
`--help` answers at once; an instance is checked when it is made, before anything is loaded.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from forge.errors import UsageError
from forge.model.catalog import DEFAULT_MODEL
from forge.option import check_needs, flag_of, option
from forge.reasons import PreemptionMode

if TYPE_CHECKING:
    from forge.cache.eviction import EvictionPolicy
    from forge.cache.factory import CacheFactory
    from forge.engine.policies import AdmissionOrder, SchedulerConfig, VictimPolicy
    from forge.engine.proposer import Proposer
    from forge.model.loader import LoadedModel, LoadProgress
    from forge.pieces import Pieces

_MODEL, _SPECULATION, _SCHEDULER, _SWITCHES = "Model", "Speculation", "Scheduler", "Scheduler switches"
_POOL_SIZES = ("gpu_memory_utilization", "num_blocks", "kv_memory")
"""The options that say how large the pool is."""
KV_KINDS = {
    "off": "every forward computes the whole sequence again",
    "basic": "a contiguous run per sequence (also: on)",
    "paged": "blocks from one pool",
    "prefix": "paged, and prompts that begin alike share blocks",
}
CPU_PREFILL_ONLY_MEMORY = 40 << 20
"""Temporary bytes that a step takes for prefill-only requests on the CPU: about what its caches hold. A forward over
2,048 rows of the 0.6B shape needs 134 MB and computes 970 tokens/s; over 512 rows 1,150."""
LARGE_GPU_STEP_TOKENS = 8192
"""Tokens of a step there, for the reason given next; not measured."""
_LARGE_GPU_PREFILL_ONLY = {"prefill_only_tokens": 8192, "prefill_only_memory": 4 << 30}
"""A large GPU's products come in waves of tiles, one per multiprocessor. Counted, not measured: 2,048 rows by a matrix
of 2,560 make 160 tiles of 128 x 256, two waves of which 132 multiprocessors idle through 39 %; 8,192 rows idle through
3 %."""
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_P = ParamSpec("_P")
_Built = TypeVar("_Built")


@dataclass(frozen=True)
class EngineArgs:
    """The options of an engine. Raises `UsageError` for a value that has no meaning, and for two that exclude each
    other, naming them as on the command line."""

    model: "str | Path | LoadedModel" = option(
        DEFAULT_MODEL,
        "A bundled or pulled model's name, a GGUF file, a Hugging Face folder, or hash.",
        flags="--model -m",
    )
    _: KW_ONLY
    kv: "str | CacheFactory | None" = option(
        None,
        f"KV cache: {'; '.join(f'{kind}, {words}' for kind, words in KV_KINDS.items())}.",
        shown="off, or paged with --speculate",
    )
    """A name, or a function from a `CacheSize` to a `KvCache`."""
    speculate: "str | Proposer | None" = option(
        None,
        "Draft tokens and verify them together: draft, a small model; ngram, what followed before; grammar, "
        "what a grammar leaves no choice about; off.",
        shown="off",
    )
    """A name, or a `Proposer`."""

    device: str = option("cpu", "cpu, reference or cuda.", _MODEL)
    threads: int | None = option(None, "CPU threads.", _MODEL, shown="all usable CPUs")
    quantize: str | None = option(None, "Quantize float weights as they are loaded: q8_0.", _MODEL)
    max_model_len: int | None = option(
        None,
        "Prompt and output tokens at most; bounds the memory reserved.",
        _MODEL,
        shown="the model's context, up to 4,096",
    )
    block_size: int = option(16, "Tokens per KV block.", _MODEL)
    num_blocks: int | None = option(
        None, "Blocks in the KV cache's pool.", _MODEL, shown="512 for paged and prefix, or what one sequence may take"
    )
    kv_memory: int | str | None = option(None, "The pool's size in bytes instead: 64MB, 1.5GB, 256MiB.", _MODEL)
    gpu_memory_utilization: float | None = option(
        None,
        "Or from what the GPU has left: the share of its memory that may be in use.",
        _MODEL,
        shown="what all sequences need, up to 0.9",
    )
    kv_dtype: str | None = option(
        None, "How keys and values are stored: float32, float16, bfloat16 or int8.", _MODEL, shown="the device's own"
    )
    invariant: bool = option(
        False, "One tiling for every batch, so that bits never depend on it (cuda; elsewhere they never do).", _MODEL
    )
    kernels: str | None = option(None, "triton, or torch (cuda).", _MODEL, shown="triton")

    draft: str | Path | Sequence[str | Path] = option(
        (), "The draft model; may be repeated, then all of them propose.", _SPECULATION, shown="tales-draft"
    )
    draft_device: str | None = option(
        None, "Where drafts are computed: cpu, reference or cuda.", _SPECULATION, shown="--device"
    )
    k: int = option(4, "Draft tokens at a time, at most.", _SPECULATION)
    speculate_fixed: bool = option(False, "Always draft that many, also where it loses.", _SPECULATION)
    acceptance: str = option(
        "gumbel",
        "Which draft tokens stand when tokens are sampled: gumbel (the output is the same as without a draft) or "
        "rejection (more are accepted; reproducible only with --speculate-fixed).",
        _SPECULATION,
    )

    max_num_seqs: int = option(16, "Sequences that may run at once.", _SCHEDULER)
    max_num_batched_tokens: int | None = option(
        None,
        "Tokens that one step may compute, whatever is asked of them.",
        _SCHEDULER,
        shown="512, or 8,192 on a large GPU",
    )
    chunked_prefill: bool = option(
        True, "Long prompts in pieces beside decodes, or whole in a step of their own.", _SWITCHES
    )
    order: "str | AdmissionOrder" = option(
        "fcfs",
        "Who is admitted first: fcfs; priority; sjf, the shortest job; sjf-aged, the same without starvation.",
        _SCHEDULER,
    )
    """A name, or a function of one's own, as are `preempt` and `evict`."""
    preempt: "str | VictimPolicy" = option(
        "lifo",
        "Which sequence is preempted: lifo (the newest), lifo-others (never the one that asks), or least-progressed.",
        _SCHEDULER,
    )
    evict: "str | EvictionPolicy" = option(
        "lru",
        "Which cached block is evicted: lru (released longest ago) or prefix-cost (rarely found, cheap to compute).",
        _SCHEDULER,
    )
    preemption: PreemptionMode = option("recompute", "What becomes of them: recompute, or swap.", _SCHEDULER)
    num_host_blocks: int = option(256, "Blocks in the pool to swap to.", _SCHEDULER)
    prefix_planning: bool = option(
        True, "Requests that begin alike wait while one of them computes what they share.", _SWITCHES
    )
    """Without it, prefill-only requests share nothing."""
    prefill_only: bool = option(True, "A generation of one token at most is prefill-only.", _SWITCHES)
    prefill_only_tokens: int | None = option(
        None,
        "Tokens of a step in which only prefill-only requests run.",
        _SCHEDULER,
        shown="2,048, or 8,192 on a large GPU",
    )
    prefill_only_memory: int | str | None = option(
        None, "Temporary memory that a step may take for them.", _SCHEDULER, shown="what the caches bear"
    )
    check: bool = option(False, "After each step, see that every rule of scheduler and cache holds.", _SCHEDULER)
    """Raises AssertionError where one does not."""

    pieces: "Pieces | None" = None
    """The pieces that the engine is put together from; None means its own."""
    time_operations: bool = False
    """Keep time per layer and operation, for `LLM.operation_times()`."""
    on_load_progress: "LoadProgress | None" = None
    """Called with (bytes loaded, bytes in all)."""
    on_compile_progress: Callable[[int, int], None] | None = None
    """Called with (kernels compiled, kernels in all) if any have to be, which happens once per machine."""

    def __post_init__(self) -> None:
        from forge.backends.choices import packed_weights_wanted
        from forge.backends.devices import check_device, check_kv_dtype, checked_utilization
        from forge.cache.eviction import eviction_policy
        from forge.cache.factory import canonical_mode
        from forge.speculation.setup import checked_acceptance, checked_mode

        _require_positive("block_size", self.block_size)
        checked_mode(self.speculate, self.k)
        checked_acceptance(self.acceptance)
        self._config({})  # checks the scheduler's
        counts = {"num_blocks": self.num_blocks, "kv_memory": self.pool_bytes}
        for name, value in (counts | {"threads": self.threads, "max_model_len": self.max_model_len}).items():
            if value is not None:
                _require_positive(name, value)
        sizes = [name for name in _POOL_SIZES if getattr(self, name) is not None]
        if len(sizes) > 1:
            both = " and ".join(map(flag_of, sizes[:2]))
            raise UsageError(f"{both} both say how large the KV cache is: give one of them")
        if self.gpu_memory_utilization is not None:
            checked_utilization(self.gpu_memory_utilization)
        if isinstance(self.cache, str):
            canonical_mode(self.cache)
        eviction_policy(self.evict)
        check_device(self.device, self.quantize, self.kernels)
        packed_weights_wanted()
        if self.kv_dtype is not None:
            for device in (self.device, self.draft_device or self.device):
                check_kv_dtype(self.kv_dtype, device)
        if self.draft_device is not None:
            check_device(self.draft_device)
        check_needs(vars(self) | {"kv": self.cache}, self._changed(), in_python=True)

    def _changed(self) -> set[str]:
        """Return the options that are not at their default."""
        options = {option.name: option.default for option in fields(self) if "help" in option.metadata}
        return {name for name, default in options.items() if getattr(self, name) not in (default, [])}

    @property
    def cache(self) -> "str | CacheFactory":
        """The kind of cache: speculation needs one, so its default is paged."""
        if self.kv is None:
            return "off" if self.speculate in (None, "off") else "paged"
        return self.kv.strip() if isinstance(self.kv, str) else self.kv

    @property
    def pool_bytes(self) -> int | None:
        """`kv_memory` as a number of bytes."""
        return memory_bytes(self.kv_memory, "--kv-memory")

    @property
    def drafts(self) -> Sequence[str | Path]:
        return [self.draft] if isinstance(self.draft, str | Path) else self.draft

    def scheduler_config(self) -> "SchedulerConfig":
        """Return the scheduler's options, with the device's defaults for those that are None."""
        from forge.backends.devices import is_large_gpu

        if is_large_gpu(self.device):
            tokens = max(LARGE_GPU_STEP_TOKENS, self.max_num_seqs)
            return self._config(_LARGE_GPU_PREFILL_ONLY | {"max_num_batched_tokens": tokens})
        return self._config({"prefill_only_memory": CPU_PREFILL_ONLY_MEMORY} if self.device == "cpu" else {})

    def _config(self, defaults: dict[str, Any]) -> "SchedulerConfig":
        """Build a `SchedulerConfig` from the fields of the same names. Raises `UsageError`."""
        from forge.engine.policies import SchedulerConfig

        options = {field.name: getattr(self, field.name) for field in fields(SchedulerConfig)}
        options["prefill_only_memory"] = memory_bytes(self.prefill_only_memory, "--prefill-only-memory")
        return SchedulerConfig(**defaults | {name: value for name, value in options.items() if value is not None})


def memory_bytes(size: int | str | None, flag: str = "--kv-memory") -> int | None:
    """Convert `64MB` to a number of bytes: k, M, G and T are powers of 1000, followed by an i of 1024. A number stays
    as it is.

    Raises `UsageError` for any other text.
    """
    if not isinstance(size, str):
        return size
    match = _BYTES.fullmatch(size.strip())
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{flag} takes a size such as 64MB, 1.5GB or 256MiB, and {size!r} is none")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def keywords_of(
    args: Callable[_P, EngineArgs],
) -> Callable[[Callable[[_Built, EngineArgs], None]], Callable[Concatenate[_Built, _P], None]]:
    """Give a constructor that takes `EngineArgs` their fields as its parameters, for callers, editors and mypy."""

    def decorate(init: Callable[[_Built, EngineArgs], None]) -> Callable[Concatenate[_Built, _P], None]:
        @wraps(init)
        def construct(self: _Built, /, *positional: _P.args, **named: _P.kwargs) -> None:
            init(self, args(*positional, **named))

        parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *signature(args).parameters.values()]
        construct.__signature__ = signature(args).replace(parameters=parameters)  # type: ignore[attr-defined]
        return construct

    return decorate


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{flag_of(name)} must be a whole number of at least 1, got {value!r}")
