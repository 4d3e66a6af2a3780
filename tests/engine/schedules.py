"""A scheduler stepped without a model: every item that samples gets a token from the test."""

from forge.cache.factory import CacheSize, create_kv_cache
from forge.engine.output_text import OutputText
from forge.engine.policies import SchedulerConfig
from forge.engine.sampling_params import SamplingParams
from forge.engine.scheduler import Scheduler
from forge.engine.sequence import Sequence
from forge.engine.step_plan import Outcome, StepPlan
from forge.engine.task import GENERATE, Task


def new_scheduler(num_blocks: int, *, kv: str = "paged", block_size: int = 4, **config) -> Scheduler:
    cache = create_kv_cache(kv, CacheSize(32, 4, block_size, 8, num_blocks))
    return Scheduler(cache, SchedulerConfig(config.pop("max_num_seqs", 4), **config))


def sequence(seq_id: int, tokens: int = 3, max_tokens: int = 9, **options) -> Sequence:
    params = options.pop("params", SamplingParams())
    scored = params.prompt_logprobs
    task = GENERATE if scored is None else Task(sample=True, score_from=1, top=scored)
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        sample_index=0,
        token_ids=options.pop("token_ids", list(range(100, 100 + tokens))),
        num_prompt_tokens=tokens,
        max_output_tokens=max_tokens,
        params=params,
        task=options.pop("task", task),
        seed=0,
        output_text=OutputText(None),
        **options,
    )


def outcomes_of(scheduler: Scheduler, plan: StepPlan, ending: tuple[int, ...] = ()) -> list[Outcome]:
    """Token 7 for every item that samples, and for each fork that begins with it; `length` for the exhausted."""

    def outcome(one: Sequence, samples: bool) -> Outcome:
        reason = "length" if one.seq_id in ending else None
        return Outcome(one.seq_id, len(one.token_ids), (7,) if samples else (), reason)

    outcomes = []
    for item in plan.items:
        outcomes.append(outcome(item.sequence, item.chooses_token))
        outcomes += [outcome(sample, True) for sample in item.sequence.waiting_samples if item.chooses_token]
    return outcomes + [outcome(one, False)._replace(finish_reason="length") for one in plan.exhausted]


def waiting(scheduler: Scheduler) -> list[Sequence]:
    """The sequences in the queue, in order, but for those whose blocks are in the host pool."""
    return [one for one in scheduler.queue if one.seq_id not in scheduler.host_pool.entries]


def admitted(plan: StepPlan) -> tuple[int, ...]:
    return tuple(one.seq_id for one in plan.admitted)


def step(scheduler: Scheduler, ending: tuple[int, ...] = ()) -> StepPlan:
    """Schedule and commit one step in which every item gets token 7."""
    plan = scheduler.schedule()
    outcomes = outcomes_of(scheduler, plan, ending)
    scheduler.commit(plan, outcomes)
    scheduler.check_invariants()
    return plan
