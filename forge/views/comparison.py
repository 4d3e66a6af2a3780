"""Two runs of the same prompt, or prompts, side by side: whether the tokens are the same, and what each cost.

`compare_runs` turns two results into a `Comparison`, plain data; the rest of the file draws one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from forge.engine.outputs import RequestOutput
from forge.trace.records import StepRecord, TokenRecord
from forge.trace.speculation_summary import draft_totals
from forge.views.block_map import CacheFigures
from forge.views.formatting import plural
from forge.views.forwards import curve_plot, shape_sentence
from forge.views.generation import sample_texts
from forge.views.json_output import as_object, climb_object, picked, run_object
from forge.views.metrics import metrics_lines
from forge.views.palette import GOOD, TITLE, TROUBLE, sequence_style
from forge.views.run_view import LiveView
from forge.views.screen import Part, question, title
from forge.views.screen import sides as side_by_side
from forge.views.summary import Forward, RunResult
from forge.views.text import one_line, quoted, short_name, tail

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Answer:
    """What one side said to one prompt."""

    output: RequestOutput
    logits: Sequence["np.ndarray"]
    """Float32 `[vocab]` for each output token of the first sample."""

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [sample.token_ids for sample in self.output.outputs]


@dataclass(frozen=True)
class Side:
    """One of the two runs, under the value that made it different."""

    name: str
    """The side's value on the command line: `off`."""
    result: RunResult

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        """One for each prompt."""
        logits = chain(self.result.logits, repeat(()))  # of an interrupted run there may be fewer
        return tuple(Answer(*pair) for pair in zip(self.result.outputs, logits, strict=False))

    @property
    def has_several(self) -> bool:
        """Whether it answered several prompts."""
        return len(self.answers) > 1

    @cached_property
    def cache(self) -> CacheFigures | None:
        """Its cache's figures; None if no step ran."""
        return CacheFigures.of(self.result.records, self.result.outputs) if self.result.records else None

    @property
    def tokens(self) -> tuple[TokenRecord, ...]:
        """The first sample's, in order."""
        first = min((token.seq_id for record in self.result.records for token in record.tokens), default=0)
        return tuple(token for record in self.result.records for token in record.tokens if token.seq_id == first)


@dataclass(frozen=True)
class LogitDifference:
    """How far apart two lists of logits are, over the forwards in which both sides had seen the same tokens."""

    largest: float
    forward: int
    """The forward with the largest difference, counted from 1."""
    forwards: int
    """How many forwards were compared."""
    same_bits: bool


@dataclass(frozen=True)
class Margin:
    """How far apart the logits of the two tokens were, on either side, where the sides chose differently."""

    token_ids: tuple[int, int]
    """The token that each side chose."""
    margins: tuple[float, float]
    """Each side's logit of its own token less that of the other side's token."""
    usual: float | None
    """The largest difference of any logit between the sides where they still chose the same; None if nowhere."""

    @property
    def apart(self) -> float:
        """The larger of the two."""
        return max(self.margins)

    @property
    def is_near_tie(self) -> bool:
        """Whether it is within what the sides' logits differ by anyway: each of the two may be off by that much."""
        return self.usual is not None and self.apart <= 2 * self.usual


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same requests, side by side."""

    question: str
    option: str
    """The option that differs: `--kv`."""
    sides: tuple[Side, Side]
    identical: bool
    """Every sample of both sides has the same tokens."""
    first_difference: int | None
    """The first output token at which the first samples of a prompt differ, counted from 1."""
    logits: LogitDifference | None
    """None if the two cannot be compared: other vocabularies, or nothing generated."""
    prompt: int = 0
    """The prompt that the first difference belongs to, counted from 0."""
    margin: Margin | None = None
    """The margin at the first difference, if both sides chose a token there, from the same vocabulary."""


def compare_runs(question: str, option: str, left: Side, right: Side) -> Comparison:
    pairs = list(zip(left.answers, right.answers, strict=True))
    differing = [place for place, (ours, theirs) in enumerate(pairs) if ours.token_ids != theirs.token_ids]
    compared: list[tuple[np.ndarray, np.ndarray]] = []
    agreeing: list[tuple[np.ndarray, np.ndarray]] = []
    for ours, theirs in pairs:
        first = _first_difference(ours.token_ids[0], theirs.token_ids[0])
        both = list(zip(ours.logits, theirs.logits, strict=False))[:first]  # all of them where nothing differs
        compared += both
        agreeing += both if first is None else both[: first - 1]
    prompt = differing[0] if differing else 0
    first = _first_difference(*(answer.token_ids[0] for answer in pairs[prompt]))
    margin = _margin(*pairs[prompt], first, _logit_difference(agreeing))
    logits = _logit_difference(compared)
    return Comparison(question, option, (left, right), not differing, first, logits, prompt, margin)


def question_for(option: str) -> str:
    """Return the title of a comparison: the question that varying `option` answers."""
    return _QUESTIONS.get(option, f"Does {option} change what the model says, and what does it cost?")


_QUESTIONS = {
    "--kv": "Does the cache change what the model says, and what does it cost?",
    "--model": "What does another model say, and what does it cost?",
    "--device": "Does the device change what the model says, and which is faster?",
    "--threads": "What do more threads buy?",
    "--speculate": "Does speculation change what the model says, and what does it gain?",
    "--k": "How many tokens should be drafted at a time?",
    "--kv-dtype": "What does rounding keys and values change, and what does it save?",
}


def comparison_object(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for `--json`."""
    logits, margin = comparison.logits, comparison.margin
    return {
        **picked(comparison, "option", "identical", "first_difference"),
        "margin": margin and as_object(margin, "apart") | {"near_tie": margin.is_near_tie},
        "largest_logit_difference": None if logits is None else logits.largest,
        "logits_compared": 0 if logits is None else logits.forwards,
        "logits_same_bits": None if logits is None else logits.same_bits,
        "sides": [
            {
                "value": side.name,
                "last_over_second_forward": side.result.last_over_second,
                **run_object(side.result, token_text=str),
                **climb_object(side.result.forwards),
                "cache": side.cache and side.cache.as_object(),
                **({"prompts": [_answer_object(answer) for answer in side.answers]} if side.has_several else {}),
            }
            for side in comparison.sides
        ],
    }


def _answer_object(answer: Answer) -> dict[str, Any]:
    output = answer.output
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        **picked(output.metrics, "tokens_cached", "time_to_first_token_ms"),
        **picked(output.outputs[0], "text", "token_ids"),
    }


class ComparisonProgress(LiveView):
    """The curves as they grow, on a terminal; nothing in a pipe. Gone when both sides have run."""

    def __init__(self, console: Console, question: str, names: Sequence[str], num_points: int, quiet: bool = False):
        super().__init__(console, quiet)
        self._question, self._names, self._num_points = question, names, num_points
        self._forwards: list[list[Forward]] = [[] for _ in names]

    def step_of(self, side: int, record: StepRecord) -> None:
        """A step of one side has ended."""
        self._forwards[side].append(Forward.of(len(self._forwards[side]) + 1, record))
        self.redraw()

    def frame(self) -> Group:
        plot = curve_plot(self._names, self._forwards, self._num_points, self._console.width)
        return Group(Text(self._question, TITLE), Text(""), *plot)


def comparison_screen(comparison: Comparison, prompt: str) -> Iterator[Part]:
    """Draw question, prompt, table, picture and verdict. With several prompts there is no picture: no forward of theirs
    has a shape of its own."""
    yield from question(comparison.question, one_line(tail(prompt, 200)))
    sides = comparison.sides
    yield comparison_table(sides)
    if not sides[0].has_several:
        names, forwards = [side.name for side in sides], [side.result.forwards for side in sides]
        yield None
        yield lambda width: curve_plot(names, forwards, max(map(len, forwards)), width)
        yield from legend(comparison)
    yield from (None, *verdict(comparison))


def interrupted_screen(sides: Sequence[Side]) -> Iterator[Part]:
    """Draw what there is of a comparison that Ctrl-C ended: each side's text and figures so far, without a verdict."""
    for side in sides:
        yield from (title(one_line(side.name)), *sample_texts(side.result, ""))
        yield partial(metrics_lines, side.result)
        yield None
    yield Text("interrupted: two whole runs are needed for a comparison")


def comparison_table(sides: Sequence[Side]) -> Table:
    """Return the figures of both sides, where at least one has them. Decoding alone has a ratio: people quote its
    speed."""
    facts = [_side_facts(side) for side in sides]
    left, right = (side.result.decode_tokens_per_second for side in sides)
    gains = {"decode": right / left} if left and right else {}
    return side_by_side([side.name for side in sides], facts, *_table_rows(sides, facts), gains=gains)


def _side_facts(side: Side) -> dict[str, Any]:
    drafts = draft_totals(record.cycles for record in side.result.records)
    accepted, proposed = sum(draft.accepted for draft in drafts), sum(draft.proposed for draft in drafts)
    return {
        "result": side.result,
        "cache": side.cache,
        "all_ms": sum(side.result.forward_ms),
        "forwards": len(side.result.records),
        "accepted": accepted / proposed if drafts else None,
        "drafts_ms": sum(draft.ms for draft in drafts) if drafts else None,
    }


def _table_rows(sides: Sequence[Side], facts: Sequence[dict[str, Any]]) -> Iterator[str]:
    several, caches = any(side.has_several for side in sides), [side.cache for side in sides]
    yield f"{'first token, median' if several else 'time to first token'}: {{result.time_to_first_token_ms:ms ms}}"
    yield "decode: {result.decode_tokens_per_second:rate tok/s}"
    if not several:
        yield "last / second forward: {result.last_over_second:times}"
    yield from ("all forwards: {all_ms:ms ms}", "forwards: {forwards:count}")
    if any(run["accepted"] is not None for run in facts):
        yield from ("draft tokens accepted: {accepted:percent}", "proposing them: {drafts_ms:ms ms}")
    yield from ("tokens computed: {result.tokens_computed:count}", "KV held: {result.kv_bytes_held:size}")
    if any(cache and cache.most_bytes_reserved for cache in caches):
        yield from ("KV reserved: {cache.most_bytes_reserved:size}", "blocks used at once: {cache.most_blocks:count}")
        yield "reserved and empty: {cache.internal_fragmentation:share}"
    if any(cache and cache.kind == "prefix" for cache in caches):
        yield "prompt tokens found: {cache.hits}"
        if several:
            yield "blocks saved at once: {cache.most_blocks_saved:count}"


def verdict(comparison: Comparison) -> list[Text]:
    """Say whether the two sides said the same, and how far apart their logits are."""
    logits = _logits_text(comparison.logits)
    if comparison.identical:
        answers = comparison.sides[0].answers
        tokens = plural(sum(len(token_ids) for answer in answers for token_ids in answer.token_ids), "token")
        extent = f"{tokens} of {len(answers)} prompts" if len(answers) > 1 else tokens
        return [Text.assemble(("✓ identical", GOOD), f": {extent}, {logits}")]
    first, prompt = comparison.first_difference, comparison.prompt
    where = "" if first is None else f" from output token {first} on"
    of_prompt = f" of prompt {prompt + 1}" if comparison.sides[0].has_several else ""
    lines = [Text.assemble(("✗ the tokens differ", TROUBLE), f"{where}{of_prompt}; {logits}")]
    if comparison.margin is not None:
        lines.append(_margin_line(comparison.margin, comparison.sides))
    if prompt:
        return [*lines, *(_answer_line(side, index, prompt) for index, side in enumerate(comparison.sides))]
    return [*lines, *(_continuation(side, index, first) for index, side in enumerate(comparison.sides))]


def legend(comparison: Comparison) -> list[Text]:
    """Return one line per curve: what it does, and why."""
    return [
        Text.assemble((f"━━ {short_name(side.name)}  ", sequence_style(index)), shape_sentence(side.result.forwards))
        for index, side in enumerate(comparison.sides)
    ]


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    from forge.engine.containers import num_common  # it loads NumPy, and the help of `forge compare` needs none

    common = num_common(left, right)
    return None if common == len(left) == len(right) else common + 1


def _logit_difference(pairs: "Sequence[tuple[np.ndarray, np.ndarray]]") -> LogitDifference | None:
    import numpy as np

    if not pairs or pairs[0][0].shape != pairs[0][1].shape:
        return None
    largest = [float(np.max(np.abs(ours - theirs))) for ours, theirs in pairs]
    where = int(np.argmax(largest))  # a NaN counts as the largest
    same = all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)
    return LogitDifference(largest[where], where + 1, len(pairs), same)


def _margin(left: Answer, right: Answer, position: int | None, agreeing: LogitDifference | None) -> Margin | None:
    """Return how far apart the sides' tokens at output token `position` (from 1) were; None if a side has no such
    logits."""
    shortest = min(len(left.logits), len(right.logits), len(left.token_ids[0]), len(right.token_ids[0]))
    if position is None or position > shortest:
        return None
    ours, theirs = (answer.logits[position - 1] for answer in (left, right))
    if ours.shape != theirs.shape:
        return None
    our_token, their_token = (answer.token_ids[0][position - 1] for answer in (left, right))
    if max(our_token, their_token) >= len(ours):  # of a vocabulary of its own
        return None
    margins = float(ours[our_token] - ours[their_token]), float(theirs[their_token] - theirs[our_token])
    return Margin((our_token, their_token), margins, None if agreeing is None else agreeing.largest)


def _margin_line(margin: Margin, sides: Sequence[Side]) -> Text:
    """Return how close the decision was."""
    names = [one_line(side.name) for side in sides]
    distances = [f"{abs(value):.3g}" for value in margin.margins]
    apart = " and ".join(f"{distance} on {name}" for distance, name in zip(distances, names, strict=True))
    apart = f"{distances[0]} on either side" if len(set(distances)) == 1 else apart
    drawn = [name for value, name in zip(margin.margins, names, strict=True) if value < 0]
    unlikelier = f"; on {' and '.join(drawn)} the less likely one was drawn" if drawn else ""
    tie = "a near tie: " if margin.is_near_tie else ""
    return Text(f"  {tie}the two tokens' logits are apart by {apart}{unlikelier}")


def _logits_text(logits: LogitDifference | None) -> str:
    if logits is None:
        return "logits not compared"
    if logits.same_bits:
        return "logits equal to the last bit (largest difference 0)"
    return f"largest logit difference {logits.largest:.3g} (forward {logits.forward} of {logits.forwards} compared)"


def _answer_line(side: Side, index: int, prompt: int) -> Text:
    text = one_line(side.answers[prompt].output.outputs[0].text)
    return Text.assemble((f"  {one_line(side.name)}  ", sequence_style(index)), text, no_wrap=True, overflow="ellipsis")


def _continuation(side: Side, index: int, position: int | None) -> Text:
    """Return what one side said at the first difference and how sure it was, or how much it said in all."""
    line = Text(f"  {one_line(side.name)}  ", sequence_style(index))
    if position is not None and position <= len(side.tokens):
        token = side.tokens[position - 1]
        text = quoted(token.text) if token.text else f"token {token.token_id}"
        return line.append(f"{text} (p {token.probability:.3f})", "default")
    ids = side.answers[0].token_ids[0]
    return line.append(f"{plural(len(ids), 'token')}, then {side.result.ending}", "default")
