"""The engine's side of structured output, with a matcher that is a rule about tokens and no grammar at all."""

import numpy as np
import pytest

from forge.engine.sampling_params import SamplingParams
from forge.engine.structured_output import MatcherError, StructuredOutput
from forge.errors import UsageError
from tests.engine.scripted import PIECES, complete, letters, muddled, new_engine, run_all

FORM = StructuredOutput(regex="stands for the rule below")


class Ascending:
    """A `Grammar` and its matcher: no token may be lower than the one before it. It holds no state."""

    def new_matcher(self):
        return self

    def mask(self, output):
        last = output[-1] if output else 0
        return np.arange(len(PIECES)) >= last

    def num_allowed(self, output, token_ids):
        walked = list(output)
        for count, token_id in enumerate(token_ids):
            if not self.mask(walked)[token_id]:
                return count
            walked.append(token_id)
        return len(token_ids)

    def forced(self, output):
        return ()


def engine_with(grammar, script=muddled, **options):
    engine = new_engine(script, **options)
    engine.compile_grammar = lambda structured: grammar
    return engine


def rows(engine):
    """Every row of logits that the engine looks at, by sequence."""
    seen: dict[int, list[np.ndarray]] = {}
    engine.on_logits.append(lambda seq_id, logits: seen.setdefault(seq_id, []).append(logits))
    return seen


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_constrained_sequence_says_nothing_that_is_refused(temperature):
    engine = engine_with(Ascending())
    output = complete(engine, "ab", max_tokens=12, temperature=temperature, seed=3, structured=FORM)
    assert list(output.token_ids) == sorted(output.token_ids)


def test_greedy_takes_the_likeliest_of_what_is_allowed():
    engine = engine_with(Ascending())
    seen = rows(engine)
    output = complete(engine, "ab", max_tokens=8, structured=FORM)
    said = list(output.token_ids)
    for index, logits in enumerate(seen[0]):
        allowed = np.where(Ascending().mask(said[:index]), logits, -np.inf)
        assert said[index] == allowed.argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_free_sequences_do_not_change_beside_constrained_ones(temperature):
    free = SamplingParams(max_tokens=10, temperature=temperature, seed=5, logprobs=2)
    alone = engine_with(Ascending())
    alone_rows = rows(alone)
    alone.add_request("free", letters("abc"), free)
    run_all(alone)
    mixed = engine_with(Ascending())
    mixed_rows = rows(mixed)
    mixed.add_request("free", letters("abc"), free)
    constrained = SamplingParams(max_tokens=12, temperature=1.0, seed=1, n=2, structured=FORM)
    mixed.add_request("constrained", letters("ba"), constrained)
    run_all(mixed)
    one, other = alone.output("free").outputs[0], mixed.output("free").outputs[0]
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert np.array_equal(alone_rows[0], mixed_rows[0])


def test_probabilities_are_the_models_own():
    """Of what is refused too: a client sees what the model wanted."""
    engine = engine_with(Ascending())
    seen = rows(engine)
    output = complete(engine, "ab", max_tokens=6, logprobs=len(PIECES), structured=FORM)
    for logits, top in zip(seen[0], output.logprobs, strict=True):
        log_total = np.log(np.exp(logits.astype(float)).sum())
        assert dict(top) == pytest.approx({i: float(logits[i]) - log_total for i in range(len(PIECES))}, abs=1e-5)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kv", ["paged", "prefix"])
def test_company_preemption_and_forks_do_not_change_the_output(kv, mode):
    def params(seed):
        return SamplingParams(max_tokens=12, temperature=1.3, seed=seed, n=2, structured=FORM)

    tight = engine_with(Ascending(), kv=kv, num_blocks=10, preemption=mode, max_num_seqs=6)
    for seed in range(4):
        tight.add_request(f"{seed}", letters("abc"), params(seed))
    records = run_all(tight)
    assert any(record.preempted for record in records)
    for seed in range(4):
        roomy = engine_with(Ascending(), kv="paged")
        roomy.add_request("only", letters("abc"), params(seed))
        run_all(roomy)
        expected = [one.token_ids for one in roomy.output("only").outputs]
        assert [one.token_ids for one in tight.output(f"{seed}").outputs] == expected


def test_a_matcher_that_fails_ends_its_sequence_alone():
    class Failing(Ascending):
        def mask(self, output):
            if len(output) == 3:
                raise MatcherError("too much work")
            return super().mask(output)

    engine = engine_with(Failing())
    engine.add_request("constrained", letters("ab"), SamplingParams(max_tokens=8, structured=FORM))
    engine.add_request("free", letters("ab"), SamplingParams(max_tokens=8, ignore_eos=True))
    run_all(engine)
    failed = engine.output("constrained").outputs[0]
    assert (failed.finish_reason, failed.errors, len(failed.token_ids)) == ("error", ("too much work",), 3)
    assert len(engine.output("free").outputs[0].token_ids) == 8


def test_a_grammar_that_is_refused_changes_nothing():
    engine = new_engine(muddled)
    with pytest.raises(UsageError, match="no grammars"):
        engine.add_request("a", letters("ab"), SamplingParams(structured=FORM))
    assert not engine.has_unfinished()
    engine.compile_grammar = lambda structured: Ascending()
    engine.add_request("a", letters("ab"), SamplingParams(structured=FORM))


@pytest.mark.parametrize("given", [{"ignore_eos": True}, {"min_tokens": 2}, {"structured": "{}"}])
def test_what_contradicts_a_grammar_is_refused(given):
    with pytest.raises(UsageError, match="structured"):
        SamplingParams(**({"structured": FORM} | given))


def test_one_allowed_token_asks_for_one_forward():
    """A request of one token is prefill-only, and constrained all the same."""
    engine = engine_with(Ascending())
    output = complete(engine, "ab", max_tokens=1, structured=FORM)
    assert len(output.token_ids) == 1
