"""What is lent can be taken back at any moment, from any thread, and how long that takes is known."""

import gc
import threading
import weakref

import pytest

from forge.errors import ForgeError
from forge.speculation.leases import Lease, LeaseRevoked


class Weights:
    """Something that a weak reference can watch."""


class Clock:
    """Seconds that pass only when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_lent_is_there_until_it_is_revoked():
    weights = Weights()
    lease = Lease("draft", weights)

    with lease.use() as lent:
        assert lent is weights
    assert (lease.revoked, lease.release_ms) == (False, None)
    lease.check()


def test_using_a_revoked_lease_raises_an_error_that_names_it():
    lease = Lease("draft", Weights())
    lease.revoke()

    for use in (lease.check, lease.use().__enter__):
        with pytest.raises(LeaseRevoked, match="the draft model was revoked") as raised:
            use()
        assert raised.value.name == "draft"
        assert isinstance(raised.value, ForgeError)
        assert "\n" not in str(raised.value)


def test_an_unused_lease_is_released_at_once():
    lease = Lease("draft", Weights())
    lease.revoke()

    assert lease.wait_released(0)
    assert lease.release_ms is not None


def test_a_forward_under_way_is_finished_and_its_time_is_the_time_to_release():
    clock = Clock()
    lease = Lease("target", Weights(), clock)
    with lease.use():
        clock.now += 1
        lease.revoke()
        assert lease.revoked
        assert not lease.wait_released(0)
        clock.now += 0.25
    clock.now += 9

    assert lease.wait_released(0)
    assert lease.release_ms == pytest.approx(250)


def test_revoking_again_changes_nothing():
    clock = Clock()
    lease = Lease("draft", Weights(), clock)
    with lease.use():
        lease.revoke()
        clock.now += 0.5
        lease.revoke()
    lease.revoke()

    assert lease.release_ms == pytest.approx(500)


def test_after_release_nothing_holds_the_weights():
    weights = Weights()
    alive = weakref.ref(weights)
    lease = Lease("draft", weights)
    del weights
    with lease.use() as lent:
        lease.revoke()
        assert lent is alive()
        del lent
    gc.collect()

    assert alive() is None


def test_an_exception_inside_a_use_ends_the_use():
    lease = Lease("draft", Weights())
    with pytest.raises(KeyboardInterrupt), lease.use():
        raise KeyboardInterrupt
    lease.revoke()

    assert lease.wait_released(0)


def test_the_last_of_several_users_releases():
    lease = Lease("target", Weights())
    entered, leave = threading.Barrier(3), threading.Event()

    def use():
        with lease.use():
            entered.wait()
            leave.wait()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    with lease.use():
        lease.revoke()
        leave.set()
        for thread in threads:
            thread.join()
        assert not lease.wait_released(0)

    assert lease.wait_released(0)


def test_a_thread_that_uses_it_all_the_time_notices_a_revocation_from_another():
    lease = Lease("draft", Weights())
    started, ended = threading.Event(), []

    def use():
        try:
            while True:
                with lease.use():
                    started.set()
        except LeaseRevoked as error:
            ended.append(error.name)

    thread = threading.Thread(target=use)
    thread.start()
    started.wait()
    lease.revoke()
    assert lease.wait_released(10)
    thread.join(10)

    assert ended == ["draft"]


def test_an_interrupted_leave_is_made_up_for_by_the_next_call_of_the_thread(monkeypatch):
    lease = Lease("draft", Weights())
    leave = lease._leave

    def interrupted():
        monkeypatch.setattr(lease, "_leave", leave)
        raise KeyboardInterrupt

    monkeypatch.setattr(lease, "_leave", interrupted)
    with pytest.raises(KeyboardInterrupt), lease.use():
        pass
    lease.revoke()
    assert not lease.wait_released(0)
    with pytest.raises(LeaseRevoked), lease.use():
        pass

    assert lease.wait_released(0)
