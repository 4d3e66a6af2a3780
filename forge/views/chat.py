"""A conversation on the screen: the answer as it comes, and under it what the turn cost."""

from rich.console import Console
from rich.text import Text

from forge.trace.records import StepRecord
from forge.views.blocks import BlockScreen
from forge.views.formatting import count, ms, plural, rate
from forge.views.keys import readline_if_any
from forge.views.palette import QUIET, TROUBLE
from forge.views.screen import draw
from forge.views.summary import RunLabel, RunResult
from forge.views.text import WordWrap, neutralise

PROMPT = "you> "
HELP = (
    "/fork marks a place · /back returns to it · /reset forgets the conversation\n"
    "/exit or Ctrl-D ends it · Ctrl-C ends an answer, or clears the line"
)
CLEARED = "line cleared · Ctrl-C again or Ctrl-D ends the conversation"


class ChatView:
    """Asks for messages and shows answers. In a pipe it asks silently, so that only answers and figures come out."""

    def __init__(self, console: Console, label: RunLabel):
        self._console, self._label = console, label
        self._asking = console.is_terminal
        self._wrap = WordWrap(console.width - 1 if console.is_terminal else None)

    def welcome(self) -> None:
        self._quiet(str(self._label))
        if self._asking:
            self._quiet(HELP)

    def ask(self) -> str | None:
        """Return the next message without white space around it; None when there are no more.

        At a terminal Ctrl-C clears the line; raises KeyboardInterrupt for a second one on an empty line.
        """
        typed = getattr(readline_if_any(), "get_line_buffer", str)
        cleared = False
        while True:
            try:
                return input(PROMPT if self._asking else "").strip()
            except EOFError:
                if self._asking:
                    self._console.print()
                return None
            except KeyboardInterrupt:
                if self._asking:
                    self._console.print()  # the line that was being typed ends here
                if not self._asking or (cleared and not typed()):
                    raise
                cleared = True
                self._quiet(CLEARED)

    def step(self, record: StepRecord) -> None:
        """Print what the step made certain of the answer."""
        for text in (*(token.text for token in record.tokens), *(finish.text for finish in record.finished)):
            self._say(self._wrap.feed(neutralise(text)))

    def finish(self, result: RunResult) -> None:
        self._say(self._wrap.flush())
        self._console.print()
        self._quiet(turn_sentence(result))
        if result.records and result.records[-1].blocks is not None:
            self._show_blocks(result)

    def _show_blocks(self, result: RunResult) -> None:
        """Print where the conversation's blocks lie after the turn, and what the turn did to them."""
        screen = BlockScreen(keeps=True)
        for record in result.records:
            screen.feed(record)
        width = self._console.width
        draw(self._console, [None, *screen.picture(width), None, *screen.story_lines(width), None])

    def forgotten(self) -> None:
        self._quiet("forgotten: the next message starts a new conversation")

    def forked(self, place: int, tokens: int, blocks: int, cache: str) -> None:
        """Print that a place was marked: what a fork of the cache holds, and how many more blocks it took."""
        cost = f"the fork took {plural(blocks, 'more block')}" if blocks else "the fork shares all of its blocks"
        self._quiet(f"place {place} marked: {plural(tokens, 'token')} held, {cost if tokens else 'nothing to fork'}")
        self._quiet(cache)

    def went_back(self, place: int, tokens: int, cache: str) -> None:
        self._quiet(f"back at place {place}: {plural(tokens, 'token')} held; what came after it is forgotten")
        self._quiet(cache)

    def help(self) -> None:
        self._quiet(HELP)

    def trouble(self, message: str) -> None:
        self._console.print(Text(neutralise(message), TROUBLE), soft_wrap=True)

    def _say(self, text: str) -> None:
        if text:
            self._console.print(Text(text), end="", soft_wrap=True)

    def _quiet(self, line: str) -> None:
        self._console.print(Text(neutralise(line), QUIET))


def turn_sentence(result: RunResult) -> str:
    """Format a turn as `prefill 23 of 64 prompt tokens, 41 held · first token 3.1 ms · 812 tok/s · stop`."""
    prompt = len(result.output.prompt_token_ids)
    first = result.records[0].items[0] if result.records else None
    held = first.start if first else 0
    new = f"{count(prompt - held)} of {plural(prompt, 'prompt token')} computed, {count(held)} held"
    figures = [new, f"first token {ms(result.time_to_first_token_ms)} ms"]
    if result.decode_tokens_per_second:
        figures.append(f"{rate(result.decode_tokens_per_second)} tok/s")
    return " · ".join([*figures, result.ending])
