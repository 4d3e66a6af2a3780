"""Compile three launches of a small model in worker processes, then ask Triton for the same; print what was found.

A process of its own: kernels defined under the interpreter cannot be compiled.
"""

import json
from pathlib import Path

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from forge.backends.cuda import warm_up
from forge.backends.cuda.ahead_of_time import weightless_model
from forge.backends.cuda.launches import ListingLauncher
from forge.gguf import GGMLType
from forge.model.manual_batch import Part, flat_batch
from tests.small_models import small_config

KERNELS = ("gather_rows", "rms_norm", "argmax_rows")
"""What compiles fastest."""


def cubins() -> int:
    return len(list(Path(knobs.cache.dir).rglob("*.cubin")))


def main() -> None:
    driver.set_active(warm_up._NoDevice(GPUTarget("cuda", 90, 32)))
    launched = []

    class Keeping(ListingLauncher):
        def __call__(self, kernel, grid, *arguments, **options) -> None:
            if kernel.__name__ in KERNELS:
                super().__call__(kernel, grid, *arguments, **options)
                launched.append((kernel, arguments, self.options(options)))

    listing = Keeping(dependent=True)
    model = weightless_model(small_config(num_layers=1), GGMLType.BF16, listing)
    batch = flat_batch([Part(list(range(40)), 0, 40, [0, 1, 2])], 16, logit_rows=[39])
    model.backend.launch(model.forward_pass, batch, model.new_storage(model.kv_layout(3, 16, "bfloat16")))
    progress = []
    broken = warm_up.LaunchDescription("rows.no_such_kernel", (), ())
    failed = warm_up.compile_all([*listing.found, broken], lambda done, of: progress.append((done, of)))
    compiled = cubins()
    for kernel, arguments, options in launched:
        kernel.warmup(*arguments, grid=(1,), **options)
    first = warm_up.compile_missing(listing.found, lambda done, of: progress.append("compiled again"))
    again = warm_up.compile_missing(listing.found, lambda done, of: progress.append("and again"))
    facts = {"listed": len(listing.found), "compiled": compiled, "afterwards": cubins(), "failed": failed}
    print(json.dumps(facts | {"progress": progress, "first": first, "again": again}))


if __name__ == "__main__":
    main()
