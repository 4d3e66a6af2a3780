"""The seventeen kinds of text that a tokenizer is measured on: from one word to 200,000 characters, prose, code, chats,
several scripts. Each has the length that its kind has in the tables of Prelude's tokenizer, on which this is modelled.
"""

from forge.workload.judging import held_out_stories
from forge.workload.requests import PASSAGE

_CHINESE = (
    "河边的磨坊还没有轮子的时候,孩子们就坐在岸上听水说话。它讲起自己出生的那座山,讲起冬天踩着冰过河的狐狸,"
    "也讲起雾来的时候有人挂在渡口的那盏灯。每天晚上都有人要听没有回来的渡船,每天晚上它都换一种讲法。"
)
_CODE = '''\
def merge(left: list[int], right: list[int]) -> list[int]:
    """Two sorted lists as one."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]


class Counter:
    def __init__(self, start=0x10, *, step=1):
        self._value, self.step = start, step

    def __next__(self):
        self._value += self.step  # no end
        return self._value
'''
_MIXED = (
    "The ferry left at dawn. Die Fähre fuhr bei Tagesanbruch. Le bac est parti à l'aube. Паром отошёл на рассвете. "
    "渡船在黎明时离开了。 渡し舟は夜明けに出た。 나룻배는 새벽에 떠났다. "
    "غادرت العبّارة عند الفجر. Η βάρκα έφυγε την αυγή. "
    "नाव भोर में निकली। Prom odpłynął o świcie. Feribot şafakta kalktı. 🛶 42 km, 3.5 h, €7. "
)
_TURNS = (
    ("user", "Tell me what the river said on the second evening, and who was listening."),
    ("assistant", PASSAGE),
    ("user", "And the ferry? Did it come back, or does everybody only say so?"),
    ("assistant", "It did not. But in the morning a lantern stood on the ford, and nobody had hung it there."),
)


def inputs() -> dict[str, str]:
    """Text by kind."""
    stories = "\n\n".join(held_out_stories())
    chat = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in _TURNS)
    return {
        "tiny": "river",
        "short_english": "The ferry went out at dusk, and did not come back. "[:51],
        "short_chinese": _cut(_CHINESE, 90),
        "medium_prose": _cut(PASSAGE + " ", 674),
        "code_snippet": _cut(_CODE, 470),
        "mixed_multilingual": _cut(_MIXED, 641),
        "long_repeat": _cut("the quick brown fox jumps over the lazy dog, and ", 2025),
        "long_unique": _cut(stories, 4000),
        "very_long": _cut(stories, 8000),
        "chat_template": _cut(chat, 212),
        "long_32K": _cut(stories, 32_000),
        "long_64K": _cut(stories, 64_000),
        "long_200K": _cut(stories, 200_000),
        "long_code_16K": _cut(_CODE, 16_000),
        "multi_turn_chat_8K": _cut(chat, 21_370),
        "multi_turn_chat_32K": _cut(chat, 85_480),
        "long_chinese_32K": _cut(_CHINESE, 31_998),
    }


def _cut(text: str, length: int) -> str:
    """So many characters of it; after the last comes the first."""
    return (text * (-(-length // len(text))))[:length]
