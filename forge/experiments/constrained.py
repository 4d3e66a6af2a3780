"""11. A grammar is a mask over the vocabulary: which tokens may come, which come, and what is given up?

[dim]forge constrained --only run --ask record[/dim]

[dim]forge constrained --only run --choice happy --choice sad[/dim]
"""

import json as json_format
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.text import Text

from forge.cli import options
from forge.cli.arguments import Takes
from forge.cli.chapters import Experiment, experiment
from forge.cli.options import FormArgs
from forge.cli.run_control import create_llm, drive, exit_status, run_label
from forge.engine.sampling import log_sum_exp
from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import StructuredOutput
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import option
from forge.views.formatting import count, plural
from forge.views.generation import LiveGeneration
from forge.views.json_output import as_object, plain
from forge.views.palette import ACCENT, QUIET
from forge.views.screen import Hanging, Part, Report, Table, leads_on, question, report
from forge.views.screen import sentences as plain_sentences
from forge.views.summary import RunResult
from forge.views.terminal import open_console
from forge.views.text import one_line

if TYPE_CHECKING:
    from forge.llm import LLM

QUESTION = "What does a grammar allow, and what does the model give up for it?"
LEADS_ON = 'Any form of your own:\n  forge generate --regex "[a-z]+ and [a-z]+" "The fox met"'
MAX_TOKENS = 64
PROPOSED = 8
"""Forced tokens per cycle at most. Fixed, so that the number of passes does not depend on the machine."""
STORY = """Nutmeg was a brave donkey.

One stormy night there was a knock at the door. Outside stood Twig, a young puppy, wet to the skin. "I lost my way in \
the cave," said Twig. "May I come in?" In his bag, Twig had only a striped scarf and a big pot.

Next to the stove sat a little fox. "We were all strangers once," said the fox.

Nutmeg made room by the fire, and Twig told wonderful stories all night. When he left, he took the pot and gave the \
scarf to Nutmeg.

From that day on, Nutmeg and the fox were the best of friends."""
FIELDS = {
    "hero": ["Twig", "Hazel", "Maple", "Nutmeg", "Pip", "Willow"],
    "place": ["forest", "garden", "castle", "cave", "market", "river"],
    "object": ["lantern", "pot", "key", "scarf", "bell", "book"],
    "mood": ["happy", "sad"],
}
"""Values that a record of a story may hold, from the lists that the bundled model's stories are made of."""
Ask = Literal["ending", "record"]
_INDENT = 14
_FORM = "Structured output (one of these)"


@dataclass(frozen=True)
class RecordArgs:
    """The JSON record that `--ask record` requests by default."""

    fields: str = option("hero,place,mood", "The record's fields, with commas, in their order.", _FORM)
    ask: Ask = option(
        "ending", "What the bundled story is followed by: a question about its ending, or a request for the record."
    )

    def prompt(self) -> str:
        """Return the bundled story and the request for a record of it."""
        fields = field_names(self.fields)
        listed = " and ".join(filter(None, (", ".join(fields[:-1]), fields[-1])))
        asked = {"ending": "Is the ending happy or sad?", "record": f"Write a JSON object with {listed}."}
        return f"{STORY}\n\n{asked[self.ask]}"


@experiment(bugs=True)
def constrained(
    form: FormArgs,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What is asked, in a chat.", show_default="a story and --ask"),
    ] = None,
    max_tokens: options.MaxTokens = MAX_TOKENS,
    *,
    record: RecordArgs,
    engine: Annotated[EngineArgs, Takes("model device threads", kv="paged")],
) -> Experiment:
    structured = form.structured_output() or StructuredOutput(json=record_schema(record.fields))
    asked = record.prompt() if prompt is None else options.read_prompt(prompt)
    return Experiment(lambda: _measure(asked, max_tokens, structured, engine))


def field_names(text: str) -> list[str]:
    """Parse `--fields`. Raises `UsageError` for a field that a record cannot have."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or {*names} - {*FIELDS}:
        raise UsageError(f"--fields takes some of {', '.join(FIELDS)}, with commas, and {text!r} is something else")
    return names


def record_schema(fields: str) -> dict[str, Any]:
    """Return the JSON schema of a story's record with these fields."""
    names = field_names(fields)
    properties = {name: {"enum": FIELDS[name]} for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _measure(prompt: str, max_tokens: int, form: StructuredOutput, engine: EngineArgs) -> Report:
    """Answer the question without the form, with it, and with its forced text proposed; then once more to record every
    row of logits."""
    plain, params = create_llm(engine), SamplingParams(max_tokens, structured=form)
    proposing = create_llm(engine, speculate="grammar", k=PROPOSED, speculate_fixed=True)
    token_ids = plain.tokenizer.encode_chat([{"role": "user", "content": prompt}])[1]
    free_text = plain.generate([token_ids], SamplingParams(max_tokens))[0].outputs[0].text
    places = _places(plain, token_ids, params)
    as_long = SamplingParams(max(2, len(places)), ignore_eos=True)
    ways = {"free": (plain, as_long), "plain": (plain, params), "proposed": (proposing, params)}
    runs: dict[str, RunResult] = {}
    for name, (llm, sampling) in ways.items():
        llm.generate([token_ids], sampling)  # kernels and grammars are compiled by then
        with LiveGeneration(open_console(), run_label(llm), prompt) as view:
            runs[name] = drive(llm, llm.start([token_ids], sampling), view.step)
    label, about = run_label(plain), {"prompt": prompt, "vocab_size": plain.model.vocab_size, "free_text": free_text}
    facts = as_object(label) | about | constrained_object(places, runs)
    return report(facts, lambda: screen(str(label), facts, places, runs), exit_status(*runs.values()))


@dataclass(frozen=True)
class Place:
    """One token of a constrained output, with the distribution at its position."""

    text: str
    forced: bool
    """Whether the text had to come; which tokens it is made of may have been open."""
    allowed: int
    """How many tokens of the vocabulary the grammar allowed."""
    mass: float
    """Their probabilities' sum, by the model."""
    probability: float
    """The model's probability of the token that came."""
    preferred: str
    """The model's most likely token, as text."""
    given_up: float
    """How much less likely the token was than the preferred one: a difference of natural log probabilities."""


def _places(llm: "LLM", token_ids: Sequence[int], params: SamplingParams) -> tuple[Place, ...]:
    from forge.grammar.compiler import GrammarCompiler

    assert params.structured is not None, "an output with a form"
    rows: list[np.ndarray] = []
    llm.engine.on_logits.append(lambda seq_id, row: rows.append(row))
    output = llm.generate([token_ids], params)[0].outputs[0].token_ids
    llm.engine.on_logits.clear()
    matcher = GrammarCompiler(llm.tokenizer, llm.model.vocab_size)(params.structured).new_matcher()
    places = []
    for index, (token_id, row) in enumerate(zip(output, rows, strict=True)):
        before, preferred = output[:index], int(row.argmax())
        mask, total = matcher.mask(before), log_sum_exp(row, float(row.max()))
        is_forced, allowed = _is_forced(llm, mask, matcher.forced(before), token_id), int(np.count_nonzero(mask))
        mass = float(np.exp(row[mask].astype(np.float64) - total).sum())
        probability, given_up = float(np.exp(row[token_id] - total)), float(row[preferred] - row[token_id])
        text, instead = _shown(llm, token_id), _shown(llm, preferred)
        places.append(Place(text, is_forced, allowed, mass, probability, instead, given_up))
    return tuple(places)


def _is_forced(llm: "LLM", mask: np.ndarray, forced: Sequence[int], token_id: int) -> bool:
    """True if the token writes only text that the grammar forced, or if only the end of the output was allowed."""
    if llm.tokenizer.is_hidden(token_id):
        return all(map(llm.tokenizer.is_hidden, np.flatnonzero(mask).tolist()))
    return b"".join(map(llm.tokenizer.token_bytes, forced)).startswith(llm.tokenizer.token_bytes(token_id))


def _shown(llm: "LLM", token_id: int) -> str:
    return "(end)" if llm.tokenizer.is_hidden(token_id) else llm.tokenizer.token_text(token_id)


def constrained_object(places: Sequence[Place], runs: Mapping[str, RunResult]) -> dict[str, Any]:
    """Return the experiment as facts. runs: `free`, without the form and with as many tokens as with it; `plain`, with
    the form; `proposed`, with its forced text proposed as draft tokens."""
    output, proposed = (runs[name].output.outputs[0] for name in ("plain", "proposed"))
    record = _parsed(output.text)
    given_up = sum(place.given_up for place in places)
    return {
        "text": output.text,
        "record": record if isinstance(record, dict) else {},
        "is_json": record is not None,
        "has_mood": isinstance(record, dict) and "mood" in record,
        "finish_reason": output.finish_reason,
        "places": plain(places),
        "num_tokens": len(places),
        "num_forced": sum(place.forced for place in places),
        "num_chosen": sum(not place.forced for place in places),
        "num_single": sum(place.allowed == 1 for place in places),
        "given_up": given_up,
        "given_up_chosen": sum(place.given_up for place in places if not place.forced),
        "given_up_per_token": given_up / len(places) if places else None,
        "same_tokens": proposed.token_ids == output.token_ids,
        **{
            f"{name}_{figure}": value
            for name, run in runs.items()
            for figure, value in (("forwards", len(run.records)), ("ms_per_token", ms_per_token(run)))
        },
    }


def _parsed(text: str) -> Any:
    try:
        return json_format.loads(text)
    except ValueError:
        return None


def ms_per_token(run: RunResult) -> float | None:
    """Return the milliseconds per token of the steps after the first, which reads the prompt."""
    num_tokens = len(run.output.outputs[0].token_ids) - sum(len(record.tokens) for record in run.records[:1])
    spent = sum(record.ended - record.started for record in run.records[1:])
    return spent * 1e3 / num_tokens if num_tokens else None


def screen(
    label: str, facts: Mapping[str, Any], places: Sequence[Place], runs: Mapping[str, RunResult]
) -> Iterator[Part]:
    """Draw the whole experiment: both answers, the tokens with their alternatives, the choices, the cost."""
    yield from question(QUESTION, label)
    for name, text in (("without", facts["free_text"]), ("with the form", facts["text"])):
        yield Hanging(Text.assemble((name.ljust(_INDENT), QUIET), one_line(text)), _INDENT)
    yield from (None, lambda width: token_lines(places, width))
    yield f"[chosen] · the rest had to come · below: how many of {count(facts['vocab_size'])} tokens might have"
    yield None
    if chosen := [place for place in places if not place.forced]:
        columns = ["chosen: {text:visible}", "might have: {allowed:count}", "probability: {probability:small}"]
        columns += ["of all these: {mass:small}", "given up: {given_up:.2f}", "it would have said: {preferred:visible}"]
        yield Table.of(chosen, *columns, formats={"visible": visible, "small": small}, lefts=(5,))
        yield None
    yield from (*plain_sentences(sentences(facts, places)), None)
    costs = []
    for name, run in zip(("without", "with the form", "forced proposed"), runs.values(), strict=True):
        tokens = len(run.output.outputs[0].token_ids)
        costs.append({"name": name, "passes": len(run.records), "tokens": tokens, "ms": ms_per_token(run)})
    columns = [": {name}", "forward passes: {passes:count}", "tokens: {tokens:count}", "ms per token: {ms:ms}"]
    yield from (Table.of(costs, *columns), leads_on(LEADS_ON))


def token_lines(places: Sequence[Place], width: int) -> list[Text]:
    """Draw the tokens in order, and under each how many the mask allowed. Brackets mark the chosen ones without colour
    too."""
    lines: list[Text] = []
    tokens, counts = Text(), Text()
    for place in places:
        shown = visible(place.text) if place.forced else f"[{visible(place.text)}]"
        figure = count(place.allowed)
        size = max(Text(shown).cell_len, len(figure))
        if tokens and tokens.cell_len + 1 + size > width:
            lines += [tokens, counts, Text("")]
            tokens, counts = Text(), Text()
        gap = " " if tokens else ""
        tokens.append(gap + shown + " " * (size - Text(shown).cell_len), QUIET if place.forced else ACCENT)
        counts.append(gap + figure.ljust(size), QUIET)
    return [*lines, tokens, counts, Text("")] if tokens else lines


def sentences(facts: Mapping[str, Any], places: Sequence[Place]) -> list[str]:
    """Say in sentences what the pictures show in this run."""
    if not places:
        return ["Nothing came: ask for more tokens."]
    num_chosen, in_choices = facts["num_chosen"], facts["given_up_chosen"]
    return [
        f"{plural(len(places), 'token')}: {count(facts['num_forced'])} had to come, "
        f"{count(num_chosen)} {'was' if num_chosen == 1 else 'were'} chosen. At the first place the grammar left "
        f"{small(places[0].mass)} of the model's probability.",
        f"Given up, in log probability: {facts['given_up'] - in_choices:.1f} for the text that had to come, "
        f"{in_choices:.1f} at the choices; {facts['given_up_per_token']:.2f} per token.",
    ]


def small(share: float) -> str:
    """Format a probability that may be very small."""
    return f"{share * 100:.1f} %" if share >= 0.001 else f"{share:.0e}"


def visible(text: str) -> str:
    """Return a token's text with visible spaces and line ends."""
    return one_line(text.replace(" ", "␣").replace("\n", "↵"))
