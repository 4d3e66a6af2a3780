"""`make pictures`: the pictures in the README, drawn by forge itself from runs that it makes there and then.

Each picture is a command of the README, run in this process on the bundled model, and drawn by the view that a terminal
would show. Its figures are those of the machine that drew it.
"""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from forge.cli.main import parse_and_run
from forge.cli.run_control import create_llm, drive, new_history, run_label, warm_up
from forge.engine.sampling_params import SamplingParams
from forge.views.blocks import BlockScreen
from forge.views.generation import LiveGeneration
from forge.views.picture import busiest_step, save_picture
from forge.views.screen import Report, draw
from forge.workload.requests import Arrival, Range, WorkloadRun, make_workload

FOLDER = Path(__file__).parent / "pictures"
GENERATED = 'forge generate --kv basic "Once upon a time" 32'
COMPARED = "forge compare --kv off vs on"
FORKED = "forge generate --kv paged --num-blocks 64 --show blocks --n 4 --temperature 0.9 --seed 7"
SCHEDULED = "forge trace-scheduler --requests 64 --num-blocks 48"
GUESSED = 'forge speculation --only run "Once upon a time" 48 --k 4'
OPENING = "Once upon a time, when the first snow fell, a little girl named Hazel woke up early"


def generation(console: Console) -> None:
    llm, prompt = create_llm("tales", kv="basic"), "Once upon a time"
    warm_up(llm, prompt)
    params = SamplingParams(max_tokens=32, temperature=0.0)
    view = LiveGeneration(console, run_label(llm), prompt)  # never entered: what moves while it runs is no picture
    view.finish(drive(llm, llm.start([prompt], params), view.step))


def block_map(console: Console) -> None:
    llm = create_llm("tales", kv="paged", num_blocks=64)
    llm.engine.scheduler.keep_block_map = True
    params, screen = SamplingParams(max_tokens=80, temperature=0.9, seed=7, n=4), BlockScreen()
    drive(llm, llm.start([OPENING], params), screen.feed)
    draw(console, [*screen.picture(console.width), None, *screen.story_lines(console.width)])


def scheduler(console: Console) -> None:
    llm = create_llm("tales", kv="paged", num_blocks=48)
    llm.engine.report_probabilities = False
    workload = make_workload(
        llm.tokenizer, 64, Range.parse("16:64", ""), Range.parse("64", ""), Arrival.parse("all"), seed=0
    )
    history = new_history(llm)
    drive(llm, WorkloadRun(llm.engine, workload), history.feed)
    draw(console, [busiest_step(history)])


def of_report(line: str) -> Callable[[Console], None]:
    """What a command that measures draws."""

    def draw_report(console: Console) -> None:
        report = parse_and_run(shlex.split(line)[1:])
        assert isinstance(report, Report), f"{line} measures nothing"
        report.draw(console)

    return draw_report


DRAWN: dict[str, tuple[str, Callable[[Console], None]]] = {
    "generate": (GENERATED, generation),
    "compare": (COMPARED, of_report(COMPARED)),
    "blocks": (FORKED, block_map),
    "scheduler": (SCHEDULED, scheduler),
    "speculation": (GUESSED, of_report(GUESSED)),
}
"""Picture → the command, and what draws it."""


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (line, draw_on) in DRAWN.items():
        save_picture(folder / f"{name}.svg", draw_on, title=line)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
