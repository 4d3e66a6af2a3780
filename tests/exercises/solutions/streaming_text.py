from codecs import getincrementaldecoder


def whole_characters(data):
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


class MyText:
    def __init__(self, stop=()):
        self.stop = tuple(stop)
        self.stopped_by = None
        self.held_bytes = b""
        self.held_text = ""

    def push(self, token):
        if self.stopped_by is not None:
            return ""
        text, self.held_bytes = whole_characters(self.held_bytes + token)
        return self.take(text)

    def take(self, text):
        self.held_text += text
        ends = []
        for stop in self.stop:
            place = self.held_text.find(stop)
            if place >= 0:
                ends.append((place + len(stop), -len(stop), stop))
        if ends:
            end, _, self.stopped_by = min(ends)
            return self.held_text[: end - len(self.stopped_by)]
        held = 0
        for stop in self.stop:
            for length in range(1, len(stop)):
                if self.held_text.endswith(stop[:length]):
                    held = max(held, length)
        cut = len(self.held_text) - held
        shown, self.held_text = self.held_text[:cut], self.held_text[cut:]
        return shown

    def finish(self):
        if self.stopped_by is not None:
            return ""
        shown = self.take(self.held_bytes.decode("utf-8", errors="replace"))
        if self.stopped_by is not None:
            return shown
        return shown + self.held_text
