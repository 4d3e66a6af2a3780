"""All that forge takes from inside Numba: names that Numba does not promise to keep, and methods that are replaced.

Everything else in forge uses what Numba documents (`njit`, `from_dtype`, `types`, `numba.extending`). A new Numba may
change what stands here, so `pyproject.toml` admits no version before the first that was tried, and none after the last:

    Numba     0.62 to 0.68    with 0.62.1 and 0.68.1 every kernel compiled, and the bundled models had the same logits
    llvmlite  0.45 to 0.50    those that such a Numba comes with

To try another: install it, run `tests/backends/cpu` with an empty cache folder (`XDG_CACHE_HOME`), move the bounds.
With a version outside them `forge doctor` reports trouble, and a kernel that cannot be compiled says so in one line.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import lower_builtin, models, register_model

from forge.errors import ForgeError

FIRST_TRIED, LAST_TRIED = "0.62", "0.68"
"""The oldest and the newest version of Numba that forge was tried with."""


class UntriedNumba(ForgeError):
    """This version of Numba lacks something that forge takes from inside it."""

    def __init__(self, error: Exception):
        super().__init__(
            f"Numba {version('numba')} cannot compile the kernels ({error}): forge was tried with {FIRST_TRIED} to "
            f"{LAST_TRIED}; forge doctor says what to install, and --device reference needs no Numba"
        )


def c_function(
    name: str, function: Callable[..., Any], arguments: tuple[str | np.dtype, ...], result: str
) -> llvm.ModuleRef:
    """Compile a Python function to LLVM's intermediate code, not optimized, as the C function `name`.

    arguments: for each, the name of a number's type, or the layout of the structure whose address it is. Raises
    `UntriedNumba`.
    """
    options: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    kinds = (getattr(numba, kind) if isinstance(kind, str) else numba.from_dtype(kind) for kind in arguments)
    signature = getattr(numba, result)(*kinds)
    try:
        with _intermediate_code_only():
            compiled = numba.njit(signature, **options)(function)
        [overload] = compiled.overloads.values()
        code, numba_name = overload.library.get_llvm_str(), overload.fndesc.mangled_name
    except (AttributeError, ImportError) as error:
        raise UntriedNumba(error) from error
    module = llvm.parse_assembly(code)
    module.link_in(llvm.parse_assembly(_c_wrapper(name, numba_name, arguments, result)))
    module.get_function(numba_name).linkage = llvm.Linkage.internal
    return module


@contextlib.contextmanager
def _intermediate_code_only() -> Iterator[None]:
    """Stop Numba at LLVM's intermediate code in this context: it neither optimizes it nor makes machine code of it.

    By itself it does both for every function and makes wrappers for calls from Python, a third of the time, and forge
    uses none of that. Numba cannot call what was compiled here: it has no machine code.
    """
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.cpu import CPUContext

    def nothing(*arguments: Any, **options: Any) -> None:
        pass

    def finish(library: Any) -> None:
        library._finalize_dynamic_globals()
        library._finalized = True

    def no_address(library: Any, name: str) -> int:
        library._ensure_finalized()
        return 0

    config: Any = numba.config
    replaced = (
        (config, "OPT", type(config.OPT)(0)),
        (CPUContext, "create_cpython_wrapper", nothing),
        (CPUContext, "create_cfunc_wrapper", nothing),
        (JITCodeLibrary, "_finalize_final_module", finish),
        (JITCodeLibrary, "get_pointer_to_function", no_address),
        (JITCPUCodegen, "set_env", nothing),
    )
    with global_compiler_lock, contextlib.ExitStack() as stack:  # which keeps other threads from compiling meanwhile
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _c_wrapper(name: str, numba_name: str, arguments: tuple[str | np.dtype, ...], result: str) -> str:
    """Write the LLVM code of the C function `name` around one that Numba compiled.

    Numba's functions take two more addresses, for the result and for an exception, and return a status. Kernels raise
    nothing, so the status is not looked at.
    """
    kinds = ["i64" if isinstance(argument, str) else "ptr" for argument in arguments]
    declared, values = ", ".join(kinds), ", ".join(f"{kind} %{number}" for number, kind in enumerate(kinds))
    returned = "void" if result == "void" else "i64"
    ending = "ret void" if result == "void" else "%value = load i64, ptr %result\n  ret i64 %value"
    return f"""
declare i32 @"{numba_name}"(ptr, ptr, {declared})

define {returned} @{name}({values}) {{
  %result = alloca i64
  %exception = alloca ptr
  call i32 @"{numba_name}"(ptr %result, ptr %exception, {values})
  {ending}
}}
"""


class VectorType(types.Type):
    """A Numba type whose values are one LLVM vector."""

    def __init__(self, name: str, llvm_type: ir.VectorType):
        self.llvm_type = llvm_type
        super().__init__(name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any):
        super().__init__(dmm, fe_type, fe_type.llvm_type)


def define_operator(function: Callable[..., Any], instruction: str, vector: types.Type) -> None:
    """Teach Numba that `function` of two such vectors is LLVM's `instruction`."""
    from numba.core.typing.templates import AbstractTemplate, infer_global, signature

    @infer_global(function)
    class _Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            return signature(vector, vector, vector) if args == (vector, vector) else None

    @lower_builtin(function, vector, vector)
    def _lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return getattr(builder, instruction)(*args)
