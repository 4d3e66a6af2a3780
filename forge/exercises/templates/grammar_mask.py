"""Exercise 13: a mask for a small grammar.

Read chapter 11 first (forge constrained). An output must be a list of numbers and lists, nested as deeply as it likes:

    list   = "[" "]"  |  "[" value ("," value)* "]"
    value  = number | list
    number = one or more of the digits 0 to 9

After each token a mask says which tokens of the vocabulary may come next: those after which the text can still become a
list. A token is bytes, and may be several characters: b"],[" or b"12,".

    so far  [[1      may come   ]  ,  2  ],  ]]  ,[  …      may not   [   ,,   ]]]   a

Fill in the four functions. A state is any value of yours but None; it stands for all that has come so far. Then:

    forge build check 13     every text of a few characters, and masks over small vocabularies
    forge build run 13       the bundled model, with your mask
"""

from collections.abc import Hashable, Sequence

State = Hashable  # yours: a tuple, a string, a frozen dataclass …


def start() -> State:
    """Return the state of an empty text."""
    raise NotImplementedError("start")


def advance(state: State, text: bytes) -> State | None:
    """Return the state after these bytes; None if no list begins with what has then come. b"" changes nothing.

    Does not change `state`, so that many texts can be tried from one state. There are no spaces in a list.
    """
    raise NotImplementedError("advance")


def is_complete(state: State) -> bool:
    """Return whether the bytes so far are a whole list. Nothing can follow one."""
    raise NotImplementedError("is_complete")


def mask(state: State, vocabulary: Sequence[bytes], eos: int) -> list[bool]:
    """Return for each token of the vocabulary whether it may come next.

    A token without bytes (a control token, padding) may never come, but for the one with the id `eos`, which ends the
    output: it may come if and only if the list is complete, whatever its bytes are.
    """
    raise NotImplementedError("mask")


if __name__ == "__main__":
    from forge.exercises import check_file

    check_file(__file__)
