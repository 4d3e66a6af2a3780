"""One table says which option means nothing without which, and every entrance refuses what it would ignore."""

from dataclasses import fields

import pytest

from forge import LLM, experiments
from forge.cluster.options import ClusterOptions
from forge.engine_args import EngineArgs
from forge.errors import UsageError
from forge.option import NEEDS, check_needs, flag_of
from forge.server.settings import Limits, Settings
from tests.cli.conftest import forge  # noqa: F401 (a fixture)
from tests.cli.test_errors import complaint
from tests.cli.test_parsing import COMMANDS

IGNORED = {
    ("block_size", "kv"): "--kv off --block-size 32",
    ("num_blocks", "kv"): "--kv off --num-blocks 3",
    ("kv_memory", "kv"): "--kv off --kv-memory 1MB",
    ("gpu_memory_utilization", "kv"): "--kv off --device cuda --gpu-memory-utilization 0.5",
    ("gpu_memory_utilization", "device"): "--kv paged --gpu-memory-utilization 0.5",
    ("invariant", "device"): "--device cpu --invariant",
    ("kernels", "device"): "--device reference --kernels torch",
    ("quantize", "device"): "--device reference --quantize q8_0",
    ("threads", "device"): "--device reference --threads 2",
    ("draft", "speculate"): "--speculate ngram --draft tales-draft",
    ("draft_device", "speculate"): "--speculate ngram --draft-device cpu",
    ("k", "speculate"): "--speculate off --k 3",
    ("speculate_fixed", "speculate"): "--speculate off --speculate-fixed",
    ("acceptance", "speculate"): "--speculate grammar --acceptance gumbel",
    ("drafts", "speculate"): "--speculate ngram --drafts tales-draft",
    ("num_speculative_tokens", "speculate"): "--num-speculative-tokens 3",
    ("tenants", "speculate"): "--tenants 4,2,0",
    ("preempt", "kv"): "--kv basic --preempt lifo",
    ("preempt", "order"): "--kv paged --order priority --preempt lifo",
    ("preemption", "kv"): "--kv off --preemption swap",
    ("evict", "kv"): "--kv paged --evict prefix-cost",
    ("num_host_blocks", "preemption"): "--kv paged --num-host-blocks 3",
    ("prefix_planning", "kv"): "--kv paged --no-prefix-planning",
    ("top_p", "temperature"): "--top-p 0.9",
    ("top_k", "temperature"): "--top-k 9",
    ("min_p", "temperature"): "--min-p 0.1",
    ("seed", "temperature"): "--seed 3",
    ("show", "kv"): "--kv off --show blocks",
    ("pace", "show"): "--pace 3",
    ("svg", "seq"): "--seq 3 --svg a.svg",
    ("svg", "view"): "--view costs --svg a.svg",
    ("step", "seq"): "--seq 3 --step",
    ("step", "view"): "--view costs --step",
    ("view", "seq"): "--seq 3 --view costs",
    ("instruction", "by"): "--by embedding --instruction order",
    ("question", "raw"): "--raw --question which",
    ("router", "engines"): "--router prefix",
    ("target_requests", "max_replicas"): "--replicas 2 --target-requests 3",
    ("upscale_delay", "max_replicas"): "--replicas 2 --upscale-delay 3",
    ("downscale_delay", "max_replicas"): "--replicas 2 --downscale-delay 3",
    ("num_blocks", "engine"): "--num-blocks 3",
    ("threads", "engine"): "--threads 3",
    ("turns", "compared"): "--turns 3",
    ("peer_model", "peer"): "--peer-model m",
    ("return_draft_at", "revoke_draft_at"): "--return-draft-at 3",
    ("requests", "workload"): "--workload FILE -n 3",
    ("arrival", "workload"): "--workload FILE --arrival all",
    ("prompt_tokens", "workload"): "--workload FILE --prompt-tokens 3",
    ("max_tokens", "workload"): "--workload FILE --max-tokens 3",
    ("dataset", "workload"): "--workload FILE --dataset words",
    ("input_tokens", "workload"): "--workload FILE --input-tokens 3",
    ("output_tokens", "workload"): "--workload FILE --output-tokens 3",
    ("num_prompts", "workload"): "--workload FILE --num-prompts 3",
    ("prefix_reuse", "workload"): "--workload FILE --prefix-reuse 0.5",
    ("request_rate", "workload"): "--workload FILE --request-rate 3",
    ("workload", "compared"): "--workload FILE --engine hash",
    ("prompt_tokens", "planned"): "--prompt-tokens 16 --prefix-planning on vs off",
    ("output_tokens", "planned"): "--output-tokens 16 --prefix-planning on vs off",
    ("arrival", "planned"): "--arrival every:3 --prefix-planning on vs off",
    ("workload", "planned"): "--workload FILE --prefix-planning on vs off",
    ("output_tokens", "prompted"): "Once 3 --output-tokens 16",
    ("arrival", "prompted"): "Once 3 --arrival every:3",
    ("workload", "prompted"): "Once --workload FILE",
    ("prompt_tokens", "prompted"): "Once 3 --prompt-tokens 16",
    ("requests", "prompts"): "--requests 3 --prompts FILE --prefix-planning on vs off",
    ("prompts", "many"): "--batch 3 --prompts FILE",
    ("execution_class", "planned"): "--class generation",
    ("temperature", "many"): "--requests 3 --temperature 1",
    ("top_p", "many"): "--requests 3 --top-p 0.5",
    ("top_k", "many"): "--requests 3 --top-k 5",
    ("min_p", "many"): "--requests 3 --min-p 0.5",
    ("repetition_penalty", "many"): "--requests 3 --repetition-penalty 1.5",
    ("seed", "many"): "--requests 3 --seed 3",
    ("stop", "many"): "--requests 3 --stop x",
    ("ignore_eos", "many"): "--requests 3 --ignore-eos",
    ("drafts", "many"): "--requests 3 --speculate draft --drafts tales-draft",
    ("num_speculative_tokens", "many"): "--requests 3 --speculate draft --num-speculative-tokens 2",
}
"""Of each row of the table, a command line on which the option would do nothing."""
WORDS = {"PROMPT": "Once", "TEXT": "Once", "CONTINUATION": "upon", "FILE": "README.md", "NUMBER": "4"}
_ALWAYS = """
allow_origins allowed_hosts api_key arrival ask batch branch_at branches budgets bug by chart chat check choice
chunked_prefill clients concurrency dataset debug_texts decode_replicas device echo engine every everything fields
file folder force goodput grace grammar graphs head_dim header_timeout hidden_size host input_tokens
intermediate_size item_tokens json json_schema kv kv_dtype labels length lengths lines live log_dir log_interval
logprobs long max_body_bytes max_model_len max_num_batched_tokens max_num_seqs max_position_embeddings max_queue
max_replicas max_tokens model model_names models n num_attention_heads num_key_value_heads num_layers num_prompts
on_engine_death only order out output_tokens part pause peer peer_bin peer_python perfetto pooling port
prefill_only prefill_only_memory prefill_only_tokens prefill_replicas prefix_reuse probe_health prompt_logprobs
pure query quick raw ray_address record regex replicas reps request_rate revoke_draft_at revoke_target_at rubric
rubric_tokens seeds seq sequences snapshot speculate stall_timeout steps system text threshold tie_word_embeddings
tokens top trace type types url vocab_size
"""
SETTINGS = {field.name for made in (Settings, Limits, ClusterOptions) for field in fields(made) if field.metadata}
ALWAYS = set(_ALWAYS.split()) | SETTINGS
"""Options that mean something whatever else is given, or whose command itself says what they need."""
FLAGS = {"execution_class": "--class"}
NEUTRAL = ("--max-model-len", "64", "vs", "65")


def _takes(command, option: str, on: str) -> bool:
    """Whether a command has both sides of a row."""
    names = {param.name for param in command.params}
    derived = {
        "engines": "decode_replicas",
        "compared": "turns",
        "many": "execution_class",
        "planned": "execution_class",
    }
    return {option, derived.get(on, "execution_class" if on == "prompted" else on)} <= names


CASES = [
    pytest.param(name, row, id=f"{name} {row[0]} without {row[1]}")
    for row in IGNORED
    for name, command in COMMANDS.items()
    if _takes(command, *row)
]


def test_every_row_has_a_line_that_it_refuses():
    assert IGNORED.keys() == {(need.option, need.on) for need in NEEDS}
    assert {row.values[1] for row in CASES} == IGNORED.keys()


def test_every_option_is_in_the_table_or_always_means_something():
    """Of the commands that run an engine; the options of one chapter or benchmark alone are its own business."""
    own = {"bench", *experiments.summaries()}
    shared = [
        command
        for name, command in COMMANDS.items()
        if name.split()[0] not in own and any(param.name == "device" for param in command.params)
    ]
    assert len(shared) > 7
    options = {param.name for command in shared for param in command.params if param.param_type_name == "option"}
    assert options - {"help"} - {need.option for need in NEEDS} - ALWAYS == set()


@pytest.mark.parametrize(("name", "row"), CASES)
def test_a_command_refuses_an_option_that_it_would_ignore(forge, name, row):  # noqa: F811
    command, line = COMMANDS[name], IGNORED[row].split()
    known = {spelling for param in command.params for spelling in (*param.opts, *param.secondary_opts)}
    if any(word.startswith("--") and word not in known for word in line):
        pytest.skip("another command's way to say it")
    arguments = [param.metavar for param in command.params if param.param_type_name == "argument"]
    words = [WORDS[argument] for argument in arguments if argument in WORDS and name != "compare"]
    words += ["--query", "fox"] if name == "rerank" else []
    sides = NEUTRAL if name == "compare" and "vs" not in line else ()

    complained = complaint(forge(*name.split(), *words, *sides, *line))

    assert complained.startswith(f"forge: {FLAGS.get(row[0], flag_of(row[0]))} means nothing")


@pytest.mark.parametrize(
    "given",
    [
        {"kv": "off", "num_blocks": 3},
        {"kv": "off", "block_size": 32},
        {"kv": "basic", "preemption": "swap"},
        {"kv": "paged", "order": "priority", "preempt": "least-progressed"},
        {"kv": "paged", "prefix_planning": False},
        {"device": "reference", "quantize": "q8_0"},
        {"draft": "tales-draft"},
        {"speculate": "ngram", "draft_device": "cpu", "draft": ["tales-draft"]},
    ],
    ids=str,
)
def test_python_refuses_the_same(given):
    with pytest.raises(UsageError, match="means nothing"):
        LLM("hash", **given)


def test_a_loaded_model_may_be_asked_for_guesses_later():
    llm = LLM("hash", kv="paged", k=3, speculate_fixed=True, acceptance="rejection")
    llm.speculate_with("ngram")
    assert llm.engine.speculation.max_k == 3


def test_a_part_of_the_callers_own_may_use_any_option():
    EngineArgs("hash", kv=lambda size: None, preemption="swap", num_host_blocks=3, prefix_planning=False)
    EngineArgs("hash", order=lambda sequence: (0,), preempt="least-progressed", kv="paged")


def test_a_default_that_is_given_is_refused_too():
    check_needs({"kv": "off", "block_size": 16}, ())
    with pytest.raises(UsageError, match="--block-size means nothing with --kv off: give --kv basic, paged or prefix"):
        check_needs({"kv": "off", "block_size": 16}, {"block_size"})


def test_the_default_that_makes_it_meaningless_is_named(forge):  # noqa: F811
    found = complaint(forge("generate", "Once", "--k", "3"))
    assert found == ("forge: --k means nothing with --speculate off: give --speculate draft or ngram, or leave --k out")


@pytest.mark.parametrize(
    "line",
    [
        "--kv off vs paged --num-blocks 8 -m hash abc 3",
        "--speculate off vs ngram --k 3 -m hash abc 3",
        "--temperature 0 vs 1 --top-p 0.5 --seed 3 -m hash abc 3",
        "--preemption recompute vs swap --num-host-blocks 4 -m hash --requests 3 4",
        "--order fcfs vs priority --preempt least-progressed -m hash --requests 3 4",
        "--preempt lifo vs least-progressed --num-blocks 48 -m hash --requests 3 4",
        "--device reference vs cpu --threads 1 -m hash abc 3",
    ],
)
def test_a_comparison_needs_a_meaning_on_one_side(forge, line):  # noqa: F811
    found = forge("compare", *line.split())
    assert found.status in (0, 1) and not found.err


@pytest.mark.parametrize("value", ["maybe", "yes "])
def test_a_variable_of_the_environment_has_two_values(forge, monkeypatch, value):  # noqa: F811
    monkeypatch.setenv("FORGE_PACKED_WEIGHTS", value)
    assert "FORGE_PACKED_WEIGHTS" in complaint(forge("generate", "-m", "hash", "Once", "1"))
    with pytest.raises(UsageError, match="give on or off"):
        LLM("hash")
