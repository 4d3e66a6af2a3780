"""What a shell may offer for the word that is being typed. Where nothing here fits, shells offer files.

It is looked up when a shell asks, and nothing heavy is loaded for it.
"""

from collections.abc import Callable, Iterable
from importlib import import_module

import typer


def models(incomplete: str) -> list[str]:
    """Bundled and pulled models, and the one without a file."""
    from forge.model.catalog import BUNDLED_MODELS, HASH_MODEL, pulled_models

    names = [name for model in BUNDLED_MODELS if model.present for name in (*model.aliases, model.name)]
    names += [model.name for model in pulled_models()] + [HASH_MODEL]
    return _beginning(names, incomplete)


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


def names_in(module: str, *tables: str) -> Callable[[str], list[str]]:
    """Complete an option whose values are the names in some tables of a module, which is imported when a shell asks."""

    def complete(incomplete: str) -> list[str]:
        loaded = import_module(module)
        return _beginning([name for table in tables for name in getattr(loaded, table)], incomplete)

    return complete


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


COMPLETIONS: dict[str, Callable[..., list[str]]] = {
    "model": models,
    "draft": models,
    "kv": names_in("forge.cache.factory", "KV_MODES", "ALIASES"),
    "kv_dtype": names_in("forge.cache.kv_storage", "KV_DTYPES"),
    "device": names_in("forge.backends.choices", "DEVICES"),
    "draft_device": names_in("forge.backends.choices", "DEVICES"),
    "quantize": names_in("forge.backends.choices", "QUANTIZE_TYPES"),
    "kernels": one_of("triton", "torch"),
    "speculate": names_in("forge.speculation.setup", "MODES"),
    "acceptance": one_of("gumbel", "rejection"),
    "order": names_in("forge.engine.policies", "ADMISSION_ORDERS"),
    "preempt": names_in("forge.engine.policies", "VICTIM_POLICIES"),
    "evict": names_in("forge.cache.eviction", "EVICTION_POLICIES"),
    "preemption": names_in("forge.engine.policies", "PREEMPTION_MODES"),
    "on_engine_death": one_of("exit", "restart"),
    "show": one_of("blocks"),
    "only": one_of("run"),
    "bug": bugs,
}
"""The function that completes an option's value, by the name of its field."""
