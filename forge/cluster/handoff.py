"""Prefill apart from decode: one engine computes a prompt, and the other takes its blocks from it over one connection.

The front sends the prompt to the first engine, and with its end the request to the second, saying where its beginning
lies (`wire.Source`). The bytes go from engine to engine and never through a front.
"""

import secrets
import socket

from forge.cluster.wire import HANDSHAKE_SECONDS, Address, Unreachable, connect
from forge.engine.handoff import KvHandoff
from forge.engine.sampling_params import SamplingParams
from forge.server.messages import Ask, Submit, frame, received

MIN_PROMPT = 2
"""Tokens of the shortest prompt of which anything can be handed over: the last one is computed where it is sampled."""


def prefill_params() -> SamplingParams:
    """Return the parameters of a request that is computed for another engine. Its one token is not used."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def prefill_of(submit: Submit) -> Submit:
    """Return the request that computes what another engine needs of this one: all of its prompt but the last token."""
    return submit._replace(token_ids=submit.token_ids[:-1], params=prefill_params(), prompt=None, stream=False)


def fetch(address: Address, key: int, secret: bytes) -> KvHandoff | None:
    """Fetch what the engine at `address` has computed of a request; None if it is gone. Blocks. Raises
    `Unreachable`."""
    connection: socket.socket = connect(address, secret, "front")
    with connection:
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            connection.sendall(frame(Ask(secrets.randbits(62), "handoff", (key,))))
            for update in received(connection):
                for answer in update.answers:
                    computed: KvHandoff | None = answer.value
                    return computed
        except OSError as error:
            raise Unreachable(f"the engine at {address[0]}:{address[1]} does not answer: {error}") from None
    return None
