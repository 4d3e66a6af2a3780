"""The four checks of `forge speculation pins`: each with what was compared, and where it failed."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from forge.bench.pins import Pin
from forge.views.palette import GOOD, QUIET, TITLE, TROUBLE
from forge.views.report import Report
from forge.views.terminal import print_hanging
from forge.views.text import one_line

_FAILED = 1
_NAME = 48


def pins_report(label: str, pins: Sequence[Pin]) -> Report:
    """Exit status 1 if a check failed."""

    def draw(console: Console) -> None:
        console.print(Text("Is this pair exact?", TITLE))
        console.print(Text(one_line(label), QUIET))
        console.print()
        for pin in pins:
            sign, style = ("✓", GOOD) if pin.failure is None else ("✗", TROUBLE)
            print_hanging(console, Text.assemble((f"{sign} ", style), f"{pin.name:<{_NAME}}", (pin.compared, QUIET)), 2)
            if pin.failure is not None:
                print_hanging(console, Text(f"  {one_line(pin.failure)}"), 2)

    held = all(pin.failure is None for pin in pins)
    return Report({"held": held, "pins": [asdict(pin) for pin in pins]}, draw, 0 if held else _FAILED)
