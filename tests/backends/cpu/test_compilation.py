"""Compiled code is kept, found again, never stale, never believed when damaged, and not needed."""

import ctypes
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
import pytest

from forge.backends.cpu import ahead, compilation, kernel_table, llvm_compiler
from forge.backends.cpu.compilation import Kernel, TileSet, compile_all
from forge.backends.cpu.kernel_table import OperationKernel
from forge.backends.cpu.op_layout import QUANTIZE
from forge.backends.cpu.packing import Q4, Q8
from forge.backends.cpu.processor import INSTRUCTION_SETS, NeonDot, runnable
from forge.model.manual_batch import one_prefill
from tests.backends.cpu.models import ThreadedBackend, run_python, small_model
from tests.slow import mostly_slow

QUICK = ("kernels", "quantize", QUANTIZE)
"""A kernel that compiles in a second."""


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """`use(root)` makes this process keep compiled code under `root`, until the test ends; an empty one at first."""

    def use(root: Path) -> Path | None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        compilation.cache_folder.cache_clear()
        return compilation.cache_folder()

    use(tmp_path / "cache")
    yield use
    monkeypatch.undo()
    compilation.cache_folder.cache_clear()
    compilation.cache_folder()


@pytest.fixture
def shipped(fresh_cache, tmp_path, monkeypatch):
    """Returns a folder of shipped code for this processor, with one kernel in it, and nothing in the cache folder."""
    compile_all([OperationKernel(*QUICK)])
    [kept] = compilation.cache_folder().glob("*.o")
    folder = tmp_path / "shipped" / compilation.shipped_name(compilation.instruction_set())
    folder.mkdir(parents=True)
    shutil.move(kept, folder)
    monkeypatch.setattr(compilation, "SHIPPED", folder.parent)
    compilation.shipped_folder.cache_clear()
    yield folder
    monkeypatch.undo()
    compilation.shipped_folder.cache_clear()


class Progress(list):
    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))


def test_where_nothing_can_be_kept_it_says_why_and_what_to_do(fresh_cache, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert fresh_cache(tmp_path / "file") is None
    compilation.compile_all([OperationKernel(*QUICK)])
    (message,) = caplog.messages
    assert message.startswith("forge: the kernels are compiled at each start, as no folder keeps them (")
    assert f"{tmp_path / 'file'}" in message and "Not a directory" in message
    assert message.endswith("set XDG_CACHE_HOME to a folder that can be written")
    fresh_cache(tmp_path / "cache")
    assert compilation.cache_problem() is None


def test_on_arm_code_is_made_with_what_the_set_needs_and_the_jits_code_model(monkeypatch):
    made = []

    class Target:
        def create_target_machine(self, **options):
            made.append(options)

    monkeypatch.setattr(llvm_compiler, "is_arm", lambda: True)
    monkeypatch.setattr(llvm_compiler, "is_forced", lambda: False)
    monkeypatch.setattr(llvm.Target, "from_triple", lambda triple: Target())
    llvm_compiler.target_machine(NeonDot())
    assert "+dotprod" in made[0]["features"].split(",") and made[0]["codemodel"] == "jitdefault"
    monkeypatch.setattr(llvm_compiler, "is_arm", lambda: False)
    llvm_compiler.target_machine(NeonDot())
    assert "+dotprod" not in made[1]["features"].split(",") and made[1]["codemodel"] == "default"


def quantizes(kernel: Kernel) -> bool:
    """Whether the machine code does what the kernel should: 32 numbers to int8."""
    from forge.backends.cpu.op_layout import CONTEXT, structure
    from forge.backends.cpu.program import Buffer, Operation, Recording, allocate
    from forge.backends.cpu.thread_pool import ThreadPool

    x = np.linspace(-1, 1, 32, dtype=np.float32)
    rows = Buffer(32)
    program = allocate(Recording([Operation(kernel, {"x": rows}, -1, "", waits=True)], {rows}, output=rows), 1, 1, 1)
    context = structure(CONTEXT)(num_rows=1)
    program.logits[0, :32] = x
    ThreadPool(1).run(program.address, 1, ctypes.addressof(context))
    _values, quants, _scales, _sums, _stretches = program.keep
    return quants[0, :32].tolist() == np.rint(x * np.float32(127)).tolist()


# The folder's name


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A copy of the package's source files, which the digest is taken of."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in Path(compilation.__file__).parent.glob("*.py"):
        shutil.copy(path, folder)
    monkeypatch.setattr(compilation, "__file__", str(folder / "compilation.py"))
    return folder


@pytest.mark.parametrize(
    "name", ["op_layout.py", "vectors.py", "kernels.py", "tiles.py", "thread_pool.py", "processor.py"]
)
def test_another_source_is_another_folder(sources, name):
    before = compilation._digest()
    text = (sources / name).read_text()

    (sources / name).write_text(text + "\n# another line\n")
    assert compilation._digest() != before

    (sources / name).write_text(text)
    os.utime(sources / name, (1, 1))
    assert compilation._digest() == before, "only what a file says counts, not when it was written"


def test_another_file_is_another_folder(sources):
    before = compilation._digest()
    (sources / "more_kernels.py").write_text("")
    assert compilation._digest() != before


@pytest.mark.parametrize(
    ("module", "attribute", "value"),
    [
        (compilation, "_numba_version", lambda: "numba-0.0.1.dist-info"),
        (llvmlite, "__version__", "0.0.1"),
        (np, "__version__", "0.0.1"),
        (compilation.sys, "version", "9.9"),
        (compilation, "host_model", lambda: "another"),
        (compilation, "host_features", lambda: frozenset({"another"})),
        (compilation, "instruction_set", lambda: INSTRUCTION_SETS["neon-dot"]()),
    ],
    ids=["numba", "llvmlite", "numpy", "python", "processor", "features", "instruction set"],
)
def test_another_version_processor_or_instruction_set_is_another_folder(module, attribute, value, monkeypatch):
    before = compilation._digest()
    with monkeypatch.context() as patched:
        patched.setattr(module, attribute, value)
        changed = compilation._digest()
    assert changed != before
    assert compilation._digest() == before


def test_the_version_of_numba_is_the_installed_one(monkeypatch):
    assert compilation._numba_version() == f"numba-{numba.__version__}.dist-info"
    monkeypatch.setattr(compilation, "find_spec", lambda name: None)
    assert compilation._numba_version() == numba.__version__


def test_code_for_an_older_processor_is_in_another_folder(monkeypatch):
    monkeypatch.setattr(compilation, "instruction_set", lambda: INSTRUCTION_SETS["avx2"]())
    before = compilation._digest()
    monkeypatch.setattr(compilation, "is_forced", lambda: not os.environ.get("FORGE_CPU_KERNEL"))
    assert compilation._digest() != before


# Keeping and finding


def test_what_was_compiled_is_found_by_who_comes_next(fresh_cache):
    first, again = [OperationKernel(*QUICK), TileSet(Q8)], [OperationKernel(*QUICK), TileSet(Q8)]
    cold, warm = Progress(), Progress()

    compile_all(first, cold)
    compile_all(again, warm)

    assert cold == [(0, 2), (1, 2), (2, 2)]
    assert warm == []
    assert {path.name for path in compilation.cache_folder().glob("*.o")} == {"quantize.o", f"{first[1].name}.o"}
    assert quantizes(first[0])
    assert quantizes(again[0])
    assert (again[1].addresses[1:] != 0).all()


def test_only_what_is_wanted_and_missing_is_compiled(fresh_cache):
    compile_all([OperationKernel(*QUICK)])
    progress = Progress()

    compile_all([OperationKernel(*QUICK), TileSet(Q4), OperationKernel(*QUICK)], progress)

    assert progress == [(0, 1), (1, 1)]
    assert not (compilation.cache_folder() / f"{TileSet(Q8).name}.o").exists()


def test_two_threads_that_first_ask_for_the_same_code_compile_it_once_and_wait_for_it(fresh_cache):
    """As the engines of a cluster's tests do, and two models of one process."""
    another_came = threading.Event()

    class Seven(compilation.MachineCode):
        modules = 0

        def _module(self):
            Seven.modules += 1
            if Seven.modules > 1:
                another_came.set()
            another_came.wait(0.3)  # for the second thread, which must not get here
            return llvm.parse_assembly("define i64 @seven() { ret i64 7 }")

        def address(self):
            self.compile()
            return self._address("seven")

    code = Seven("seven")
    with ThreadPoolExecutor(2) as pool:
        addresses = {asked.result() for asked in [pool.submit(code.address) for _ in range(2)]}
    (address,) = addresses
    assert Seven.modules == 1 and ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == 7


FOUR = ("quantize", "rms_norm", "matmul_f16", "swiglu")
"""Kernels that compile quickly, as many as are worth a helper process."""


@pytest.mark.parametrize("python", mostly_slow(["sys.executable", "no such file", "/bin/false"], quick=["/bin/false"]))
def test_another_process_helps_to_compile_and_is_done_without_if_it_fails(fresh_cache, python, monkeypatch):
    monkeypatch.setattr(compilation, "usable_cpus", lambda: 2)
    if python != "sys.executable":
        monkeypatch.setattr(compilation.sys, "executable", python)
    compiled_here, module_of = [], Kernel._module

    def module(kernel):
        compiled_here.append(kernel.name)
        return module_of(kernel)

    monkeypatch.setattr(Kernel, "_module", module)
    known = [vars(kernel_table)[name] for name in FOUR]
    kernels = [OperationKernel(each._module_name, each.name, each.layout) for each in known]
    progress = Progress()

    compile_all(kernels, progress)

    assert set(compiled_here) < set(FOUR) if python == "sys.executable" else sorted(compiled_here) == sorted(FOUR)
    assert {path.stem for path in compilation.cache_folder().glob("*.o")} == set(FOUR)
    assert quantizes(kernels[0])
    assert progress[0] == (0, 4) and progress[-1] == (4, 4)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_shipped_code_runs_and_nothing_is_compiled_or_kept(shipped):
    kernel, progress = OperationKernel(*QUICK), Progress()
    compile_all([kernel], progress)
    assert not progress and not list(compilation.cache_folder().glob("*.o"))
    assert quantizes(kernel)


def test_shipped_code_of_other_sources_is_not_used(shipped, monkeypatch):
    sources = compilation._sources()
    sources.update(b"one line more")
    monkeypatch.setattr(compilation, "_sources", lambda: sources)
    compilation.shipped_folder.cache_clear()
    assert compilation.shipped_folder() is None
    assert not OperationKernel(*QUICK).is_cached


@pytest.mark.skipif(not compilation.instruction_set().target_needs, reason="no code is shipped for this processor")
def test_shipped_code_is_not_used_by_a_processor_that_lacks_a_feature_it_may_use(shipped, monkeypatch):
    needed = compilation.instruction_set().target_needs
    monkeypatch.setattr(compilation, "host_features", lambda: needed - {"movbe"})
    compilation.shipped_folder.cache_clear()
    assert not OperationKernel(*QUICK).is_cached


def test_damaged_shipped_code_is_compiled_again(shipped):
    [file] = shipped.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    kernel, progress = OperationKernel(*QUICK), Progress()
    compile_all([kernel], progress)
    assert progress and quantizes(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ahead.SETS if name in runnable()])
def test_code_for_every_kernel_is_shipped(name, tmp_path):
    folder = ahead.compile_for(name, tmp_path)
    assert {file.stem for file in folder.iterdir()} == {item.name for item in kernel_table.all_items()}


@pytest.mark.skipif(not set(ahead.SETS) & set(runnable()), reason="no code is shipped for this processor")
def test_an_instruction_set_of_which_a_kernel_is_missing_is_not_shipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ahead, "_COMPILE", "")  # as where the disk is full
    assert ahead.main([str(tmp_path / "kernels")]) == 1
    number = len(kernel_table.all_items())
    assert f"{number} of {number} kernels are missing" in capsys.readouterr().err
    assert not (tmp_path / "kernels").exists()


def test_a_folder_with_something_in_it_is_refused_and_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "work.txt").write_text("kept")
    assert ahead.main([str(tmp_path)]) == ahead.main([str(tmp_path / "work.txt")]) == ahead.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path} is not an empty folder: remove it, or name another",
        f"{tmp_path / 'work.txt'} is not an empty folder: remove it, or name another",
        "usage: python -m forge.backends.cpu.ahead FOLDER",
    ]
    assert (tmp_path / "work.txt").read_text() == "kept"


DAMAGES = {
    "empty": lambda kept: b"",
    "shorter than a digest": lambda kept: kept[:20],
    "half": lambda kept: kept[: len(kept) // 2],
    "one bit": lambda kept: kept[:500] + bytes([kept[500] ^ 1]) + kept[501:],
    "one bit of the digest": lambda kept: bytes([kept[0] ^ 1]) + kept[1:],
    "longer": lambda kept: kept + b"\0",
    "zeros": lambda kept: b"\0" * len(kept),
}


def test_a_damaged_object_file_is_not_believed(fresh_cache):
    compile_all([OperationKernel(*QUICK)])
    kept = compilation.cache_folder() / "quantize.o"
    whole = kept.read_bytes()
    assert OperationKernel(*QUICK).is_cached
    for name, damage in DAMAGES.items():
        kept.write_bytes(damage(whole))
        assert not OperationKernel(*QUICK).is_cached, name


def test_a_damaged_object_file_is_replaced_by_a_whole_one(fresh_cache):
    compile_all([OperationKernel(*QUICK)])
    kept = compilation.cache_folder() / "quantize.o"
    kept.write_bytes(kept.read_bytes()[:-100])
    repaired = OperationKernel(*QUICK)

    compile_all([repaired])

    assert quantizes(repaired)
    assert OperationKernel(*QUICK).is_cached


def test_a_folder_that_cannot_be_written_is_done_without(fresh_cache, tmp_path):
    file = tmp_path / "not a folder"
    file.write_text("")

    assert fresh_cache(file) is None

    kernel, progress = OperationKernel(*QUICK), Progress()
    compile_all([kernel], progress)
    assert progress == [(0, 1), (1, 1)]
    assert quantizes(kernel)
    assert not OperationKernel(*QUICK).is_cached
    assert file.read_text() == ""


def test_a_full_disk_while_writing_is_done_without(fresh_cache, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compilation.os, "replace", full)
    kernel = OperationKernel(*QUICK)

    compile_all([kernel])

    monkeypatch.undo()
    assert quantizes(kernel)
    assert list(compilation.cache_folder().glob("*.tmp")) == []


WORKS_WITHOUT_A_FOLDER = """
from forge.backends.cpu.compilation import cache_folder
from forge.backends.cpu.thread_pool import ThreadPool
import numba
import numpy as np
pool = ThreadPool(2)
program = np.zeros((0, 32), np.int64)
pool.run(program.ctypes.data, 0, program.ctypes.data)
pool.close()
print(cache_folder())
"""


@pytest.mark.slow
def test_a_process_without_a_folder_runs_its_threads(tmp_path):
    (tmp_path / "file").write_text("")
    result = run_python(["-c", WORKS_WITHOUT_A_FOLDER], XDG_CACHE_HOME=str(tmp_path / "file"))
    assert (result.stdout, result.stderr) == ("None\n", "")


COMPILE_QUICKLY = """
from forge.backends.cpu import kernel_table as k
from forge.backends.cpu.compilation import TileSet, cache_folder, compile_all
from forge.backends.cpu.packing import Q8
seen = []
compile_all([k.quantize, k.rms_norm, TileSet(Q8)], lambda done, total: seen.append((done, total)))
print(cache_folder())
print(seen)
"""


@pytest.mark.slow
def test_two_processes_that_compile_at_once_leave_whole_files_and_a_third_compiles_nothing(tmp_path):
    def run(_=None):
        result = run_python(["-c", COMPILE_QUICKLY], XDG_CACHE_HOME=str(tmp_path))
        assert (result.returncode, result.stderr) == (0, "")  # Numba warns of nothing either
        return result.stdout.splitlines()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    third = run()

    assert first[0] == second[0] == third[0]
    assert third[1] == "[]"
    folder = Path(third[0])
    assert folder.is_relative_to(tmp_path)
    assert sorted(path.name for path in folder.glob("*.o")) == [
        "quantize.o",
        "rms_norm.o",
        f"{TileSet(Q8).name}.o",
    ]
    assert list(folder.glob("*.tmp")) == []


START = """
from tests.backends.cpu.models import small_model
from forge.model.manual_batch import one_prefill
from forge.backends.cpu.backend import CpuBackend
seen = []
one_prefill(small_model(CpuBackend(2, on_compile=lambda *done: seen.append(done)), "Q8_0"), [1, 2, 3])
print(seen)
"""


@pytest.mark.skipif(compilation.cache_folder() is None, reason="no folder can be written here, so nothing is kept")
def test_a_second_start_with_the_same_kind_of_model_compiles_nothing():
    run_python(["-c", START])

    result = run_python(["-c", START])

    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("tensor_type", "wanted", "unwanted"),
    [
        ("F32", {"matmul_f32", "embed_float"}, {"matmul_quantized", "matmul_f16", "quantize", "embed_quantized"}),
        ("Q8_0", {"matmul_quantized", "embed_quantized"}, {"matmul_f32", "matmul_f16", "matmul_bf16", "embed_float"}),
    ],
)
def test_a_model_asks_for_the_kernels_that_its_file_needs(tensor_type, wanted, unwanted):
    model = small_model(ThreadedBackend(1), tensor_type)
    one_prefill(model, [1])
    names = {item.name for item in model.backend._programs[model.forward_pass].recording.kernels()}

    assert wanted <= names
    assert not names & unwanted
    tiles = {name for name in names if name.startswith("tiles_")}
    assert tiles == ({TileSet(Q8).name} if tensor_type == "Q8_0" else set())


def test_kernels_have_names_of_their_own_because_their_files_would_overwrite_each_other():
    package = Path(compilation.__file__).parent
    modules = [import_module(f"forge.backends.cpu.{path.stem}") for path in package.glob("*.py")]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    assert len(kernels) > 8
    assert len({kernel.name for kernel in kernels}) == len(kernels)


def test_a_function_of_ones_own_is_compiled_whole_after_a_kernel_was(fresh_cache):
    compilation.compile_all([OperationKernel(*QUICK)])

    @numba.njit
    def twice(number):
        return inner(number) + inner(number)

    @numba.njit
    def inner(number):
        return number

    assert twice(21) == 42
