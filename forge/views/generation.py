"""What `forge generate` shows: a live picture on a terminal, plain lines in a pipe. Both show the same run."""

from rich.console import Console, Group, RenderableType
from rich.text import Text

from forge.trace.explain import explain_cycle, explain_undrafted
from forge.trace.records import StepRecord
from forge.views.formatting import count, ms, rate
from forge.views.forwards import chart_rows, chart_scale, compact_chart
from forge.views.history import TextStreams
from forge.views.metrics import chart_heading, flowing, metrics_lines, plain_metrics
from forge.views.palette import QUIET, sequence_style
from forge.views.run_view import LiveView, RunView
from forge.views.screen import draw
from forge.views.summary import Forward, RunLabel, RunResult, decode_rate
from forge.views.terminal import can_redraw
from forge.views.text import neutralise, quoted, tail

CHART_ROWS = 12
"""Rows of the live chart; older ones scroll out of it."""
_PROMPT_SHOWN = 240
"""Characters of a long prompt that are worth seeing before its continuation."""


def generation_view(console: Console, label: RunLabel, prompt: str, echo: bool = False) -> RunView:
    """Return the view that fits what `console` writes to.

    `prompt` is what to show before the text: quietly on a terminal, where it is the context of what follows, and in a
    pipe only where `echo` asks for it.
    """
    view = LiveGeneration if can_redraw(console) else PlainGeneration
    return view(console, label, prompt, echo)


class PlainGeneration(RunView):
    """One line per forward as it happens, then the text, then the figures, one to a line. No escape codes."""

    def __init__(self, console: Console, label: RunLabel, prompt: str = "", echo: bool = False):
        self._console = console
        self._prompt = prompt if echo else ""
        self._steps = 0

    def step(self, record: StepRecord) -> None:
        self._steps += 1
        self._print(forward_line(self._steps, record))

    def finish(self, result: RunResult) -> None:
        for text in sample_texts(result, self._prompt):
            if text.plain:
                self._print("")
                self._print(text.plain)
        self._print("")
        for line in plain_metrics(result):
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(Text(neutralise(line)), soft_wrap=True)


class LiveGeneration(LiveView):
    """The text so far over a chart of the latest forwards; at the end all text, a compact chart, the figures."""

    frames_per_second = 20

    def __init__(self, console: Console, label: RunLabel, prompt: str, echo: bool = False):
        super().__init__(console)
        self._label = label
        self._prompt, self._echo = prompt, echo
        self._records: list[StepRecord] = []
        self._forwards: list[Forward] = []
        self._streams = TextStreams()

    def step(self, record: StepRecord) -> None:
        self._records.append(record)
        self._forwards.append(Forward.of(len(self._forwards) + 1, record))
        self._streams.feed(record)
        self.redraw()

    def finish(self, result: RunResult) -> None:
        self.close()
        width = self._console.width
        texts = sample_texts(result, self._prompt, quiet_prompt=not self._echo)
        draw(self._console, [part for text in texts for part in (text, None)])
        chart = (chart_heading(result.label, width), *compact_chart(result.forwards, width))
        draw(self._console, [*chart, None, *metrics_lines(result, width)])

    def frame(self) -> RenderableType:
        width, height = self._console.size
        rows = max(3, min(CHART_ROWS, height - 8, len(self._forwards)))
        shown = self._forwards[-rows:]
        chart = chart_rows(shown, chart_scale(self._forwards), width)
        so_far = flowing(self._facts(), width)
        room = max(1, height - len(chart) - len(so_far) - 4)
        text = self._text_so_far(width, room)
        return Group(*text, Text(""), chart_heading(self._label, width), *chart, Text(""), *so_far)

    def _text_so_far(self, width: int, room: int) -> list[Text]:
        """Return the last lines of what has been said; with several samples, the last line of each."""
        if len(self._streams.texts) > 1:
            return [
                Text.assemble((f"{sample} ", sequence_style(sample)), tail(neutralise(text), width - 4)[: width - 2])
                for sample, text in enumerate(self._streams.texts[:room])
            ]
        shown = Text(neutralise(tail(self._prompt, _PROMPT_SHOWN)), QUIET if not self._echo else "")
        for text in self._streams.texts:
            shown.append(neutralise(text), "default")
        shown.append("▌")
        return list(shown.wrap(self._console, width))[-room:]

    def _facts(self) -> list[tuple[str, str]]:
        speed = decode_rate(self._records)
        return [
            ("forwards", count(len(self._forwards))),
            ("tokens computed", count(sum(forward.tokens for forward in self._forwards))),
            *([("decode", f"{rate(speed)} tok/s")] if speed else []),
        ]


def forward_line(number: int, record: StepRecord) -> str:
    """Format a forward as `forward   1  prefill     4 tok      1.9 ms  " there"  id 291`, several samples one after
    another.

    A token's probability (`p 0.931`) follows where it was reported.
    """
    tokens = (f"{quoted(token.text)}  id {token.token_id}{_probability(token.probability)}" for token in record.tokens)
    figures = f"{count(record.tokens_computed):>5} tok  {ms(record.forward_ms):>8} ms"
    cycles = "".join(f"  drafted: {explain_cycle(cycle)}" for cycle in record.cycles)
    plain = "".join(f"  plain: {explain_undrafted(undrafted)}" for undrafted in record.undrafted[:1])
    return f"forward {number:>3}  {record.phase:<7}  {figures}  {' | '.join(tokens)}{cycles}{plain}".rstrip()


def _probability(probability: float | None) -> str:
    return "" if probability is None else f"  p {probability:.3f}"


def sample_texts(result: RunResult, prompt: str, quiet_prompt: bool = False) -> list[Text]:
    """Return each sample's text after its prompt, labelled where there are several."""
    samples = result.output.outputs
    before = tail(prompt, _PROMPT_SHOWN) if quiet_prompt else prompt
    shown = []
    for sample in samples:
        text = Text(neutralise(before), QUIET if quiet_prompt else "")
        text.append(neutralise(sample.text), "default" if quiet_prompt else "")
        if len(samples) > 1:
            label = (f"sample {sample.index} · {result.endings[sample.index]}\n", sequence_style(sample.index))
            text = Text.assemble(label, text)
        shown.append(text)
    return shown
