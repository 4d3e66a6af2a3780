"""forge: LLM serving, step by step. A teaching tool for the command line that is also a small real engine.

    from forge import LLM, SamplingParams
    llm = LLM("tales", kv="basic")
    print(llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))[0].outputs[0].text)

Importing this package loads nothing but the names below, each on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "ForgeError", "RequestOutput", "SamplingParams", "StructuredOutput", "UsageError"]

if TYPE_CHECKING:
    from forge.engine.outputs import RequestOutput
    from forge.engine.sampling_params import SamplingParams
    from forge.engine.structured_output import StructuredOutput
    from forge.errors import ForgeError, UsageError
    from forge.llm import LLM

_HOME = {
    "LLM": "forge.llm",
    "RequestOutput": "forge.engine.outputs",
    "SamplingParams": "forge.engine.sampling_params",
    "StructuredOutput": "forge.engine.structured_output",
    "ForgeError": "forge.errors",
    "UsageError": "forge.errors",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'forge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return [*__all__, "__version__"]
