from dataclasses import replace

from forge.views.answers import logprobs_screen
from forge.views.screen import draw
from tests.views.records import flat, piped, run_of, written


def shown(output, logprobs=None, prompt_logprobs=None):
    console = piped()
    draw(console, logprobs_screen(output, logprobs, prompt_logprobs, lambda token_id: f"t{token_id}\x1b"))
    return written(console)


def with_logprobs(samples=1):
    result = run_of([(4, 1.0), (1, 1.0)], samples=samples)
    entries = (((101, -0.1), (5, -2.5)), ((6, -0.3), (102, -1.5)))
    outputs = tuple(replace(sample, logprobs=entries) for sample in result.output.outputs)
    return replace(result.output, outputs=outputs, prompt_logprobs=(None, ((2, -1.0),), ((3, -0.5),), ((4, -0.5),)))


def test_each_output_token_stands_with_its_alternatives():
    out = shown(with_logprobs(), logprobs=2)
    assert '"t101␛"' in out and "-0.100" in out and "0.905" in out
    assert '"t6␛" 0.741' in out and "\x1b" not in out


def test_the_first_prompt_token_has_no_probability():
    rows = [line for line in shown(with_logprobs(), prompt_logprobs=0).splitlines() if line.startswith('"')]
    assert rows[0].split() == ['"t1␛"', "–", "–"] and rows[1].split() == ['"t2␛"', "-1.000", "0.368"]


def test_several_samples_have_a_table_each():
    out = shown(with_logprobs(samples=2), logprobs=1)
    assert "sample 0" in out and "sample 1" in out


def test_nothing_is_printed_that_was_not_asked_for():
    assert shown(with_logprobs()) == ""
    assert shown(flat(2).output, prompt_logprobs=1) == ""
