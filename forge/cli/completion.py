"""What a shell may offer for the word that is being typed. Where nothing here fits, shells offer files.

It is looked up when a shell asks, and nothing heavy is loaded for it.
"""

from collections.abc import Callable, Iterable

import typer


def models(incomplete: str) -> list[str]:
    """Bundled and pulled models, and the one without a file."""
    from forge.model.catalog import HASH_MODEL, bundled_models, pulled_models

    names = [name for model in bundled_models() if model.present for name in (*model.aliases, model.name)]
    names += [model.name for model in pulled_models()] + [HASH_MODEL]
    return _beginning(names, incomplete)


def kv_modes(incomplete: str) -> list[str]:
    from forge.cache.factory import ALIASES, KV_MODES

    return _beginning([*KV_MODES, *ALIASES], incomplete)


def kv_dtypes(incomplete: str) -> list[str]:
    from forge.cache.kv_storage import KV_DTYPES

    return _beginning(KV_DTYPES, incomplete)


def devices(incomplete: str) -> list[str]:
    from forge.backends.choices import DEVICES

    return _beginning(DEVICES, incomplete)


def quantize_types(incomplete: str) -> list[str]:
    from forge.backends.choices import QUANTIZE_TYPES

    return _beginning(QUANTIZE_TYPES, incomplete)


def orders(incomplete: str) -> list[str]:
    from forge.engine.policies import ADMISSION_ORDERS

    return _beginning(ADMISSION_ORDERS, incomplete)


def victim_policies(incomplete: str) -> list[str]:
    from forge.engine.policies import VICTIM_POLICIES

    return _beginning(VICTIM_POLICIES, incomplete)


def eviction_policies(incomplete: str) -> list[str]:
    from forge.cache.eviction import EVICTION_POLICIES

    return _beginning(EVICTION_POLICIES, incomplete)


def preemption_modes(incomplete: str) -> list[str]:
    from forge.engine.policies import PREEMPTION_MODES

    return _beginning(PREEMPTION_MODES, incomplete)


def proposers(incomplete: str) -> list[str]:
    from forge.speculation.setup import MODES

    return _beginning(MODES, incomplete)


def chapters(incomplete: str) -> list[str]:
    """Return the chapters' commands, or their numbers if one is being typed."""
    from forge.book.catalog import entries

    every = entries()
    return _beginning([entry.command for entry in every] + [str(entry.number) for entry in every], incomplete)


def bugs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the bugs of the chapter whose command it is."""
    from forge.book.bugs import bugs_of

    return _beginning(bugs_of(ctx.info_name or ""), incomplete)


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Complete an option whose values are few and fixed."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(names, incomplete)

    return complete


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


COMPLETIONS: dict[str, Callable[[str], list[str]]] = {
    "model": models,
    "draft": models,
    "kv": kv_modes,
    "kv_dtype": kv_dtypes,
    "device": devices,
    "draft_device": devices,
    "quantize": quantize_types,
    "kernels": one_of("triton", "torch"),
    "speculate": proposers,
    "acceptance": one_of("gumbel", "rejection"),
    "order": orders,
    "preempt": victim_policies,
    "evict": eviction_policies,
    "preemption": preemption_modes,
    "on_engine_death": one_of("exit", "restart"),
    "show": one_of("blocks"),
}
"""What is offered for the value of an option, by the name of its field."""
