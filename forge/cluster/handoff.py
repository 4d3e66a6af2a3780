"""Prefill apart from decode: the engine of a replica that computes prompts for others, and takes in what others did.

The bytes never cross the socket between the engine's thread and the actor: they are in one process, and the actor gives
them to Ray's object store, which the other replica's process reads in place.
"""

from typing import Any

from forge.engine.handoff import KvHandoff
from forge.engine.sampling_params import SamplingParams
from forge.server.engine_process import EngineServer
from forge.server.messages import Submit

MIN_PROMPT = 2
"""Tokens of the shortest prompt of which anything can be handed over: the last one is computed where it is sampled."""


def prefill_params() -> SamplingParams:
    """For a request that is computed for another engine. Its one token is not used."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def prefill_of(submit: Submit) -> Submit:
    """The request that computes what another engine needs of this one: all of its prompt but the last token."""
    return submit._replace(token_ids=submit.token_ids[:-1], params=prefill_params(), prompt=None, stream=False)


class HandoffEngine(EngineServer):
    """An `EngineServer` that hands over the caches of the requests in `prefills`."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.handed_off: dict[int, KvHandoff] = {}
        """By the request's key, here before its end is told."""

    def _take_output(self, request: Any, error: str | None) -> None:
        (seq_id, *_) = self._log.seq_ids(request.request_id)
        super()._take_output(request, error)
        if request.key in self.prefills:
            self.prefills.discard(request.key)
            if self.engine.is_retained(seq_id):
                self.handed_off[request.key] = self.engine.hand_off(seq_id)
                self.engine.release(seq_id)
