"""Step records without what they say: token ids and texts belong to the client that asked."""

from dataclasses import replace

from forge.trace.records import StepRecord


def without_texts(record: StepRecord) -> StepRecord:
    """Return `record` with 0 for every token id and no text. Counts, times, blocks and reasons stay."""
    return replace(
        record,
        tokens=tuple([token._replace(token_id=0, text="", probability=None, logprobs=None) for token in record.tokens]),
        finished=tuple([replace(finish, text="", stop=None) for finish in record.finished]),
        cycles=tuple(
            replace(
                cycle,
                proposed=(0,) * len(cycle.proposed),
                emitted=(0,) * len(cycle.emitted),
                verdicts=tuple(replace(verdict, token_id=0, target_argmax=0) for verdict in cycle.verdicts),
            )
            for cycle in record.cycles
        ),
    )
