"""What the cycles of a run add up to for each draft, and the positions in both caches."""

from dataclasses import replace

from forge.trace.explain import explain_cycle
from forge.trace.records import CachedPositions, SpecCycle, TokenVerdict
from forge.trace.speculation_summary import draft_totals


def cycle(name: str, accepted: int, won: bool = True, proposed: int = 4) -> SpecCycle:
    verdicts = tuple(TokenVerdict(5, place < accepted, 5) for place in range(min(accepted + 1, proposed)))
    emitted = (5,) * (accepted + 1) if won else ()
    return SpecCycle(
        0, name, 10, (5,) * proposed, verdicts, emitted, 0.5, 1.0, won=won, draft_cached=(9, 10 + proposed - 1)
    )


def test_each_draft_has_its_acceptance_by_position_and_what_it_gained_over_the_others():
    steps = [
        (cycle("small", 1, won=False), cycle("large", 3)),
        (cycle("small", 2), cycle("large", 2, won=False)),
        (cycle("small", 1, proposed=1),),
    ]
    small, large = draft_totals(steps)
    assert (small.name, small.cycles, small.won, small.proposed, small.accepted, small.gained) == (
        "small", 3, 2, 9, 4, 1
    )  # fmt: skip
    assert small.by_position == [(3, 3), (1, 2), (0, 2), (0, 2)] and small.ms == 1.5
    assert (large.won, large.gained, large.acceptance) == (1, 2, 5 / 8)
    assert draft_totals([(), (replace(cycle("small", 0), proposed=()),)]) == ()


def test_a_rollback_is_told_as_positions_in_both_caches():
    own = cycle("small", 2)
    assert own.target_positions == CachedPositions(9, 14, 12)
    assert own.draft_positions == CachedPositions(9, 13, 12)
    assert explain_cycle(own) == "small 2 of 4; KV 9 > 14 > 12, draft's 9 > 13 > 12; 0.50 + 1.0 ms"
    lost = cycle("small", 2, won=False)
    assert lost.target_positions == CachedPositions(9, 14, 9) and "another draft won" in explain_cycle(lost)
    everything = cycle("small", 4)
    assert everything.target_positions.after == 14 and everything.draft_positions == CachedPositions(9, 13, 13)
    assert own.draft_positions == (9, 13, 12)
    assert "draft's" not in explain_cycle(replace(own, draft_cached=None))
    assert explain_cycle(replace(own, error="revoked")) == "small is left out: revoked"
