"""A leased model can be taken back at any moment, from any thread, and how long that takes is known."""

import gc
import threading
import weakref
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from forge.engine.sampling_params import SamplingParams
from forge.errors import ForgeError
from forge.llm import LLM
from forge.model.hash_model import HashModel
from forge.model.model import Model, ModelUnavailable
from forge.speculation.leases import LeasedModel, LeaseRevoked, lease_model
from tests.engine.scripted import new_engine, saying
from tests.waiting import PATIENCE


class Busy(HashModel):
    """A model that calls a function in each forward."""

    def __init__(self, during: Callable[[], object] = lambda: None):
        super().__init__()
        self.during = during

    def forward(self, batch, storage):
        return self.during()

    def hidden(self, batch, storage):
        return self.during()


class Clock:
    """Seconds that pass only when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Classifier(HashModel):
    """A model with other facts than the hash model's."""

    generates, embeds, labels, runs_ahead = False, True, ("yes", "no"), True
    num_layers = max_position_embeddings = 7


def leased(during: Callable[[], object] = lambda: None, name: str = "draft", **options) -> LeasedModel:
    return LeasedModel(Busy(during), name, **options)


def test_a_leased_model_is_the_model_until_it_is_revoked():
    model = leased(lambda: "logits")

    assert model.forward(None, None) == "logits"
    assert (model.lease.revoked, model.lease.release_ms) == (False, None)
    facts = ("vocab_size", "num_layers", "max_position_embeddings", "generates", "embeds", "labels", "runs_ahead")
    for original in (HashModel(), Classifier()):
        model = LeasedModel(original, "target")
        assert all(getattr(model, fact) == getattr(original, fact) for fact in facts)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("forward", "bs"), ("hidden", "bs"), ("kv_layout", (3, 8, "int8")), ("new_storage", "l"), ("prepare", "l")),
        *(("temporary_bytes", (5, 2)), ("time_operations", ()), ("operation_times", ()), ("check_available", ())),
    ],
)
def test_a_leased_model_passes_on_what_it_is_asked(name, arguments):
    original = Mock(spec=HashModel())
    answer, asked = getattr(LeasedModel(original, "draft"), name)(*arguments), getattr(original, name)
    asked.assert_called_once_with(*arguments)
    assert answer is (None if name in ("prepare", "time_operations", "check_available") else asked.return_value)


def test_a_lease_says_whether_a_forward_uses_its_model():
    model = leased(lambda: seen.append(model.lease.in_use))
    seen = []
    model.forward(None, None)
    assert (seen, model.lease.in_use) == ([True], False)


def test_a_model_that_was_given_back_is_not_yet_released_again():
    model = leased()
    model.lease.revoke()
    assert model.lease.wait_released(0)
    model.lease.grant(HashModel())
    assert not model.lease.wait_released(0)


def test_a_leased_model_is_told_apart_by_what_it_can_do():
    able = HashModel()
    able.embeds, able.runs_ahead = not able.embeds, not able.runs_ahead
    model = LeasedModel(able, "draft")
    assert (model.embeds, model.runs_ahead) == (able.embeds, able.runs_ahead)


def test_it_forwards_every_method_of_a_model():
    methods = {name for name, member in vars(Model).items() if callable(member) and not name.startswith("_")}

    assert methods <= vars(LeasedModel).keys()


def test_a_revoked_model_raises_an_error_that_names_it_and_keeps_its_sizes():
    model = leased()
    model.lease.revoke()

    for use in (model.check_available, lambda: model.forward(None, None), lambda: model.hidden(None, None)):
        with pytest.raises(LeaseRevoked, match="the draft model was revoked") as raised:
            use()
        assert raised.value.name == "draft"
        assert raised.value.release_ms == model.lease.release_ms is not None
        assert isinstance(raised.value, ModelUnavailable) and isinstance(raised.value, ForgeError)
        assert "\n" not in str(raised.value)
    assert (model.vocab_size, model.temporary_bytes(5, 2)) == (HashModel().vocab_size, 0)


def test_an_unused_model_is_released_at_once():
    lease = leased().lease
    lease.revoke()

    assert lease.wait_released(0)
    assert lease.release_ms is not None


def test_a_forward_under_way_is_finished_and_its_time_is_the_time_to_release():
    clock = Clock()

    def during():
        clock.now += 1
        lease.revoke()
        assert lease.revoked
        assert not lease.wait_released(0)
        clock.now += 0.25
        return "logits"

    model = leased(during, "target", clock=clock)
    lease = model.lease
    assert model.forward(None, None) == "logits"
    clock.now += 9

    assert lease.wait_released(0)
    assert lease.release_ms == pytest.approx(250)


def test_revoking_again_changes_nothing():
    clock = Clock()

    def during():
        lease.revoke()
        clock.now += 0.5
        lease.revoke()

    model = leased(during, clock=clock)
    lease = model.lease
    model.forward(None, None)
    lease.revoke()

    assert lease.release_ms == pytest.approx(500)


def test_after_release_nothing_holds_the_wrapped_model():
    original = Busy()
    alive, model = weakref.ref(original), LeasedModel(original, "draft")
    original.during = model.lease.revoke
    del original
    model.forward(None, None)
    gc.collect()

    assert alive() is None


def test_an_exception_inside_a_forward_ends_its_use():
    def interrupt():
        raise KeyboardInterrupt

    model = leased(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.forward(None, None)
    model.lease.revoke()

    assert model.lease.wait_released(0)


def test_the_last_of_several_users_releases():
    entered, leave = threading.Barrier(3), threading.Event()

    def during():
        entered.wait()
        leave.wait()

    model = leased(during)
    threads = [threading.Thread(target=model.forward, args=(None, None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    model.lease.revoke()
    assert not model.lease.wait_released(0)
    leave.set()
    for thread in threads:
        thread.join()

    assert model.lease.wait_released(0)


def test_a_thread_that_uses_it_all_the_time_notices_a_revocation_from_another():
    started, ended = threading.Event(), []
    model = leased(started.set)

    def use():
        try:
            while True:
                model.forward(None, None)
        except LeaseRevoked as error:
            ended.append(error.name)

    thread = threading.Thread(target=use)
    thread.start()
    started.wait()
    model.lease.revoke()
    assert model.lease.wait_released(PATIENCE)
    thread.join(PATIENCE)

    assert ended == ["draft"]


def test_an_interrupted_leave_is_made_up_for_by_the_next_call_of_the_thread(monkeypatch):
    model = leased()
    lease, leave = model.lease, model.lease.leave

    def interrupted():
        monkeypatch.setattr(lease, "leave", leave)
        raise KeyboardInterrupt

    monkeypatch.setattr(lease, "leave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.forward(None, None)
    lease.revoke()
    assert not lease.wait_released(0)
    with pytest.raises(LeaseRevoked):
        model.forward(None, None)

    assert lease.wait_released(0)


def test_a_model_is_wrapped_when_its_lease_is_first_asked_for():
    engine = new_engine(saying([1], 1))
    model = engine.model

    lease = lease_model(engine, "target")

    assert isinstance(engine.model, LeasedModel) and lease.model() is model
    assert lease_model(engine, "target") is lease


def test_a_released_model_can_be_given_back_and_revoked_again():
    model, other = leased(lambda: "first"), Busy(lambda: "second")
    with pytest.raises(ValueError, match="nothing to give back"):
        model.lease.grant(other)
    model.lease.revoke()
    model.lease.grant(other)
    assert model.forward(None, None) == "second" and not model.lease.revoked and not model.lease.in_use
    model.lease.revoke()
    assert model.lease.release_ms is not None and model.lease.wait_released(0)


def test_an_engine_that_waits_for_its_model_keeps_its_sequences():
    llm = LLM("hash", kv="paged")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = llm.generate("abc", params)[0].outputs[0].token_ids
    run, lease = llm.start("abc", params), llm.lease()
    model, steps = lease.model(), iter(run)
    for _ in range(4):
        next(steps)
    llm.engine.waits_for_model = True
    lease.revoke()
    for _ in range(2):
        with pytest.raises(LeaseRevoked):
            next(iter(run))
    lease.grant(model)
    assert [record.finished for record in run][-1] and run.outputs[0].outputs[0].token_ids == expected
