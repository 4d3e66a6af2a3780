def start():
    return (0, "")


def advance(state, text):
    depth, last = state
    for character in text.decode("latin-1"):
        if depth == 0 and last != "":
            return None
        if character == "[":
            if last not in ("", "[", ","):
                return None
            depth += 1
        elif depth == 0:
            return None
        elif character == "]":
            if last == ",":
                return None
            depth -= 1
        elif character == ",":
            if last in ("[", ","):
                return None
        elif character not in "0123456789" or last == "]":
            return None
        last = character
    return (depth, last)


def is_complete(state):
    return state[0] == 0 and state[1] == "]"


def mask(state, vocabulary, eos):
    allowed = [token != b"" and advance(state, token) is not None for token in vocabulary]
    allowed[eos] = is_complete(state)
    return allowed
