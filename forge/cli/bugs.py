"""`--bug NAME` of a chapter's command: put one known bug back into the engine, and see what catches it."""

from forge.book.bugs import find_bug
from forge.cli.run_control import create_llm
from forge.engine_args import EngineArgs
from forge.views.report import Report

_MODEL = "tales"
UNNOTICED = 1
"""The exit status when nothing caught the bug, or the engine fails without it."""


def run_bug(chapter: str, name: str, engine_args: EngineArgs, json: bool) -> "Report":
    """Run one of a chapter's bugs, which compares texts of the bundled model, with the device and threads of
    `engine_args`."""
    from forge.book.bug_runs import bug_object, print_bug, run_with_and_without

    bug = find_bug(name, chapter)
    loading = {"device": engine_args.device, "threads": engine_args.threads}
    if bug.loading.get("device", engine_args.device) == "reference":
        del loading["threads"]  # which that device has none of
    runs = run_with_and_without(bug, lambda: create_llm(_MODEL, **{**loading, **bug.loading}))
    is_caught = runs.sound.failure is None and runs.caught_by is not None
    report = Report(bug_object(runs), lambda console: print_bug(console, runs), 0 if is_caught else UNNOTICED)
    return report.as_json() if json else report
