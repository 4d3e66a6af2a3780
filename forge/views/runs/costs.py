"""Where the time of the steps went, by what they computed: planning, forward pass, choosing tokens, the rest."""

from collections.abc import Iterator
from typing import Any

from forge.views.history import History
from forge.views.report import Report
from forge.views.screen import Part, Table, question, report

_PARTS = {"plan": "schedule_ms", "forward": "forward_ms", "choose": "sample_ms"}


def view(history: History) -> Report:
    classes = []
    for phase in dict.fromkeys(record.execution_class for record in history.records):
        steps = [record for record in history.records if record.execution_class == phase]
        whole = sum(record.ended - record.started for record in steps) * 1e3 / len(steps)
        parts = {name: sum(getattr(record, field) for record in steps) / len(steps) for name, field in _PARTS.items()}
        rest = {"rest": whole - sum(parts.values()), "whole": whole}
        classes.append({"class": phase, "steps": len(steps), "milliseconds": parts | rest})
    return report({"classes": classes}, lambda: _screen(classes, str(history.label)))


def _screen(classes: list[dict[str, Any]], label: str) -> Iterator[Part]:
    yield from question("Where did the time of the steps go?", f"{label}, milliseconds per step")
    columns = (f"{name}: {{milliseconds.{name}:ms}}" for name in (*_PARTS, "rest", "whole"))
    yield Table.of(classes, "class: {class}", "steps: {steps:count}", *columns)
