"""What the reference pages say beside their commands, as patterns of what the commands print.

A command line (without its comment) → regular expressions, each of which its output must match. A line is in here or
among `EXEMPT`; tests/test_readme.py runs it and holds its output against them.
"""

PAGED_FIGURES = r"KV held|blocks"
SAME = r"✓ identical"
DECODED = r"per forward ms +min"
CLAIMS: dict[str, tuple[str, ...]] = {
    "forge --help": (r"generate", r"compare", r"serve", r"doctor"),
    "forge compare --kv off vs on": (SAME, r"KV held", r"tokens computed +\d+ +\d+"),
    "forge generate --kv paged --num-blocks 64 --show blocks --n 4 --temperature 0.9 --seed 7    "
    '"Once upon a time, when the first snow fell, a little girl named Hazel woke up early" 80': (
        r"sample 3",
        r"(?i)shared",
    ),
    'forge speculation --only run "Once upon a time" 48 --k 4': (r"Which draft tokens did the target accept\?",),
    'forge generate --model Qwen/Qwen3-0.6B-GGUF:Q8_0 --kv prefix --chat "What is a KV cache?" 200': (DECODED,),
    "forge naive --model Qwen/Qwen3-0.6B-GGUF:Q8_0": (r"(?i)forward",),
    "forge models synth qwen3-0.6b --type Q8_0 --out qwen3-0.6b-q8_0.gguf": (r"random parameters",),
    "forge bench cpu -m qwen3-0.6b-q8_0.gguf": (r"tokens/s +forge", r"decode 1 +[\d,]+"),
    "forge bench serve --concurrency 64": (
        r"TTFT",
        r"TPOT",
        r"ITL",
        r"output tokens/s +[\d.]+",
    ),
    "forge bench serve --concurrency 4 --num-prompts 400 --input-tokens 128 --output-tokens 32 --json": (
        r'"[^"]*ttft',
        r'"[^"]*itl',
    ),
    "forge bench serve --concurrency 16 --peer http://127.0.0.1:8081": (r"TTFT", r"(?i)ratio|peer| x\b"),
    'forge generate --kv basic "Once upon a time" 32': (r"(?m)^forward +\d+ .* ms  ", DECODED, r"forwards +32"),
    'forge generate "Once upon a time" 32 --temperature 0.8 --top-p 0.95 --top-k 40 --seed 7': (r"seed +7", DECODED),
    "forge chat": (r"prompt tokens computed, 0 held", r"first token"),
    "forge chat --kv paged": (r"kv paged",),
    "forge chapters": (r"forge naive", r"forge cluster"),
    "forge glossary prefill": (r"(?i)^prefill", r"Chapter 2"),
    "forge tour": (r"HTTP", r"forge/engine/"),
    "forge paged --bug freed-block": (r"What catches it\? freed-block", r"the rule", r"the bug"),
    "forge kernels --only run --layer": (
        r"(?s)reference  NumPy.*attn_q .*write_kv .*ffn_down .*add .*cpu  .*head norm, rope, store .*ffn_down ",
        r"cpu: \d+ operations read",
    ),
    "forge doctor": (r"device", r"kernels", r"Nothing needs mending|need mending"),
    'forge compare --kv off vs basic "The fox and the lantern" 64': (r"off +basic", SAME),
    "forge compare --model tales-q8_0 vs tales-q4_0": (r"tales-q8_0 +tales-q4_0",),
    "forge compare --device reference vs cpu": (r"reference +cpu",),
    "forge compare --batch 1 vs 16": (SAME, r"throughput"),
    "forge compare --preempt lifo vs lifo-others -m hash -n 12 --num-blocks 16 --arrival every:3 "
    "--output-tokens 16:64": (SAME, r"preemptions +7 +5", r"of them again +382 +252"),
    "forge compare --requests 4 vs 8 16": (SAME, r"outputs of 16", r"4 requests"),
    "forge compare --chunked-prefill vs --no-chunked-prefill --prompt-tokens 16:400 --max-num-batched-tokens 128": (
        SAME,
        r"on +off",
    ),
    'forge generate --kv paged --num-blocks 64 --show blocks --n 3 --temperature 0.9 "Once upon a time" 64': (
        r"sample 2",
        r"(?i)block",
    ),
    "forge compare --kv basic vs paged": (SAME, r"(?i)empty|reserved"),
    "forge compare --kv paged vs prefix --prompts FILE": (r"computed", r"found", r"blocks saved|saved"),
    "forge compare --evict lru vs prefix-cost --num-blocks 48 --requests 18 4": (
        r"lru +prefix-cost",
        SAME,
        r"tokens found +247 +391",
    ),
    "forge prefix --snapshot": (r"What does a snapshot hold, and what is shared\?", r"saved"),
    "forge bench cache": (r"What does paging cost, and what does it save\?", r"scattered"),
    "forge compare --kv basic --kv-dtype bfloat16 vs int8": (
        r"logit",
        r"✗ the tokens differ from output token|✓ identical",
    ),
    "forge bench quality -m tales-q8_0 --tokens 2048": (
        r"perplexity +KL",
        r"cpu +float16 +1\.5188 +0\.072 +11 +99\.76 %",
        r"cpu +int8 +1\.5194 +0\.100 +16 +99\.76 %",
    ),
    'forge generate --speculate draft --k 4 "Once upon a time" 64': (
        r"8 plain steps to go, to know what one takes",
        r"drafted: tales-draft-q8_0",
        r"tales-draft-q8_0 drafted",
    ),
    'forge generate --speculate ngram "Once upon a time" 64': (r"plain decodes",),
    "forge bench engine -m hash --draft hash:0.8": (r"speculative",),
    "forge compare --speculate off vs draft": (SAME, r"off +draft"),
    "forge trace-scheduler -n 9 --speculate draft --tenants 4,2,0": (r"Each tenant's draft tokens",),
    "forge trace-scheduler -n 8 --speculate draft": (r"drafted: tales-draft-q8_0 \d of \d",),
    'forge speculation --revoke-target-at 10 "Once" 40': (r"taken back|given back|waits|away",),
    "forge speculation pins --model tales --draft tales-draft": (r"(?s)(✓.*){4}", r"all bits"),
    "forge speculation pins --lengths 8,64,256 --temperature 1 --seeds 0,1,2": (
        r"sampled by gumbel, seed 0, 1, 2",
        r"8, 64, 256",
    ),
    "forge speculation pins --temperature 1 --acceptance rejection": (r"chi-squared", r"✓ the distribution"),
    'forge generate --speculate draft --draft-device reference "Once"': (r"tales-draft-q8_0",),
    "forge bench speculation": (r"formula", r"speed-up"),
    'forge generate --choice happy --choice sad "The fox had lost his lantern. He was"': (r"(?m)^(happy|sad)$",),
    'forge generate --regex "[A-Z][a-z]+ the (fox|owl|mouse)" "The hero of the story is called"': (
        r"(?m)^[A-Z][a-z]+ the (fox|owl|mouse)$",
    ),
    'forge generate --regex "My name is [A-Z][a-z]{2,6} and I live in a [a-z]{3,6}\\."    --speculate grammar '
    '--speculate-fixed "Hello" 30': (
        r"(?m)^My name is [A-Z][a-z]{2,6} and I live in a [a-z]{3,6}\.$",
        r"grammar drafted +[1-9]\d* of \d+ accepted",
    ),
    "forge constrained --only run --ask record": (r"with the form \{",),
    "forge constrained --bug mask-after": (r"What catches it\? mask-after", r"the model has no say"),
    "forge trace-scheduler --order sjf -n 60 -m hash --max-num-seqs 2 --arrival every:3 --max-tokens 4:60": (
        r"overtaken \d+ of 60 requests by more than 8 later ones",
    ),
    "forge trace-scheduler --preempt lifo -m hash -n 12 --num-blocks 16 --arrival every:3 --max-tokens 16:64": (
        r"preemptions [1-9]",
    ),
    "forge trace-scheduler --preempt lifo -m hash -n 12 --num-blocks 20 --arrival every:6 --max-tokens 8:100": (
        r"preemptions [1-9]",
    ),
    "forge trace-scheduler -n 60 --chart": (r"Throughput over time|tok/s",),
    'forge classify --labels happy,sad "The mole lost his crown, and he wept all night."': (
        r"(?s)sad +0\.9\d.*happy +0\.0",
    ),
    "forge classify --labels happy,sad --file stories.txt": (r"(?s)happy.*happy",),
    'forge score "Once upon a time" ", when the first snow fell"': (r"perplexity",),
    'forge logprobs "Once upon a time" --top 5': (r"perplexity",),
    'forge embed "the fox found a lantern" "a lantern was found" "the sea is cold"': (r"1\.000?",),
    'forge rerank --query "who found the lantern" FILE': (r"lantern",),
    "forge compare --class generation vs prefill-only --requests 64": (r"generation +prefill-only",),
    "forge compare --prefix-planning off vs on --prompts FILE": (r"off +on",),
    "forge cluster --only run --replicas 3 --requests 96": (r"round-robin", r"3 engines"),
    "forge cluster --only run --part scale": (r"(?m) 32 ", r"simulat"),
    "forge cluster --only run --part apart": (r"by another engine", r"bytes", r"milliseconds"),
    "forge models list": (r"tales-q8_0, tales", r"tales-bad-draft"),
    "forge models inspect models/tales-q8_0.gguf": (r"GGUF version 3", r"qwen3\.block_count"),
    "forge models synth qwen3-0.6b --type Q8_0 --out a.gguf": (r"random parameters",),
    "forge models pull Qwen/Qwen3-0.6B-GGUF:Q8_0": (r"run it: forge generate",),
    "forge bench engine --requests 64": (r"sequential", r"static", r"continuous"),
    "forge bench tokenizer path/to/tokenizer.json": (r"✓ equal ids and texts", r"faster"),
    "forge build": (r"11  A router that knows prefixes",),
    "forge build start 4": (r"wrote exercises/04_block_pool\.py",),
    "forge build hint 4": (r"hint 1",),
    "forge trace-scheduler --requests 64 --num-blocks 48 --trace run.jsonl": (r"(?m)^step +1 ",),
    "forge replay run.jsonl": (r"(?m)^step +1 ", r"What did the run come to\?"),
    "forge replay run.jsonl --view costs": (r"Where did the time of the steps go\?",),
    "forge replay run.jsonl --seq 3": (r"arrives", r"admitted", r"ends"),
    "forge replay run.jsonl --json": (r'"why"',),
    "forge trace export run.jsonl --perfetto": (r"run\.perfetto\.json: \d",),
    "forge trace-scheduler --workload run.jsonl --max-num-seqs 4": (
        r"ended length 64",
        r"batch [\d.]+ on average, 4 at most",
    ),
}
EXEMPT = (
    'forge speculation "Once upon a time" 64 --k 4',
    "forge speculation --revoke-draft-at 10",
    "forge bench oneshot -m hash",
    "forge bench prefix-planning",
    "forge cluster --only run --part failure",
    "forge cluster --only run --part measured",
    "forge replay run.jsonl --svg run.svg",
    "forge review",
)
"""Lines beside which nothing stands that their run here shows; tests/experiments and tests/bench run them, too."""
