"""From `--speculate` and `--draft` to proposers: loaded, checked against the target, with what they may cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from forge.backends.devices import create_backend
from forge.engine.proposer import Proposer
from forge.engine.rng import MAX_BRANCHES
from forge.errors import UsageError
from forge.model.catalog import is_hash_model, model_name, resolve_model
from forge.model.loader import load_model, load_qwen3, open_weights
from forge.model.model import Model
from forge.speculation.controller import Costs
from forge.speculation.draft import DraftProposer, check_same_tokenizer
from forge.speculation.lookup import ForcedProposer, NgramProposer
from forge.speculation.verification import Acceptance
from forge.tokenizer import Tokenizer

MODES = ("off", "draft", "ngram", "grammar")
ACCEPTANCE_RULES: tuple[Acceptance, ...] = get_args(Acceptance)
DEFAULT_DRAFT = "tales-draft"
"""The bundled draft, for the bundled target."""
DEFAULT_K = 4
MAX_K = 64
ASSUMED_ROW = 0.1
"""What a further row is assumed to add to the target's forward before that is measured."""
ASSUMED_LOOKUP = 0.01
"""What a draft token without a model is assumed to cost."""
_SMALL_DRAFT_BYTES = 64 << 20
"""A draft below this runs on one thread: several would wait for each other longer than they save."""


@dataclass(frozen=True)
class Target:
    """What proposers need to know of the target model and its engine."""

    tokenizer: Tokenizer
    vocab_size: int
    path: Path | None
    max_model_len: int
    max_num_seqs: int
    draft_device: str
    """Where drafts are computed."""
    threads: int | None
    kv_dtype: str
    """How a draft's keys and values are stored: as the target's on its device, as another device's own there."""


def checked_mode(mode: str | Proposer | None, k: int) -> str | Proposer:
    """Return the mode, `off` for None. Raises `UsageError` for an unknown one, and for a K out of range."""
    if not isinstance(mode, Proposer) and mode not in (None, *MODES):
        raise UsageError(f"unknown --speculate {mode!r}; supported: {', '.join(MODES)}")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise UsageError(f"--k is how many draft tokens to propose at a time, 1 to {MAX_K}, got {k!r}")
    return mode or "off"


def checked_acceptance(rule: str) -> Acceptance:
    """Return the acceptance rule. Raises `UsageError` for an unknown one."""
    if rule not in ACCEPTANCE_RULES:
        raise UsageError(f"unknown --acceptance {rule!r}; supported: {', '.join(ACCEPTANCE_RULES)}")
    return cast(Acceptance, rule)


def load_proposers(mode: str | Proposer, drafts: Sequence[str | Path], target: Target) -> list[tuple[Proposer, Costs]]:
    """Load the proposers of a mode, each with its assumed costs. Without `drafts` the bundled one.

    A `Proposer` given as the mode is assumed to cost as little as a lookup.

    Raises `UsageError` for a draft whose tokens are not the target's, and the `ForgeError` of its format for a file
    that is not a sound model.
    """
    if mode == "off":
        return []
    if mode == "ngram":
        mode = NgramProposer()
    if mode == "grammar":
        mode = ForcedProposer()
    if isinstance(mode, Proposer):
        return [(mode, Costs(ASSUMED_LOOKUP, ASSUMED_ROW))]
    if len(drafts) > MAX_BRANCHES:
        raise UsageError(f"--draft is given {len(drafts)} times, and {MAX_BRANCHES} drafts at most can be told apart")
    proposers: list[tuple[Proposer, Costs]] = []
    for draft in drafts or [DEFAULT_DRAFT]:
        if is_hash_model(draft):
            loaded = load_model(draft, lambda: create_backend(target.draft_device, target.threads))
            check_same_tokenizer(target.tokenizer, loaded.tokenizer)
            name, model = str(draft), loaded.model
            costs = Costs(1.0 if target.path is None else ASSUMED_LOOKUP, ASSUMED_ROW)
        else:
            path = resolve_model(draft)
            name, model = model_name(path), _load_draft(path, target, is_default=not drafts)
            costs = _assumed_costs(path, target)
        name = _unused(name, [proposer.name for proposer, _ in proposers])
        proposers.append((_proposer_of(model, name, target), costs))
    return proposers


def _load_draft(path: Path, target: Target, is_default: bool) -> Model:
    threads = 1 if target.draft_device == "cpu" and _num_bytes(path) < _SMALL_DRAFT_BYTES else target.threads
    hint = "; give one that can with --draft MODEL, or take --speculate ngram" if is_default else ""
    with open_weights(path) as weights:
        check_same_tokenizer(target.tokenizer, Tokenizer(weights.tokenizer_spec()), hint)
        return load_qwen3(weights, create_backend(target.draft_device, threads))


def _proposer_of(model: Model, name: str, target: Target) -> DraftProposer:
    try:
        proposer = DraftProposer(
            model,
            vocab_size=target.vocab_size,
            max_num_seqs=target.max_num_seqs,
            max_model_len=target.max_model_len,
            kv_dtype=target.kv_dtype,
            name=name,
        )
    except (MemoryError, ValueError):  # NumPy raises the latter for more bytes than an address can hold
        raise UsageError(
            f"the KV cache of the draft {name} does not fit in memory: lower --max-model-len or --max-num-seqs"
        ) from None
    model.prepare(proposer.storage.layout)
    return proposer


def _assumed_costs(draft: Path, target: Target) -> Costs:
    """Estimate the costs from the weights that a forward has to read."""
    ratio = _num_bytes(draft) / _num_bytes(target.path) if target.path is not None else ASSUMED_LOOKUP
    return Costs(ratio, ASSUMED_ROW)


def _num_bytes(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return max(1, sum(file.stat().st_size for file in files if file.is_file()))


def _unused(name: str, names: Sequence[str]) -> str:
    """Return `name`, numbered if it is taken: the same draft may be given twice."""
    number, candidate = 1, name
    while candidate in names:
        number += 1
        candidate = f"{name} #{number}"
    return candidate
