"""The measured part of the model card, `README.md`: between two marks, written by the last step of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: written by models/build.py -->", "<!-- end of figures -->"
Figures = Mapping[str, Mapping[str, Any]]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def write_card(path: Path, new: Figures, old: Figures) -> None:
    """Replace what is between the marks; a file without them gets both at its end."""
    text = path.read_text() if path.exists() else ""
    if BEGIN not in text:
        text += f"\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{figures(new, old)}\n\n{END}{after}")


def figures(new: Figures, old: Figures) -> str:
    """Two tables, old beside new, and the SHA-256 of the new files."""
    targets = [name for name in new if "consistency" in new[name]]
    drafts = [name for name in new if "agreement" in new[name]]
    sums = "\n".join(f"{new[name]['sha256']}  {name}" for name in new)
    return f"{table(targets, new, old, target_lines)}\n\n{table(drafts, new, old, draft_lines)}\n\n```\n{sums}\n```"


def table(names: list[str], new: Figures, old: Figures, lines: Callable[[Mapping[str, Any]], dict[str, str]]) -> str:
    """One column per file before and after; a file that was not there before has one column."""
    columns = [
        (f"{name}, {when}", lines(known[name]))
        for name in names
        for when, known in (("before", old), ("now", new))
        if name in known
    ]
    rows = list(dict.fromkeys(row for _, cells in columns for row in cells))
    head = f"| | {' | '.join(name for name, _ in columns)} |\n|{' --- |' * (len(columns) + 1)}"
    return "\n".join([head, *(f"| {row} | {' | '.join(cells.get(row, '') for _, cells in columns)} |" for row in rows)])


def target_lines(one: Mapping[str, Any]) -> dict[str, str]:
    lines = {
        "parameters": f"{one['parameters']:,}",
        "bytes": f"{one['bytes']:,}",
        "loss on stories, nats per byte": f"{one['held_out_loss']:.4f}",
    }
    for title, key in (("answers right, {}", "answers"), ("{}, held-out phrasing", "answers_held_out_phrasing")):
        for kind, share in one[key].items():
            lines[title.format(kind)] = f"{percent(share)} ({percent(one[f'{key}_of_two'][kind])})"
    for how, shares in one["consistency"].items():
        lines |= {f"consistent mentions, {how} stories, {kind}": percent(share) for kind, share in shares.items()}
    return lines


def draft_lines(one: Mapping[str, Any]) -> dict[str, str]:
    agreement = one["agreement"]
    lines = {
        "parameters": f"{one['parameters']:,}",
        "bytes": f"{one['bytes']:,}",
        "loss on stories, nats per byte": f"{one['held_out_loss']:.4f}",
    }
    lines["greedy agreement with the target"] = percent(agreement["rate"])
    lines |= {f"accepted over proposed, K = {k}": percent(share) for k, share in agreement["accepted"].items()}
    lines["accepted, temperature 0.8, K = 1"] = percent(agreement["sampled"])
    lines["cost of a step over the target's"] = f"{one['cost']:.3f}"
    return lines
