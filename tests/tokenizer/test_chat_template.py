"""Chat prompts: Qwen3's published text, the file's own template as Hugging Face renders it, and hostile templates."""

import json

import pytest

from forge.errors import ForgeError, UsageError
from forge.tokenizer import Tokenizer, TokenizerSpec
from forge.tokenizer.chat_template import MAX_TEMPLATE_CHARS, QWEN3_CHAT_TEMPLATE, ChatTemplate, ChatTemplateError

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def qwen3(messages, **variables):
    return ChatTemplate(QWEN3_CHAT_TEMPLATE, {}).render(messages, **{"add_generation_prompt": True} | variables)


def render(source, messages=(USER,), **variables):
    return ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(messages, **variables)


def test_qwen3_user_turn_with_generation_prompt():
    assert qwen3([USER]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_qwen3_system_turn_comes_first():
    assert qwen3([SYSTEM, USER], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_qwen3_without_thinking_opens_with_an_empty_think_block():
    assert qwen3([USER], enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert qwen3([USER], enable_thinking=True) == qwen3([USER])


def test_qwen3_earlier_answers_lose_their_thinking():
    rendered = qwen3([USER, answer("<think>\nlong\n</think>\n\nHello!"), {"role": "user", "content": "And?"}])
    assert rendered == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen3_the_last_answer_keeps_its_thinking():
    with_thinking = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nlong\n</think>\n\nHello!<|im_end|>\n"
    )
    for last in (answer("<think>\nlong\n</think>\n\nHello!"), answer("Hello!", reasoning_content="\nlong\n")):
        assert qwen3([USER, last], add_generation_prompt=False) == with_thinking


def test_qwen3_the_last_answer_without_thinking_gets_an_empty_block():
    assert qwen3([USER, answer("\nHello!")], add_generation_prompt=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\nHello!<|im_end|>\n"
    )


def test_qwen3_a_tool_response_is_not_a_new_question():
    tool = {"role": "user", "content": "<tool_response>\n5\n</tool_response>"}
    rendered = qwen3([USER, answer("Let me see.", reasoning_content="look"), tool], add_generation_prompt=False)
    assert "<think>\nlook\n</think>\n\nLet me see." in rendered


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_qwen3_tools_are_listed_in_the_system_turn():
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    listed = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "f", "description": "é"}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    )
    turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3([USER], tools=tools) == "<|im_start|>system\n" + listed + turns
    assert qwen3([SYSTEM, USER], tools=tools) == "<|im_start|>system\nBe brief.\n\n" + listed + turns


def test_qwen3_calls_and_their_results_are_turns():
    calls = [call("f", '{"a": 1}'), call("g", {"b": "é"})]
    results = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}]
    turn = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n' + (
        '<tool_call>\n{"name": "g", "arguments": {"b": "é"}}\n</tool_call><|im_end|>\n'
    )
    for said, before in (("", ""), (None, ""), ("Let me see.", "Let me see.\n")):
        rendered = qwen3([USER, answer(said, tool_calls=calls), *results])
        assert rendered == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + before + turn + "<|im_start|>user\n"
            "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_qwen3_says_what_it_has_not():
    with pytest.raises(ChatTemplateError, match="no role wizard"):
        qwen3([{"role": "wizard", "content": "5"}])


def test_a_template_without_tools_shows_them_as_qwen3_does(entries):
    own = Tokenizer(TokenizerSpec(**entries, chat_template="{{ messages[0].content }}"))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert own.apply_chat_template([USER]) == "Hi"
    assert own.apply_chat_template([USER], tools=tools) == qwen3([USER], tools=tools)
    result = [USER, {"role": "tool", "content": "5"}]
    assert own.apply_chat_template(result) == qwen3(result)
    with_tools = Tokenizer(TokenizerSpec(**entries, chat_template="{{ tools | tojson }}"))
    assert with_tools.apply_chat_template([USER], tools=tools) == json.dumps(tools)


def test_the_tokenizer_uses_the_files_template_and_qwen3s_when_it_has_none(entries, tokenizer):
    own = Tokenizer(TokenizerSpec(**entries, chat_template="{{ bos_token }}|{{ eos_token }}|{{ enable_thinking }}"))
    assert own.apply_chat_template([USER], enable_thinking=False) == "<|endoftext|>|<|im_end|>|False"
    assert own.apply_chat_template([USER]) == "<|endoftext|>|<|im_end|>|"
    assert tokenizer.apply_chat_template([USER]) == qwen3([USER])


def test_a_rendered_prompt_becomes_control_tokens(tokenizer):
    ids = tokenizer.encode(tokenizer.apply_chat_template([USER]), allow_special=True)
    assert [tokenizer.token_text(i) for i in ids].count("<|im_start|>") == 2
    assert tokenizer.eos_token_id in ids


def test_blocks_are_trimmed_as_hugging_face_trims_them():
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n") == "Hi\n"
    )


def test_loops_may_be_left_early():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_the_loop_variable_knows_its_length():
    assert render("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}") == "1/1True"


def test_json_is_neither_escaped_for_html_nor_made_ascii():
    value = {"b": "<é> & '", "a": [1, None]}
    assert render("{{ value | tojson }}", value=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ value | tojson(indent=2) }}", value=value) == json.dumps(value, ensure_ascii=False, indent=2)


def test_a_template_can_ask_for_the_date():
    assert render("{{ strftime_now('%Y') | length }}") == "4"


def test_a_template_can_refuse_with_its_own_words():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_content_may_be_a_list_of_text_parts():
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]
    assert "Hi you<|im_end|>" in qwen3([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "Hi"}],
        ["Hi"],
        [{"role": 1, "content": "Hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_messages_that_are_none_are_a_usage_error(messages):
    with pytest.raises(UsageError, match="message"):
        qwen3(messages)


_DOUBLING = "{% set n = namespace(x='aa') %}{% for i in range(60) %}STEP{% endfor %}{{ n.x }}"
HOSTILE = {
    "not jinja": "{% if %}",
    "unclosed": "{% for m in messages %}",
    "undefined": "{{ nothing.at.all }}",
    "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "mutation": "{{ messages.append(1) }}",
    "files": "{% include '/etc/passwd' %}",
    "division": "{{ 1 / 0 }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "exponential recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubling by ~": _DOUBLING.replace("STEP", "{% set n.x = n.x ~ n.x %}"),
    "doubling by +": _DOUBLING.replace("STEP", "{% set n.x = n.x + n.x %}"),
    "doubling by block": _DOUBLING.replace("STEP", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
    "doubling by list": _DOUBLING.replace("STEP", "{% set n.x = [n.x, n.x] %}"),
    "doubling by replace": "{{ ('a' * 999999).replace('a', 'b' * 999999) | length }}",
    "long constant": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "repetition": "{{ 'a' * 10000000000 }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "filter width": "{{ 'a' | center(10000000000) }}",
    "method width": "{{ 'a'.ljust(10000000000) }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "nested format width": "{{ '{:{}}'.format(1, 999999999) }}",
    "format doubling": "{{ ('{0}' * 100000).format('x' * 100000) | length }}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "too long": "x" * (MAX_TEMPLATE_CHARS + 1),
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_one_line_of_error(source):
    with pytest.raises(ForgeError) as raised:
        render(source)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert "MemoryError" not in str(raised.value)


def test_bounds_leave_ordinary_numbers_and_long_conversations_alone():
    assert render("{{ '%d' % 1700000000 }} {{ 1700000000 | string }}") == "1700000000 1700000000"
    assert (
        render("{{ '{}'.format(messages[0].content) }}", [{"role": "user", "content": "call 12345678"}])
        == "call 12345678"
    )
    conversation = [USER, answer("x" * 2_000)] * 2_000 + [USER]
    assert qwen3(conversation).count("<|im_start|>") == 4_002


def test_one_rendering_does_not_spend_anothers_budget():
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}done", {})
    assert {template.render([USER]) for _ in range(20)} == {"done"}
